"""From the command line to plain configurations, and from errors to a few clear lines.

Hydra composes. Modules below this one see neither Hydra nor a DictConfig. Errors are printed
without a traceback. Exit status 2: configuration, 1: the run failed, 130: Ctrl-C.
HYDRA_FULL_ERROR=1 shows Hydra's own tracebacks.
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lab.cli.hydra_errors import explain
from lab.sweeps.job import run_job
from rl.config.positions import positions_of
from rl.config.schema import ConfigError
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.lock import FolderUnusable
from rl.runtime.stop_request import AT_ONCE, Stopped
from rl.runtime.sweep_folder import sweep_of_this_process
from rl.runtime.text import strip_escapes

REPO = Path(__file__).parents[2]


def _shipped(path: str) -> str:
    """Return a path of a shipped YAML file: as written if it exists, else beside conf/."""
    return path if Path(path).exists() else str(REPO / path)


def _at_most_positions(length: int, *, _parent_: DictConfig) -> int:
    """Return a length, or the shorter one that the model in the folder `path` was built for.

    A model on the hub is not asked, because configurations are composed offline.
    """
    path = None if OmegaConf.is_missing(_parent_, "path") else _parent_["path"]
    return min(length, positions_of(path) or length)


OmegaConf.register_new_resolver("shipped", _shipped, replace=True)
OmegaConf.register_new_resolver("at_most_positions", _at_most_positions, replace=True)

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, AT_ONCE
# Hydra's own keys that a single run ignores.
_OF_A_SWEEP = (
    "hydra.mode=",
    *("hydra.sweep.", "hydra/sweeper=", "hydra.sweeper.", "hydra/launcher=", "hydra.launcher."),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run as requested on the command line."""

    config: dict[str, Any]  # resolved
    overrides: list[str]  # as written; in a sweep, those of this run
    choices: dict[str, str]  # group: the file that was chosen
    command: list[str]  # the command line before them, as written


def compose(name: str) -> dict[str, Any]:
    """Return another configuration of conf/ without the overrides of the command line.

    It works inside a task. `${hydra:runtime.choices.loss}` then is the loss of this composition.
    """
    return composed(HydraConfig.get(), [], name)


def composed(chosen: Any, overrides: list[str], name: str | None = None) -> dict[str, Any]:
    """Return a configuration with these overrides.

    `name` is that of the configuration; None means the one of Hydra's node `chosen`.
    """
    lines = [*chosen.overrides.hydra, *overrides]
    config = hydra.compose(name or chosen.job.config_name, lines, return_hydra_config=True)
    with _as_hydra_config(config):
        return resolved(config)


def _choices(chosen: Any) -> dict[str, str]:
    """Return which file of each group Hydra's node `chosen` has."""
    return {
        group: choice
        for group, choice in chosen.runtime.choices.items()
        if choice is not None and not group.startswith("hydra/")
    }


@contextmanager
def _as_hydra_config(config: DictConfig) -> Iterator[None]:
    """Let `${hydra:...}` read this composition while the block runs."""
    # Hydra's resolver reads this singleton for every composition.
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(config)
    try:
        yield
    finally:
        singleton.cfg = before


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return all keys except Hydra's own, interpolations replaced; ConfigError if one fails."""
    keys = [str(key) for key in config if key != "hydra"]
    try:
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    except OmegaConfBaseException as error:
        where, why = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{where}: {why}" if where else why]) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def task(function: Callable[[Job], float | None]) -> Callable[[DictConfig], float | None]:
    """Turn a function of a Job into what hydra.main takes. Stands below @hydra.main."""

    @wraps(function)
    def run(config: DictConfig) -> float | None:
        chosen = HydraConfig.get()
        in_sweep = chosen.mode == RunMode.MULTIRUN
        sweep = sweep_of_this_process() if in_sweep else None
        command = (
            sweep.read_info()["run_command"]
            if sweep
            else command_of(sys.orig_argv, sys.argv, chosen.overrides.hydra)
        )

        def start(changes: Mapping[str, Any]) -> float | None:
            with open_dict(config):
                config.update(changes)
            job = Job(
                config=resolved(config),
                overrides=list(chosen.overrides.task),
                choices=_choices(chosen),
                command=command,
            )
            return function(job)

        # Runs of a sweep without records may start in the same second, so they need numbers.
        if sweep is None:
            has_name = in_sweep and "run_name" in config
            name = {"run_name": f"{config.run_name}-{chosen.job.num}"} if has_name else {}
            return _guarded(lambda: start(name), in_sweep)
        return run_job(
            sweep,
            list(chosen.overrides.task),
            output_dir=Path(str(config.output_dir)),
            run_name=str(config.run_name),
            max_steps=int(config.max_steps),
            start=lambda name, resume: _guarded(
                lambda: start({"run_name": name, "resume": resume}), in_sweep
            ),
        )

    return run


