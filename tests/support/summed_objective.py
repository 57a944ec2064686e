"""An objective that tests call for the weighted sum of one micro-batch."""

from torch import Tensor

from rl.learner.objective import Batch, Objective


class SummedObjective(Objective):
    """Returns the micro-batch's share of the objective, and the metrics."""

    def __call__(
        self,
        batch: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        beta: float = 0.0,
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.per_token(batch, logprobs, entropies, beta, candidate_logprobs)
        return batch.weighted_sum(loss), metrics
