"""More cases of policy_worker.py: what surrounds a step. Each is run by every rank.

Several updates of a batch, divergence and entropy in a step, references that follow, the penalty in
the reward, and the learner that holds all of it.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.record_cases import recorded

UPDATE_MODES = {1: ("zero0", "zero3"), 2: ("zero0", "zero3")}
RATE, BETA, BONUS = 0.05, 2.0, 1.0
FACTOR = 300.0  # two untrained models hardly differ: without it weights would round a step away


def around(cases: Any, mode: str) -> dict[str, Any]:
    """Everything on one policy under a ZeRO stage: a DeepSpeed start takes a second."""
    from tests.support.policy_setup import PlainSteps

    optim = PlainSteps(RATE)
    policy = cases.policy("float32", mode, optim, entropy_gradient=True)
    reference = initial(cases, policy)
    result = {"reference at the start": gap(cases, policy, reference)}
    start = cases.everywhere(policy)
    result["pulled"] = pulled(cases, policy, start)
    result["several"] = several(cases, policy, optim)
    result["distilled"] = distilled(cases, policy)
    result["penalty"] = penalty(cases, policy)
    result["recorded"] = recorded(cases, policy)
    result["refresh"] = refreshed(cases, policy, reference, start)
    return result


def pulled(cases: Any, policy: Any, before: Any) -> dict[str, float]:
    """A step with k3 and entropy bonus, and the same by plain torch."""
    from losses.kl import k3
    from rl.learner.kl import KLPenalty
    from rl.learner.objective import Batch, Objective
    from tests.support import tiny_policy as tiny

    def terms(loss: Any, tokens: Any, entropies: Any) -> Any:
        k1 = tokens.logprobs - tokens.ref_logprobs
        return loss + BETA * ((-k1).exp() + k1 - 1) - BONUS * entropies

    kl = KLPenalty(estimator=k3, beta=9.0, place="loss", target_kl=None)
    objective = Objective(cases.loss, kl=kl, entropy_bonus=BONUS)
    cases.twin.load_state_dict(before, strict=False)
    value, gradient = tiny.reference(cases.twin, cases.rows, cases.loss, terms)
    batch = cases.batch(cases.rows)
    micros = (Batch.of(micro, cases.ranks.device, batch.step) for micro in batch.micro_batches)
    batches = [tiny.filled(micro, old=False, dtype=torch.float32) for micro in micros]
    stats = policy.update(batch, objective, batches=batches, beta=BETA)
    _, alone = tiny.reference(cases.twin, cases.rows, cases.loss)
    after = cases.everywhere(policy)
    update = {name: (before[name].double() - after[name].double()) / RATE for name in before}
    return {
        "error": tiny.relative_error(update, gradient),
        "matters": tiny.relative_error(alone, gradient),
        "value": value,
        "loss": stats["train/loss"],
    }


def distilled(cases: Any, policy: Any) -> dict[str, Any]:
    """A step towards a teacher's candidates by all divergences, and the same by plain torch."""
    from losses.forward_kl_topk import forward_kl_topk
    from losses.jsd_topk import jsd_topk
    from losses.reverse_kl_topk import reverse_kl_topk
    from losses.tokens import TokenLoss
    from rl.learner.objective import Batch, Objective
    from rl.learner.reference.local import InitialPolicy
    from tests.support import tiny_policy as tiny

    def loss(tokens: Any) -> Any:
        parts = (forward_kl_topk, reverse_kl_topk, partial(jsd_topk, mix=0.25))
        ones = torch.ones_like(tokens.logprobs)
        measured = {f"of_rank_{cases.ranks.rank}": ones, "two": torch.tensor(2.0)}
        return TokenLoss(FACTOR * sum(part(tokens).loss for part in parts), measured)

    # Of the same size and other weights.
    teacher = InitialPolicy(refresh_every=0, refresh_mix=1.0, top_k=3, sees_hint=False)
    reference = teacher.start(replace(setting(cases, policy, reads_candidates=True), seed=9))
    before, batch = cases.everywhere(policy), cases.batch(cases.rows)
    batches, _ = anchors(policy, keeps_old=False, reference=reference, beta=0.0)(batch, 0.0)
    stats = policy.update(batch, Objective(loss), batches=batches)
    after = cases.everywhere(policy)
    cases.twin.load_state_dict(before, strict=False)
    likes = tiny.exact_model(cases.sources["float32"])
    likes.load_state_dict(dict(reference._module.model.named_parameters()), strict=False)
    value, gradient = divergence(cases.twin, likes, cases.rows)
    alone = [Batch.of(micro, cases.ranks.device, 0) for micro in batch.micro_batches]
    update = {name: (before[name].double() - after[name].double()) / RATE for name in before}
    return {
        "error": tiny.relative_error(update, gradient),
        "value": value,
        "loss": stats["train/loss"],
        "without": sum(b.candidates is not None for b in alone),
        "shares": [stats[f"train/of_rank_{rank}"] for rank in range(cases.ranks.world)],
        "two": stats["train/two"],
    }


