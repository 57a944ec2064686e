"""gloo between processes: what arrives, who listens where, what a peer that ends or hangs costs.

A replica here is two processes, as under tensor parallelism; the trainer is this one.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

import pytest
import torch

from rl.run.failure import RunFailed
from rl.weights.gloo import GlooSender, own_address
from tests.support.composing import REPO
from tests.support.replicas import replica_at

WEIGHTS = {
    "a": torch.randn(3, 5).bfloat16(),
    "b": torch.randn(1 << 22),  # 16 MiB: more than one piece, and than a socket holds
    "empty": torch.empty(0, 7),
    "odd": torch.randn(3).half(),
}


class Workers:
    """The processes of one replica, and the routes of vLLM that would reach them."""

    def __init__(self, number: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.gloo_worker", str(worker)],
                cwd=REPO,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for worker in range(number)
        ]
        self.answers: list[Any] = []
        self.replica = replica_at(Path("/nowhere/vllm.sock"))

    def ask(self, call: dict[str, Any]) -> None:
        for process in self.processes:
            assert process.stdin
            with suppress(BrokenPipeError):  # it was killed
                process.stdin.write(json.dumps(call) + "\n")
                process.stdin.flush()
        self.answers = [json.loads(p.stdout.readline() or "{}") for p in self.processes if p.stdout]
        errors = [a["error"] for a in self.answers if isinstance(a, dict) and "error" in a]
        if errors:
            raise RunFailed(f"vLLM refused: {errors}")

    def num_workers(self) -> int:
        return len(self.processes)

    def init_transfer(self, info: dict[str, Any]) -> None:
        self.ask({"connect": info["facts"]})

    def start_update(self) -> None:
        pass

    def update(self, info: dict[str, Any]) -> None:
        self.ask({"read": [info["fingerprint"], info["where"]["num_bytes"]]})

    def finish_update(self, version: int) -> None:
        pass


@contextmanager
def replica(number: int) -> Iterator[Any]:
    workers = Workers(number)
    with ExitStack() as stack:
        for process in workers.processes:
            stack.enter_context(process)
            stack.callback(process.kill)
        yield workers


def listeners(pid: int) -> set[str]:
    """The addresses on which a process listens for TCP connections."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:")}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.add(fields[1].partition(":")[0])
    return found


def test_all_workers_get_every_byte_and_a_peer_that_ends_or_hangs_is_an_error_in_time():
    sender = GlooSender(timeout=60.0)
    with replica(2) as workers:
        sender.connect(workers)
        loopback = {"0100007F"}
        assert [listeners(p.pid) for p in workers.processes] == [loopback, loopback]
        assert listeners(os.getpid()) <= loopback
        for step in range(2):
            weights = {name: tensor * (1 + step) for name, tensor in WEIGHTS.items()}
            sender.pack(weights)
            sender.send(workers, step)
            expected = {n: [str(t.dtype), list(t.shape)] for n, t in weights.items()}
            assert workers.answers == [expected, expected]
        workers.processes[1].send_signal(signal.SIGKILL)
        with pytest.raises(RunFailed, match="vLLM refused"):
            sender.send(workers, 3)
        # The one that is left was told, and did not wait for its own timeout.
        assert "imed out" not in workers.answers[0]["error"]

        # What is left of it, as if it had been started again; soon it hangs.
        del workers.processes[1:]
        sender = GlooSender(timeout=2.0)
        sender.connect(workers)
        sender.pack(WEIGHTS)
        sender.send(workers, 4)
        workers.update = lambda info: None  # it says that it has read, and has not
        with pytest.raises(RunFailed, match="gloo between the trainer and vLLM failed"):
            sender.send(workers, 5)


def test_a_push_that_fails_late_leaves_the_group_of_the_restarted_replica_alone():
    sender, before = GlooSender(timeout=60.0), set(enumerate_threads())
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


def refused(_: Any) -> None:
    raise RunFailed("refused")


def test_the_address_by_which_another_host_sees_us_is_found_by_the_way_to_it():
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    assert own_address("127.0.0.7", 9) in ("127.0.0.1", "127.0.0.7")
    assert own_address("::1", 9) == "::1"
