"""Hydra callbacks of a sweep: they check its jobs, lock its folder, and write its report."""

import atexit
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lab.cli.hydra_errors import explain_hydra_error
from lab.cli.launch import BAD_CONFIG, command_of, compose_config, exit_with
from lab.sweeps.job import is_done
from lab.sweeps.overview import print_end, printing_changes, start_message
from lab.sweeps.slots import Slot, slots_of
from lab.sweeps.sweeper import parse_jobs
from rl.config.check import check
from rl.config.resume_rules import resume_problems
from rl.config.schema import ConfigError
from rl.dry_call.child import DryCall
from rl.runtime.devices import core_of, visible_cpus, visible_gpus
from rl.runtime.folder import RunFolder
from rl.runtime.lock import FolderUnusable, locked
from rl.runtime.sweep_folder import (
    SWEEP_VARIABLE,
    WAITING,
    SweepFolder,
    identity,
    sweep_of_this_process,
)
from rl.runtime.text import key_of, relative_path, say

# This stack is global, because Hydra pickles the callbacks, and an ExitStack cannot be pickled.
_RESOURCES = ExitStack()
_DIR, _ACCEPT = "hydra.sweep.dir=", "accept_changed_code="
_SEED = re.compile(r"seed=\d+")  # jobs that differ only in the seed need only one check
_UNFAIR = (
    "warning: an order, a buffer or a strategy chooses examples or rollouts by rewards, so "
    "training rewards cannot be compared: add evaluation=default"
)
Settings = dict[str, Any]


