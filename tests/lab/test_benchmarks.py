"""Benchmarks: the stored baseline, the claims of papers in claims/, and the first hour on a GPU."""

import json
from functools import partial
from importlib import import_module

import pytest
import yaml

from benchmarks import baseline, verdicts
from benchmarks.claims import CLAIMS, FAILS, HOLDS, UNDECIDED, judged, line
from benchmarks.first_hour.__main__ import STAGES
from benchmarks.first_hour.update import config
from rl.dry_call.learn import run_with_facts
from rl.model.shape import GIB, shape
from rl.placement.memory import trainer_need
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


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_is_a_function(stage):
    module, _, name = STAGES[stage].rpartition(".")
    assert callable(getattr(import_module(f"benchmarks.first_hour.{module}"), name))


@pytest.mark.parametrize(
    ("size", "adapter", "how", "length", "measured"),  # in GiB, on an H100 (docs/cuda.md)
    [
        *(("0.6b", "lora", "plain", 1024, 17.2), ("0.6b", "none", "plain", 1024, 28.8)),
        *(("1.7b", "lora", "plain", 1024, 27.4), ("1.7b", "none", "plain", 1024, 57.0)),
        *(("4b", "lora", "plain", 1024, 53.0), ("4b", "lora", "checkpointed", 1024, 12.9)),
        *(("moe", "lora", "plain", 1024, 18.8), ("moe", "none", "plain", 1024, 67.9)),
        *(("0.6b", "lora", "compiled", 1000, 11.6), ("0.6b", "none", "compiled", 1000, 19.2)),
        *(("1.7b", "lora", "compiled", 1000, 19.6), ("4b", "lora", "compiled", 1000, 39.3)),
    ],
)
def test_the_plan_is_within_15_percent_of_the_measured_peak(size, adapter, how, length, measured):
    run = run_with_facts(
        composed(
            *(f"adapter={adapter}", f"trainer.compile={str(how == 'compiled').lower()}"),
            f"trainer.gradient_checkpointing={str(how == 'checkpointed').lower()}",
            *("batch_size=8", "group_size=8", "model.dtype=bfloat16", f"max_seq_len={length}"),
            *(f"trainer.tokens_per_micro_batch={8 * length}", "trainer.share_prefixes=false"),
        )
    )
    sizes = shape(config(size, tiny=False).to_dict())
    plan = trainer_need(run, sizes, ranks=1, first=False, on_gpu=True).on_device / GIB
    assert plan == pytest.approx(measured, rel=0.15)
