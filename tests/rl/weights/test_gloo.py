"""gloo between processes: received bytes, listening addresses, and workers that die or hang.

A replica here is two processes, as under tensor parallelism; the trainer is this one.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.inference.replica import Replica
from rl.runtime.failure import RunFailed
from rl.runtime.network import Address
from rl.weights import gloo
from rl.weights.transport import open_reader
from tests.support.receiving import opened
from tests.support.replicas import replica_at

WEIGHTS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(1 << 22),  # 16 MiB: more than one piece, and than a socket holds
    "empty": torch.empty(0, 7),
    "odd": torch.randn(3).half(),
}


def forms(weights: Any) -> dict[str, list[Any]]:
    return {name: [str(t.dtype), list(t.shape)] for name, t in weights.items()}


def worker(number: int, calls: Connection) -> None:
    """Open a reader and read with it, as told; answer every call, with the error if it fails."""
    reader: Any = None
    with suppress(EOFError):
        while True:
            call = calls.recv()
            try:
                if "reader" in call:
                    reader = open_reader(call["reader"], number, call["facts"])
                    calls.send("ready")
                else:
                    calls.send(forms(reader.read(call["fingerprint"], **call["source"])))
            except RuntimeError as error:
                calls.send({"error": str(error)})


class Workers:
    """The processes of one replica, and the routes of vLLM that would reach them."""

    def __init__(self, number: int, run: Any = worker, *more: Any) -> None:
        spawn, pairs = get_context("spawn"), [get_context("spawn").Pipe() for _ in range(number)]
        self.calls = [ours for ours, _ in pairs]
        self.processes = [
            spawn.Process(target=run, args=(i, theirs, *more), daemon=True)
            for i, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()
        self.answers: list[Any] = []
        self.replica = replica_at(Path("/nowhere/vllm.sock"))

    def ask(self, call: dict[str, Any]) -> None:
        self.answers = [{"error": "killed"} for _ in self.calls]
        for one in self.calls:
            with suppress(BrokenPipeError):
                one.send(call)
        for i, one in enumerate(self.calls):
            with suppress(EOFError, ConnectionResetError):
                self.answers[i] = one.recv()
        errors = [answer["error"] for answer in self.answers if "error" in answer]
        if errors:
            raise RunFailed(f"vLLM refused: {errors}")

    def num_workers(self) -> int:
        return len(self.calls)

    init_transfer = update = ask

    def start_update(self) -> None:
        pass

    def finish_update(self, version: int) -> None:
        pass


@contextmanager
def replica(number: int, run: Any = worker, *more: Any) -> Iterator[Any]:
    workers = Workers(number, run, *more)
    yield workers
    for process in workers.processes:
        process.kill()
        process.join()


def listeners(pid: int | None) -> set[str]:
    """Return the addresses on which a process listens for TCP connections."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def test_all_workers_get_every_byte_and_a_dead_or_hanging_worker_is_an_error_in_time(tmp_path):
    sender = opened("gloo", 60.0)
    with replica(2) as workers:
        sender.connect(workers)
        loopback = {"0100007F"}
        assert [listeners(p.pid) for p in workers.processes] == [loopback, loopback]
        assert listeners(os.getpid()) <= loopback
        for step in range(2):
            weights = {name: tensor * (1 + step) for name, tensor in WEIGHTS.items()}
            sender.pack(weights)
            sender.send(workers, step)
            assert workers.answers == [forms(weights)] * 2
        os.kill(workers.processes[1].pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match="vLLM refused"):
            sender.send(workers, 3)
        # The other worker fails at once, without waiting for its own timeout.
        assert "imed out" not in workers.answers[0]["error"]

        # The other worker alone, as a restarted replica that soon hangs.
        del workers.calls[1:]
        sender = opened("gloo", 2.0)
        sender.connect(workers)
        sender.pack(WEIGHTS)
        sender.send(workers, 4)
        workers.update = lambda info: None  # answers that it has read, and has not
        with pytest.raises(RunFailed, match="sync=gloo cannot reach vLLM"):
            sender.send(workers, 5)


def test_a_push_that_fails_late_keeps_the_group_of_the_restarted_replica(tmp_path):
    sender, before = opened("gloo", 60.0), set(enumerate_threads())
    with replica(1) as killed, replica(1) as restarted:
        sender.connect(killed)
        sender.pack(WEIGHTS)
        killed.update = refused
        with pytest.raises(RunFailed, match="refused"):
            sender.send(killed, 0)  # while its broadcast waits for a worker that does not read
        (late,) = set(enumerate_threads()) - before
        sender.connect(restarted)
        killed.processes[0].kill()
        late.join(timeout=60)
        sender.send(restarted, 1)
        assert restarted.answers[0].keys() == WEIGHTS.keys()


def test_a_vllm_on_another_host_gets_the_address_from_which_this_host_reaches_it(monkeypatch):
    asked = []
    monkeypatch.setattr(gloo, "source_address", lambda *to: asked.append(to) or "127.0.0.2")
    far = SimpleNamespace(replica=Replica("inference", Address(None, "10.0.0.7", 8000)))
    facts, _ = opened("gloo", 5.0).rendezvous(far, 3)
    assert asked == [("10.0.0.7", 8000)]
    assert facts == {"host": "127.0.0.2", "port": facts["port"], "size": 3, "timeout": 5.0}


def refused(_: Any) -> None:
    raise RunFailed("refused")
