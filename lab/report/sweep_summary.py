"""A Hydra callback that reports a sweep at its end."""

import atexit
import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rl.runtime.sweep_folder import SWEEP_VARIABLE, sweep_of_this_process


class SweepSummary(Callback):
    """Prints the report of a --multirun and writes it into the sweep's folder.

    It reads the records of the jobs, so a sweep that dies half way also gets its report.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Register the report for the end of the process."""
        # Hydra skips on_multirun_end after a failed job, and such a sweep needs its report most.
        atexit.register(self.on_multirun_end, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Print and write the report."""
        atexit.unregister(self.on_multirun_end)
        if (sweep := sweep_of_this_process()) is None:
            return  # refused before it began; Hydra 1.4 calls every callback nevertheless
        del os.environ[SWEEP_VARIABLE]
        from lab.report.command import report  # not at the top, because every run imports this file

        report([sweep.path], sweep.path / "report.html")
