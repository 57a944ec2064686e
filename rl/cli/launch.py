"""From the command line to plain configurations, and from errors to a few clear lines.

Hydra composes; below this module nobody sees Hydra or a DictConfig. What is wrong is printed
without a traceback; exit status 2: configuration, 1: the run failed, 130: Ctrl-C.
HYDRA_FULL_ERROR=1 brings Hydra's own tracebacks back.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rl.cli.hydra_errors import explain
from rl.config.check import check
from rl.config.schema import ConfigError
from rl.run.failure import RunFailed, printable
from rl.run.lock import FolderUnusable

REPO = Path(__file__).parents[2]


def _shipped(path: str) -> str:
    """A path in our YAML: as it stands where it is, else in the folder that conf/ lies in."""
    return path if Path(path).exists() else str(REPO / path)


OmegaConf.register_new_resolver("ours", _shipped, replace=True)

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, as the command line asked for it."""

    config: dict[str, Any]  # resolved
    overrides: list[str]  # as written; in a sweep, those of this run
    choices: dict[str, str]  # group: the file that was chosen
    command: list[str]  # the command line before them, as written


def compose(overrides: list[str]) -> dict[str, Any]:
    """The primary configuration with these overrides, and none of the command line's.

    Works inside a task; `${hydra:runtime.choices.loss}` then is the loss of this composition.
    """
    return _composed(HydraConfig.get(), overrides)[0]


def _composed(chosen: Any, overrides: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The primary configuration of Hydra's node `chosen` with these overrides, and its choices."""
    lines = [*chosen.overrides.hydra, *overrides]
    config = hydra.compose(chosen.job.config_name, lines, return_hydra_config=True)
    with _as_hydra_config(config):
        return resolved(config), _choices(config.hydra)


def _choices(chosen: Any) -> dict[str, str]:
    """Which file of each group Hydra's node `chosen` has."""
    return {
        group: choice
        for group, choice in chosen.runtime.choices.items()
        if choice is not None and not group.startswith("hydra/")
    }


@contextmanager
def _as_hydra_config(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` look into this composition while the block runs."""
    # Hydra's resolver looks into this singleton, whichever composition it resolves.
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(config)
    try:
        yield
    finally:
        singleton.cfg = before


def resolved(config: DictConfig) -> dict[str, Any]:
    """Every key but Hydra's own, interpolations worked out. ConfigError where one leads nowhere."""
    keys = [str(key) for key in config if key != "hydra"]
    try:
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    except OmegaConfBaseException as error:
        where, why = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{where}: {why}" if where else why]) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def task(function: Callable[[Job], float | None]) -> Callable[[DictConfig], float | None]:
    """Make a function of a Job what hydra.main takes. Goes below @hydra.main."""

    @wraps(function)
    def run_job(config: DictConfig) -> float | None:
        chosen = HydraConfig.get()
        in_sweep = chosen.mode == RunMode.MULTIRUN
        try:
            if in_sweep and "run_name" in config:
                # Runs of a sweep may start in the same second. Callbacks read this config too.
                with open_dict(config):
                    config.run_name = f"{config.run_name}-{chosen.job.num}"
            job = Job(
                config=resolved(config),
                overrides=list(chosen.overrides.task),
                choices=_choices(chosen),
                command=command_of(sys.orig_argv, sys.argv, chosen.overrides.hydra),
            )
            return function(job)
        except ConfigError as error:
            _stop("this run cannot start", error, BAD_CONFIG)
        except FolderUnusable as error:
            _stop("this run cannot start", ConfigError([str(error)]), BAD_CONFIG)
        except RunFailed as error:
            if not in_sweep:
                _stop("the run failed", error, FAILED)
            _say("the run failed", error)
            raise  # Hydra notes it and goes on with the next run of the sweep
        except Exception:  # noqa: BLE001 a bug of ours: Hydra would cut its traceback
            traceback.print_exc()
            sys.exit(FAILED)

    return run_job


def command_of(typed: list[str], arguments: list[str], hydra: Sequence[str]) -> list[str]:
    """The command line that starts one run, without what it overrides.

    Args:
        typed: the whole command line, the interpreter included.
        arguments: it from the program's name on.
        hydra: overrides of Hydra's own keys.

    """
    program = arguments[0]
    start = typed[: typed.index(program) + 1] if program in typed else [sys.executable, program]
    known, _ = get_args_parser().parse_known_args(arguments[1:])
    flags = {"--config-path": known.config_path, "--config-name": known.config_name}
    flags["--config-dir"] = known.config_dir
    own = [item for item in hydra if not item.startswith("hydra.mode=")]
    # A sweep's own file says that it is one; whoever goes on with a run of it means that run.
    mode = ["hydra.mode=RUN"] if known.config_name else []
    chosen = [part for flag, value in flags.items() if value for part in (flag, value)]
    return [*start, *chosen, *mode, *own]


def launch(main: Callable[[], object], primary: str = "train") -> None:
    """Call what @hydra.main made, and say in a few lines what Hydra itself found wrong."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # then Hydra raises instead of printing
    sys.path.append(os.getcwd())  # a user's modules: our `python -m` children find them there too
    try:
        main()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
    except RunFailed:
        sys.exit(FAILED)  # of a sweep; it was said when it happened
    except Exception as error:
        if wants_traceback:
            raise
        _stop("this run cannot start", explain(error, sys.argv[1:], primary), BAD_CONFIG)


class SweepCheck(Callback):
    """Hydra callback: checks every run of a sweep before the first one starts."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:  # noqa: ARG002
        """Exit with everything that is wrong, and in how many runs."""
        jobs = _jobs_of(config)
        alike: dict[tuple[str, ...], list[list[str]]] = {}  # composing is slow: one of all seeds
        for job in jobs:
            alike.setdefault(tuple(o for o in job if not o.startswith("seed=")), []).append(job)
        where: dict[str, list[str]] = {}
        for same in alike.values():
            for problem in _problems_of(config, same[0]):
                where.setdefault(problem, []).extend(" ".join(job) for job in same)
        if where:
            problems = [
                f"{problem} ({len(names)} of {len(jobs)} runs, first: {names[0]})"
                for problem, names in where.items()
            ]
            _stop("this sweep cannot start", ConfigError(problems), BAD_CONFIG)


def _problems_of(config: DictConfig, overrides: list[str]) -> list[str]:
    """What is wrong with one run of a sweep."""
    try:
        composed, choices = _composed(config.hydra, overrides)
        check(composed, choices=choices)
    except ConfigError as error:
        return error.problems
    except HydraException as error:
        return explain(error, overrides).problems
    return []


def _jobs_of(config: DictConfig) -> list[list[str]]:
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


def _say(title: str, error: Exception) -> None:
    print(f"{title}:\n{printable(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


def _stop(title: str, error: Exception, status: int) -> NoReturn:
    _say(title, error)
    sys.exit(status)
