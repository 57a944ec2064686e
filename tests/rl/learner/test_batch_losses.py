"""Losses that see more than a micro-batch: statistics of the batch, and whole groups."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from losses.aggregation import sequence_mean
from losses.tokens import TokenLoss, mean_per_sequence
from rl.config.schedules import split_schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.kl import KLPenalty
from rl.learner.learner import Learner
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, Objective
from rl.learner.preparation import Preparation
from rl.records import Credit
from rl.rollouts.plan import plan, weighted_rows
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from tests.support import tiny_policy as tiny
from tests.support.composing import composed
from tests.support.policy_setup import PlainSteps
from tests.support.ranks import on_ranks, per_world

RATE = 0.05
FACTOR = 5.0  # the distributions of an untrained model hardly differ


class Centred:
    """A loss in which the numbers of a token are relative to means of the batch."""

    def statistics(self, tokens):
        columns = [torch.ones_like(tokens.logprobs), tokens.logprobs, tokens.entropies]
        return torch.stack([*columns, tokens.kl_from_uniform, tokens.advantages]).sum(1)

    def __call__(self, tokens, statistics):
        assert statistics.dtype == torch.float64
        logprob, entropy, kl, advantage = statistics[1:] / statistics[0]
        surprise = tokens.logprobs.detach() - logprob + tokens.entropies - entropy
        surprise += FACTOR * (tokens.kl_from_uniform - kl)
        loss = -(tokens.advantages - advantage) * surprise * tokens.logprobs
        return TokenLoss(loss, {})


CASES = [(split, updates) for split in ("one", "several") for updates in (1, 2)]


@per_world(
    "mode, split, updates",
    {1: [("zero0", *case) for case in CASES], 2: [("zero3", *case) for case in CASES[1:]]},
)
@on_ranks
def test_an_update_with_statistics_of_the_batch_is_that_of_plain_torch(setup, mode, split, updates):
    """At two updates per batch the pass for the old logprobs serves the first update."""
    policy = setup.policy("float32", mode, PlainSteps(RATE), kl_from_uniform=True)
    loss = Centred()
    before, batch = setup.everywhere(policy), setup.batch(setup.rows, split)
    passes = []
    policy.engine.module.register_forward_hook(lambda *_: passes.append(1))
    kl = KLPenalty(estimator=None, beta=0.0, place="loss", target_kl=None)
    prepare = Preparation(
        policy, None, keeps_old=updates > 1, kl=kl, compared=True, for_statistics=True
    )
    batches, _ = prepare(batch, 0.0)
    stats = policy.update(batch, Objective(loss), batches=batches, updates=updates)
    several = len(batch.micro_batches) > 1
    assert several == (split == "several")
    expected = {(1, False): 1, (1, True): 2, (2, False): 3, (2, True): 4}[updates, several]
    assert len(passes) == expected * len(batch.micro_batches)
    setup.twin.load_state_dict(before, strict=False)
    values = []
    for _ in range(updates):
        value, gradient = tiny.reference(
            setup.twin, setup.rows, tiny.informed(setup.twin, setup.rows, loss)
        )
        values.append(value)
        with torch.no_grad():
            for name, parameter in setup.twin.named_parameters():
                parameter -= RATE * gradient[name]
    after, moved = setup.everywhere(policy), dict(setup.twin.named_parameters())
    found, steps = ({n: w[n].double() - before[n] for n in before} for w in (after, moved))
    assert tiny.relative_error(found, steps) < 1e-4
    # The values of the two updates have different signs.
    assert stats["train/loss"] == pytest.approx(sum(values) / updates, abs=3e-5)


@dataclass(frozen=True)
class Ranked:
    """A loss that compares mean logprobs and KL divergences of all rollouts of a group."""

    whole_groups = True

    def __call__(self, tokens):
        ids, index = tokens.rollout_ids.unique(return_inverse=True)
        means = mean_per_sequence(tokens.logprobs, index, len(ids))
        numbers = tokens.advantages + FACTOR * tokens.kl_from_uniform
        worth = mean_per_sequence(numbers, index, len(ids))
        groups = torch.zeros_like(ids).scatter(0, index, tokens.group_ids)
        same = groups[:, None] == groups
        gaps = (means[:, None] - means) * (worth[:, None] - worth)
        losses = (torch.nn.functional.softplus(-gaps) * same).sum(1)
        return TokenLoss(losses[index], {})


def forked(group):
    """Return the group with its rollouts in two rows each, so that a group has six."""
    rollouts = []
    for rollout in group.rollouts:
        (row,) = rollout.rows
        rollouts.append(replace(rollout, rows=(row, replace(row))))
    return replace(group, rollouts=tuple(rollouts))


def in_parts(model, groups, ranks, budget, shares_prefixes):
    """Value and gradient, summed over micro-batches and ranks by hand."""
    module = PolicyModule(model, chunk=7, kl_from_uniform=True)
    objective = Objective(Ranked())
    model.zero_grad()
    total, seen = 0.0, []
    for share in plan(
        weighted_rows(groups, sequence_mean),
        step=0,
        ranks=ranks,
        tokens_per_micro_batch=budget,
        metrics={},
        shares_prefixes=shares_prefixes,
        whole_groups=True,
    ):
        for micro in share.micro_batches:
            batch = Batch.of(micro, torch.device("cpu"), 0)
            outputs = module(batch.token_ids, batch.mask, 1.0, entropies=True)
            known = replace(batch, kl_from_uniform=outputs[2])
            loss, _ = objective.per_token(known, outputs[0], outputs[1], 0.0)
            value = batch.weighted_sum(loss)
            value.backward()
            total += float(value.detach())
            seen.append(set(micro.group_ids.tolist()) - {-1})
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    return total, gradient, seen


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.exact_model(tiny.model_folder(tmp_path_factory.mktemp("groups") / "model"))


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_a_loss_that_compares_rollouts_is_the_same_for_every_split_into_whole_groups(
    model, shares_prefixes
):
    torch.set_num_threads(1)
    groups = [forked(group) for group in tiny.groups(model, num_groups=5)]
    flat = Credit(0.0, (0.0,))
    groups[1] = replace(groups[1], credits=(flat, flat, flat))
    # One rollout of this group has no advantage, and goes with the others all the same.
    groups[2] = replace(groups[2], credits=(flat, *groups[2].credits[1:]))
    # A rollout that does not train is no member of its group.
    groups[3] = replace(groups[3], credits=(*groups[3].credits[:2], replace(flat, trains=False)))
    value, gradient, _ = in_parts(model, groups, 1, 10_000, shares_prefixes)
    counts = set()
    for seed, (ranks, budget) in enumerate(itertools.product((1, 2, 3), (120, 200, 400))):
        shuffled = random.Random(seed).sample(groups, len(groups))
        total, found, seen = in_parts(model, shuffled, ranks, budget, shares_prefixes)
        assert total == pytest.approx(value, rel=1e-12)
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-12)
        members = list(itertools.chain(*seen))
        assert sorted(members) == sorted(set(members)) == list(range(5))
        assert len(seen) % ranks == 0
        counts.add(len(seen))
    assert len(counts) > 2


def test_a_group_that_exceeds_a_micro_batch_ends_the_run(model):
    groups = [forked(group) for group in tiny.groups(model)]
    expected = r"a group of 6 rows exceeds trainer.tokens_per_micro_batch=20: raise it or"
    with pytest.raises(RunFailed, match=expected):
        in_parts(model, groups, 1, 20, False)


def test_a_batch_without_rows_is_planned():
    sizes = {"step": 0, "tokens_per_micro_batch": 8, "metrics": {}}
    for share in plan([], ranks=3, whole_groups=True, **sizes):
        (micro,) = share.micro_batches
        assert micro.group_ids.tolist() == [-1]


@per_world("how", {1: ["scheduled"]})
@on_ranks
def test_a_step_with_schedules_is_that_of_their_values_at_this_step(setup, how):
    """`run.entropy_bonus` is the largest value of its schedule, 0, and the entropy has a gradient.

    It is large, because the entropies of an untrained model hardly have a gradient.
    """
    folder, found = RunFolder(setup.new_folder()), []
    folder.set_model(setup.sources["float32"])
    common = ("loss=grpo", "kl=k3", "correction=tis_token", "updates_per_batch=2", "max_steps=2")
    common += ("model.dtype=float32", "optim.learning_rate=1e-3", "optim.schedule=linear")
    common += ("optim.warmup_steps=0", "optim.min_ratio=0.5")
    values = {"entropy_bonus": -1e4, "kl.beta": 0.5, "loss.clip_high": 0.01, "correction.cap": 0.9}
    first = {"entropy_bonus": 0.0, "kl.beta": 5.0, "loss.clip_high": 0.9, "correction.cap": 9.0}
    for form in ("{1}", "{{_target_: rl.schedule.pieces, values: {{0: {0}, 1: {1}}}}}"):
        options = (f"{key}={form.format(first[key], value)}" for key, value in values.items())
        config = split_schedules(composed(*common, *options))
        learner = Learner(run_with_facts(config), folder, setup.ranks)
        found.append(learner.update(setup.batch(setup.rows, "one", step=1)))
    constant, scheduled = found
    assert constant["train/learning_rate"] == pytest.approx(5e-4)  # of the last step
    assert scheduled == constant | {f"schedule/{key}": value for key, value in values.items()}


def surest(tokens):
    return TokenLoss(-tokens.kl_from_uniform * tokens.logprobs, {})


@per_world("how", {1: ["read"]})
@on_ranks
def test_a_learner_computes_the_kl_from_uniform_only_for_a_loss_that_reads_it(setup, how):
    folder, seen = RunFolder(setup.new_folder()), []
    folder.set_model(setup.sources["float32"])
    for target in (f"{__name__}.surest", "losses.reinforce.reinforce"):
        run = run_with_facts(composed("loss=reinforce", f"loss._target_={target}"))
        learner = Learner(run, folder, setup.ranks)
        learner.policy.engine.module.register_forward_hook(lambda *given: seen.append(given[2]))
        assert learner.update(setup.batch(setup.rows, "one"))["train/grad_norm"] > 0
    assert [len(outputs) for outputs in seen] == [3, 2]
