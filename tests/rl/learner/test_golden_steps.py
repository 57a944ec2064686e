"""The complete metrics of training steps of a tiny model, and the token record of a step."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from losses.aggregation import token_mean
from rl.config.schedules import split_schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.learner import Learner
from rl.rollouts.plan import plan_batch
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.trainer.checkpoint import save_checkpoint
from tests.support.composing import composed
from tests.support.forked_groups import forked_groups
from tests.support.golden import golden
from tests.support.ranks import _ranks
from tests.support.recorded_run import record_run
from tests.support.tiny_policy import exact_model, model_folder

COMMON = (
    "model.dtype=float32", "optim.learning_rate=0.1", "optim.warmup_steps=2", "max_steps=5",
    "optim.eps=0.01",  # else the first update has the sign of rounding errors
    "sampler.temperature=0.8", "trainer.logprob_chunk=7", "entropy_bonus=0.01",
)  # fmt: skip
FALL = "{_target_: rl.schedule.linear, start: 1.0, end: 0.5, steps: 4}"
SLIGHT = "{_target_: rl.schedule.linear, start: 1e-3, end: 1e-4, steps: 4}"
RUNS = {
    "grpo": ("loss=grpo", "updates_per_batch=2", "correction=tis_token", "kl=k3", "kl.beta=0.1"),
    "cispo": ("trainer.max_grad_norm=0.05", "kl=k1", "kl.beta=0.1"),
    "critic": (
        "loss=ppo", "critic.optim.eps=1", "critic.head_start=1", "critic.over=turns",
        "updates_per_batch=2", "critic.loss.clip=1e-5", "kl=k1",
    ),
    "adaptive": ("loss=ppo_clip_kl", "reference.refresh_every=1", "reference.refresh_mix=0.5"),
    "statistics": ("loss=m2po", "loss.max_second_moment=1e-3", "updates_per_batch=2"),
    "scheduled": (
        "loss=grpo", "updates_per_batch=2", "correction=tis_token", "kl=k3",
        f"sampler.temperature={FALL}", f"entropy_bonus={FALL}", f"kl.beta={FALL}",
        f"correction.cap={FALL}", f"loss.clip_high={SLIGHT}",
    ),
    "distilled": ("loss=forward_kl_topk", "reference=model", "reference.path=TEACHER"),
    "muon": ("optim=muon", "optim.adamw_ratio=0.5", "optim.learning_rate=0.01"),
    "adapter": ("adapter=lora", "adapter.rank=2", "adapter.alpha=4", "deepspeed=zero2"),
}  # fmt: skip


def train(setup, name: str, path: str) -> None:
    """Train three steps of a run on this rank, and write what they return to `path`."""
    groups = [replace(group, version=group.index) for group in forked_groups(num_groups=3)]
    for row in (row for group in groups for rollout in group.rollouts for row in rollout.rows):
        row.rollout_logprobs[row.completion_mask] = -5.5  # near those of a new model
        row.rollout_logprobs[row.completion_mask] += np.sin(row.token_ids[row.completion_mask]) / 3
    teacher = model_folder(setup.new_folder() / "teacher")
    exact_model(teacher, seed=5).float().save_pretrained(teacher)
    given = [override.replace("TEACHER", str(teacher)) for override in RUNS[name]]
    folder, how = RunFolder(setup.new_folder()), {"ranks": 1, "tokens_per_micro_batch": 80}
    folder.set_model(setup.sources["float32"])
    run = run_with_facts(split_schedules(composed(*COMMON, *given)))
    learner = Learner(run, folder, setup.ranks)
    how["shares_prefixes"] = learner.shares_prefixes
    plans = [plan_batch(groups, token_mean, step=i, metrics={}, **how) for i in range(3)]
    rows = [learner.update(batch) for (batch,) in plans]
    model, first = setup.sources["float32"], {"rollouts": {"next": 1}, "keep": 1}
    saved = save_checkpoint(learner, folder, step=3, model=model, **first)
    files = sorted(str(p.relative_to(saved)) for p in saved.rglob("*") if p.is_file())
    squares = {k: float(v.double().square().sum()) for k, v in learner.policy.weights().items()}
    found = {"how": how, "rows": rows, "files": files, "squares": squares}
    found["deepspeed"] = learner.policy.engine._config._param_dict
    Path(path).write_text(json.dumps(found))


@pytest.mark.parametrize("name", RUNS)
def test_three_steps_of_a_run(name, tmp_path):
    """Metrics, squares of the weights, checkpoint files, DeepSpeed's configuration."""
    _ranks(1).run(__name__, "train", {"name": name, "path": str(tmp_path / "found.json")})
    golden(f"learner/steps_{name}", json.loads((tmp_path / "found.json").read_text()))


def test_the_token_record_of_a_step(tmp_path):
    """All columns of all rows of two updates on three ranks, with made-up forward passes."""
    how = ("loss=grpo", "kl.beta=0.1", "correction=tis_token")
    folder = record_run(tmp_path, *how, num_groups=2)
    rows = [[each.id, each.row, each.update, each.columns] for each in read_rows(folder, 5)]
    golden("learner/record", [sorted(path.name for path in folder.tokens.iterdir()), rows])
