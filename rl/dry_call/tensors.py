"""Check loss, correction, divergence and critic by calls with made-up tensors before a run.

A loss gets eight made-up tokens of two sequences with several turns, and a third sequence without
tokens. The ratios are near 1, within the usual bounds of PPO's clip. Advantages have both signs.
"""

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from losses.tokens import TokenLoss, Tokens, describe
from rl.config.build import component
from rl.config.facts import fact
from rl.dry_call.report import BadResult, Report, unwrap
from rl.records import MicroBatch, columns_of

INPUT = "eight made-up tokens"
NUM_TOKENS, NUM_SEQUENCES = 8, 3
# The run itself logs metrics with these names after "train/". Components must use other names.
RUN_METRICS = {
    *("loss", "grad_norm", "learning_rate", "skipped", "empty", "entropy", "ratio_clamped"),
    *("kl_to_rollout", "kl_divergence", "kl_beta", "kl_penalty", "correction", "reward", "tokens"),
    *("shaped_reward", "policy_version", "reference_retries", "value_mean", "return_mean"),
    *("explained_variance", "critic_learning_rate", "critic_grad_norm", "critic_skipped"),
    *("value_loss", "zero_gradient_fraction"),
}


class RecordingTensor(Tensor):
    """A field of the made-up tokens. A torch operation on it adds the field's name to `used`.

    Reading the field from Tokens is not a use, because `dataclasses.replace` reads every field.
    """

    field: str
    used: set[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        is_shape = isinstance(result, torch.Size | torch.dtype | torch.device | bool | int)
        if not is_shape and not name.endswith("_like") and not name.startswith("new_"):
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, RecordingTensor):
                    value.used.add(value.field)
        return result


def made_up_tokens(*, has_old: bool, change: float = 0.0) -> tuple[Tokens, list[Tensor], set[str]]:
    """Return made-up tokens, their leaf tensors, and a set that collects names of used fields.

    `has_old`: whether the tokens have old_logprobs. `change` is added to rollout_logprobs.
    """
    generator = torch.Generator().manual_seed(0)

    def add_noise(values: Tensor) -> Tensor:
        return values + 0.02 * torch.randn(values.shape, generator=generator)

    logprobs = -0.2 - torch.rand(NUM_TOKENS, generator=generator)
    candidates = torch.randn(NUM_TOKENS, 4, generator=generator).log_softmax(-1)
    leaves = [logprobs.clone().requires_grad_(), candidates.clone().requires_grad_()]
    fields: dict[str, Tensor] = {
        "logprobs": leaves[0],
        "rollout_logprobs": add_noise(logprobs) + change,
        "advantages": torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, -1.0, -1.0, -0.5]),
        "sequence_ids": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
        "staleness": torch.tensor([0, 0, 1, 1, 1, 0, 0, 2]),
        "entropies": 0.1 + torch.rand(NUM_TOKENS, generator=generator),
        "positions": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]),
        "turns": torch.tensor([0, 0, 1, 1, 1, 0, 0, 1]),
        "rollout_ids": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]),
        "group_ids": torch.zeros(NUM_TOKENS, dtype=torch.int64),
        "source": torch.tensor([0, 0, 1, 1, 1, 0, 0, 2]),
        "ref_logprobs": add_noise(logprobs),
        "candidate_logprobs": leaves[1],
        "ref_candidate_logprobs": add_noise(candidates).sort(descending=True).values,
        "kl_from_uniform": torch.linspace(2.0, 0.5, NUM_TOKENS),
    }
    added = columns_of(MicroBatch).keys() & Tokens.__dataclass_fields__.keys() - fields.keys()
    fields |= {name: torch.zeros(NUM_TOKENS) for name in added}
    if has_old:
        fields["old_logprobs"] = add_noise(logprobs)
    used: set[str] = set()
    watched: dict[str, Any] = {}
    for name, values in fields.items():
        watched[name] = values.as_subclass(RecordingTensor)
        watched[name].field, watched[name].used = name, used
    return Tokens(num_sequences=NUM_SEQUENCES, **watched), leaves, used