class SweepCheck(Callback):
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Check all jobs. If jobs have problems, print each with its number of jobs, and exit."""
        jobs = jobs_of(config)
        before = _earlier_runs(config)
        alike: dict[Any, list[list[str]]] = defaultdict(list)  # overrides without the seed -> jobs
        for job in jobs:
            alike[tuple(o for o in job if not _SEED.fullmatch(o))].append(job)
        jobs_with: dict[str, list[str]] = defaultdict(list)  # problem -> jobs
        checked: list[tuple[list[list[str]], Settings]] = []
        for same in alike.values():
            first = next((job for job in same if identity(job) in before), same[0])
            problems, settings = _problems_of(config, first, before.get(identity(first)))
            for problem in problems:
                jobs_with[problem] += map(" ".join, same)
            checked += [(same, settings)] if settings else []
        is_unfair = False
        with DryCall([settings for _, settings in checked]) as dry_call:
            for number, (same, settings) in enumerate(checked):
                try:
                    evaluates = not settings["evaluation"]["_target_"].endswith(".NoEvaluation")
                    is_unfair |= dry_call.learned(number).selects_examples and not evaluates
                except ConfigError as error:
                    for problem in error.problems:
                        jobs_with[problem] += map(" ".join, same)
        if jobs_with:
            problems = [
                f"{problem} ({len(names)} of {len(jobs)} runs, first: {names[0]})"
                for problem, names in jobs_with.items()
            ]
            exit_with("this sweep cannot start", ConfigError(problems), BAD_CONFIG)
        if is_unfair and len(alike) > 1:
            say(_UNFAIR)


def _problems_of(
    config: DictConfig, overrides: list[str], before: RunFolder | None
) -> tuple[list[str], Settings | None]:
    """Return a job's problems and its settings (None if invalid). `before`: the job's last run."""
    try:
        node = config.hydra
        settings = compose_config(node.job.config_name, [*node.overrides.hydra, *overrides])
        check(settings)
    except ConfigError as error:
        return error.problems, None
    except HydraException as error:
        return explain_hydra_error(error, overrides).problems, None
    return list(resume_problems(settings, before.config)) if before else [], settings


def _earlier_runs(config: DictConfig) -> dict[tuple[str, ...], RunFolder]:
    """Return {identity of a job: its run folder} for jobs with results from an earlier start."""
    folder = SweepFolder(Path(str(config.hydra.sweep.dir)))
    runs = {
        identity(record.overrides): RunFolder(Path(record.folder))
        for record in folder.records().values()
        if record.folder
    }
    return {job: run for job, run in runs.items() if run.config.is_file() and run.has_results()}


def jobs_of(config: DictConfig) -> list[list[str]]:
    """Return the overrides of each job; [] if the configured sweeper is not BasicSweeper."""
    if not str(config.hydra.sweeper._target_).endswith(".BasicSweeper"):
        return []
    return parse_jobs(overrides_of(config) + ["seed=0"] * bool(config.get("until")))


def overrides_of(config: DictConfig) -> list[str]:
    """Return the overrides of a sweep. With until=decided, leave out `until` and the seeds."""
    params = (config.hydra.sweeper.params or {}).items()
    lines = [*(f"{key}={value}" for key, value in params), *config.hydra.overrides.task]
    left_out = ("until", "seed") if config.get("until") else ()
    return [line for line in lines if key_of(line).partition(".")[0] not in left_out]


def vary_seeds_last(config: DictConfig) -> None:
    """Sort the overrides so that the first seed of every arm runs before any second seed."""
    sweeper = config.hydra.sweeper
    if str(sweeper._target_).endswith(".BasicSweeper"):
        lines = overrides_of(config)
        with read_write(config), open_dict(config):
            # Hydra varies the last override fastest, so put all overrides in one list, seed first.
            sweeper.params = None
            config.hydra.overrides.task = sorted(lines, key=lambda line: key_of(line) != "seed")


def use_until(config: DictConfig) -> None:
    """Make Hydra use UntilDecided as its sweeper. Raise ConfigError for wrong options."""
    until, sweeper = OmegaConf.to_container(config.until), str(config.hydra.sweeper._target_)
    assert isinstance(until, dict)
    problems = []
    for key in ("smallest_effect", "max_hours"):
        value = until.get(key)
        is_number = isinstance(value, int | float) and 0 < value < inf
        if (not is_number or value is True) and (key, value) != ("max_hours", None):
            problems.append(f"until.{key}={value}: set it to a number above 0")
    if not sweeper.endswith(".BasicSweeper"):
        problems.append(f"until=decided cannot use {sweeper}: remove hydra/sweeper=...")
    if seeds := [item for item in config.hydra.overrides.task if key_of(item) == "seed"]:
        problems.append(f"until=decided chooses the seeds: remove {seeds[0]}")
    if len(jobs_of(config)) < 2 and not problems:
        problems.append("until=decided compares arms: give a key two values, as in loss=cispo,grpo")
    if problems:
        raise ConfigError(problems)
    from lab.sweeps.until import UntilDecided  # slow import, which other sweeps skip

    _replace_sweeper(config, UntilDecided)


def use_card(config: DictConfig) -> None:
    """Make Hydra use CardSweeper as its sweeper. Raise ConfigError for wrong options."""
    first, *others = jobs_of(config) or [[]]
    varied = {key_of(item) for job in others for item in {*job} - {*first}}
    if names := ", ".join(sorted(varied - {"row", "card.level", "seed"})):
        raise ConfigError([f"a report card takes one value of {names}: start a card per value"])
    from lab.sweeps.card import CardSweeper  # slow import, which other sweeps skip

    _replace_sweeper(config, CardSweeper)


def _replace_sweeper(config: DictConfig, subclass: type) -> None:
    # Hydra creates only sweepers of plugins, so register our subclass under the configured name.
    Plugins.instance().class_name_to_class[str(config.hydra.sweeper._target_)] = subclass


class SweepStart(Callback):
    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        until, card = config.get("until"), config.get("card")
        folder = Path(str(config.hydra.sweep.dir)).absolute()
        unresolved: Any = OmegaConf.to_container(config.hydra.sweep)
        is_new = "${now:" in str(unresolved["dir"])
        if folder.exists() and is_new:  # another sweep started in the same second
            folder = folder.with_name(f"{folder.name}-{os.getpid()}")
        try:
            if until:
                use_until(config)
            elif card:
                use_card(config)
            slots = slots_of(config.hydra.launcher, visible_cpus(), visible_gpus())
            _RESOURCES.enter_context(locked(RunFolder(folder)))
        except (ConfigError, FolderUnusable) as error:
            exit_with("this sweep cannot start", error, BAD_CONFIG)
        vary_seeds_last(config)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)  # ${now:...} would differ between jobs
        os.environ[SWEEP_VARIABLE] = str(folder)
        sweep = SweepFolder(folder)
        rerun = rerun_command(sys.orig_argv, folder)
        self._jobs = jobs_of(config)  # computed now, because Hydra's parser is gone at exit
        numbers = [] if card else record_jobs(sweep, self._jobs)
        before = sweep.read_info()
        # Keep the rule by which an earlier start with until=decided chose the number of seeds.
        rule = {key: before[key] for key in ("smallest_effect", "baseline") if key in before}
        info = {
            "question": before.get("question") or question_of(config),
            "command": rerun,
            "started": time.time(),  # time of the latest start or resume
            # Numbers of this start's jobs, or [] if the sweeper chooses jobs by earlier results.
            "jobs": [] if until else numbers,
            **({"smallest_effect": until.smallest_effect} if until else rule),
            "slots": [asdict(slot) for slot in slots],
            "process": {"host": socket.gethostname(), "pid": os.getpid()},
            "run_command": command_of(sys.orig_argv, sys.argv, config.hydra.overrides.hydra),
        }
        sweep.write_info(info)
        say(start_message(sweep, rerun))
        # After a failed job or Ctrl-C, Hydra does not call on_multirun_end, so call it at exit.
        atexit.register(self.on_multirun_end, config)
        _RESOURCES.callback(print_end, sweep, rerun)
        if slots:
            _prepare_for_parallel_jobs(slots)
            _RESOURCES.enter_context(printing_changes(sweep))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Unlock the folder, print how many jobs are unfinished, and write the report or card."""
        atexit.unregister(self.on_multirun_end)
        _RESOURCES.close()
        if (sweep := sweep_of_this_process()) is None:
            return  # the sweep never started, but Hydra 1.4 still calls every callback
        del os.environ[SWEEP_VARIABLE]
        if config.get("card"):
            from lab.sweeps.card import write_card  # slow import, which other sweeps skip

            write_card(config.hydra.runtime.choices.loss, sweep, self._jobs)
            return
        from lab.report.command import report  # imports numpy, which single runs do not need

        report([sweep.path], sweep.path / "report.html")


