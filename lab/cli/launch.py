"""Compose the configuration of a program with Hydra, call the program, and print its errors.

The program gets a Job, whose `config` is a plain dict. Expected errors are printed in a few lines.
HYDRA_FULL_ERROR=1 shows the tracebacks of Hydra's errors. Exit status: 2 for a wrong configuration,
1 for a failed run, 130 for an interrupted run that saved no new checkpoint.
"""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lab.cli.help import explained_keys
from lab.cli.hydra_errors import explain_hydra_error
from lab.sweeps.job import run_job
from rl.config.endpoints import with_endpoints
from rl.config.positions import positions_of
from rl.config.schema import ConfigError
from rl.config.shipped import CONF, ROOT, SHIPPED
from rl.runtime.devices import fast_dtype
from rl.runtime.failure import OutOfTime, RunFailed
from rl.runtime.lock import FolderUnusable
from rl.runtime.stop_request import EXIT_UNSAVED, Stopped
from rl.runtime.sweep_folder import sweep_of_this_process
from rl.runtime.text import printable


def _at_most_positions(length: int, *, _parent_: DictConfig) -> int:
    """Return `length`, or the number of positions of the node `model` if it is known and lower."""
    path = None if OmegaConf.is_missing(_parent_, "path") else _parent_["path"]
    return min(length, positions_of(path) or length)


OmegaConf.register_new_resolver(
    "shipped", lambda path: path if Path(path).exists() else str(SHIPPED / path), replace=True
)
OmegaConf.register_new_resolver("fast_dtype", fast_dtype, replace=True)
OmegaConf.register_new_resolver("explained_keys", explained_keys, replace=True)
OmegaConf.register_new_resolver("at_most_positions", _at_most_positions, replace=True)

_SEARCH_PATH = "hydra.searchpath="
FAILED, BAD_CONFIG, INTERRUPTED = 1, 2, EXIT_UNSAVED
# Overrides of Hydra's own keys that only a sweep uses begin with one of these prefixes.
_SWEEP_KEYS = ("hydra.mode=", "hydra.sweep", "hydra/sweeper=", "hydra.launcher.", "hydra/launcher=")


@dataclass(frozen=True, kw_only=True)
class Job:
    config: dict[str, Any]  # all interpolations are resolved
    overrides: list[str]  # the overrides of this run, such as loss=cispo
    choices: dict[str, str]  # config group -> chosen file
    command: list[str]  # the command line without these overrides


def compose(name: str) -> dict[str, Any]:
    """Return the configuration `name` of conf/ without the run's overrides, such as loss=cispo."""
    return compose_config(name, HydraConfig.get().overrides.hydra)


def compose_config(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose the main file `name` with `overrides`, and return the configuration as a dict."""
    config = hydra.compose(name, [*overrides], return_hydra_config=True)
    singleton = HydraConfig.instance()
    before = singleton.cfg
    singleton.set_config(config)  # the interpolation ${hydra:...} reads from the singleton
    try:
        return as_plain_dict(config)
    finally:
        singleton.cfg = before


def as_plain_dict(config: DictConfig) -> dict[str, Any]:
    """Return a run's keys as a dict. Resolve interpolations and endpoint names (endpoints.toml)."""
    keys = [str(key) for key in config if key != "hydra"]
    try:
        plain = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True)
    except OmegaConfBaseException as error:
        where, why = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{where}: {why}" if where else why]) from None
    assert isinstance(plain, dict)
    # Runs do not have the keys of report cards and claims.
    return with_endpoints({str(k): x for k, x in plain.items() if k not in ("card", "claim")})


def as_hydra_task(function: Callable[[Job], float | None]) -> Callable[[DictConfig], float | None]:
    @wraps(function)
    def run_task(config: DictConfig) -> float | None:
        chosen = HydraConfig.get()
        in_sweep = chosen.mode == RunMode.MULTIRUN
        if config.get("until") and not in_sweep:
            error = ConfigError(["until=decided adds runs to a sweep: add --multirun"])
            exit_with("this run cannot start", error, BAD_CONFIG)
        sweep = sweep_of_this_process() if in_sweep else None
        command = (
            sweep.read_info()["run_command"]
            if sweep
            else command_of(sys.orig_argv, sys.argv, chosen.overrides.hydra)
        )

        def start_job(changes: Mapping[str, Any]) -> float | None:
            raw = {**cast("dict[str, Any]", OmegaConf.to_container(config)), **changes}
            # ${now:...} gives each start a new name, so it cannot name the run to resume.
            if raw.get("resume") and "${now:" in str(raw["run_name"]):
                name = f"run_name=<a folder in {config.output_dir}>"
                raise ConfigError([f"resume=true needs the name of the run: add {name}"])
            with open_dict(config):
                config.update(changes)
            choices = {k: v for k, v in chosen.runtime.choices.items() if v is not None}
            job = Job(
                config=as_plain_dict(config),
                overrides=list(chosen.overrides.task),
                choices={k: v for k, v in choices.items() if not k.startswith("hydra/")},
                command=command,
            )
            return function(job)

        if sweep is None:
            # Append the job number, because jobs of the same second would share a run_name.
            has_name = in_sweep and "run_name" in config
            name = {"run_name": f"{config.run_name}-{chosen.job.num}"} if has_name else {}
            return _start_and_print_errors(lambda: start_job(name), in_sweep)
        return run_job(
            sweep,
            list(chosen.overrides.task),
            output_dir=Path(str(config.output_dir)),
            run_name=str(config.run_name),
            max_steps=int(config.max_steps),
            start=lambda name, resume: _start_and_print_errors(
                lambda: start_job({"run_name": name, "resume": resume}), in_sweep
            ),
        )

    return run_task


