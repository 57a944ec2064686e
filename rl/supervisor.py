"""The process on the terminal: checks, prepares, starts, watches, cleans up. Imports no torch.

    check ---> model folder (built or fetched, warm-started once) ---> inference, rollouts,
    trainer ranks
                                                                          |
    screen <--- status/*.json, metrics.jsonl ---- watch: a part that ends too early ends the run

Each part is a process group of its own with its own log. Whatever ends this process, the reaper
ends theirs.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import yaml

from rl.config import ConfigError, Run, build, check
from rl.failure import RunFailed, first_failure
from rl.layout import Layout
from rl.metrics import column, read_metrics
from rl.process import Child, Reaper, end_groups, last_lines
from rl.screen import Screen, final_summary
from rl.server import VLLMServer, healthy
from rl.status import Status
from rl.warm_start import cache_folder, keep_result, warm_start_key, warm_start_run

_TICK_S = 0.25
_HEALTH_EVERY_S = 5.0


def run(
    config: dict[str, Any],
    *,
    overrides: list[str],
    choices: dict[str, str],
    compose: Callable[[list[str]], dict[str, Any]],
) -> float | None:
    """Do a whole run and return the mean reward of its last ten steps (None without rewards).

    Args:
        config: resolved configuration.
        overrides: what the command line changed, as written.
        choices: which file of each group was chosen.
        compose: makes a resolved configuration out of overrides.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        RunFailed: the run ended early; the message is for the user.

    """
    check(config)
    main = Run(**config)
    _construct(main)
    with _signals(), Reaper() as reaper:
        main.folder.mkdir(parents=True, exist_ok=True)
        record = {"overrides": overrides, "choices": choices}
        (main.folder / "overrides.yaml").write_text(yaml.safe_dump(record, sort_keys=False))
        model = _prepare_model(main, reaper, compose)
        _execute(main, model, reaper)
    rewards = column(read_metrics(main.folder), "train/reward")[-10:]
    return sum(rewards) / len(rewards) if rewards else None


def _construct(run: Run) -> None:
    """Let every constructor object before anything is started; they are cheap."""
    problems: list[str] = []
    for group in ("model", "env", "sampler", "buffer", "optim", "inference", "logger"):
        try:
            build(getattr(run, group))()
        except Exception as error:  # noqa: BLE001 an environment is user code and may raise anything
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            problems.append(f"{group}: {kind}{error}")
    if problems:
        raise ConfigError(problems)


def _prepare_model(
    run: Run, reaper: Reaper, compose: Callable[[list[str]], dict[str, Any]]
) -> Path:
    """Return the local folder of the model, warm-started if the config asks for it."""
    source = build(run.model)()
    if run.model["warm_start"] is None:
        return source.prepare(run.folder / "model")
    kept = cache_folder() / "warm" / warm_start_key(run)
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder = run.folder / "warm-start"
        shutil.rmtree(folder, ignore_errors=True)
        supervised = compose(["loss=sft", "sampler=demonstrations"])
        first = warm_start_run(run, supervised, folder)
        print(
            f"warm start: {first.max_steps} supervised steps, once for this model and environment"
        )
        _execute(first, source.prepare(folder / "model"), reaper)
        keep_result(first, kept)
    return kept


def _execute(run: Run, model: Path, reaper: Reaper) -> None:
    layout = Layout(run.folder)
    run.folder.mkdir(parents=True, exist_ok=True)
    run.save(run.folder / "config.yaml")
    (run.folder / "versions.json").write_text(json.dumps(_versions(), indent=1))
    for stale in ("failures", "status", "sockets"):
        _remove(run.folder / stale)
    layout.make_sockets_folder()
    layout.set_model(model)
    with ExitStack() as stack:
        stack.callback(_remove, run.folder / "sockets")
        parts = Parts(run, layout, reaper)
        stack.callback(parts.end)
        parts.start()
        with Screen(run.folder, run.max_steps) as screen:
            parts.watch(screen.update)
    _say(final_summary(run.folder))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 this process owns the terminal


class Parts:
    """The child processes of one run."""

    def __init__(self, run: Run, layout: Layout, reaper: Reaper) -> None:
        self._run, self._layout, self._reaper = run, layout, reaper
        self._children: dict[str, Child] = {}
        self._server: VLLMServer = build(run.inference)()
        self._status = Status(run.folder, "inference")
        self._ready = not self._uses_engine
        self._began = self._checked = time.monotonic()

    @property
    def _uses_engine(self) -> bool:
        return build(self._run.sampler)().uses_engine

    def start(self) -> None:
        """Start everything at once; the parts wait for each other."""
        folder, run = str(self._run.folder), self._run
        if self._uses_engine:
            self._status.set("starting vLLM (logs/inference.log)")
            command = self._server.command(
                self._layout.model(),
                self._layout.vllm_socket,
                dtype=run.model["dtype"],
                max_seq_len=run.max_seq_len,
            )
            self._start("inference", command, self._server.environment())
        self._start("rollouts", [sys.executable, "-m", "rl.rollouts", folder], {})
        world = run.trainer["ranks"]
        for rank in range(world):
            where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            command = [sys.executable, "-m", "rl.trainer", folder]
            self._start(f"trainer.rank{rank}", command, {**where, **_accelerator()})

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        log = self._layout.logs / f"{name}.log"
        child = Child(name, command, log=log, reaper=self._reaper, env=env)
        self._children[name] = child
        child.start()

    def watch(self, tick: Callable[[], None]) -> None:
        """Return when every trainer rank has finished; raise RunFailed when anything else ends."""
        trainers = [child for name, child in self._children.items() if name.startswith("trainer")]
        while True:
            tick()
            ended = {n: c.returncode for n, c in self._children.items() if c.returncode is not None}
            if all(trainer.returncode == 0 for trainer in trainers):
                return
            if any(not (n.startswith("trainer") and status == 0) for n, status in ended.items()):
                self._fail(ended)
            self._watch_server()
            self._reaper.ensure_alive()
            time.sleep(_TICK_S)

    def _watch_server(self) -> None:
        """A server can hang while its process lives, so the URL is watched too."""
        now, limit = time.monotonic(), self._server.startup_timeout
        if not self._uses_engine or (self._ready and now - self._checked < _HEALTH_EVERY_S):
            return
        if healthy(self._layout.vllm_socket):
            self._ready, self._checked = True, now
            self._status.set("serving")
        elif not self._ready and now - self._began > limit:
            self._explain(
                "inference", f"did not answer within inference.startup_timeout={limit:g} s"
            )
        elif self._ready and now - self._checked > self._run.trainer["wait_timeout"]:
            self._explain("inference", "has stopped answering")

    def _fail(self, ended: dict[str, int | None]) -> NoReturn:
        if ended.get("inference") is not None:  # the others only notice that it is gone
            self._explain("inference", f"ended with status {ended['inference']}")
        time.sleep(2 * _TICK_S)  # the first to fail may not be the first to end
        failure = first_failure(self._run.folder)
        if failure:
            log = self._layout.logs / f"{failure['part']}.log"
            raise RunFailed(f"{failure['part']}: {failure['message']}\n(details: {log})")
        name = next(
            n for n, status in ended.items() if not (n.startswith("trainer") and status == 0)
        )
        self._explain(name, f"ended with status {ended[name]}")

    def _explain(self, name: str, what: str) -> NoReturn:
        log = self._layout.logs / f"{name}.log"
        raise RunFailed(f"{name} {what}. The end of {log}:\n{last_lines(log)}")

    def end(self) -> None:
        """End all of them at once, with everything they started."""
        end_groups([child.group for child in self._children.values() if child.group is not None])
        for child in self._children.values():
            child.end()


def _accelerator() -> dict[str, str]:
    """DeepSpeed must be told that there is no GPU."""
    return {} if shutil.which("nvidia-smi") else {"DS_ACCELERATOR": "cpu"}


def _versions() -> dict[str, str]:
    return dict(sorted((d.metadata["Name"], d.version) for d in distributions()))


def _remove(path: Path) -> None:
    """Delete a folder; for a link, the folder it points to as well."""
    if path.is_symlink():
        shutil.rmtree(path.resolve(), ignore_errors=True)
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _signals() -> Iterator[None]:
    """TERM and HUP stop the run as Ctrl-C does."""

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {s: signal.signal(s, stop) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
