"""Test functions whose bodies run on the ranks of a gloo group.

    @per_world("mode", {1: ("zero0",), 2: ("zero0", "zero3")})
    @on_ranks
    def test_...(setup, mode): ...

Every rank runs the body with its own `setup` (tests/support/policy_setup.py); the first failure of
a rank fails the test. The processes of a world are started once per session, because importing
torch and DeepSpeed takes seconds.
"""

import functools
import inspect
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

_LONGEST_S = 280.0  # below pytest's timeout; the ranks share the cores with other work
_OTHERS_S = 5.0  # after the first failure; the other ranks may wait in a collective for ever


def per_world(names: str, cases: Mapping[int, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrise a test with (world size, case) pairs. Cases with compiled layers are slow."""
    values = [
        pytest.param(
            *(world, *(case if isinstance(case, tuple) else (case,))),
            marks=[pytest.mark.slow] if "compiled" in str(case) else [],
        )
        for world, own in cases.items()
        for case in own
    ]
    return pytest.mark.parametrize(f"world, {names}", values)


worlds = pytest.mark.parametrize("world", [1, 2])


def on_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Turn `body(setup, ...)` into a test that takes `world` in the place of `setup`."""

    @functools.wraps(body)
    def test(world: int, **given: Any) -> None:
        _ranks(world).run(body.__module__, body.__name__, given)

    signature = inspect.signature(body)
    _, *others = signature.parameters.values()
    world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = signature.replace(parameters=[world, *others])  # pyright: ignore
    return test


@functools.cache
def _ranks(world: int) -> "_Ranks":
    return _Ranks(world)


class _Ranks:
    """The processes of a world; after a failure new ones are started."""

    def __init__(self, world: int) -> None:
        self._world, self._calls, self._processes = world, [], []

    def _start(self) -> None:
        spawn, self._folder = get_context("spawn"), tempfile.TemporaryDirectory()
        self._calls, self._processes = [], []
        for rank in range(self._world):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, rank, self._world, self._folder.name)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._calls.append(ours)
            self._processes.append(process)

    def run(self, *call: Any) -> None:
        if not self._processes:
            self._start()
        for one in self._calls:
            one.send(call)
        failures, running = list[str](), dict(zip(self._calls, range(self._world), strict=True))
        while running:
            ready = wait(list(running), _OTHERS_S if failures else _LONGEST_S)
            if not ready:
                failures.append(f"ranks {list(running.values())} did not end")
                break
            for one in ready:
                rank, outcome = running.pop(one), "the process ended"  # type: ignore[call-overload]
                with suppress(EOFError, ConnectionResetError):
                    outcome = one.recv()  # type: ignore[union-attr]
                failures += [f"rank {rank}: {outcome}"] if outcome else []
        if failures:
            for process in self._processes:
                process.kill()
                process.join()
            self._processes = []
            pytest.fail("\n".join(failures), pytrace=False)


def _serve(calls: Connection, rank: int, world: int, folder: str) -> None:
    """Run what arrives, and answer each with the failure, or with nothing."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "OMP_NUM_THREADS": 1}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    setup: Any = None
    with suppress(EOFError):
        while True:
            module, name, given = calls.recv()
            try:
                setup = setup or _joined(Path(folder))
                inspect.unwrap(getattr(import_module(module), name))(setup, **given)
            except BaseException as error:  # noqa: BLE001 the test that runs here may raise anything
                one = traceback.TracebackException.from_exception(
                    error, capture_locals=True, compact=True
                )
                calls.send("".join(one.format()))
            else:
                calls.send("")


def _joined(folder: Path) -> Any:
    import gc

    import torch

    from rl.learner.ranks import Ranks
    from tests.support.policy_setup import Setup

    torch.set_num_threads(1)
    setup = Setup(folder, Ranks.join(folder / "rendezvous", 60.0))
    gc.freeze()  # DeepSpeed collects garbage at every start: half a second over all imports
    return setup
