"""Runs compared by everything but the seed, and the callback inside a real Hydra sweep."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from rl.report.finished_runs import result_of, resume_command
from rl.report.sweep_summary import SweepSummary, as_markdown, compare, summarise
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsFile
from rl.run.status import Status
from tests.support.sweep_app import SweepApp


def make_run(folder, overrides, reward, *, steps=20, seed=0, **settings):
    metrics = MetricsFile(RunFolder(folder))
    for step in range(steps):
        # The first half is worse: only the last ten steps may count.
        value = reward if step >= steps - 10 else 0.0
        metrics.append(step, {"train/reward": value, "time/step": 3.0})
    metrics.close()
    names = {"seed": seed, "run_name": folder.name, "max_steps": 20, "env": {"seed": seed}}
    names["log"] = f"elsewhere/{folder.name}/log"
    OmegaConf.save(OmegaConf.create({**names, **settings}), folder / "config.yaml")
    record = {"overrides": [*overrides, f"seed={seed}"], "choices": {}}
    (folder / "overrides.yaml").write_text(json.dumps(record))
    return folder


@pytest.fixture
def six_runs(tmp_path):
    return [
        make_run(tmp_path / f"{loss}-s{seed}", [f"loss={loss}", "max_steps=20"], base + seed / 10,
                 seed=seed, loss={"name": loss})
        for loss, base in (("grpo", 0.2), ("cispo", 0.5))
        for seed in range(3)
    ]  # fmt: skip


def lines(folders):
    return [
        group.as_dict() for group in compare([result_of(RunFolder(folder)) for folder in folders])
    ]


def test_runs_that_differ_in_the_seed_form_one_group_and_the_best_stands_first(six_runs):
    cispo, grpo = lines(six_runs)
    assert (cispo["run"], cispo["seeds"], cispo["steps"], cispo["failed"]) == (
        "loss=cispo",
        3,
        20,
        0,
    )
    assert [cispo["reward"], cispo["min"], cispo["max"]] == pytest.approx([0.6, 0.5, 0.7])
    assert cispo["minutes"] == pytest.approx(1.0)
    assert (grpo["run"], grpo["reward"]) == ("loss=grpo", pytest.approx(0.3))


def test_a_run_that_stopped_early_is_counted_and_left_out_of_the_reward(six_runs):
    make_run(
        six_runs[0].parent / "cispo-s3",
        ["loss=cispo"],
        9.0,
        steps=15,
        seed=3,
        loss={"name": "cispo"},
    )
    cispo = lines([*six_runs, six_runs[0].parent / "cispo-s3"])[0]
    assert (cispo["seeds"], cispo["failed"]) == (4, 1)
    assert cispo["reward"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("doing", "failed"),
    [
        ("done: the task is solved: the buffer rejected the last 64 groups", 0),
        ("done: stopped, as asked", 1),
        ("done", 1),
        ("training step 15", 1),
    ],
)
def test_a_run_that_had_nothing_left_to_learn_has_not_failed(doing, failed, tmp_path):
    folder = make_run(tmp_path / "early", ["loss=cispo"], 1.0, steps=15)
    Status(RunFolder(folder), "trainer.rank0").set(doing)
    (group,) = lines([folder])
    assert (group["failed"], group["reward"]) == (failed, None if failed else 1.0)


def test_a_group_of_which_nothing_finished_stands_last_without_a_reward(six_runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "overrides.yaml").write_text('["loss=sapo"]')
    last = lines([empty, *six_runs])[-1]
    assert (last["run"], last["reward"], last["failed"], last["steps"]) == ("loss=sapo", None, 1, 0)


def test_equal_overrides_on_another_config_are_another_group_named_by_the_difference(tmp_path):
    one = make_run(tmp_path / "one", [], 0.1, optim={"learning_rate": 0.1})
    two = make_run(tmp_path / "two", [], 0.2, optim={"learning_rate": 0.2}, seed=1)
    assert [line["run"] for line in lines([one, two])] == [
        "optim.learning_rate=0.2",
        "optim.learning_rate=0.1",
    ]


def test_one_kind_of_run_needs_no_name(tmp_path):
    folder = make_run(tmp_path / "one", ["loss=grpo"], 0.1)
    assert lines([folder])[0]["run"] == "(as composed)"
    assert compare([]) == []


def test_the_table_and_the_page_show_mean_and_range(six_runs):
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summarise(six_runs))
    text = console.export_text()
    page = as_markdown(compare([result_of(RunFolder(folder)) for folder in six_runs]))
    assert "0.600  0.500..0.700" in text
    assert "| loss=cispo | 3 | 0.600 | 0.500..0.700 | 20 | 1.0 |  |" in page
    assert f"- {six_runs[0]}" in page


def test_the_command_to_go_on_keeps_the_overrides_and_quotes_them(tmp_path):
    folder = make_run(tmp_path / "a run", ["+env.words=[a,b]", "run_name=x", "resume=true"], 0.1)
    assert resume_command(RunFolder(folder)) == (
        "python train.py '+env.words=[a,b]' seed=0 'run_name=a run' resume=true"
    )


@pytest.fixture
def app(tmp_path):
    """Runs a sweep; returns its status, output, and the summary it wrote."""
    program = SweepApp(tmp_path)

    def run(*arguments):
        status, output = program.run(*arguments)
        written = list(tmp_path.glob("outputs/sweeps/*/summary.json"))
        groups = json.loads(written[0].read_text()) if written else None
        return status, output, groups

    return run


def test_a_sweep_ends_with_its_table_on_the_screen_and_on_disk(app, tmp_path):
    status, output, groups = app("--multirun", "seed=range(3)", "rate=0.5,0.7")
    assert status == 0, output
    assert [group["run"] for group in groups] == ["rate=0.7", "rate=0.5"]
    assert [group["reward"] for group in groups] == pytest.approx([1.7, 1.5])
    assert [group["seeds"] for group in groups] == [3, 3]
    assert all(Path(folder).is_dir() for group in groups for folder in group["folders"])
    assert "rate=0.7" in output
    assert "1.700  0.700..2.700" in output
    assert len(list(tmp_path.glob("outputs/sweeps/*/summary.md"))) == 1


def test_a_sweep_with_a_failed_job_runs_the_others_and_still_prints_its_table(app):
    status, output, groups = app("--multirun", "seed=range(3)", "crash=error")
    assert status != 0
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 1, pytest.approx(1.5))
    assert group["errors"] == ["vLLM is gone"]
    assert "0.500..2.500" in output


def test_a_sweep_that_dies_in_the_middle_still_says_what_it_had(app):
    status, _, groups = app("--multirun", "seed=range(3)", "crash=exit")
    assert status == 3
    (group,) = groups
    assert (group["seeds"], group["failed"], group["reward"]) == (3, 2, pytest.approx(0.5))
    assert group["errors"] == ["ended with status 3", "not started"]


def test_a_single_run_writes_no_sweep(app, tmp_path):
    status, output, groups = app("seed=1")
    assert (status, groups) == (0, None), output
    assert not (tmp_path / "outputs" / "sweeps").exists()


def test_a_sweep_that_was_refused_before_it_began_has_no_table(capsys):
    SweepSummary().on_multirun_end(None)  # Hydra 1.4 tells every callback of the end
    assert capsys.readouterr().out == ""
