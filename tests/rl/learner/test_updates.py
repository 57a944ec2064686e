"""What surrounds a step, compared with plain torch: references, penalties, several updates."""

import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from pyarrow import parquet

from losses.correction import tis_sequence
from losses.forward_kl_topk import forward_kl_topk
from losses.jsd_topk import jsd_topk
from losses.kl import k1, k3
from losses.ppo_clip import ppo_clip
from losses.reverse_kl_topk import reverse_kl_topk
from losses.tokens import TokenLoss
from rl.config.schedules import Schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.collectives import gather_bytes
from rl.learner.kl import KLPenalty
from rl.learner.learner import Learner
from rl.learner.logprobs import Logprobs, Rows
from rl.learner.objective import Batch, Objective
from rl.learner.preparation import Preparation
from rl.learner.reference.local import InitialPolicy
from rl.learner.reference.protocol import ReferenceSetting
from rl.runtime.folder import RunFolder
from rl.trainer.trained_tokens import StepRecord
from tests.support import tiny_policy as tiny
from tests.support.composing import composed
from tests.support.policy_setup import PlainSteps, all_same
from tests.support.ranks import on_ranks, per_world
from tests.support.summed_objective import SummedObjective

RATE, BETA, BONUS = 0.05, 2.0, 1.0
FACTOR = 300.0  # two untrained models hardly differ: without it rounding would hide the step

stages = per_world("mode", {1: ("zero0",), 2: ("zero0", "zero3")})


def trained(setup, mode, rate=RATE):
    """Return a policy after one step, so that it differs from its reference, and the optimizer."""
    optim = PlainSteps(rate)
    policy = setup.policy("float32", mode, optim, entropy_gradient=True)
    policy.update(setup.batch(setup.rows), setup.objective)
    return policy, optim


def setting(setup, policy, **changes):
    given = {
        "model": setup.sources["float32"],
        "dtype": torch.float32,
        "temperature": tiny.TEMPERATURE,
        "logprob_chunk": 7,
        "max_seq_len": 64,
        "seed": 0,
        "vocabulary": policy.vocabulary,
    }
    return ReferenceSetting(policy=policy, **{**given, **changes})


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
    _, alone = tiny.reference(setup.twin, setup.rows, setup.loss)
    assert tiny.relative_error(alone, gradient) > 0.1  # the two terms matter
    batch = setup.batch(setup.rows)
    micros = (Batch.of(micro, setup.ranks.device, batch.step) for micro in batch.micro_batches)
    batches = [tiny.filled(micro, old=False, dtype=torch.float32) for micro in micros]
    stats = policy.update(batch, objective, batches=batches, beta=BETA)
    assert tiny.relative_error(step_of(before, setup.everywhere(policy)), gradient) < 1e-5
    assert stats["train/loss"] == pytest.approx(value, rel=1e-5)


@per_world("mode", {1: ("zero0",)})
@on_ranks
def test_tokens_are_scored_at_the_temperature_at_which_their_group_started(setup, mode):
    def loss(tokens):
        seen.append(tokens.logprobs.detach())
        return TokenLoss(tokens.logprobs * tokens.advantages, {})

    policy, _ = trained(setup, mode)
    reference = InitialPolicy(refresh_every=0, refresh_mix=1.0, top_k=3, sees_hint=False)
    reference = reference.start(setting(setup, policy, seed=0))
    num_rollouts = 1 + max(row.rollout_id for row in setup.rows)
    versions = np.arange(num_rollouts, dtype=np.int32) % 3
    batch = replace(setup.batch(setup.rows), versions=versions)
    temperature = Schedules({"sampler.temperature": lambda step: 0.5 + step})
    prepare = preparation(policy, keeps_old=True, reference=reference, beta=0.0)
    batches, _ = replace(prepare, schedules=temperature)(batch, 0.0)
    own, seen = [], []
    for b in batches:
        ones = [policy.logprobs(b.token_ids.numpy(), 0.5 + v)[b.mask] for v in range(3)]
        chosen = torch.tensor(versions)[b.rollout_ids], torch.arange(len(ones[0]))
        own.append(torch.stack(ones)[chosen])
        torch.testing.assert_close(b.old_logprobs, own[-1])
        refs = [
            InitialPolicy(refresh_every=0, refresh_mix=1.0, top_k=3, sees_hint=False)
            .start(setting(setup, policy, temperature=0.5 + version))
            .score([Rows(b.token_ids, b.mask, b.envs)])[0]
            .logprobs
            for version in range(3)
        ]
        torch.testing.assert_close(b.ref_logprobs, torch.stack(refs)[chosen])
    policy.update(batch, Objective(loss), batches=batches)
    for found, expected in zip(seen, own, strict=True):
        torch.testing.assert_close(found, expected)


