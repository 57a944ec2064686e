"""Hydra's callback for the end of a sweep: what it found."""

import atexit
import os
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rl.run.sweep_folder import SWEEP_VARIABLE, sweep_of_this_process


class SweepSummary(Callback):
    """Prints what a --multirun found and writes it into the sweep's folder.

    It goes by the records of the jobs, so a sweep that dies half way still says what it had.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Be there at the end."""
        # Hydra skips on_multirun_end when a job has failed; that sweep needs its table most.
        atexit.register(self.on_multirun_end, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Say what the sweep found, and write it into its folder."""
        atexit.unregister(self.on_multirun_end)
        if (sweep := sweep_of_this_process()) is None:
            return  # refused before it began: Hydra 1.4 says so to every callback
        del os.environ[SWEEP_VARIABLE]
        from rl.report.conclude import conclude  # every run would pay for it at its start

        conclude(sweep.path)
