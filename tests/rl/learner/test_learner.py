"""Steps of a learner built from a configuration: schedules, references, checkpoints."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rl.dry_call.learn import run_with_facts
from rl.learner.collectives import gather_bytes
from rl.learner.learner import load_for_training
from rl.runtime.folder import RunFolder
from tests.support.composing import composed
from tests.support.policy_setup import all_same
from tests.support.ranks import on_ranks, worlds
from tests.support.tiny_policy import model_folder

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