def divergence(model: Any, teacher: Any, rows: Any) -> tuple[float, dict[str, Any]]:
    """Value and gradient of the divergences over three candidates and the rest, row by row."""
    from tests.support.tiny_policy import TEMPERATURE, _by_token

    total = torch.zeros((), dtype=torch.float64)
    for one in rows:
        ids = torch.tensor(one.row.token_ids, dtype=torch.int64)
        mask = torch.tensor(one.row.completion_mask)
        places = mask.nonzero()[:, 0] - 1
        p, q = (
            torch.softmax(m(input_ids=ids[None]).logits[0][places] / TEMPERATURE, -1)
            for m in (model, teacher)
        )
        best = q.detach().topk(3).indices
        kept = [x.gather(1, best) for x in (p, q)]
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in kept)
        m = 0.25 * q + 0.75 * p
        terms = q * (q / p).log() + p * (p / q).log()
        terms = terms + 0.25 * q * (q / m).log() + 0.75 * p * (p / m).log()
        total = total + FACTOR * (_by_token(one.token_weights, mask) * terms.sum(-1)).sum()
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(total, list(parameters.values()))
    return float(total.detach()), dict(zip(parameters, gradients, strict=True))


def several(cases: Any, policy: Any, optim: Any) -> dict[str, Any]:
    """Three updates with one set of old logprobs, and three plain steps."""
    from losses.ppo_clip import ppo_clip
    from rl.learner.objective import Objective
    from tests.support import tiny_policy as tiny

    loss = partial(ppo_clip, clip_low=0.01, clip_high=0.01, dual_clip=None)
    batch, before, steps = cases.batch(cases.rows), cases.everywhere(policy), optim.made.steps
    batches, _ = anchors(policy, keeps_old=True)(batch, 0.0)
    stats = policy.update(batch, Objective(loss), batches=batches, updates=3)
    after = cases.everywhere(policy)
    update = {name: before[name].double() - after[name].double() for name in before}
    cases.twin.load_state_dict(before, strict=False)
    old, values, norms = tiny.own(cases.twin, cases.rows), [], []
    sampled = [torch.tensor(r.row.rollout_logprobs)[r.row.completion_mask] for r in cases.rows]
    for _ in range(3):
        value, gradient = tiny.reference(cases.twin, cases.rows, loss, old=old)
        values.append(value)
        norms.append(float(tiny.flat(gradient).norm()))
        with torch.no_grad():
            for name, parameter in cases.twin.named_parameters():
                parameter -= RATE * gradient[name]
    twin = dict(cases.twin.named_parameters())
    expected = {name: before[name].double() - twin[name].detach() for name in before}
    return {
        "error": tiny.relative_error(update, expected),
        "steps": optim.made.steps - steps,
        "losses": [sum(values) / 3, stats["train/loss"]],
        "norms": [sum(norms) / 3, stats["train/grad_norm"]],
        **mismatch(torch.cat(old) - torch.cat(sampled), stats),
    }


