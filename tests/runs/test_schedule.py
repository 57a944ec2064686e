"""A run with schedules on a scripted engine, and the same run continued after a kill."""

import json
import shutil

import pytest

from tests.support.composing import REPO
from tests.support.equal_runs import SYNC, TIMES, Run

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(600)]

SCHEDULES = [
    "sampler.temperature={_target_:rl.schedule.linear,start:1.0,end:0.5,steps:5}",
    "loss.clip_high={_target_:rl.schedule.pieces,values:{0:5.0,4:2.0}}",
    "reward.length_penalty={_target_:rl.schedule.linear,start:0.0,end:0.05,steps:5}",
]


def finished(run: Run) -> list[dict]:
    """Run the command to its end, and return the metrics except times."""
    process = run.start()
    assert process.wait() == 0, process.stdout and process.stdout.read()
    times = tuple(name for name in TIMES if name != "time")
    return [{k: v for k, v in line.items() if not k.startswith(times)} for line in run.metrics]


def test_a_killed_run_continues_its_schedules(tmp_path):
    run = Run(REPO, "scheduled", [*SYNC, *SCHEDULES], tmp_path)
    whole = [{k: v for k, v in line.items() if k != "time"} for line in finished(run)]
    temperatures = [line["schedule/sampler.temperature"] for line in whole]
    assert temperatures == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    assert [line["schedule/loss.clip_high"] for line in whole] == [5.0] * 4 + [2.0] * 2
    shutil.rmtree(run.folder / "checkpoints" / "step_000006")  # as if killed before it was written
    run.overrides.append("resume=true")
    again = [{k: v for k, v in line.items() if k != "time"} for line in finished(run)]
    assert json.dumps(again) == json.dumps(whole)