def record_jobs(sweep: SweepFolder, jobs: Sequence[list[str]]) -> list[int]:
    """Record new jobs, set unfinished `jobs` to waiting, and return the numbers of `jobs`."""
    numbers, earlier = [], [record.grown for record in sweep.records().values()]
    for number, record in sweep.claim_all(jobs, grown=max(earlier, default=-1) + 1):
        numbers.append(number)
        if not is_done(record, record.max_steps or 0):
            record.state = WAITING
            sweep.write(number, record)
    return numbers


def question_of(config: DictConfig) -> str | None:
    """Return the first line of the sweep's YAML file if it is a comment that ends with "?"."""
    name = f"{str(config.hydra.job.config_name).removesuffix('.yaml')}.yaml"
    for source in config.hydra.runtime.config_sources:
        path = Path(source.path, name)
        if source.schema == "file" and path.is_file():
            first = path.read_text().partition("\n")[0]
            return first.lstrip("# ") if first.startswith("#") and first.endswith("?") else None
    return None


def rerun_command(orig_argv: Sequence[str], folder: Path) -> str:
    line = [item for item in orig_argv if not item.startswith((_DIR, _ACCEPT))]
    return shlex.join([*line, f"{_DIR}{relative_path(folder)}"])


def _prepare_for_parallel_jobs(slots: Sequence[Slot]) -> None:
    # Set OMP_NUM_THREADS so that a job leaves one core of its slot free. Without this, joblib would
    # set it to the number of cores divided by n_jobs. A value that the user has set stays.
    num_threads = max(len({core_of(cpu) for cpu in slots[0].cores}) - 1, 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    # Make these signals raise KeyboardInterrupt, because joblib ends workers only on this error.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
