"""The published claims in claims/, and how they are judged."""

import json
import re

import pytest
import yaml

from benchmarks.claims import CLAIMS, FAILS, HOLDS, UNDECIDED, judged, line
from tests.support.composing import check_all, composed

NAMES = sorted(path.stem for path in CLAIMS.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_claim_asks_has_a_source_and_compares_two_runs_that_could_start(name, tmp_path):
    text = (CLAIMS / f"{name}.yaml").read_text()
    content = yaml.safe_load(text)
    assert text.startswith("# ")
    assert text.partition("\n")[0].endswith("?")
    assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", content["claim"]["source"])
    assert content["claim"]["expected"] in ("better", "equal")
    assert content["hydra"]["sweep"]["dir"].endswith(f"/claims/{name}")
    ((key, values),) = content["hydra"]["sweeper"]["params"].items()
    assert len(values.split(",")) == 2
    for value in values.split(","):
        arm = composed(f"{key}={value}", f"output_dir={tmp_path}", sweep=name, folder=CLAIMS)
        arm.pop("until")  # of the sweep, not of a job
        assert "claim" not in arm
        check_all(arm)


@pytest.mark.parametrize(
    ("expected", "decision", "judgement"),
    [("better", "better", HOLDS), ("better", "worse", FAILS), ("better", "equal", FAILS),
     ("equal", "equal", HOLDS), ("equal", "better", FAILS), ("equal", "open", UNDECIDED)],
)  # fmt: skip
def test_a_claim_holds_if_the_arm_got_the_expected_decision(expected, decision, judgement):
    assert judged(expected, decision) == judgement


def test_the_line_of_a_claim_has_the_second_arm(tmp_path):
    assert line("clip_higher", tmp_path).startswith("not judged")
    interval = {"value": 0.05, "low": 0.01, "high": 0.09}
    arms = [
        {"run": "loss.clip_high=0.28", "decision": "better", "difference": interval},
        {"run": "loss.clip_high=0.2", "decision": "baseline", "difference": None},
    ]
    report = {"baseline": "loss.clip_high=0.2", "arms": arms}
    (tmp_path / "report.json").write_text(json.dumps(report))
    expected = r"holds here +\+0\.050 \[\+0\.010, \+0\.090\] .*2503"
    assert re.match(expected, line("clip_higher", tmp_path))
