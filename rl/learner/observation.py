"""Collect the numbers that the token record stores per completion token and update.

docs/token-record.md explains each number. `grad` is the derivative of the objective with respect to
log pi of the token, with entropies and candidates held constant. `candidate_grad` is the sum of the
absolute derivatives with respect to log pi of the candidates.

N: completion tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rl.learner.objective import Batch

Observer = Callable[[int, int, Mapping[str, Tensor]], None]
"""(index of the update, index of the micro-batch on this rank, numbers [N] by name) -> None"""

_UNPREFIXED = ("entropy", "correction")  # metrics recorded without the prefix metric_
_DERIVED = ("kl_to_rollout",)  # not recorded, because it follows from the columns pi and mu


def observation(
    batch: Batch,
    logprobs: Tensor,  # [N] log pi
    loss: Tensor,  # [N] unweighted loss of each token
    # These are the gradients of the objective with respect to logprobs [N], entropies [N] and, if
    # there are candidates, their logprobs [N, K]:
    grads: Sequence[Tensor],
    metrics: Mapping[str, Tensor],  # metrics of the objective, [N] or one number each
) -> dict[str, Tensor]:
    """Return {name: numbers [N]}, without the numbers that the run does not compute."""
    correction = metrics.get("correction")
    weight = batch.token_weights if correction is None else batch.token_weights * correction
    values = {
        "pi": logprobs,
        "old": batch.old_logprobs,
        "ref": batch.ref_logprobs,
        **{name: metrics.get(name) for name in _UNPREFIXED},
        "advantage": batch.advantages,
        "weight": batch.token_weights,
        "loss": loss,
        "grad": grads[0],
        "candidate_grad": grads[2].abs().sum(-1) if len(grads) > 2 else None,
        "kept": weight != 0,
        **{
            f"metric_{name}": values
            for name, values in metrics.items()
            # Leave out a metric that is one number for all tokens.
            if name not in (*_UNPREFIXED, *_DERIVED) and values.shape == logprobs.shape
        },
    }
    return {name: each.detach() for name, each in values.items() if each is not None}
