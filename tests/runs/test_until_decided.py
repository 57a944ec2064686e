"""A real sweep that adds seeds until its arm is decided, and plays nothing when it starts again."""

import json

import pytest

from rl.runtime.sweep_folder import SweepFolder

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(1800)]


def test_a_sweep_of_real_runs_ends_when_its_arm_is_decided(launcher):
    place = launcher.output / "until"
    jobs = ["loss.clip_high=5,8", "until=decided", "until.smallest_effect=0.5", "max_steps=2"]
    jobs += ["evaluation=default", "evaluation.every=2", "model.warm_start=null"]
    # The engine answers from a script, because six starts of the real vLLM take minutes.
    jobs += ["inference._target_=tests.support.scripted_vllm.ScriptedVLLM", "sync.max_mismatch=1e9"]
    jobs += [f"hydra.sweep.dir={place}", "--multirun"]
    result = launcher.succeed("until-${seed}-${loss.clip_high}", *jobs, warm=[])
    assert "0 of 1 arms decided; open: loss.clip_high=8 (0 seeds)" in result.screen
    records = SweepFolder(place).records().values()
    assert {record.state for record in records} == {"done"}
    # An untrained policy answers nothing, so all seeds are equal and three of each arm suffice.
    seeds = [next(o for o in record.overrides if o[:5] == "seed=") for record in records]
    assert seeds == [f"seed={seed}" for seed in (0, 0, 1, 1, 2, 2)]
    assert not any(item.startswith("until") for record in records for item in record.overrides)
    report = json.loads((place / "report.json").read_text())
    decisions = {arm["name"]: arm["decision"] for arm in report["arms"]}
    assert decisions == {"clip_high=5": "baseline", "clip_high=8": "equal within 0.5"}
    assert "1 of 1 arms decided by 6 runs" in " ".join(report["notes"])
    again = launcher.succeed("until-${seed}-${loss.clip_high}", *jobs, warm=[])
    assert "1 of 1 arms decided by 6 runs" in again.screen
    assert len(SweepFolder(place).records()) == 6