def _start_and_print_errors(start: Callable[[], float | None], in_sweep: bool) -> float | None:
    try:
        return start()
    except (ConfigError, FolderUnusable) as error:
        problems = error if isinstance(error, ConfigError) else ConfigError([str(error)])
        exit_with("this run cannot start", problems, BAD_CONFIG)
    except OutOfTime as error:  # the supervisor has already printed this error
        if not in_sweep:
            raise SystemExit(0) from error
        raise  # in a sweep Hydra continues with the next run, which has its own max_time
    except RunFailed as error:
        if not in_sweep:
            exit_with("the run failed", error, FAILED)
        _print_error("the run failed", error)
        raise  # Hydra records the error and starts the next run of the sweep
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(FAILED) from error


def command_of(orig_argv: list[str], argv: list[str], hydra_overrides: Sequence[str]) -> list[str]:
    """Return the command line that starts one run, without the run's overrides.

    The arguments are sys.orig_argv, sys.argv, and the overrides of Hydra's own keys.
    """
    end = orig_argv.index(argv[0]) + 1 if argv[0] in orig_argv else 0
    start = orig_argv[:end] or [sys.executable, argv[0]]
    if [Path(part).name for part in orig_argv[1:2]] == ["offbyone"]:  # the user typed offbyone
        start = ["offbyone", orig_argv[2]]
    known, _ = get_args_parser().parse_known_args(argv[1:])
    flags = {"--config-path": known.config_path, "--config-name": known.config_name}
    flags["--config-dir"] = known.config_dir
    own = [item for item in hydra_overrides if not item.startswith(_SWEEP_KEYS)]
    # A sweep's file (--config-name) sets hydra.mode=MULTIRUN, but this command starts one run.
    mode = ["hydra.mode=RUN"] if known.config_name else []
    chosen = [part for flag, value in flags.items() if value for part in (flag, value)]
    return [*start, *chosen, *mode, *own]


def put_options_first(arguments: list[str]) -> list[str]:
    """Return the arguments with all overrides at the end, where Hydra's parser expects them."""
    overrides = get_args_parser().parse_intermixed_args(arguments).overrides
    rest = list(arguments)
    for override in overrides:
        rest.remove(override)
    return [*rest, *overrides]


def add_conf_folder(arguments: list[str]) -> list[str]:
    """Return the arguments with ./conf, if it exists, added to Hydra's search path.

    A --config-dir such as `sweeps` that exists only among the shipped files becomes absolute.
    """
    chosen = get_args_parser().parse_known_args(arguments)[0].config_dir
    if chosen and not Path(chosen).is_dir() and (SHIPPED / chosen).is_dir():
        flags = (chosen, f"--config-dir={chosen}", f"-cd={chosen}")
        at = next(i for i, part in enumerate(arguments) if part in flags)
        flag = arguments[at].removesuffix(chosen)
        arguments = [*arguments[:at], f"{flag}{SHIPPED / chosen}", *arguments[at + 1 :]]
    own = Path("conf")
    if not own.is_dir() or own.resolve() in (CONF.resolve(), Path(chosen or "").resolve()):
        return arguments
    if not chosen:
        return ["--config-dir", str(own), *arguments]
    if any(part.startswith(_SEARCH_PATH) for part in arguments):
        return arguments
    return [*arguments, f"{_SEARCH_PATH}[file://{own.resolve()}]"]


def _share_code_with_children() -> None:
    """Put ROOT into PYTHONPATH if child processes would import another copy of this project."""
    # Python puts the script's folder first in the sys.path of this process, but not of children.
    specs = (f.find_spec("rl", sys.path[1:] if f is PathFinder else None) for f in sys.meta_path)
    found = next(filter(None, specs), None)
    if found is None or Path(str(found.origin)).parents[1].resolve() != ROOT.resolve():
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])


def run_program(
    function: Callable[[Job], float | None], primary: str = "train", added: Sequence[str] = ()
) -> None:
    composing = hydra.main(version_base=None, config_path=str(CONF), config_name=primary)
    launch(composing(as_hydra_task(function)), primary, added)


def launch(main: Callable[[], object], primary: str = "train", added: Sequence[str] = ()) -> None:
    """Call a function decorated with @hydra.main, and print Hydra's errors in a few lines."""
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise its errors instead of printing them
    _share_code_with_children()
    sys.path.append(os.getcwd())  # makes modules of the current folder importable
    sys.argv[1:] = add_conf_folder(put_options_first(sys.argv[1:]))
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        # Send the rest of stdout to /dev/null, because Python's flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (KeyboardInterrupt, Stopped) as end:
        status = end.code if isinstance(end, Stopped) else INTERRUPTED
        if status == INTERRUPTED:
            print("\ninterrupted", file=sys.stderr)  # noqa: T201
        sys.exit(status)
    except RunFailed:
        sys.exit(FAILED)  # the error has already been printed
    except Exception as error:
        if wants_traceback:
            raise
        problems = explain_hydra_error(error, sys.argv[1:], primary, added)
        exit_with("this run cannot start", problems, BAD_CONFIG)


def _print_error(title: str, error: Exception) -> None:
    print(f"{title}:\n{printable(str(error))}", file=sys.stderr, flush=True)  # noqa: T201


def exit_with(title: str, error: Exception, status: int) -> NoReturn:
    _print_error(title, error)
    raise SystemExit(status) from error
