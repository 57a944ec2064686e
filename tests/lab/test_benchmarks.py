"""Benchmarks that use reports: the stored baseline, and the claims of papers in claims/."""

import json
from functools import partial

import pytest
import yaml

from benchmarks import baseline, verdicts
from benchmarks.claims import CLAIMS, FAILS, HOLDS, UNDECIDED, judged, line
from rl.runtime.folder import RunFolder
from tests.support.composing import check_all, composed
from tests.support.finished_runs import made_arm


@pytest.mark.parametrize(("last", "difference"), [(20, -0.2), (10, -0.1)])
def test_code_that_learns_less_is_worse_at_the_last_version_that_both_have(
    last, difference, tmp_path
):
    made_arm(tmp_path / "before", "code=a")
    main = partial(baseline.main, file=tmp_path / "stored" / "default.json")
    assert main([str(tmp_path / "before"), "store"]) == 0
    for folder in made_arm(tmp_path / "now", "code=b", gain=-0.2, max_steps=last):
        if last == 10:
            RunFolder(folder).evaluation_of(20).rename(folder / "gone")
    assert main([str(tmp_path / "now")]) == 1
    record = json.loads((tmp_path / "now" / "baseline.json").read_text())
    (today,) = [arm for arm in record["arms"] if arm["run"] == "today"]
    assert (record["judged"], today["decision"]) == (f"version {last}", "worse")
    assert today["difference"]["value"] == pytest.approx(difference, abs=0.03)


def test_unscored_rollouts_that_were_stored_and_runs_of_today_that_failed_are_counted(
    tmp_path, capsys
):
    first, *_ = made_arm(tmp_path / "before", "code=a")
    evaluation = RunFolder(first).evaluation_of(20)
    text = evaluation.read_text()
    evaluation.write_text(text.replace('"reward": 0.', '"reward": null, "was": 0.', 1))
    main = partial(baseline.main, file=tmp_path / "stored.json")
    assert main([str(tmp_path / "before"), "store"]) == 0
    *_, last = made_arm(tmp_path / "now", "code=a")
    RunFolder(last).evaluation_of(20).unlink()
    assert main([str(tmp_path / "now")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "left out: stored 1 of " in told
    assert "Ended early: 1 of 10 runs, of today." in told


@pytest.mark.parametrize("case", verdicts.CASES)
def test_few_simulated_sweeps_of_equal_arms_name_an_arm(case):
    """The benchmark measures the rates; this only shows that it runs."""
    assert sum(verdicts.judged(case, number) for number in range(4)) <= 1


def test_a_claim_holds_if_its_second_arm_got_the_expected_decision(tmp_path):
    assert judged("better", "better") == HOLDS
    assert judged("better", "worse") == judged("equal", "better") == FAILS
    assert judged("equal", "open") == UNDECIDED
    interval = {"value": 0.05, "low": 0.01, "high": 0.09}
    first, second = {"run": "a", "decision": "baseline"}, {"run": "b", "decision": "better"}
    arms = [second | {"difference": interval}, first | {"difference": None}]
    (tmp_path / "report.json").write_text(json.dumps({"baseline": "a", "arms": arms}))
    assert "holds here" in line("clip_higher", tmp_path)
    assert "+0.050 [+0.010, +0.090]" in line("clip_higher", tmp_path)


@pytest.mark.parametrize("name", sorted(path.stem for path in CLAIMS.glob("*.yaml")))
def test_every_claim_compares_two_runs_that_could_start(name, tmp_path):
    content = yaml.safe_load((CLAIMS / f"{name}.yaml").read_text())
    assert content["claim"]["expected"] in ("better", "equal")
    assert content["hydra"]["sweep"]["dir"].endswith(f"/claims/{name}")
    ((key, values),) = content["hydra"]["sweeper"]["params"].items()
    assert len(values.split(",")) == 2
    for value in values.split(","):
        arm = composed(f"{key}={value}", f"output_dir={tmp_path}", sweep=name, folder=CLAIMS)
        arm.pop("until")  # of the sweep, not of a job
        assert "claim" not in arm
        check_all(arm)
