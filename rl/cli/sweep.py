"""The beginning of a sweep: every job is checked, its folder is opened, its screen is shown."""

import atexit
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from rl.cli.hydra_errors import explain
from rl.cli.launch import BAD_CONFIG, command_of, composed, stop
from rl.config.check import check
from rl.config.resume_rules import changes
from rl.config.schema import ConfigError
from rl.run.devices import core_of, visible_cores, visible_gpus
from rl.run.folder import RunFolder
from rl.run.lock import FolderUnusable, locked
from rl.run.sweep_folder import (
    SWEEP_VARIABLE,
    WAITING,
    SweepFolder,
    identity,
)
from rl.run.typed import as_typed
from rl.sweeps.job import is_done
from rl.sweeps.overview import what_is_left, what_will_be_done
from rl.sweeps.process import this_process
from rl.sweeps.screen import SweepScreen
from rl.sweeps.slots import Slot, slots_of

# Hydra sends its callbacks to the launcher's processes, so what is open cannot lie in one of them.
_OPEN = ExitStack()
_DIR = "hydra.sweep.dir="
_SEED = re.compile(r"seed=\d+")  # one as good as any other
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w./@-]*=|~")


class SweepCheck(Callback):
    """Hydra callback: checks every run of a sweep before the first one starts."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Exit with everything that is wrong, and in how many runs."""
        jobs = jobs_of(config)
        before = _runs_before(config)
        alike: dict[tuple[str, ...], list[list[str]]] = {}  # composing is slow: one of all seeds
        for job in jobs:
            alike.setdefault(tuple(o for o in job if not _SEED.fullmatch(o)), []).append(job)
        where: dict[str, list[str]] = {}
        for same in alike.values():
            first = next((job for job in same if identity(job) in before), same[0])
            for problem in _problems_of(config, first, before.get(identity(first))):
                where.setdefault(problem, []).extend(" ".join(job) for job in same)
        if where:
            problems = [
                f"{problem} ({len(names)} of {len(jobs)} runs, first: {names[0]})"
                for problem, names in where.items()
            ]
            stop("this sweep cannot start", ConfigError(problems), BAD_CONFIG)


def _problems_of(config: DictConfig, overrides: list[str], before: RunFolder | None) -> list[str]:
    """What is wrong with one run of a sweep; `before` is what it has left, if it was begun."""
    try:
        settings, choices = composed(config.hydra, overrides)
        check(settings, choices=choices)
    except ConfigError as error:
        return error.problems
    except HydraException as error:
        return explain(error, overrides).problems
    return list(changes(settings, before.config)) if before else []


def _runs_before(config: DictConfig) -> dict[tuple[str, ...], RunFolder]:
    """The runs that the sweep has begun before, by what their jobs are known by."""
    folder = SweepFolder(Path(str(config.hydra.sweep.dir)))
    runs = {
        identity(record.overrides): RunFolder(Path(record.folder))
        for record in folder.records().values()
        if record.folder
    }
    return {job: run for job, run in runs.items() if run.config.is_file()}


def jobs_of(config: DictConfig) -> list[list[str]]:
    """The overrides of each run, where the sweeper knows them beforehand."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    sweeper = config.hydra.sweeper
    if not str(sweeper._target_).endswith(".BasicSweeper"):
        return []
    lines = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    loader = GlobalHydra.instance().config_loader()
    overrides = OverridesParser.create(loader).parse_overrides(
        [*lines, *config.hydra.overrides.task]
    )
    return [job for batch in BasicSweeper.split_arguments(overrides, None) for job in batch]


class SweepStart(Callback):
    """Hydra callback: opens a sweep's folder, or goes on in it; shows jobs that run at once."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the jobs and what they need, and say how to go on with them."""
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        is_named = any(item.startswith(_DIR) for item in config.hydra.overrides.hydra)
        if folder.exists() and not is_named:  # another began in the same second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        try:
            slots = slots_of(config.hydra.launcher, visible_cores(), visible_gpus())
            _OPEN.enter_context(locked(RunFolder(folder)))
        except (ConfigError, FolderUnusable) as error:
            stop("this sweep cannot start", error, BAD_CONFIG)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)  # else ${now:...} may be another time for the jobs
        os.environ[SWEEP_VARIABLE] = str(folder)
        sweep = SweepFolder(folder)
        numbers = _claimed(sweep, jobs_of(config))
        again = command_again(sys.orig_argv, folder)
        sweep.write_info(_info(config, sweep, again, slots, numbers))
        _say(what_will_be_done(sweep, again))
        # Hydra tells nobody of the end when a job has failed, nor when it is interrupted.
        atexit.register(self.on_multirun_end, config)
        _OPEN.callback(lambda: _say(what_is_left(sweep, again)))
        if slots:
            _prepare_for_jobs_at_once(slots)
            _OPEN.enter_context(SweepScreen(sweep))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Give the terminal back and say what is left to do."""
        atexit.unregister(self.on_multirun_end)
        _OPEN.close()


def _claimed(sweep: SweepFolder, jobs: Sequence[list[str]]) -> list[int]:
    """The numbers of the jobs; those that are not done are waiting from now on."""
    numbers = []
    for job in jobs:
        number, record = sweep.claim(job)
        numbers.append(number)
        if not is_done(record, record.max_steps or 0):
            record.state = WAITING
            sweep.write(number, record)
    return numbers


def _info(
    config: DictConfig, sweep: SweepFolder, again: str, slots: list[Slot], numbers: list[int]
) -> dict[str, Any]:
    """What sweep.json says."""
    before, name = sweep.read_info(), config.hydra.job.config_name
    return {
        "question": before.get("question") or question_of(config),
        "command": again,
        "config_name": name,
        "started": time.time(),  # the last time
        "jobs": numbers,  # of the last start; a sweep that searches knows none beforehand
        "slots": [asdict(slot) for slot in slots],
        "process": this_process(),
        "run_command": command_of(sys.orig_argv, sys.argv, config.hydra.overrides.hydra),
    }


def question_of(config: DictConfig) -> str | None:
    """The first line of the primary configuration, where it is a comment that asks something."""
    name = f"{str(config.hydra.job.config_name).removesuffix('.yaml')}.yaml"
    for source in config.hydra.runtime.config_sources:
        path = Path(source.path, name)
        if source.schema == "file" and path.is_file():
            first = path.read_text().partition("\n")[0]
            return first.lstrip("# ") if first.startswith("#") and first.endswith("?") else None
    return None


def command_again(typed: Sequence[str], folder: Path) -> str:
    """The command line of a sweep as it was typed, and its folder beside the other overrides."""
    line = [item for item in typed if not item.startswith(_DIR)]
    # Hydra's parser takes overrides in one piece, flags before or behind them.
    places = [i for i, item in enumerate(line) if _OVERRIDE.match(item)]
    line.insert(places[-1] + 1 if places else len(line), f"{_DIR}{as_typed(folder)}")
    return shlex.join(line)


def _prepare_for_jobs_at_once(slots: Sequence[Slot]) -> None:
    # joblib would count the cores of the whole machine. Whoever sets it wins, there as here.
    num_threads = max(len({core_of(cpu) for cpu in slots[0].cores}) - 1, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # The launcher waits in this process and ends its workers when it is interrupted.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    if text:
        print(text, flush=True)  # noqa: T201
