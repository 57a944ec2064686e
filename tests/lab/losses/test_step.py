"""compare_losses.py with step=true takes the optimizer step of a loss."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lab.losses.arms import arms_of
from lab.losses.command import main
from lab.losses.step import _rank_batch, take_steps
from losses.aggregation import token_mean
from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.objective import Batch
from rl.rollouts.plan import plan_batch, weighted_rows
from tests.support.forked_groups import forked_groups
from tests.support.ranks import on_ranks, per_world
from tests.support.recorded_run import STEP, record_run

FAST = ("model.dtype=float32", "optim.learning_rate=0.01", "optim.warmup_steps=0")


def answers(learner, batch):
    """Return log pi of each rollout."""
    sums = torch.zeros(18)
    for micro in batch.micro_batches:
        tokens = Batch.of(micro, torch.device("cpu"), STEP)
        sums.index_add_(0, tokens.rollout_ids, learner.policy.score(tokens))
    return sums


@per_world("case", {1: ["alone"]})
@on_ranks
def test_the_step_of_a_loss_is_that_of_a_run_with_it(setup, case):
    folder = record_run(setup.new_folder(), *FAST)
    record_run(folder.path, *FAST, step=STEP + 1)  # the same answers, held out here
    path = folder.rollouts_of(STEP + 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:  # the recorded advantages are 0 or above
        if line["id"].endswith(".1"):
            line["advantage"] = -1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.set_model(setup.sources["float32"])
    run = Run.load(folder.config)
    learner, checkpoint = Learner(run, folder, setup.ranks), folder.checkpoint(STEP)
    checkpoint.mkdir(parents=True)
    learner.save(checkpoint)
    groups = forked_groups(num_groups=6)
    all_train = [[replace(one, trains=True) for one in group.credits] for group in groups]
    trains = [replace(g, credits=tuple(c)) for g, c in zip(groups, all_train, strict=True)]
    options = {"step": STEP, "ranks": 1, "tokens_per_micro_batch": 99, "metrics": {}}
    batch, everything = (
        plan_batch(some, build(run.aggregation), **options)[0] for some in (groups, trains)
    )
    before = answers(learner, everything)
    learner.update(batch)
    change = answers(learner, everything) - before
    worse = torch.arange(len(change)) % 3 == 1
    better = torch.tensor([c.advantages[0] > 0 for group in groups for c in group.credits]) & ~worse
    arms = arms_of(folder, ["loss=gspo"], has_model=True)
    own, other = take_steps(folder, arms, checkpoint)
    expected = (change[better].mean(), change[worse].mean(), change.abs().mean())
    for found, value in zip(own[1:], expected, strict=True):
        assert abs(float(found) - float(value)) < 2e-4
    assert abs(float(own[3])) > 0.01
    assert other[0] == "loss=gspo"
    assert other[1:] != own[1:]


@pytest.mark.parametrize("whole", [True, False])
def test_a_loss_that_compares_rollouts_gets_each_group_whole(whole, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"step_whole_{whole}".lower()
    (tmp_path / f"{name}.py").write_text(f"whole_groups = {whole}\ndef mine(tokens): ...\n")
    rows = weighted_rows(forked_groups(num_groups=6), token_mean)
    run, learner = SimpleNamespace(loss={"_target_": f"{name}.mine"}), SimpleNamespace()
    learner.shares_prefixes = False
    batch = _rank_batch(run, learner, rows, STEP)  # advantages of 0 are apart, except in a group
    places = [{*micro.group_ids.tolist()} for micro in batch.micro_batches]
    assert (sum(map(len, places)) == len(set().union(*places))) is whole


@pytest.mark.parametrize(
    ("choice", "step"),
    [
        pytest.param("", STEP + 1, id="no next step"),
        *((one, STEP) for one in ("sampler.top_k=20", "kl=k1", "loss=ppo")),
        ("deepspeed=zero1 trainer.ranks=2", STEP),
    ],
)
def test_a_run_without_a_usable_checkpoint_or_record_is_refused(choice, step, tmp_path, capsys):
    folder = record_run(tmp_path, *choice.split())
    record_run(tmp_path, *choice.split(), step=STEP + 1)
    folder.checkpoint(step).mkdir(parents=True)  # nothing was recorded after STEP + 1
    assert main([str(tmp_path), "step=true"]) == 2
    assert "step=true needs a run with" in capsys.readouterr().err