@stages
@on_ranks
def test_a_step_towards_a_teachers_candidates_is_that_of_plain_torch(setup, mode):
    def loss(tokens):
        divergences = (forward_kl_topk, reverse_kl_topk, partial(jsd_topk, mix=0.25))
        ones = torch.ones_like(tokens.logprobs)
        measured = {f"of_rank_{setup.ranks.rank}": ones, "two": torch.tensor(2.0)}
        return TokenLoss(FACTOR * sum(one(tokens).loss for one in divergences), measured)

    policy, _ = trained(setup, mode)
    # A teacher of the same size with other weights.
    teacher = InitialPolicy(refresh_every=0, refresh_mix=1.0, top_k=3, sees_hint=False)
    reference = teacher.start(setting(setup, policy, reads_candidates=True, seed=9))
    before, batch = setup.everywhere(policy), setup.batch(setup.rows)
    assert all(Batch.of(m, setup.ranks.device, 0).candidates is None for m in batch.micro_batches)
    batches, _ = preparation(policy, keeps_old=False, reference=reference, beta=0.0)(batch, 0.0)
    stats = policy.update(batch, Objective(loss), batches=batches)
    setup.twin.load_state_dict(before, strict=False)
    likes = tiny.exact_model(setup.sources["float32"])
    likes.load_state_dict(dict(reference._module.model.named_parameters()), strict=False)
    candidates = likeliest(likes, setup.rows)
    value, gradient = tiny.reference(setup.twin, setup.rows, loss, candidates=candidates)
    assert tiny.relative_error(step_of(before, setup.everywhere(policy)), gradient) < 1e-5
    assert stats["train/loss"] == pytest.approx(value, rel=1e-5)
    # What one rank alone measured is a mean over all tokens and shifts no other metric.
    shares = [stats[f"train/of_rank_{rank}"] for rank in range(setup.ranks.world)]
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(1)
    assert stats["train/two"] == pytest.approx(2)


@torch.no_grad()
def likeliest(teacher, rows):
    """Return the teacher's three most likely tokens, and their logprobs, at each place of a row."""
    found = []
    for row in rows:
        ids, mask = torch.tensor(row.token_ids)[None].long(), torch.tensor(row.completion_mask)
        logits = teacher(input_ids=ids).logits[0, :-1][mask[1:]]
        best = torch.log_softmax(logits / tiny.TEMPERATURE, -1).topk(3)
        found.append((best.indices, best.values))
    return found


@stages
@on_ranks
def test_several_updates_of_a_batch_are_plain_steps_with_the_old_logprobs_fixed(setup, mode):
    policy, optim = trained(setup, mode)
    loss = partial(ppo_clip, clip_low=0.01, clip_high=0.01, dual_clip=None)
    batch, before, taken = setup.batch(setup.rows), setup.everywhere(policy), optim.made.steps
    batches, _ = preparation(policy, keeps_old=True)(batch, 0.0)
    stats = policy.update(batch, Objective(loss), batches=batches, updates=3)
    assert optim.made.steps == taken + 3
    setup.twin.load_state_dict(before, strict=False)
    old, values, norms = tiny.own(setup.twin, setup.rows), [], []
    for _ in range(3):
        value, gradient = tiny.reference(setup.twin, setup.rows, loss, old=old)
        values.append(value)
        norms.append(float(tiny.flat(gradient).norm()))
        with torch.no_grad():
            for name, parameter in setup.twin.named_parameters():
                parameter -= RATE * gradient[name]
    twin = {name: p.detach() for name, p in setup.twin.named_parameters() if name in before}
    error = tiny.relative_error(step_of(before, setup.everywhere(policy)), step_of(before, twin))
    assert error < 1e-5
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


def liking(token_ids):
    return 0.5 * torch.cos(token_ids.float()) - 2.0


class Fixed:
    """A reference whose logprob of a token depends on the token alone."""

    def score(self, batches):
        return [Logprobs(liking(rows.token_ids[rows.mask])) for rows in batches]

    def metrics(self):
        return {}