def _guarded(start: Callable[[], float | None], in_sweep: bool) -> float | None:
    """Do a run; print in a few lines why it cannot be done."""
    try:
        return start()
    except (ConfigError, FolderUnusable) as error:
        problems = error if isinstance(error, ConfigError) else ConfigError([str(error)])
        stop("this run cannot start", problems, BAD_CONFIG)
    except OutOfTime as error:  # the supervisor has printed it
        if not in_sweep:
            raise SystemExit(0) from error
        raise  # the next run of the sweep has its own max_time
    except RunFailed as error:
        if not in_sweep:
            stop("the run failed", error, FAILED)
        _say("the run failed", error)
        raise  # Hydra records it and starts the next run of the sweep
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(FAILED) from error


def command_of(typed: list[str], arguments: list[str], hydra: Sequence[str]) -> list[str]:
    """Return the command line that starts one run, without its overrides.

    `typed` is the whole command line, `arguments` its words from the program's name on, and `hydra`
    the overrides of Hydra's own keys.
    """
    program = arguments[0]
    start = typed[: typed.index(program) + 1] if program in typed else [sys.executable, program]
    known, _ = get_args_parser().parse_known_args(arguments[1:])
    flags = {"--config-path": known.config_path, "--config-name": known.config_name}
    flags["--config-dir"] = known.config_dir
    own = [item for item in hydra if not item.startswith(_OF_A_SWEEP)]
    # The file of a sweep sets the mode MULTIRUN, but this command starts a single run.
    mode = ["hydra.mode=RUN"] if known.config_name else []
    chosen = [part for flag, value in flags.items() if value for part in (flag, value)]
    return [*start, *chosen, *mode, *own]


def options_first(arguments: list[str]) -> list[str]:
    """Return the arguments with all overrides at the end: Hydra wants them in one place."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    rest = list(arguments)
    for override in overrides:
        rest.remove(override)
    return [*rest, *overrides]


def launch(main: Callable[[], object], primary: str = "train", added: Sequence[str] = ()) -> None:
    """Call what @hydra.main made; print in a few lines what Hydra itself found wrong.

    `primary` is its configuration in conf/; `added` are further keys, each written with a plus.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # then Hydra raises instead of printing
    sys.path.append(os.getcwd())  # for a user's modules; `python -m` children search it, too
    sys.argv[1:] = options_first(sys.argv[1:])
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` for one, has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(0)
    except (KeyboardInterrupt, Stopped) as end:
        status = end.code if isinstance(end, Stopped) else INTERRUPTED
        if status == INTERRUPTED:
            print("\ninterrupted", file=sys.stderr)  # noqa: T201
        sys.exit(status)
    except RunFailed:
        sys.exit(FAILED)  # of a sweep, which printed the failure when it happened
    except Exception as error:
        if wants_traceback:
            raise
        stop("this run cannot start", explain(error, sys.argv[1:], primary, added), BAD_CONFIG)


def _say(title: str, error: Exception) -> None:
    print(f"{title}:\n{strip_escapes(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


def stop(title: str, error: Exception, status: int) -> NoReturn:
    """Print an error and exit."""
    _say(title, error)
    raise SystemExit(status) from error