def check_loss(report: Report, node: Any, num_updates: int) -> tuple[set[str], bool]:
    """Return the names of the fields that the loss reads, and whether it corrects (see below).

    The loss is called with and without old_logprobs, which it gets if a batch has several updates.
    An error is reported only if it would also occur in this run. A loss corrects for the difference
    between trainer and vLLM if rollout_logprobs change its result although it has old_logprobs.
    """
    used, results, loss = set[str](), list[Tensor](), component(node)
    for has_old, change in ((False, 0.0), (True, 0.0), (True, 1e-3)):
        trial = report if has_old == (num_updates > 1) and not change else Report()
        tokens, leaves, here = made_up_tokens(has_old=has_old, change=change)
        with trial.calling("loss", loss, INPUT):
            bound = with_statistics(loss, tokens)
            check_token_loss(trial, result := bound(tokens), leaves)
            if trial is report and not fact(node["_target_"], "whole_groups", False):
                _require_independent_losses(bound, tokens, result.loss.detach())
            with trial.calling("loss", loss, "no tokens, as a rank without rollouts calls it"):
                bound(_split_sequences(tokens)[2])
            results += [result.loss.detach()] if has_old else []
        used |= here
    corrects = len(results) == 2 and not torch.equal(*results)
    module = sys.modules.get(unwrap(loss).__module__)
    if (stated := getattr(module, "READS", None)) is None:
        return used, corrects
    with report.calling("loss", loss):
        if unknown := set(stated) - set(Tokens.__dataclass_fields__):
            known = ", ".join(Tokens.__dataclass_fields__)
            raise BadResult(
                f"has READS={stated}, but Tokens has no field {', '.join(sorted(unknown))}: name "
                f"only fields of Tokens ({known})"
            )
    return set(stated), corrects


def with_statistics(loss: Any, tokens: Tokens) -> Any:
    """Return the loss. If it has a method `statistics`, bind the sums that this method returns."""
    if not hasattr(loss, "statistics"):
        return loss
    whole, *shares = (loss.statistics(each) for each in (tokens, *_split_sequences(tokens)))
    if not isinstance(whole, Tensor) or whole.dim() != 1 or not whole.isfinite().all():
        what = f"has statistics() that return {describe(whole)}"
        raise BadResult(
            f"{what}: return finite sums over the tokens, in one tensor of shape [number of sums]"
        )
    total = torch.stack(shares).detach().sum(0)
    if not torch.allclose(total, whole.detach()):
        raise BadResult(
            "has statistics() whose results for two sequences and an empty one do not add up to "
            "the result for all tokens: return sums over the tokens, and divide them in __call__"
        )
    return partial(loss, statistics=whole.detach())


def _split_sequences(tokens: Tokens) -> list[Tokens]:
    """Return one micro-batch for each of the three sequences. The last sequence is empty."""
    with torch._C.DisableTorchFunctionSubclass():  # do not record copies as uses
        fields = {k: v for k, v in vars(tokens).items() if isinstance(v, Tensor)}
        values = {k: v.detach().requires_grad_(v.requires_grad) for k, v in fields.items()}
        values["sequence_ids"] = torch.zeros(NUM_TOKENS, dtype=torch.int64)
        return [
            Tokens(num_sequences=1, **{name: each[index] for name, each in values.items()})
            for index in (slice(0, 5), slice(5, 8), slice(0, 0))
        ]


def _require_independent_losses(loss: Any, tokens: Tokens, first: Tensor) -> None:
    """Raise BadResult if `first`, the losses of `tokens`, depend on other sequences of the call."""
    before = torch.get_rng_state().tolist(), random.getstate()
    again = loss(tokens).loss.detach()
    is_random = before != (torch.get_rng_state().tolist(), random.getstate())
    parts = torch.cat([loss(part).loss for part in _split_sequences(tokens)[:2]])
    if not is_random and torch.equal(first, again) and not parts.allclose(first, 1e-4, 1e-6):
        raise BadResult(
            "returned losses that depend on the other sequences of the call: a call gets a "
            "micro-batch, which is a part of the batch, so compute no mean, sum or maximum over "
            "several sequences. Use the method `statistics` for sums over the batch, or set "
            "whole_groups = True to get all tokens of a group at once (docs/losses.md)"
        )


