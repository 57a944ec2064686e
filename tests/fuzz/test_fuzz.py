"""Some damaged inputs for each reader; `python -m tests.fuzz` reads more."""

import json

import pytest

from rl.rollouts.__main__ import dispatcher_state
from rl.runtime.folder import RunFolder
from tests.fuzz.cases import findings
from tests.fuzz.readers import READERS

CASES = {"config": 60, "tools": 300, "tokens": 300, "checkpoint": 300, "wire": 500}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_read_or_refused_by_the_documented_error(name, tmp_path):
    reader = READERS[name](tmp_path)
    assert list(findings(reader, name, 0, range(CASES[name]), seconds=60.0)) == []


@pytest.mark.parametrize("rollouts", [None, [], {"pending": 7, "places": []}])
def test_a_damaged_state_of_a_checkpoint_is_named(rollouts, tmp_path):
    folder = RunFolder(tmp_path)
    folder.checkpoint(4).mkdir(parents=True)
    content = json.dumps({"step": 4, "rollouts": rollouts}) if rollouts is not None else ""
    folder.state_of(folder.checkpoint(4)).write_text(content)
    with pytest.raises(ValueError, match=r"step_000004/state\.json is damaged.*: delete its check"):
        dispatcher_state(folder.resume_point())
