"""A Hydra callback that reports a sweep at its end."""

import atexit
import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rl.runtime.sweep_folder import SWEEP_VARIABLE, sweep_of_this_process


class SweepSummary(Callback):
    """Hydra callback that prints the report of a sweep and writes it to the sweep's folder.

    The report is made from the job records, so an interrupted sweep also gets a report.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Schedule the report for the exit of this process."""
        # Hydra skips on_multirun_end after a failed job, so call it when the process exits.
        atexit.register(self.on_multirun_end, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Print and write the report of the sweep."""
        atexit.unregister(self.on_multirun_end)
        if (sweep := sweep_of_this_process()) is None:
            return  # the sweep never started, but Hydra 1.4 still calls every callback
        del os.environ[SWEEP_VARIABLE]
        from lab.report.command import report  # imported here, because every run imports this file

        report([sweep.path], sweep.path / "report.html")
