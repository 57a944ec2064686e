"""Hydra's callback for a sweep: a record of every job, and at the end what the sweep found."""

import atexit
import json
import os
import time
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

SWEEP_VARIABLE = "OFFBYONE_SWEEP"  # environment: the sweep's folder, for jobs in other processes


class SweepSummary(Callback):
    """Hydra callback: prints what a --multirun found and writes <output_dir>/sweeps/<time>/.

    Every job leaves a record there, so jobs may run in other processes (submitit, joblib) and a
    sweep that dies half way still says what it had.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Open the sweep's folder."""
        folder = Path(str(config.output_dir), "sweeps", time.strftime("%Y%m%d-%H%M%S")).absolute()
        if folder.exists():
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        folder.mkdir(parents=True)
        os.environ[SWEEP_VARIABLE] = str(folder)
        # Hydra skips on_multirun_end when a job has failed; that sweep needs its table most.
        atexit.register(self.on_multirun_end, config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the job, so that one that is killed is not forgotten."""
        self._record(config, list(config.hydra.overrides.task), None, "did not end")

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:  # noqa: ARG002
        """Note where the job's run lies, and why it failed if it did."""
        # The task's own config: in any other copy ${now:...} of the run name is another time.
        settings = job_return.cfg
        assert settings is not None
        folder = Path(str(settings.output_dir), str(settings.run_name)).absolute()
        error = None
        if job_return.status is not JobStatus.COMPLETED:
            cause = job_return._return_value  # the property would print it and raise
            error = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        known = str(folder) if folder.is_dir() else None
        self._record(config, list(job_return.overrides or []), known, error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Say what the sweep found, and write it into its folder."""
        if SWEEP_VARIABLE not in os.environ:
            return  # refused before it began: Hydra 1.4 says so to every callback
        folder = Path(os.environ.pop(SWEEP_VARIABLE))
        atexit.unregister(self.on_multirun_end)
        from rl.report.conclude import conclude  # every run would pay for it at its start

        conclude(folder)

    def _record(
        self, config: DictConfig, overrides: list[str], folder: str | None, error: str | None
    ) -> None:
        if config.hydra.mode is not RunMode.MULTIRUN or SWEEP_VARIABLE not in os.environ:
            return
        path = Path(os.environ[SWEEP_VARIABLE], "jobs", f"{config.hydra.job.num:05d}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"overrides": overrides, "folder": folder, "error": error}))
