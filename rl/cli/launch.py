"""From the command line to plain configurations, and from errors to a few clear lines.

Hydra composes; below this module nobody sees Hydra or a DictConfig. What is wrong is printed
without a traceback; exit status 2: configuration, 1: the run failed, 130: Ctrl-C.
HYDRA_FULL_ERROR=1 brings Hydra's own tracebacks back.
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

from rl.cli.hydra_errors import explain_all
from rl.config.positions import positions_of
from rl.config.schema import ConfigError
from rl.run.failure import OutOfTime, RunFailed, printable
from rl.run.lock import FolderUnusable
from rl.run.stop_request import AT_ONCE, Stopped
from rl.run.sweep_folder import sweep_of_this_process
from rl.sweeps.job import run_job

REPO = Path(__file__).parents[2]


def _shipped(path: str) -> str:
    """A path in our YAML: as it stands where it is, else in the folder that conf/ lies in."""
    return path if Path(path).exists() else str(REPO / path)


def _at_most_positions(length: int, *, _parent_: DictConfig) -> int:
    """A length, or what the model in the folder `path` beside it was built for where that is less.

    One on the hub is not asked, for a configuration is made offline.
    """
    path = None if OmegaConf.is_missing(_parent_, "path") else _parent_["path"]
    return min(length, positions_of(path) or length)


OmegaConf.register_new_resolver("ours", _shipped, replace=True)
OmegaConf.register_new_resolver("at_most_positions", _at_most_positions, replace=True)

FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, AT_ONCE
# Hydra's own keys that mean nothing to one run.
_OF_A_SWEEP = (
    "hydra.mode=",
    *("hydra.sweep.", "hydra/sweeper=", "hydra.sweeper.", "hydra/launcher=", "hydra.launcher."),
)


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
    return composed(HydraConfig.get(), overrides)[0]


def composed(chosen: Any, overrides: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
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
    def run(config: DictConfig) -> float | None:
        chosen = HydraConfig.get()
        in_sweep = chosen.mode == RunMode.MULTIRUN
        sweep = sweep_of_this_process() if in_sweep else None
        command = sweep.read_info()["run_command"] if sweep else _command(chosen)

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

        if sweep is None:  # runs of a sweep that keeps no records may start in the same second
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
    """Do a run, and say in a few lines why it cannot be done."""
    try:
        return start()
    except ConfigError as error:
        stop("this run cannot start", error, BAD_CONFIG)
    except FolderUnusable as error:
        stop("this run cannot start", ConfigError([str(error)]), BAD_CONFIG)
    except OutOfTime as error:  # it was said, with all else of the end
        if not in_sweep:
            raise SystemExit(0) from error
        raise  # the next run of the sweep has a time of its own
    except RunFailed as error:
        if not in_sweep:
            stop("the run failed", error, FAILED)
        _say("the run failed", error)
        raise  # Hydra notes it and goes on with the next run of the sweep
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(FAILED) from error


def _command(chosen: Any) -> list[str]:
    """The command line of this process before its overrides; `chosen` is Hydra's node."""
    return command_of(sys.orig_argv, sys.argv, chosen.overrides.hydra)


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
    own = [item for item in hydra if not item.startswith(_OF_A_SWEEP)]
    # A sweep's own file says that it is one; whoever goes on with a run of it means that run.
    mode = ["hydra.mode=RUN"] if known.config_name else []
    chosen = [part for flag, value in flags.items() if value for part in (flag, value)]
    return [*start, *chosen, *mode, *own]


def options_first(arguments: list[str]) -> list[str]:
    """The arguments with all overrides at the end: Hydra takes them in one place only."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    rest = list(arguments)
    for override in overrides:
        rest.remove(override)
    return [*rest, *overrides]


def launch(main: Callable[[], object], primary: str = "train", added: Sequence[str] = ()) -> None:
    """Call what @hydra.main made, and say in a few lines what Hydra itself found wrong.

    Args:
        main: to be called.
        primary: the configuration in conf/ that it has.
        added: keys that it takes besides, each with a plus.

    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # then Hydra raises instead of printing
    sys.path.append(os.getcwd())  # a user's modules: our `python -m` children find them there too
    sys.argv[1:] = options_first(sys.argv[1:])
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # head has read enough; the pipes of a run end in `_guarded`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        sys.exit(0)
    except (KeyboardInterrupt, Stopped) as end:
        status = end.code if isinstance(end, Stopped) else INTERRUPTED
        if status == INTERRUPTED:
            print("\ninterrupted", file=sys.stderr)  # noqa: T201
        sys.exit(status)
    except RunFailed:
        sys.exit(FAILED)  # of a sweep; it was said when it happened
    except Exception as error:
        if wants_traceback:
            raise
        stop("this run cannot start", explain_all(error, sys.argv[1:], primary, added), BAD_CONFIG)


def _say(title: str, error: Exception) -> None:
    print(f"{title}:\n{printable(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


def stop(title: str, error: Exception, status: int) -> NoReturn:
    _say(title, error)
    raise SystemExit(status) from error
