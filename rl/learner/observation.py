"""What one update made of every completion token, for whoever wants to see it.

    pi           log pi of the policy in training
    old, ref     before the step's first update, and of the reference, where they were made
    entropy      of the distribution that the token was drawn from
    advantage    less the penalties that only the trainer knows
    weight       in the objective, which is the sum of weight * loss
    loss         corrected, with divergence and entropy bonus
    correction   factor of the token loss in it, where there is one
    slope        d objective / d log pi: below 0 the token is made more likely, above 0 less
    kept         1 where weight and correction let it through; with a slope of 0 the loss stopped it
    metric_*     what the loss and its correction measured, token by token

The objective is differentiated in the module's outputs anyway (policy.py), for any loss: the slope
is that of log pi, all other outputs held. Under an entropy bonus the entropies have slopes of their
own, -bonus * weight each; under a loss that compares distributions the candidates have, and the sum
of their sizes is `candidate_slope`.

N: completion tokens of a micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rl.learner.objective import Batch

Observer = Callable[[int, Mapping[str, Tensor]], None]
"""(place of the micro-batch among the rank's, [N] by name): called once for each of them"""

_NAMED = ("entropy", "correction")
_DERIVED = ("kl_to_rollout",)  # from log pi and log mu, so it need not be kept


def observation(
    batch: Batch,
    logprobs: Tensor,
    loss: Tensor,
    slopes: Sequence[Tensor],
    metrics: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the numbers [N] by name; what a run does not have is missing.

    Args:
        batch: the micro-batch.
        logprobs: [N] under the policy in training.
        loss: [N] what each token adds to the objective, before its weight.
        slopes: of the objective in logprobs [N], entropies [N] and candidates [N, K].
        metrics: [N] those of the objective.

    """
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
        "slope": slopes[0],
        "candidate_slope": slopes[2].abs().sum(-1) if len(slopes) > 2 else None,
        "kept": weight != 0,
        **{
            f"metric_{name}": values
            for name, values in metrics.items()
            # A loss of one's own may return a number for the whole micro-batch.
            if name not in (*_NAMED, *_DERIVED) and values.shape == logprobs.shape
        },
    }
    return {name: each.detach() for name, each in values.items() if each is not None}
