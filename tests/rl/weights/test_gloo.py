"""Pushes through a process group: what arrives, what is refused, and which waits end.

The first tests are of weights in a file in memory, and of their fingerprints.

A replica here is two processes, as under tensor parallelism; the trainer is this one. For sync=nccl
and sync=ipc the functions of CUDA and NCCL are replaced (tests/support/receiving.py); `pytest -m
gpu` has tests with them.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rl.inference.replica import Replica
from rl.runtime.failure import RunFailed
from rl.runtime.network import Address
from rl.weights import gloo, packed
from rl.weights.fingerprint import fingerprint
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.transport import open_reader
from tests.support.receiving import opened
from tests.support.replicas import replica_at

torch.set_num_threads(1)
WEIGHTS = {
    "a.weight": torch.randn(3, 5).bfloat16(),
    "big.weight": torch.randn(1 << 22),  # 16 MiB: more than one piece, and than a socket holds
    "empty.weight": torch.empty(0, 7),
    "odd.weight": torch.randn(3).half(),  # six bytes
    "turned.weight": torch.randn(4, 6).T,
}
ANY = {
    **WEIGHTS,
    "a.slice": torch.randn(9, 8)[1::2, 3:],
    "scalar": torch.tensor(2.5),
    "a.count": torch.tensor([3, -4]),
    "a.flags": torch.tensor([True, False, True]),
    "trained": torch.nn.Parameter(torch.randn(2, 2).double()),
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
                    reader = open_reader(call["reader"], number, call["arguments"])
                    calls.send("ready")
                else:
                    calls.send(forms(reader.read(call["fingerprint"], **call["source"])))
            except RuntimeError as error:
                calls.send({"error": str(error)})


class Workers:
    """The processes of one replica, and the routes of vLLM that would reach them."""

    def __init__(self, number: int, run: Any) -> None:
        spawn, pairs = get_context("spawn"), [get_context("spawn").Pipe() for _ in range(number)]
        self.calls = [ours for ours, _ in pairs]
        self.processes = [
            spawn.Process(target=run, args=(i, theirs), daemon=True)
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
def replica(number: int, run: Any = worker) -> Iterator[Any]:  # tests/gpu have another `run`
    workers = Workers(number, run)
    yield workers
    for process in workers.processes:
        process.kill()
        process.join()


def listeners(pid: int) -> set[str]:
    """Return the addresses on which a process listens for TCP connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def test_any_tensor_is_read_as_it_was_until_the_file_ends_with_the_block():
    before = set(os.listdir("/proc/self/fd"))
    with closing(MemoryFile()) as file:
        written, path = file.write(ANY), file.path
        read = read_weights(path, written)
        assert read.keys() == ANY.keys()
        for name, tensor in ANY.items():
            torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0)
            assert read[name].data_ptr() % tensor.element_size() == 0
        # In any order of the names and with any strides.
        assert written == fingerprint(ANY) == fingerprint(dict(reversed(read.items())))
        for width in (4, 4, 9, 2):  # other weights of the same size, more, less
            weights = {"w": torch.randn(3, width)}
            read = read_weights(path, file.write(weights))
            torch.testing.assert_close(read["w"], weights["w"], rtol=0, atol=0)
        del read
    assert not os.path.exists(path)
    assert set(os.listdir("/proc/self/fd")) <= before  # sockets of other tests may close meanwhile


def test_other_weights_than_expected_are_refused():
    with closing(MemoryFile()) as file:
        before = file.write(ANY)
        changed = {name: tensor.detach().clone() for name, tensor in ANY.items()}
        changed["a.weight"][2, 4] += 1
        after = file.write(changed)
        with pytest.raises(RuntimeError, match=f"trainer wrote {before}, vLLM read {after}"):
            read_weights(file.path, before)
        with open(file.path, "r+b") as content:
            content.seek(-1, os.SEEK_END)
            content.write(b"!")
        with pytest.raises(RuntimeError, match=f"trainer wrote {after}, vLLM read"):
            read_weights(file.path, after)


