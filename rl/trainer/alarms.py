"""Warnings of rank 0 about well-known problems of training, each once, with the remedy.

docs/troubleshooting.md explains each of them under the name in parentheses.
"""

import logging
from collections.abc import Iterator

from rl.runtime.metrics import Row, mean_of

log = logging.getLogger(__name__)

WINDOW = 10  # steps over which the metrics are averaged
_PAGE = "docs/troubleshooting.md"
_METRICS = (
    *("train/reward", "train/entropy", "rollout/zero_spread", "train/zero_gradient_fraction"),
    "rollout/truncated",
)


class Alarms:
    """The metrics of the last steps, and the warnings that were given."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._best, self._entropy = 0.0, None  # best mean reward; mean entropy of the first steps
        self._given = set[str]()

    def add(self, row: Row) -> None:
        """Add the metrics of a step, and log each new warning."""
        if row.get("train/reward") is None:  # no rollout of this step has a reward
            return
        self._rows = [*self._rows, row][-WINDOW:]
        if len(self._rows) == WINDOW:
            for title, message in self._found():
                if title not in self._given:
                    self._given.add(title)
                    log.warning("last %d steps: %s (%s, %s)", WINDOW, message, _PAGE, title)

    def _found(self) -> Iterator[tuple[str, str]]:
        """Yield (heading of the page, message) for each problem of the last steps."""
        reward, entropy, spread, unmoved, truncated = (
            mean_of(self._rows, name) or 0.0 for name in _METRICS
        )
        self._best = max(self._best, reward)
        self._entropy = entropy if self._entropy is None else self._entropy
        if spread >= 0.9 and unmoved >= 0.9:  # some losses learn without a spread
            yield (
                "no spread",
                f"{spread:.0%} of the groups have equal rewards, so they teach nothing: use easier "
                "or harder examples, a larger group_size, or buffer=difficulty",
            )
        if reward < self._best / 2 and self._best > 0.05:
            yield (
                "instability",
                f"the mean reward fell from {self._best:.2f} to {reward:.2f}: lower "
                "optim.learning_rate, raise batch_size, or add kl=k3, from an earlier checkpoint",
            )
        if entropy < self._entropy / 20 and reward < 0.8 * self._best:
            yield (
                "entropy",
                f"the entropy fell from {self._entropy:.3g} to {entropy:.3g}, so rollouts repeat "
                "one answer: lower optim.learning_rate, or raise entropy_bonus",
            )
        if truncated >= 0.5:
            yield (
                "length",
                f"{truncated:.0%} of the rollouts were cut off: raise sampler.max_tokens and "
                "max_seq_len, or choose what becomes of them by truncation",
            )