@stages
@on_ranks
def test_a_penalty_in_the_reward_counts_the_tokens_of_a_rollout_on_all_ranks(setup, mode):
    """Advantages of 12 rollouts minus the divergence of each, the third unscorable."""
    policy, _ = trained(setup, mode)
    rewards = np.arange(12, dtype=np.float32) % 5
    rewards[2] = np.nan
    group_ids = np.repeat(np.arange(4, dtype=np.int32), 3)
    batch = replace(setup.batch(setup.rows), rewards=rewards, group_ids=group_ids)
    batches, metrics = preparation(policy, keeps_old=False, reference=Fixed())(batch, BETA)
    setup.twin.load_state_dict(setup.everywhere(policy), strict=False)
    own = tiny.own(setup.twin, setup.rows)
    lost = [
        BETA * float((o - liking(tiny.completion(r)[0])).sum())
        for o, r in zip(own, setup.rows, strict=True)
    ]
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


@stages
@on_ranks
def test_observed_gradients_are_those_of_the_objective_at_each_of_two_updates(setup, mode):
    policy, _ = trained(setup, mode)
    kl = KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None)
    objective = SummedObjective(setup.loss, partial(tis_sequence, cap=1.05), kl, BONUS)
    batch, seen = setup.batch(setup.rows), []
    micros = [Batch.of(micro, setup.ranks.device, batch.step) for micro in batch.micro_batches]
    policy.update(
        batch,
        objective,
        batches=[tiny.filled(micro, old=True, dtype=torch.float32) for micro in micros],
        updates=2,
        beta=BETA,
        observer=lambda *observed: seen.append(observed),
    )
    expected_calls = [(update, number) for update in range(2) for number in range(len(micros))]
    assert [(update, number) for update, number, _ in seen] == expected_calls
    for micro, (_, _, numbers) in zip(micros * 2, seen, strict=True):
        leaf = numbers["pi"].double().requires_grad_()
        whole = tiny.filled(micro, old=True)
        value, _ = objective(whole, leaf, numbers["entropy"].double(), BETA)
        (expected,) = torch.autograd.grad(value, leaf)
        error = (numbers["grad"] - expected).abs().max() if len(leaf) else 0.0
        assert error <= 1e-5 * float(expected.abs().sum())


@per_world("how", {1: ["alone"], 2: ["shared"]})
@on_ranks
def test_a_metric_that_the_loss_omits_in_an_update_counts_as_0_there(setup, how):
    batch, calls = setup.batch(setup.rows), []

    def loss(tokens):
        calls.append(tokens)
        name = "early" if len(calls) <= len(batch.micro_batches) else "late"
        return TokenLoss(-tokens.logprobs, {name: torch.ones_like(tokens.logprobs)})

    stats = setup.policy("float32", "zero0", setup.adamw()).update(
        batch, Objective(loss), updates=2
    )
    assert (stats["train/early"], stats["train/late"]) == (0.5, 0.5)


@per_world("how", {1: ["alone"], 2: ["shared"]})
@on_ranks
def test_the_clip_share_of_the_record_is_that_of_the_metric_over_four_updates(setup, how):
    policy = setup.policy("float32", "zero0", setup.adamw(learning_rate=0.03))
    batch, run_folder = setup.batch(setup.rows), RunFolder(setup.new_folder())
    batch = replace(batch, record_ids=tuple(f"{i:06d}.0" for i in range(len(setup.rows))))
    micros = [Batch.of(micro, setup.ranks.device, batch.step) for micro in batch.micro_batches]
    olds = [replace(micro, old_logprobs=policy.score(micro)) for micro in micros]
    clip = partial(ppo_clip, clip_low=0.01, clip_high=0.01, dual_clip=None)
    record = StepRecord(batch)
    stats = policy.update(batch, Objective(clip), batches=olds, updates=4, observer=record.observe)
    record.write(run_folder, setup.ranks.rank)
    torch.distributed.barrier()
    tables = [parquet.read_table(path) for path in run_folder.tokens.iterdir()]
    lines = [line for table in tables for line in table.to_pylist()]
    shares = [
        np.mean([x for line in lines if line["update"] == i for x in line["metric_clip_fraction"]])
        for i in range(4)
    ]
    assert shares[0] == 0
    assert shares[3] > 0.1
    assert np.mean(shares) == pytest.approx(stats["train/clip_fraction"], abs=1e-6)


def gap(setup, policy, reference):
    """Return the largest |log pi - log ref| of a batch, over all ranks."""
    micros = [Batch.of(m, setup.ranks.device, 0) for m in setup.batch(setup.rows).micro_batches]
    rows = [Rows(m.token_ids, m.mask, ("",) * len(m.mask)) for m in micros]
    pairs = zip(micros, reference.score(rows), strict=True)
    found = [(policy.score(micro) - scores.logprobs).abs() for micro, scores in pairs]
    return setup.largest(torch.cat([torch.zeros(1), *found]).max())


