"""Messages arrive as they were sent, and a silent or closed connection raises RunFailed."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from rl.records import MicroBatch, RankBatch
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.trainer import rollouts_link
from rl.trainer.rollouts_link import RolloutsLink
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack


def batch(height: int = 3, width: int = 5) -> RankBatch:
    rng, shape = np.random.default_rng(0), (height, width)
    micro = MicroBatch(
        token_ids=rng.integers(0, 2**31 - 1, shape, np.int32),
        completion_mask=rng.random(shape) < 0.5,
        rollout_logprobs=rng.standard_normal(shape, np.float32),
        advantages=rng.standard_normal(shape, np.float32),
        token_weights=np.full(shape, 1 / 3, np.float32),
        token_versions=rng.integers(-1, 3, shape, np.int32),
        turns=rng.integers(-1, 9, shape, np.int32),
        source=rng.integers(0, 3, shape, np.int8),
        rollout_ids=np.arange(height, dtype=np.int32),
        group_ids=np.arange(height, dtype=np.int32) // 2,
        first_positions=rng.integers(0, 99, height, np.int32),
        row_numbers=rng.integers(0, 9, height, np.int32),
        envs=("words",) * height,
        hinted_token_ids=rng.integers(0, 99, (height, width + 2), np.int32),
    )
    metrics = {"train/reward": 0.1 + 0.2, "inf": float("inf"), "numpy": np.float32(0.25)}
    rewards, group_ids = np.array([0.5, np.nan], np.float32), np.array([0, 0], np.int32)
    return RankBatch(7, (micro, micro), rewards, group_ids, metrics)


@pytest.mark.parametrize(("height", "width"), [(3, 5), (0, 4)])
def test_a_batch_arrives_exactly_as_it_was_sent(height, width):
    sent = batch(height, width)
    received = unpack(pack(sent), RankBatch)
    assert (received.step, received.metrics) == (sent.step, sent.metrics)
    np.testing.assert_array_equal(received.rewards, sent.rewards)
    np.testing.assert_array_equal(received.group_ids, sent.group_ids)
    assert len(received.micro_batches) == 2
    for before, after in zip(sent.micro_batches, received.micro_batches, strict=True):
        for name in MicroBatch.__dataclass_fields__:
            a, b = getattr(before, name), getattr(after, name)
            if isinstance(a, np.ndarray):
                a, b = ((x.dtype, x.shape, x.tobytes()) for x in (a, b))
            assert a == b


def test_an_array_that_is_not_contiguous_arrives_too_and_an_object_is_refused():
    ids = np.arange(24).reshape(4, 6).T[::2]
    assert unpack(pack({"ids": ids}), dict[str, np.ndarray])["ids"].tolist() == ids.tolist()
    with pytest.raises(NotImplementedError, match="object"):
        pack({"a": object()})


@pytest.fixture
def folder(tmp_path_factory) -> RunFolder:
    run_folder = RunFolder(tmp_path_factory.mktemp("r"))
    run_folder.private.make()
    return run_folder


@pytest.fixture
def serve(folder) -> Iterator:
    """Return a function that lets behave(connection) answer one rank in a thread."""
    threads = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.private.rollouts_socket))
        listener.listen()

        def start(behave) -> RolloutsLink:
            def accept() -> None:
                connection, _ = listener.accept()
                with connection:
                    behave(connection)

            threads.append(threading.Thread(target=accept, daemon=True))
            threads[-1].start()
            link = RolloutsLink(folder, rank=1)
            link.connect(1.0)
            return link

        yield start
    for thread in threads:
        thread.join(2)  # no longer, so that a failed test ends


def test_each_call_of_a_rank_gets_its_answer(serve):
    calls, large = [], batch(500, 1000)  # it arrives in several reads
    over = [Answer(over="nothing to learn", stopped=stopped) for stopped in (True, False)]

    def behave(connection: socket.socket) -> None:
        for answer in (large, {}, {"next_index": 3, "pending": []}, *over):
            size = HEADER.unpack(connection.recv(HEADER.size))[0]
            calls.append(unpack(connection.recv(size), Call))
            is_end = isinstance(answer, Answer)
            data = pack(answer if is_end else Answer(value=msgspec.Raw(pack(answer))))
            connection.sendall(HEADER.pack(len(data)) + data)

    link = serve(behave)
    received = link.next_batch(7, 5.0)
    assert received.metrics == large.metrics
    expected = large.micro_batches[1].token_ids
    assert received.micro_batches[1].token_ids.tobytes() == expected.tobytes()
    link.publish(8, {})
    assert link.state() == {}  # only rank 0 asks for it
    link._rank = 0
    assert link.state() == {"next_index": 3, "pending": []}
    asked = Call(what="next_batch", rank=1, step=7)
    assert calls == [asked, Call(what="publish", version=8), Call(what="state")]
    for stopped in (True, False):
        with pytest.raises(NoMoreBatches, match="nothing to learn") as end:
            link.next_batch(7, 5.0)
        assert end.value.stopped == stopped


def test_the_error_for_a_late_batch_names_the_timeout_and_the_log(serve):
    hold = threading.Event()
    link = serve(lambda connection: hold.wait(2))
    with pytest.raises(RunFailed, match=r"batch for step 3 within trainer\.wait_timeout=0\.05 s"):
        link.next_batch(3, 0.05)
    with pytest.raises(RunFailed, match=r"not answer within trainer\.wait_timeout=0\.05 s: see"):
        link.publish(3, {})
    hold.set()


@pytest.mark.parametrize("sent", [b"", HEADER.pack(100) + b"half"])
def test_a_closed_connection_is_an_error_that_names_the_log(serve, sent, monkeypatch):
    monkeypatch.setattr(rollouts_link, "_REPORT_DELAY_S", 0.0)
    with pytest.raises(RunFailed, match=r"closed its connection: see logs/rollouts\.log"):
        serve(lambda connection: connection.sendall(sent)).next_batch(0, 2.0)


def test_a_rank_waits_for_the_rollouts_process_to_listen(folder):
    link = RolloutsLink(folder, rank=0)
    with pytest.raises(RunFailed, match=r"wait_timeout=0\.05 s: see logs/rollouts\.log"):
        link.connect(0.05)
    waiting = threading.Thread(target=link.connect, args=(5.0,))
    waiting.start()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder.private.rollouts_socket))
        listener.listen()
        listener.settimeout(5)
        listener.accept()
        waiting.join(5)
