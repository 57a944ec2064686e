"""TensorBoard: `tensorboard --logdir outputs` shows every run, by the name of its folder."""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import finite
from rl.trainer.loggers import Logger, first_line

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TensorBoardLogger(Logger):
    """Event files in the run's folder. If they cannot be written, the run continues."""

    _writer: Any = field(default=None, init=False, repr=False)

    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Continue after the last checkpoint, because later steps will be done again."""
        try:
            from torch.utils.tensorboard import SummaryWriter

            run_folder = RunFolder(folder)
            start = run_folder.num_saved_steps()
            if not start:  # purge_step cannot drop step 0
                shutil.rmtree(run_folder.tensorboard, ignore_errors=True)
            self._writer = SummaryWriter(run_folder.tensorboard, purge_step=start or None)
            indented = yaml.safe_dump(dict(config), sort_keys=False).replace("\n", "\n    ")
            self._writer.add_text(run_name, f"    {indented}", start)  # Markdown shows it as code
        except Exception as error:  # noqa: BLE001 the writer may raise anything
            log.warning("TensorBoard is off for this run: %s", first_line(error))

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Write one step at once, so that a killed run loses none."""
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if (number := finite(value)) is not None:
                    self._writer.add_scalar(name, number, step)
            self._writer.flush()
        except Exception as error:  # noqa: BLE001 as above
            log.warning("TensorBoard is off from step %d on: %s", step, first_line(error))
            self._writer = None

    def finish(self) -> None:
        """Close the files."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:  # noqa: BLE001 as above
            log.warning("TensorBoard did not finish: %s", first_line(error))