def test_every_difference_shows_in_the_fingerprint():
    few = {
        **{"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "empty": torch.zeros(0, 3)},
        **{"b": torch.arange(4, dtype=torch.bfloat16), "scalar": torch.tensor(1.5)},
    }
    missing = {name: tensor for name, tensor in few.items() if name != "b"}
    changes = {
        "one bit": {"b": torch.tensor([0, 1, 2, 3.015625], dtype=torch.bfloat16)},
        "sign of zero": {"a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
        "shape": {"a": torch.arange(6, dtype=torch.float32).reshape(3, 2)},
        "shape of nothing": {"empty": torch.zeros(3, 0)},
        "dtype of the same bytes": {"b": few["b"].view(torch.int16)},
        "one more": {"c": torch.zeros(0)},
        "swapped": {"a": few["b"], "b": few["a"]},
    }
    others = {name: few | change for name, change in changes.items()}
    others |= {"one less": missing, "renamed": missing | {"B": few["b"]}}
    names_of = {fingerprint(few): "unchanged"}
    for name, weights in others.items():
        assert names_of.setdefault(fingerprint(weights), name) == name


def test_all_workers_get_every_byte_and_a_dead_or_hanging_worker_is_an_error_in_time(tmp_path):
    sender = opened("gloo", 60.0)
    with replica(2) as workers:
        sender.connect(workers)
        loopback = {"127.0.0.1"}
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


def test_a_vllm_on_another_host_gets_the_address_from_which_this_host_reaches_it(monkeypatch):
    asked = []
    monkeypatch.setattr(gloo, "source_address", lambda *to: asked.append(to) or "127.0.0.2")
    far = SimpleNamespace(replica=Replica("inference", Address(None, "10.0.0.7", 8000)))
    facts, _ = opened("gloo", 5.0).rendezvous(far, 3)
    assert asked == [("10.0.0.7", 8000)]
    assert facts == {"host": "127.0.0.2", "port": facts["port"], "size": 3, "timeout": 5.0}


@pytest.mark.parametrize("sync", ["nccl", "ipc"])
def test_two_workers_read_every_push_also_of_the_next_trainer(sync):
    with replica(2) as workers:
        for scale in (1, 3):  # two trainers
            sender = opened(sync, 60.0)
            for step in range(2):
                weights = {name: tensor * (scale + step) for name, tensor in WEIGHTS.items()}
                sender.pack(weights)
                if step == 0:
                    sender.connect(workers)
                sender.send(workers, step)
                # Each has compared the fingerprint of what it read with that of the trainer.
                assert workers.answers == [forms(weights)] * 2


def test_a_request_that_does_not_fit_the_buffer_is_refused():
    sender = opened("nccl")
    mark = sender.pack(ANY)
    source = sender.source(None)
    del source["num_bytes"]
    read = packed.unpack(sender.buffer, **source, fingerprint=mark)
    assert fingerprint(read) == fingerprint(ANY)
    assert all(torch.equal(read[name], tensor) for name, tensor in ANY.items())
    header, odd = source["header"], source["header"]["odd.weight"]
    last = odd["data_offsets"][1] - 1
    sender.buffer[last] ^= 1
    with pytest.raises(RuntimeError, match="the fingerprints differ"):
        packed.unpack(sender.buffer, **source, fingerprint=mark)
    sender.buffer[last] ^= 1
    missing = {name: form for name, form in header.items() if name != "odd.weight"}
    for changed in (missing, header | {"odd.weight": odd | {"shape": [1, 3]}}):
        with pytest.raises(RuntimeError, match="the fingerprints differ"):
            packed.unpack(sender.buffer, **(source | {"header": changed}), fingerprint=mark)


def mixed(words):
    """Return the checksum in plain Python."""
    total, full = 0, (1 << 64) - 1
    for position, word in enumerate(words, 1):
        z = (word ^ position * 0x9E3779B97F4A7C15) & full
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & full
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & full
        total += z ^ z >> 31
    return total & full


def test_the_checksum_is_a_sum_of_mixed_words_however_it_is_divided(monkeypatch):
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (10,))
    whole = int(packed.checksum(words))
    assert whole & ((1 << 64) - 1) == mixed(words.tolist())
    monkeypatch.setattr(packed, "_WORDS", 3)
    assert int(packed.checksum(words)) == whole
    swapped, signs = words.clone(), words.clone()
    swapped[[2, 7]] = words[[7, 2]]
    signs[[2, 7]] ^= -(1 << 63)  # these two cancel each other in a plain sum
    longer = torch.cat([words, words.new_zeros(1)])
    assert len({int(packed.checksum(one)) for one in (words, swapped, signs, longer)}) == 4


def test_every_wait_ends_at_the_timeout_and_the_error_names_what_was_awaited():
    sender = opened("nccl", 1.0)
    sender.pack(WEIGHTS)
    with replica(1) as workers:
        facts, _ = sender.rendezvous(workers, 2)
        with pytest.raises(RunFailed, match="=1 s for the trainer to join the group"):
            sender.open_readers(workers, facts)
        sender.connect(workers)
        with pytest.raises(RunFailed, match="=1 s for the weights of the trainer"):
            workers.update(sender.push_info(workers))  # and rank 0 broadcasts nothing
        sender.connect(workers)
        workers.update = lambda info: None  # answers that it has read, and has not
        with pytest.raises(RunFailed, match=r"sync=nccl .* s for inference to receive"):
            sender.send(workers, 3)
        workers.init_transfer = lambda info: None
        with pytest.raises(RunFailed, match=r"sync=nccl .* workers of inference to join the group"):
            sender.connect(workers)


def test_the_buffer_of_ipc_is_in_no_expandable_segment_unlike_later_memory(monkeypatch):
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    opened("ipc").pack(WEIGHTS)
    assert settings == ["expandable_segments:False", "expandable_segments:True"]
