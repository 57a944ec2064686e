"""On rank 0, log one warning for each common problem of training, with a remedy."""

import logging
import resource
from collections.abc import Callable
from typing import Self

from rl.config.learned import Learned
from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import Row, mean_of, read_metrics

log = logging.getLogger(__name__)

WINDOW = 10  # steps over which the metrics are averaged
_METRICS = (
    *("train/reward", "train/entropy", "rollout/truncated", "rollout/zero_spread"),
    "rollout/untrained",
)
_MESSAGES = {  # heading of docs/troubleshooting.md -> message
    "no spread": "{equal:.0%} of the groups have equal rewards, so their advantages are 0: use "
    "easier or harder examples, a larger group_size, or buffer=difficulty",
    "instability": "the mean reward fell from {best:.2f} to {reward:.2f}: lower "
    "optim.learning_rate, raise batch_size, or add kl=k3, and start from an earlier checkpoint",
    "entropy": "the entropy fell from {first:.3g} to {entropy:.3g}, so rollouts repeat one answer: "
    "lower optim.learning_rate, or raise entropy_bonus",
    "length": "{truncated:.0%} of the rollouts were cut off: raise sampler.max_tokens and "
    "max_seq_len, or change the option truncation",
    "masked": "{untrained:.0%} of the rollouts are not trained: stop/* in metrics.jsonl "
    "shows how they end. Raise the limit that ends most of them, or change truncation or buffer",
    "memory": "the memory of rank 0 grew from {early:.1f} to {memory:.1f} GiB after the first "
    "steps and may run out: look for tensors or lists that a custom loss, critic or logger keeps",
}


def peak_memory_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Alarms:
    """Checks the metrics of the last ten steps. Each check logs its warning once per run."""

    def __init__(self, learned: Learned, memory: Callable[[], float] = peak_memory_gib) -> None:
        self._memory, self._early = memory, 0.0  # _early: GiB of memory after the first steps
        self._num_steps = 0  # number of steps since this process started
        self._needs_spread = learned.advantage_compares and learned.reads_advantages
        self._rows: list[Row] = []
        self._best, self._first = 0.0, 0.0  # best mean reward; mean entropy of the first steps
        self._not_logged = dict(_MESSAGES)

    @classmethod
    def of(cls, run: Run, run_folder: RunFolder, start: int) -> Self:
        """Return a run's alarms, without warnings that the steps before `start` have caused."""
        alarms = cls(Learned.of(run))
        for row in read_metrics(run_folder) if start else ():
            if row["step"] < start:
                alarms._new_warnings(row, memory=0.0)
        return alarms

    def add(self, row: Row) -> None:
        self._num_steps += 1
        memory = self._memory() if self._num_steps >= WINDOW else 0.0
        for heading, text in self._new_warnings(row, memory).items():
            page = f"docs/troubleshooting.md, {heading}"
            log.warning("last %d steps: %s (%s)", WINDOW, text, page)

    def _new_warnings(self, row: Row, memory: float) -> dict[str, str]:
        """Add a row and return the new warnings by heading. `memory`: GiB, 0 if not measured."""
        # Skip a step without rewards, unless no recent step has one (training on demonstrations).
        if row.get("train/reward") is None and mean_of(self._rows, "train/reward") is not None:
            return {}
        self._rows = [*self._rows, row][-WINDOW:]
        if len(self._rows) < WINDOW:
            return {}
        means = [mean_of(self._rows, name) or 0.0 for name in _METRICS]
        reward, entropy, truncated, equal, untrained = means
        early = self._early = self._early or memory
        best = self._best = max(self._best, reward)
        first = self._first = self._first or entropy  # the first mean that is not 0
        found = {
            "no spread": self._needs_spread and equal >= 0.9,
            "instability": reward < best / 2 and best > 0.05,
            "entropy": 0 < entropy < first / 20 and reward < 0.8 * best,
            "length": truncated >= 0.5,
            "masked": untrained >= 0.5,
            "memory": memory > max(1.5 * early, early + 1),
        }
        values = {"best": best, "first": first, "reward": reward, "entropy": entropy}
        values |= {"equal": equal, "truncated": truncated, "untrained": untrained}
        values |= {"early": early, "memory": memory}
        new = [heading for heading in self._not_logged if found[heading]]
        return {heading: self._not_logged.pop(heading).format(**values) for heading in new}