def mismatch(difference: Any, stats: dict[str, float]) -> dict[str, list[float]]:
    """Each measure of how far vLLM is off: of all tokens [N] of all ranks, and as reported."""
    w = difference.exp()
    expected = {
        "mean_abs": difference.abs().mean(),
        "max_abs": difference.abs().max(),
        "kl": (w - 1 - difference).mean(),
        "chi_square": w.square().mean() - 1,
        "effective_sample_size": w.mean().square() / w.square().mean(),
    }
    return {
        f"mismatch {name}": [float(value), stats[f"mismatch/sampled_{name}"]]
        for name, value in expected.items()
    }


@dataclass
class Fixed:
    """A reference that likes some tokens better than others, wherever they stand."""

    def score(self, batches: Any) -> Any:
        from rl.learner.rows import Scores

        return [Scores(liking(rows.token_ids[rows.mask])) for rows in batches]

    def metrics(self) -> dict[str, float]:
        return {}


def liking(token_ids: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.cos(token_ids.float()) - 2.0


def anchors(policy: Any, *, keeps_old: bool, reference: Any = None, beta: float = 9.0) -> Any:
    from losses.kl import k1
    from rl.learner.kl import KLPenalty
    from rl.learner.preparation import Preparation

    kl = KLPenalty(estimator=k1, beta=beta, place="reward", target_kl=None)
    return Preparation(policy, reference, keeps_old=keeps_old, kl=kl, compared=True)


def penalty(cases: Any, policy: Any) -> dict[str, Any]:
    """Advantages of 12 rollouts less the divergence of each, the third unscorable."""
    import numpy as np

    from tests.support import tiny_policy as tiny

    rewards = np.arange(12, dtype=np.float32) % 5
    rewards[2] = np.nan
    group_ids = np.repeat(np.arange(4, dtype=np.int32), 3)
    batch = replace(cases.batch(cases.rows), rewards=rewards, group_ids=group_ids)
    made = anchors(policy, keeps_old=False, reference=Fixed())
    batches, metrics = made(batch, BETA)
    cases.twin.load_state_dict(cases.everywhere(policy), strict=False)
    own = tiny.own(cases.twin, cases.rows)
    lost = np.array(
        [
            BETA * float((o - liking(tiny.completion(r)[0])).sum())
            for o, r in zip(own, cases.rows, strict=True)
        ]
    )
    counted = np.array([r.row.num_completion > 0 for r in cases.rows]) & ~np.isnan(rewards)
    known = np.where(counted, lost, np.nan).reshape(4, 3)
    relative = np.nan_to_num(known - np.nanmean(known, axis=1, keepdims=True)).flatten()
    expected = np.array([r.advantages for r in cases.rows]) - relative
    wrong = max(
        float(np.abs(b.advantages.numpy() - expected[b.rollout_ids.numpy()]).max(initial=0.0))
        for b in batches
    )
    found = torch.tensor(wrong)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return {
        "error": float(found),
        "old": sum(b.old_logprobs is not None for b in batches),
        "mean": [float(lost.mean()), metrics["train/kl_penalty"]],
    }


def initial(cases: Any, policy: Any) -> Any:
    """The initial policy as a reference that moves halfway to the policy every second step."""
    from rl.learner.reference.local import InitialPolicy

    reference = InitialPolicy(refresh_every=2, refresh_mix=0.5, top_k=3, sees_hint=False)
    return reference.start(setting(cases, policy))


def setting(cases: Any, policy: Any, *, reads_candidates: bool = False) -> Any:
    from rl.learner.reference.protocol import ReferenceSetting
    from tests.support.tiny_policy import TEMPERATURE

    return ReferenceSetting(
        policy=policy,
        model=cases.sources["float32"],
        dtype=torch.float32,
        temperature=TEMPERATURE,
        logprob_chunk=7,
        max_seq_len=64,
        seed=0,
        vocabulary=policy.vocabulary,
        reads_candidates=reads_candidates,
    )


def rows_of(batch: Any) -> Any:
    from rl.learner.rows import Rows

    return Rows(batch.token_ids, batch.mask, ("",) * len(batch.mask))


def gap(cases: Any, policy: Any, reference: Any) -> float:
    """Largest |log pi - log ref| of a batch, over all ranks."""
    from rl.learner.objective import Batch

    micros = [Batch.of(m, cases.ranks.device, 0) for m in cases.batch(cases.rows).micro_batches]
    references = reference.score([rows_of(micro) for micro in micros])
    found = [(policy.score(m) - r.logprobs).abs() for m, r in zip(micros, references, strict=True)]
    largest = torch.cat([torch.zeros(1), *found]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def refreshed(cases: Any, policy: Any, reference: Any, start: Any) -> dict[str, Any]:
    """The weights of a reference by its checkpoint, as the policy moves away and steps go by."""
    now = cases.everywhere(policy)
    reference.after_step(1)
    result: dict[str, Any] = {"odd": worst(kept(cases, reference), start)}
    reference.after_step(2)
    half = {name: (start[name] + now[name]) / 2 for name in start}
    result["even"] = worst(kept(cases, reference), half)
    result["ranks"] = apart(reference)
    again = initial(cases, policy)
    again.load(checkpoint(cases))
    result["gaps"] = [gap(cases, policy, each) for each in (reference, again)]
    reference._mix, reference._average = 1.0, {}
    reference.after_step(4)
    result["replaced"] = gap(cases, policy, reference)
    result["away"] = worst(now, start)
    return result


def checkpoint(cases: Any) -> Path:
    folder = cases.folder / "reference"
    folder.mkdir(exist_ok=True)
    return folder


def kept(cases: Any, reference: Any) -> dict[str, Any]:
    """What the reference saves."""
    from safetensors.torch import load_file

    reference.save(checkpoint(cases))
    dist.barrier()
    found = load_file(checkpoint(cases) / "reference.safetensors")
    dist.barrier()
    return found


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def apart(reference: Any) -> float:
    """How far a rank's reference lies from that of rank 0."""
    largest = torch.zeros(1)
    for parameter in reference._module.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        largest = torch.maximum(largest, (first - parameter.detach()).abs().max())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def learner(cases: Any) -> dict[str, Any]:
    """Two steps with adaptive beta, and a third, by the same learner and by one that loaded."""
    from rl.config.schema import Run
    from rl.learner.learner import Learner
    from rl.run.folder import RunFolder
    from tests.support.composing import composed

    run_folder = RunFolder(cases.folder / "learner")
    run_folder.path.mkdir()
    run_folder.set_model(cases.sources["float32"])

    def start(*overrides: str) -> Learner:
        common = ("model.dtype=float32", "updates_per_batch=2", "optim.learning_rate=1e-4")
        return Learner(Run(**composed(*common, *overrides)), run_folder, cases.ranks)

    bare = start("reference=initial", "correction=tis_token")
    result: dict[str, Any] = {"bare": [bare._reference is None]}
    result["bare"] += [name for name in bare.update(cases.batch(cases.rows)) if "kl_b" in name]
    steered = ("loss=ppo_clip_kl", "reference.refresh_every=2", "reference.refresh_mix=0.5")
    one = start(*steered)
    betas = []
    for step in range(2):
        betas.append(one.update(cases.batch(cases.rows, step=step))["train/kl_beta"])
    one.save(run_folder.path)
    third = cases.batch(cases.rows, step=2)
    expected = one.update(third)
    other = start(*steered, "seed=1")
    other.load(run_folder.path)
    found = other.update(third)
    betas.append(found["train/kl_beta"])
    same = {name for name in expected if expected[name] == found[name]}
    return {
        **result,
        "betas": betas,
        "divergence": expected["train/kl_divergence"],
        "different": sorted(expected.keys() ^ found.keys() | (expected.keys() - same)),
    }
