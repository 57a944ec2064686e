"""Loggers copy a run's metrics to a service or to files; metrics.jsonl is always written."""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import finite
from rl.trainer.rollout_rows import rollout_rows

_LONGEST_NAME = 55  # of the 64 characters that wandb takes
WANDB_TIMEOUT_S = 30.0  # for the service to answer at the start, and for uploads at the end

log = logging.getLogger(__name__)


class Logger:
    """What the trainer calls on rank 0; this one does nothing."""

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the copy of this run, or continue it after a resume."""

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy one step."""

    def finish(self) -> None:
        """Write or upload what is left."""


@dataclass
class ConsoleLogger(Logger):
    """Nothing beyond metrics.jsonl and the screen."""


@dataclass(kw_only=True)
class Loggers(Logger):
    """Several loggers at once."""

    loggers: dict[str, Logger]

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the copies of this run."""
        for logger in self.loggers.values():
            logger.start(folder, run_name, config)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Copy one step to each."""
        for logger in self.loggers.values():
            logger.log(step, metrics)

    def finish(self) -> None:
        """Write or upload what is left."""
        for logger in self.loggers.values():
            logger.finish()


# The metrics that show first whether a run is healthy. Of each, a table of runs shows the last
# value (None), the maximum or the mean.
CURATED = {
    "train/reward": None,
    "eval/reward": "max",
    "train/entropy": None,
    "train/grad_norm": None,
    "train/clip_fraction": "mean",
    "train/kl_divergence": None,
    "mismatch/mean_abs": "max",
    "staleness/mean": "mean",
    "rollout/mean_length": None,
    "rollout/truncated": None,
    "rollout/zero_spread": None,
    "rollout/tokens_per_s": "mean",
}
HIDDEN = (
    *("time/*", "stop/*", "buffer/*", "order/*", "staleness/share_*", "mismatch/sampled_*"),
    *("train/empty", "train/skipped", "train/ratio_clamped", "train/policy_version"),
)


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """Weights & Biases. If it fails, the logger goes offline or stops, and the run continues.

    Attributes:
        rollouts_every: steps between two tables of rollouts, 0 for none.
        num_rollouts: rows of such a table.

    """

    project: str
    entity: str | None
    mode: Literal["online", "offline", "disabled"]
    rollouts_every: NonNegativeInt
    num_rollouts: PositiveInt
    _run: Any = field(default=None, init=False, repr=False)
    _folder: RunFolder | None = field(default=None, init=False, repr=False)

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the run of this folder, so that a resumed one continues it."""
        if self.mode == "disabled":
            return
        try:
            self._run, self._folder = self._init(folder, run_name, config), RunFolder(folder)
            for name, summary in CURATED.items():
                self._run.define_metric(name, summary=summary)
            for pattern in HIDDEN:
                self._run.define_metric(pattern, hidden=True)
        except Exception as error:  # noqa: BLE001 the client may raise anything
            log.warning("wandb is off for this run: %s", first_line(error))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Send one step."""
        if self._run is None:
            return
        try:
            values = {name: v for name, v in metrics.items() if finite(v) is not None}
            self._run.log({**values, **self._table(step)}, step=step)
        except Exception as error:  # noqa: BLE001 as above
            log.warning("wandb is off from step %d on: %s", step, first_line(error))
            self._run = None

    def finish(self) -> None:
        """Upload what is left, for at most WANDB_TIMEOUT_S; the files stay for `wandb sync`."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except Exception as error:  # noqa: BLE001 as above
            log.warning("wandb did not finish, its files stay here: %s", first_line(error))

    def _table(self, step: int) -> dict[str, Any]:
        """Return a few rollouts of the step, if it is due."""
        if self._folder is None or not self.rollouts_every or step % self.rollouts_every:
            return {}
        rows = rollout_rows(self._folder, step, self.num_rollouts)
        if not rows:
            return {}
        import wandb

        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        return {"rollouts": table}

    def _init(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S
        )
        opened = partial(
            wandb.init, project=self.project, entity=self.entity, dir=folder, name=run_name,
            id=wandb_id(folder, run_name), resume="allow", config=dict(config), settings=settings,
        )  # fmt: skip
        if self.mode == "online":
            try:
                # Without a prompt, because wandb would wait for an answer at the terminal.
                if wandb.login(prompt=False):
                    return opened(mode="online")
                problem = "no key; run `wandb login` or set WANDB_API_KEY"
            except wandb.Error as error:
                problem = first_line(error)
            later = folder / "wandb" / "offline-run-*"
            log.warning("wandb goes offline (%s). Send it later: wandb sync %s", problem, later)
        return opened(mode="offline")


def wandb_id(folder: Path, run_name: str) -> str:
    """Return the run's id at wandb, drawn at its first start and kept in its folder.

    It is random because runs in other folders and on other machines may have the same name.
    """
    path = RunFolder(folder).wandb_id
    if not path.exists():
        legal = re.sub(r"[^\w.-]", "-", run_name)[-_LONGEST_NAME:]
        path.write_text(f"{legal}-{secrets.token_hex(4)}\n")
    return path.read_text().strip()


def first_line(error: Exception) -> str:
    """Return the error on one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
