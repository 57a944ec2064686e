"""What one update computed for every completion token, for the token record.

    pi           log pi of the policy in training
    old, ref     log pi before the step's first update, and of the reference, if the run has them
    entropy      of the distribution that the token was drawn from
    advantage    minus the penalties that only the trainer knows
    weight       in the objective, which is the sum of weight * loss
    loss         after the correction, with divergence and entropy bonus
    correction   factor of the token loss, if there is a correction
    grad         d objective / d log pi: below 0 the update makes the token more likely
    kept         1 where weight and correction are not 0; if grad is still 0, the loss stopped it
    metric_*     what the loss and its correction measured for each token

rl/learner/policy.py differentiates the objective in the module's outputs, for any loss. `grad` is
the derivative in log pi with all other outputs held constant. With an entropy bonus the entropies
have gradients of their own, -bonus * weight each. With a loss that compares distributions the
candidates have gradients, and `candidate_grad` is the sum of their absolute values.

N: completion tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rl.learner.objective import Batch

Observer = Callable[[int, Mapping[str, Tensor]], None]
"""Called once per micro-batch with its position among the rank's, and numbers [N] by name."""

_NAMED = ("entropy", "correction")
_DERIVED = ("kl_to_rollout",)  # not recorded, because it follows from log pi and log mu


def observation(
    batch: Batch,
    logprobs: Tensor,  # [N] under the policy in training
    loss: Tensor,  # [N] what each token adds to the objective, before its weight
    grads: Sequence[Tensor],  # of the objective in logprobs [N], entropies [N], candidates [N, K]
    metrics: Mapping[str, Tensor],  # [N] those of the objective
) -> dict[str, Tensor]:
    """Return the numbers [N] by name; a quantity that the run does not have is missing."""
    correction = metrics.get("correction")
    weight = batch.token_weights if correction is None else batch.token_weights * correction
    values = {
        "pi": logprobs,
        "old": batch.old_logprobs,
        "ref": batch.ref_logprobs,
        **{name: metrics.get(name) for name in _NAMED},
        "advantage": batch.advantages,
        "weight": batch.token_weights,
        "loss": loss,
        "grad": grads[0],
        "candidate_grad": grads[2].abs().sum(-1) if len(grads) > 2 else None,
        "kept": weight != 0,
        **{
            f"metric_{name}": values
            for name, values in metrics.items()
            # A custom loss may return one number for the whole micro-batch.
            if name not in (*_NAMED, *_DERIVED) and values.shape == logprobs.shape
        },
    }
    return {name: each.detach() for name, each in values.items() if each is not None}
