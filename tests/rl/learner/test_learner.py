"""The learner: its ranks, the metrics of its steps, schedules, references, checkpoints."""

import json
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import rendezvous

from losses.aggregation import token_mean
from rl.config.schedules import split_schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.collectives import gather_bytes
from rl.learner.learner import Learner, load_for_training
from rl.learner.ranks import Ranks, init_method
from rl.rollouts.plan import plan_batch
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from rl.trainer.checkpoint import save_checkpoint
from tests.support.composing import composed
from tests.support.forked_groups import forked_groups
from tests.support.golden import golden
from tests.support.policy_setup import all_same
from tests.support.ranks import _ranks, on_ranks, worlds
from tests.support.recorded_run import record_run
from tests.support.tiny_policy import exact_model, model_folder

FAST = ("optim.learning_rate=0.1", "optim.warmup_steps=0")


@pytest.mark.parametrize("world", [1])
@on_ranks
def test_an_adaptive_beta_and_a_moving_reference_survive_a_checkpoint(setup):
    run_folder = setup.run_folder()
    start = partial(setup.learner, run_folder, "updates_per_batch=2", "optim.learning_rate=1e-4")
    steered = ("loss=ppo_clip_kl", "reference.refresh_every=2", "reference.refresh_mix=0.5")
    fall = "entropy_bonus={_target_: rl.schedule.linear, start: 0.0, end: -1.0, steps: 2}"
    half = start(*steered, "model.head_dtype=bfloat16", fall)
    modules = half.policy.engine.module, half._reference._module
    assert [module._head_dtype for module in modules] == [torch.bfloat16] * 2
    assert modules[0]._entropy_gradient  # although the largest bonus is 0
    one = start(*steered)

    def compared():
        return {n: p.clone() for n, p in one._reference._module.named_parameters()}

    first, stats = compared(), [one.update(setup.batch(setup.rows, step=0))]
    assert all_same(compared(), first)
    stats.append(one.update(setup.batch(setup.rows, step=1)))
    assert not all_same(compared(), first)  # refreshed after the second step
    one.save(run_folder.path)
    third = setup.batch(setup.rows, step=2)
    expected, drawn = one.update(third), torch.initial_seed()
    other = start(*steered, "seed=1")
    other.load(run_folder.path)
    found = other.update(third)
    assert found == expected
    assert torch.initial_seed() != drawn
    # The divergence stays far below its target: beta falls by the most, two percent a step.
    assert 0 < expected["train/kl_divergence"] < 0.04
    betas = [each["train/kl_beta"] for each in (*stats, found)]
    assert betas == pytest.approx([0.05, 0.05 * 0.98, 0.05 * 0.98**2], rel=1e-12)


def test_an_adapter_names_its_base_on_the_hub_or_else_the_folder_that_the_run_began_with(tmp_path):
    run, folder = run_with_facts(composed("adapter=lora")), model_folder(tmp_path / "model")
    for path, revision, init_from, expected in (
        (None, None, None, str(folder)),
        ("a/hub-name", None, None, "a/hub-name"),
        ("a/hub-name", "v2", None, str(folder)),  # `evaluate.py` and peft load the newest commit
        (str(tmp_path), None, None, str(folder)),
        ("a/hub-name", None, "another-run", str(folder)),
    ):
        node = {**run.model, "path": path, "revision": revision}
        given = replace(run, init_from=init_from, model=type(run.model).of(node))
        model = load_for_training(given, folder, compiled=False)
        assert model.peft_config["default"].base_model_name_or_path == expected


@worlds
@on_ranks
def test_a_new_run_continues_with_the_optimizer_of_another_run_if_asked(setup):
    parent, child = setup.run_folder(), RunFolder(setup.new_folder())
    one = setup.learner(parent, *FAST)
    first, second = (setup.batch(setup.rows, step=step) for step in range(2))
    one.update(first)
    checkpoint = parent.checkpoint(1)
    if setup.ranks.first:
        checkpoint.mkdir(parents=True)
    torch.distributed.barrier()
    one.save(checkpoint)
    one.policy.export(parent.export_of(checkpoint), parent.initial_model())
    child.set_model(parent.export_of(checkpoint))
    torch.distributed.barrier()
    one.update(second)
    expected = setup.everywhere(one.policy)
    for with_optimizer in (True, False):
        changes = ("init_from=first", f"init_optimizer={with_optimizer}", "loss=grpo")
        other = setup.learner(child, *FAST, *changes)
        other._objective = one._objective
        other.update(second)
        assert all_same(setup.everywhere(other.policy), expected) == with_optimizer


@worlds
@on_ranks
def test_a_resumed_run_draws_the_dropout_masks_of_its_step(setup):
    run_folder = setup.run_folder()
    dropout = ("adapter=lora", "adapter.dropout=0.5")
    one, other = (setup.learner(run_folder, *FAST, *dropout) for _ in range(2))
    first, second = (setup.batch(setup.rows, step=step) for step in range(2))
    one.update(first)  # the adapter starts at zero, where dropout has no effect
    one.save(run_folder.path)
    torch.distributed.barrier()
    expected = one.update(second)
    other.load(run_folder.path)
    assert other.update(second) == expected
    seeds = gather_bytes(str(torch.initial_seed()).encode())
    assert len(set(seeds)) == setup.ranks.world  # each rank draws its own masks
    other.load(run_folder.path)
    again = other.update(replace(second, step=2))  # the masks of another step
    assert again["train/entropy"] != expected["train/entropy"]


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


def test_a_rank_that_cannot_use_its_gpu_says_why_and_does_not_train_on_the_cpu(monkeypatch):
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "DS_ACCELERATOR": "cuda"}
    for name, value in (given | {"CUDA_VISIBLE_DEVICES": "7"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=r"GPU 1 of CUDA_VISIBLE_DEVICES=7: \w+.*PyTorch"):
        Ranks.join(None, 1.0)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_first_rank_listens_on_master_addr_alone(address, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "0")
    store, *_ = next(rendezvous(init_method(0), 0, 2, timeout=timedelta(seconds=20)))
    sockets = psutil.Process().net_connections("inet")
    assert {one.laddr.ip for one in sockets if one.laddr.port == store.port} == {address}


@worlds
@on_ranks
def test_every_rank_gets_the_bytes_of_all_in_their_order(setup):
    ranks, texts = setup.ranks, (b"", "ä longer text\0".encode())
    for sent in (texts, texts[::-1]):
        assert gather_bytes(sent[ranks.rank]) == list(sent[: ranks.world])
    words = ["ä first", ""]
    assert ranks.from_first(words[ranks.rank]) == words[0]
    assert ranks.from_first(words[1 - ranks.rank]) == words[1]
    assert ranks.sum(1.5 + ranks.rank) == (1.5, 4.0)[ranks.world - 1]
