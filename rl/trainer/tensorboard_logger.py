"""Log to TensorBoard. `tensorboard --logdir outputs` shows every run under its folder's name."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import finite_float
from rl.trainer.loggers import Logger, turn_off_on_error


@dataclass(kw_only=True)
class TensorBoardLogger(Logger):
    _writer: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if find_spec("tensorboard") is None:
            raise ValueError("logger=tensorboard needs TensorBoard: pip install tensorboard")

    @turn_off_on_error
    def start(self, folder: Path, run_name: str, config: Mapping[str, Any]) -> None:
        """Open the event files. Delete the events of steps that run again after a resume."""
        from torch.utils.tensorboard import SummaryWriter

        run_folder = RunFolder(folder)
        start = run_folder.num_saved_steps()
        if not start:  # no step is saved, so delete the events of all steps
            shutil.rmtree(run_folder.tensorboard, ignore_errors=True)
        self._writer = SummaryWriter(run_folder.tensorboard, purge_step=start)
        indented = yaml.safe_dump(dict(config), sort_keys=False).replace("\n", "\n    ")
        # Indent the text, because Markdown then shows it as code.
        self._writer.add_text(run_name, f"    {indented}", start)

    @turn_off_on_error
    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        for name, value in metrics.items():
            if (number := finite_float(value)) is not None:
                self._writer.add_scalar(name, number, step)
        self._writer.flush()

    @turn_off_on_error
    def finish(self) -> None:
        self._writer.close()
        self.is_off = True
