"""Steps whose loss or gradient is not finite: keep their batches, and end the run after several."""

import logging

from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.trainer.rollouts_link import RolloutsLink
from rl.trainer.trained_tokens import StepRecord

log = logging.getLogger(__name__)


class NonFiniteSteps:
    """The count of such steps in a row, on one rank. All ranks see the same steps."""

    def __init__(self, run_folder: RunFolder, rank: int, most: int) -> None:
        """`most`: trainer.max_nonfinite_steps."""
        self._run_folder, self._rank, self._most = run_folder, rank, most
        self._in_a_row = 0

    def check(self, step: int, skipped: float, record: StepRecord, rollouts: RolloutsLink) -> None:
        """Record the tokens of the whole batch if the step was skipped, whatever `record` is.

        Raises:
            RunFailed: too many steps in a row were skipped.
        """
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped:
            return
        record.write_all(self._run_folder, self._rank, rollouts.record_all(step))
        said = (
            f"the loss or the gradient of {self._in_a_row} steps in a row was NaN or infinite, and "
            f"trainer.max_nonfinite_steps={self._most} of them end the run. Lower "
            "optim.learning_rate. In a custom loss, check divisors and arguments of logarithms "
            f"(docs/troubleshooting.md, instability). The tokens of step {step} are kept: python "
            f"compare_losses.py {self._run_folder} steps={step} loss=<another>"
        )
        if self._in_a_row >= self._most:
            raise RunFailed(said)
        if self._rank == 0:
            log.warning("%s", said)