def worst(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@stages
@on_ranks
def test_a_reference_moves_by_the_mix_when_it_is_due_and_only_then(setup, mode):
    """Every second step, halfway: (start + policy) / 2; with a mix of 1 it becomes the policy."""
    policy = setup.policy("float32", mode, PlainSteps(RATE))
    initial = InitialPolicy(refresh_every=2, refresh_mix=0.5, top_k=3, sees_hint=False)
    reference = initial.start(setting(setup, policy))

    def weights():
        return {n: p.clone() for n, p in reference._module.model.named_parameters()}

    assert gap(setup, policy, reference) == 0
    start = setup.everywhere(policy)
    policy.update(setup.batch(setup.rows), setup.objective)
    now = setup.everywhere(policy)
    assert worst(now, start) > 0.01
    reference.after_step(1)
    assert all_same(weights(), start)
    reference.after_step(2)
    assert worst(weights(), {name: (start[name] + now[name]) / 2 for name in start}) < 1e-6
    assert all_same(weights(), setup.from_first(weights()))
    folder = setup.new_folder()
    reference.save(folder)
    torch.distributed.barrier()
    loaded = initial.start(setting(setup, policy))
    loaded.load(folder)
    assert gap(setup, policy, loaded) == gap(setup, policy, reference) > 0.01
    reference._mix, reference._average = 1.0, {}
    reference.after_step(4)
    assert gap(setup, policy, reference) == 0


@per_world("how", {1: ["all of it"]})
@on_ranks
def test_an_adaptive_beta_and_a_moving_reference_survive_a_checkpoint(setup, how):
    run_folder = RunFolder(setup.new_folder())
    run_folder.set_model(setup.sources["float32"])

    def start(*overrides):
        common = ("model.dtype=float32", "updates_per_batch=2", "optim.learning_rate=1e-4")
        return Learner(run_with_facts(composed(*common, *overrides)), run_folder, setup.ranks)

    bare = start("reference=initial", "correction=tis_token")
    assert bare._reference is None  # nothing reads it
    noisy = shutil.copytree(setup.sources["float32"], setup.new_folder(), dirs_exist_ok=True)
    tiny.exact_model(noisy, seed=5).float().save_pretrained(noisy)
    config = json.loads((noisy / "config.json").read_text())
    (noisy / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    given = (f"reference.path={noisy}", "model.head_dtype=bfloat16")
    taught = start("loss=ppo_clip_kl", "reference=model", *given)
    assert (bare.shares_prefixes, taught.shares_prefixes) == (True, False)
    modules = taught.policy.engine.module, taught._reference._module
    assert [module._head_dtype for module in modules] == [torch.bfloat16] * 2
    assert not [name for name in bare.update(setup.batch(setup.rows)) if "kl_b" in name]
    steered = ("loss=ppo_clip_kl", "reference.refresh_every=2", "reference.refresh_mix=0.5")
    one = start(*steered)

    def compared():
        return {n: p.clone() for n, p in one._reference._module.named_parameters()}

    initial, stats = compared(), [one.update(setup.batch(setup.rows, step=0))]
    assert all_same(compared(), initial)
    stats.append(one.update(setup.batch(setup.rows, step=1)))
    assert not all_same(compared(), initial)  # refreshed after the second step
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


@per_world("how", {1: ["alone"], 2: ["shared"]})
@on_ranks
def test_a_new_run_continues_with_the_optimizer_of_another_run_if_asked(setup, how):
    def start(folder, *overrides):
        fast = ("model.dtype=float32", "optim.learning_rate=0.1", "optim.warmup_steps=0")
        return Learner(run_with_facts(composed(*fast, *overrides)), folder, setup.ranks)

    parent, child = RunFolder(setup.new_folder()), RunFolder(setup.new_folder())
    parent.set_model(setup.sources["float32"])
    one = start(parent)
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
        other = start(child, "init_from=first", f"init_optimizer={with_optimizer}", "loss=grpo")
        other._objective = one._objective
        other.update(second)
        assert all_same(setup.everywhere(other.policy), expected) == with_optimizer


@per_world("how", {1: ["alone"], 2: ["shared"]})
@on_ranks
def test_a_resumed_run_draws_the_dropout_masks_of_its_step(setup, how):
    run_folder = RunFolder(setup.new_folder())
    run_folder.set_model(setup.sources["float32"])
    fast = ("model.dtype=float32", "optim.learning_rate=0.1", "optim.warmup_steps=0")
    run = run_with_facts(composed(*fast, "adapter=lora", "adapter.dropout=0.5"))
    one, other = (Learner(run, run_folder, setup.ranks) for _ in range(2))
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
