"""Parse a sweep's jobs, and define the base class of sweepers that choose jobs by results."""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from rl.runtime.sweep_folder import SweepFolder, sweep_of_this_process

Jobs = list[list[str]]  # the overrides of each job


def parse_jobs(arguments: list[str]) -> Jobs:
    """Return a job for each combination of values in `arguments`, such as loss=a,b seed=0,1."""
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
    return jobs


class ChoosingSweeper(BasicSweeper):
    @property
    def folder(self) -> SweepFolder:
        folder = sweep_of_this_process()
        assert folder is not None
        return folder

    def launch(self, jobs: Jobs, first_number: int) -> list[Any]:
        """Launch jobs, numbered from `first_number` on. Return their Hydra JobReturns."""
        assert self.launcher is not None
        self.folder.claim_all(jobs)
        return list(self.launcher.launch(jobs, initial_job_idx=first_number)) if jobs else []
