"""Record batches with a NaN or infinite loss or gradient. Several of them in a row end the run."""

import logging

from rl.learner.ranks import Ranks
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import program
from rl.trainer.rollouts_link import RolloutsLink
from rl.trainer.trained_tokens import StepRecord

_MAX_RECORDED = 5  # maximum number of recorded batches, besides the one that ends the run

log = logging.getLogger(__name__)


class NonFiniteSteps:
    def __init__(self, run_folder: RunFolder, ranks: Ranks, max_nonfinite_steps: int) -> None:
        self._run_folder, self._ranks, self._limit = run_folder, ranks, max_nonfinite_steps
        self._in_a_row = self._num_recorded = 0

    def check(self, step: int, skipped: float, record: StepRecord, rollouts: RolloutsLink) -> str:
        """Record all tokens of the first batches whose updates are skipped, even with record=none.

        `skipped`: fraction of the step's updates that DeepSpeed skipped, because the gradient was
        NaN or infinite. Return why the run ends after too many such steps, else "". Collective.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped:
            return ""
        is_last = self._in_a_row >= self._limit
        if self._num_recorded >= _MAX_RECORDED and not is_last:
            return ""
        self._num_recorded += 1
        ids = rollouts.record_all(step)
        own = record.write_all(self._run_folder, self._ranks.rank, ids)
        # `gather` waits until all ranks have written. If a rank fails, the supervisor ends all.
        found = sorted({*" ".join(self._ranks.gather(" ".join(own))).split()})
        where = "no token, but in the backward pass through the model or in the critic"
        if found:
            where = f"tokens of {len(found)} of {len(ids)} rollouts, for example of {found[0]}"
        message = (
            f"the loss or the gradient was NaN or infinite at {where} (steps in a row: "
            f"{self._in_a_row}). The limit is trainer.max_nonfinite_steps={self._limit}. Lower "
            "optim.learning_rate. In a custom loss, check divisors and arguments of logarithms "
            f"(docs/troubleshooting.md, instability). To try another loss on step {step}: "
            f"{program('compare_losses')} {self._run_folder} steps={step} loss=<another>"
        )
        if self._ranks.first and not is_last:
            log.warning("%s", message)
        return message if is_last else ""
