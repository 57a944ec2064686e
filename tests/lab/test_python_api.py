"""What a run, an evaluation and a configuration show in a notebook and in a terminal."""

import math

import pytest

import offbyone
from lab.evaluation.standalone import read_summary
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from tests.lab.evaluation.test_standalone import OURS, played, rollout, written
from tests.support.prompted_endpoint import PromptedEndpoint


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "mine")
    metrics = MetricsFile(folder)
    for step in range(4):
        metrics.append(step, {"train/reward": step / 10, "time/step": 1.0})
    folder.config.write_text("max_steps: 9")
    folder.overrides.write_text("overrides: ['loss=<grpo>\\e]0;x\\a']\nrun_name: mine")
    return folder


def test_a_run_shows_rewards_files_how_to_resume_and_its_newest_model(folder):
    run = offbyone.load_run(folder.path)
    assert repr(run) == f"<Run {folder}: 4 steps, last reward 0.300>"
    bundle = run._repr_mimebundle_([], [])  # what a notebook shows
    assert "0.050 (first 2) -> 0.250 (last 2)" in bundle["text/plain"]
    assert "resume=true" in bundle["text/plain"]
    assert "&lt;grpo&gt;" in bundle["text/html"]  # a name is no markup
    assert "\x1b]" not in bundle["text/plain"]
    assert run.checkpoint is None
    for step in (2, 4):
        folder.export_of(folder.checkpoint(step)).mkdir(parents=True)
    assert offbyone.load_run(folder.path).checkpoint == folder.checkpoint(4) / "hf"


def test_train_supervises_the_composed_configuration(tmp_path, monkeypatch):
    given, folder = {}, tmp_path / "outputs" / "mine"
    folder.mkdir(parents=True)

    def supervise(values, **options):
        given.update(options, values=values)
        (folder / "config.yaml").write_text("max_steps: 7")

    monkeypatch.setattr("lab.python_api.supervise", supervise)
    monkeypatch.chdir(tmp_path)
    overrides = ["max_steps=7", "run_name=mine"]
    for config in (overrides, offbyone.compose(overrides)):
        assert offbyone.train(config).folder.path == folder
        assert (given["values"]["max_steps"], given["overrides"]) == (7, overrides)
        assert given["command"] == ["offbyone", "train"]
    assert given["compose"]("warm_start")["group_size"] == 1  # the value of conf/warm_start.yaml
    with pytest.raises(ValueError, match="is not the folder of a run: use a folder such as"):
        offbyone.load_run(tmp_path)


def test_sample_plays_held_out_examples_with_the_options_of_evaluate(tmp_path):
    with PromptedEndpoint().listening() as endpoint:
        options = [o for o in endpoint.overrides() if not o.startswith(OURS)]
        options += [f"output_dir={tmp_path}", "num_examples=3", "rollouts_per_example=2"]
        run = offbyone.sample(options)
    assert run.folder.path.parent == tmp_path
    assert run.rollouts["step"].to_list() == [-1] * 6
    assert len(endpoint.policy_asked) == 6


def test_an_evaluation_without_a_score_has_no_number(tmp_path):
    written(tmp_path, played(rollout(None)))
    assert math.isnan(read_summary(RunFolder(tmp_path)).reward)
    assert read_summary(RunFolder(tmp_path / "none")) is None


def test_the_rollouts_of_a_run_that_still_writes_are_its_complete_lines(folder):
    path = folder.rollouts_of(2)
    path.write_text('{"reward": 1.0}\n{"rew')
    table = offbyone.load_run(folder.path).rollouts
    assert table.to_dict("records") == [{"step": 2, "reward": 1.0}]
    for damaged in ('{"rew', "[1]", "5"):
        path.write_text(f'{{"reward": 1.0}}\n{damaged}\n')
        with pytest.raises(
            ValueError, match=r"step_000002.jsonl is damaged .*: restore it, or delete its line 2"
        ):
            _ = offbyone.load_run(folder.path).rollouts
