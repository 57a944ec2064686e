"""What surrounds a step, compared with plain torch: references, penalties, several updates."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from losses.kl import k1, k3
from losses.ppo_clip import ppo_clip
from losses.tokens import TokenLoss
from rl.learner.kl import KLPenalty
from rl.learner.logprobs import Rows
from rl.learner.objective import Batch, Objective
from rl.learner.preparation import Preparation
from rl.learner.reference.local import InitialPolicy
from rl.learner.reference.protocol import ReferenceSetting
from tests.rl.learner.test_logprobs import kept_with
from tests.support import tiny_policy as tiny
from tests.support.policy_setup import PlainSteps
from tests.support.ranks import on_ranks, per_world

RATE, BETA, BONUS = 0.05, 2.0, 1.0

stages = per_world("mode", {1: ("zero0",), 2: ("zero0", "zero3")})


def trained(setup, mode):
    """Return a policy after one step, so that it differs from its reference, and the optimizer."""
    optim = PlainSteps(RATE)
    policy = setup.policy("float32", mode, optim, entropy_gradient=True)
    policy.update(setup.batch(setup.rows), setup.objective)
    return policy, optim


def initial(setup, policy, *, every=0, mix=1.0, **changes):
    """Return the first weights of a policy as its reference."""
    setting = {
        "model": setup.sources["float32"],
        "dtype": torch.float32,
        "temperature": tiny.TEMPERATURE,
        "logprob_chunk": 7,
        "max_seq_len": 64,
        "seed": 0,
    }
    choice = InitialPolicy(refresh_every=every, refresh_mix=mix, top_k=3, sees_hint=False)
    return choice.start(ReferenceSetting(policy=policy, **{**setting, **changes}))


def preparation(policy, *, keeps_old, reference=None, beta=9.0):
    kl = KLPenalty(estimator=k1, beta=beta, place="reward", target_kl=None)
    return Preparation(policy, reference, keeps_old=keeps_old, kl=kl, compared=True)


def step_of(before, after):
    return {name: (before[name].double() - after[name].double()) / RATE for name in before}


@stages
@on_ranks
def test_a_step_with_divergence_and_entropy_is_that_of_plain_torch(setup, mode):
    def terms(loss, tokens, entropies):
        gap = tokens.logprobs - tokens.ref_logprobs
        return loss + BETA * ((-gap).exp() + gap - 1) - BONUS * entropies

    policy, _ = trained(setup, mode)
    before = setup.everywhere(policy)
    kl = KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None)
    objective = Objective(setup.loss, kl=kl, entropy_bonus=BONUS)
    setup.twin.load_state_dict(before, strict=False)
    value, gradient = tiny.reference(setup.twin, setup.rows, setup.loss, terms)
    batch = setup.batch(setup.rows)
    micros = [Batch.of(micro, setup.ranks.device, 0) for micro in batch.micro_batches]
    batches = [tiny.filled(micro, old=False, dtype=torch.float32) for micro in micros]
    stats = policy.update(batch, objective, batches=batches, beta=BETA)
    assert tiny.relative_error(step_of(before, setup.everywhere(policy)), gradient) < 1e-5
    assert stats["train/loss"] == pytest.approx(value, rel=1e-5)


def plain_steps(setup, loss, updates, **given):
    """Take plain steps with the twin; return the losses and lengths of the gradient."""
    values, norms = [], []
    for _ in range(updates):
        informed = tiny.informed(setup.twin, setup.rows, loss)
        value, gradient = tiny.reference(setup.twin, setup.rows, informed, **given)
        values.append(value)
        norms.append(float(tiny.flat(gradient).norm()))
        with torch.no_grad():
            for name, parameter in setup.twin.named_parameters():
                parameter -= RATE * gradient[name]
    return values, norms


def difference(before, setup, policy):
    """Return the relative difference of the steps that policy and twin have taken."""
    twin = {name: p.detach() for name, p in setup.twin.named_parameters() if name in before}
    return tiny.relative_error(step_of(before, setup.everywhere(policy)), step_of(before, twin))


@stages
@on_ranks
def test_several_updates_of_a_batch_are_plain_steps_with_the_old_logprobs_fixed(setup, mode):
    policy, optim = trained(setup, mode)
    loss, calls, seen = partial(ppo_clip, clip_low=0.01, clip_high=0.01, dual_clip=None), [], []
    batch, before, taken = setup.batch(setup.rows), setup.everywhere(policy), optim.made.steps
    batches, _ = preparation(policy, keeps_old=True)(batch, 0.0)

    def with_metric(tokens):
        calls.append(tokens)
        name, ones = "early" if len(calls) <= len(batches) else "late", torch.ones(())
        return TokenLoss(loss(tokens).loss, {name: ones, f"of_rank_{setup.ranks.rank}": ones})

    stats = policy.update(
        batch,
        Objective(with_metric),
        batches=batches,
        updates=3,
        observer=lambda *observed: seen.append(observed),
    )
    assert optim.made.steps == taken + 3
    # A metric that the loss omits in an update counts as 0 there.
    assert stats["train/early"] == pytest.approx(1 / 3)
    assert stats["train/late"] == pytest.approx(2 / 3)
    # What one rank alone measured is a mean over all tokens and shifts no other metric.
    shares = [stats[f"train/of_rank_{rank}"] for rank in range(setup.ranks.world)]
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1)
    numbers = [(update, number) for update in range(3) for number in range(len(batches))]
    assert [(update, number) for update, number, _ in seen] == numbers
    for b, (*_, observed) in zip(batches, seen[: len(batches)], strict=True):
        torch.testing.assert_close(observed["pi"], b.old_logprobs)
    setup.twin.load_state_dict(before, strict=False)
    old = tiny.own(setup.twin, setup.rows)
    values, norms = plain_steps(setup, loss, 3, old=old)
    assert difference(before, setup, policy) < 1e-5
    sampled = [torch.tensor(r.rollout_logprobs)[r.completion_mask] for r in setup.rows]
    gap = torch.cat(old) - torch.cat(sampled)
    w = gap.exp()
    expected = {
        "train/loss": sum(values) / 3,
        "train/grad_norm": sum(norms) / 3,
        "mismatch/sampled_mean_abs": gap.abs().mean(),
        "mismatch/sampled_max_abs": gap.abs().max(),
        "mismatch/sampled_kl": (w - 1 - gap).mean(),
        "mismatch/sampled_chi_square": w.square().mean() - 1,
        "mismatch/sampled_effective_sample_size": w.mean().square() / w.square().mean(),
    }
    for name, number in expected.items():
        assert stats[name] == pytest.approx(float(number), rel=1e-5), name
    # One version later the tokens are stale: a difference of the policies is no mismatch.
    stale = policy.update(setup.batch(setup.rows, step=1), setup.objective)
    assert not [name for name in stale if name.startswith("mismatch/")]


class Centred:
    """A loss in which the numbers of a token are relative to means of the batch."""

    def statistics(self, tokens):
        columns = [torch.ones_like(tokens.logprobs), tokens.logprobs, tokens.entropies]
        return torch.stack([*columns, tokens.kl_from_uniform, tokens.advantages]).sum(1)

    def __call__(self, tokens, statistics):
        assert statistics.dtype == torch.float64
        logprob, entropy, kl, advantage = statistics[1:] / statistics[0]
        surprise = tokens.logprobs.detach() - logprob + tokens.entropies - entropy
        surprise += 5.0 * (tokens.kl_from_uniform - kl)
        loss = -(tokens.advantages - advantage) * surprise * tokens.logprobs
        return TokenLoss(loss, {})


CASES = [(split, updates) for split in ("one", "several") for updates in (1, 2)]


@per_world(
    "mode, split, updates",
    {1: [("zero0", *case) for case in CASES], 2: [("zero3", *case) for case in CASES[1:]]},
)
@on_ranks
def test_an_update_with_statistics_of_the_batch_is_that_of_plain_torch(setup, mode, split, updates):
    policy = setup.policy("float32", mode, PlainSteps(RATE), kl_from_uniform=True)
    before, batch = setup.everywhere(policy), setup.batch(setup.rows, split)
    prepare = preparation(policy, keeps_old=updates > 1, beta=0.0)
    batches, _ = prepare(batch, 0.0)
    stats = policy.update(batch, Objective(Centred()), batches=batches, updates=updates)
    assert (len(batch.micro_batches) > 1) == (split == "several")
    setup.twin.load_state_dict(before, strict=False)
    values, _ = plain_steps(setup, Centred(), updates)
    assert difference(before, setup, policy) < 1e-4
    # The values of the two updates have different signs.
    assert stats["train/loss"] == pytest.approx(sum(values) / updates, abs=3e-5)


@stages
@on_ranks
def test_a_penalty_in_the_reward_counts_the_tokens_of_a_rollout_on_all_ranks(setup, mode):
    """Advantages of 12 rollouts minus the divergence of each, the third unscorable."""
    policy, _ = trained(setup, mode)
    rewards = np.arange(12, dtype=np.float32) % 5
    rewards[2] = np.nan
    group_ids = np.repeat(np.arange(4, dtype=np.int32), 3)
    batch = replace(setup.batch(setup.rows), rewards=rewards, group_ids=group_ids)
    reference = initial(setup, policy, seed=9)
    batches, metrics = preparation(policy, keeps_old=False, reference=reference)(batch, BETA)
    pairs = []
    for weights in (setup.everywhere(policy), dict(reference._module.model.named_parameters())):
        setup.twin.load_state_dict(weights, strict=False)
        pairs.append(tiny.own(setup.twin, setup.rows))
    lost = [BETA * float((own - ref).sum()) for own, ref in zip(*pairs, strict=True)]
    counted = np.array([r.num_completion > 0 for r in setup.rows]) & ~np.isnan(rewards)
    known = np.where(counted, lost, np.nan).reshape(4, 3)
    relative = np.nan_to_num(known - np.nanmean(known, axis=1, keepdims=True)).flatten()
    expected = np.array([r.advantages[0] for r in setup.rows]) - relative
    for b in batches:
        found = b.advantages.numpy()
        np.testing.assert_allclose(found, expected[b.rollout_ids.numpy()], rtol=0, atol=1e-5)
        # For the penalty alone, one update keeps the sampler as its anchor.
        assert b.old_logprobs is None
    assert metrics["train/kl_penalty"] == pytest.approx(np.nanmean(known), rel=1e-5)


@per_world("mode", {2: ("zero0", "zero3")})
@on_ranks
def test_a_reference_moves_by_the_mix_when_it_is_due_on_every_rank(setup, mode):
    """Every second step, halfway: (start + policy) / 2."""
    policy = setup.policy("float32", mode, PlainSteps(RATE))
    reference, start = initial(setup, policy, every=2, mix=0.5), setup.everywhere(policy)
    policy.update(setup.batch(setup.rows), setup.objective)
    now = setup.everywhere(policy)
    for step in (1, 2):
        reference.after_step(step)
    expected = {name: (start[name] + now[name]) / 2 for name in start}
    assert tiny.relative_error(start, expected) > 1e-3
    found = dict(reference._module.model.named_parameters())
    assert tiny.relative_error(found, expected) < 1e-6


def with_sets(rows):
    """Give every other row sets, of different sizes, as in a batch with demonstrations."""
    made = []
    for number, row in enumerate(rows):
        own = torch.tensor(row.token_ids[row.completion_mask])
        kept = kept_with(own, number)[:, : 6 - number % 3].numpy().astype(np.int32)
        made.append(replace(row, kept=kept if number % 2 and len(own) else None))
    return made


@per_world("mode", {1: ("zero0", "zero0 shared"), 2: ("zero0", "zero3")})
@on_ranks
def test_a_step_with_sets_is_that_of_plain_torch_in_every_split(setup, mode):
    rows = with_sets(setup.rows)
    policy, _ = trained(setup, mode)
    reference = initial(setup, policy)
    prepare = preparation(policy, keeps_old=True, reference=reference, beta=0.0)
    for split in ("one", "several", "rows"):
        before, batch = setup.everywhere(policy), setup.batch(rows, split)
        for b in prepare(batch, 0.0)[0]:  # old and reference logprobs have the sets, too
            torch.testing.assert_close(b.old_logprobs, policy.with_scores(b).logprobs)
            rows_of_b = Rows(b.token_ids, b.mask, b.envs, kept=b.kept)
            among, whole = reference.score([rows_of_b, replace(rows_of_b, kept=None)])
            torch.testing.assert_close(b.ref_logprobs, among.logprobs)
            full = policy.score(replace(b, kept=None))
            if b.kept is not None:
                assert b.old_logprobs is not None
                assert b.ref_logprobs is not None
                has_set = b.kept[:, 0] >= 0
                assert (b.old_logprobs > full)[has_set].all()
                assert (b.ref_logprobs > whole.logprobs)[has_set].all()
        value, gradient = setup.plain(before, rows)
        stats = policy.update(batch, setup.objective)
        assert tiny.relative_error(step_of(before, setup.everywhere(policy)), gradient) < 1e-4
        assert stats["train/loss"] == pytest.approx(value, rel=1e-5)