def check_token_loss(report: Report, result: Any, leaves: list[Tensor]) -> None:
    """Raise BadResult unless `result` is a TokenLoss of 8 finite numbers with finite gradients."""
    if not isinstance(result, TokenLoss):
        raise BadResult(
            f"returned {describe(result)}: return TokenLoss(loss, metrics) of losses/tokens.py"
        )
    values = result.loss
    _require_shape(values, "a loss that is ", "number per token, neither summed nor averaged")
    if not values.requires_grad:
        raise BadResult(
            "returned a loss without a gradient: compute it from tokens.logprobs or "
            "tokens.candidate_logprobs (a critic's loss: from the values), and do not detach them"
        )
    gradients = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    if not all(g.isfinite().all() for g in (values, *gradients) if g is not None):
        raise BadResult(
            "returned a loss or a gradient that is NaN or infinite for ordinary tokens: clamp each "
            "divisor, each argument of a logarithm, and each base of a power"
        )
    check_metrics(report, result.metrics)


def check_metrics(report: Report, metrics: Mapping[str, Tensor]) -> None:
    """Raise BadResult if a metric has the name of another metric."""
    owners = {"the run itself uses": RUN_METRICS, "another component uses": report.metric_names}
    for owner, names in owners.items():
        if taken := " and ".join(sorted(repr(name) for name in metrics if name in names)):
            raise BadResult(f"returned metrics named {taken}, which {owner}: choose other names")
    report.metric_names |= metrics.keys()


def _require_shape(
    values: Any, what: str, wanted: str, shape: tuple[int, ...] = (NUM_TOKENS,)
) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        raise BadResult(f"returned {what}{describe(values)}: return a tensor with one {wanted}")


def check_correction(report: Report, correction: Any) -> bool:
    """Return whether a correction leaves all weights at 1, even for ratios far from 1."""
    gaps = torch.tensor([5.0, -5.0, 2.0, 3.0, 4.0, -5.0, -4.0, -3.0])
    old = torch.full((NUM_TOKENS,), -6.0)
    tokens, *_ = made_up_tokens(has_old=True)
    with report.calling("correction", correction, INPUT):
        result = correction(replace(tokens, old_logprobs=old, rollout_logprobs=old - gaps))
        weights = getattr(result, "weights", result)
        if not hasattr(result, "metrics") or weights.shape != (NUM_TOKENS,):
            raise BadResult(
                f"returned {describe(weights)}: return Correction(weights, metrics) of "
                "losses/correction.py, one weight per token"
            )
        if not weights.isfinite().all():
            raise BadResult("returned a weight that is NaN or infinite: clamp the log ratio")
        check_metrics(report, result.metrics)
        return bool((weights == 1).all())
    return False


def check_divergence(report: Report, estimator: Any) -> bool:
    """Return whether the gradient of a divergence estimator is the same for every token."""
    logprobs = torch.linspace(-2.0, -0.2, NUM_TOKENS).requires_grad_()
    with report.calling("kl", estimator, INPUT):
        values = estimator(logprobs, torch.full((NUM_TOKENS,), -1.0))
        _require_shape(values, "", "number per token")
        if not values.requires_grad:
            raise BadResult("returned numbers without a gradient: do not detach the first argument")
        (gradient,) = torch.autograd.grad(values.sum(), [logprobs])
        return bool((gradient == gradient[0]).all())
    return False


def check_critic(report: Report, estimator: Any, loss: Any) -> None:
    """Call the critic's advantage estimator and its value loss with made-up values."""
    rewards, values = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]]), torch.full((2, 3), 0.3)
    with report.calling("critic.estimator", estimator, "made-up rewards and values"):
        advantages = estimator(rewards, values)
        _require_shape(advantages, "", "advantage for each value, of shape [2, 3]", (2, 3))
    now = torch.linspace(-1.0, 1.0, NUM_TOKENS).requires_grad_()
    with report.calling("critic.loss", loss, "eight made-up values"):
        check_token_loss(report, loss(now, now.detach() + 0.1, now.detach() - 0.01), [now])
