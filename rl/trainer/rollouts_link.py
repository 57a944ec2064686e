"""Send requests from a trainer rank to the rollouts process."""

import select
import socket
import time
from typing import Any, TypeVar

import numpy as np

from rl.records import RankBatch
from rl.runtime.endpoint import Endpoint
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.trainer.delivery import Delivery
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack

T = TypeVar("T")

_POLL_MS = 500  # milliseconds between two checks for restarted vLLMs
_REPORT_DELAY_S = 1.0  # seconds to wait, so that the rollouts process reports its error first


class RolloutsLink:
    """The connection of one rank to the rollouts process. Every blocking call has a deadline."""

    def __init__(self, run_folder: RunFolder, rank: int, delivery: Delivery | None = None) -> None:
        self._run_folder, self._rank, self._delivery = run_folder, rank, delivery
        self._version = 0  # the version of the last `publish`
        self._socket = socket.socket()  # replaced in `connect`

    def connect(self, timeout: float) -> None:
        """Connect to the rollouts process, or raise RunFailed if it does not listen in time."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket = self._open_connection(timeout)
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the rollouts process did not listen within trainer.wait_timeout="
                        f"{timeout:g} s: see logs/rollouts.log, or raise the limit"
                    ) from error
                time.sleep(0.1)  # retry, because the rollouts process first loads the environment

    def _open_connection(self, timeout: float) -> socket.socket:
        listening = Endpoint.read(self._run_folder, "rollouts")
        if listening is None:
            return Address(path=self._run_folder.private.rollouts_socket).connect(timeout)
        connection = listening.address.connect(timeout)
        key = self._run_folder.private.key.read_bytes()
        # Enable TCP keepalive, because the connection is idle while a batch is sampled.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(HEADER.pack(len(key)) + key)
        return connection

    def next_batch(self, step: int, timeout: float, *, shares_prefixes: bool = False) -> RankBatch:
        """Return this rank's share of a step's batch. Raise NoMoreBatches if no batch will come."""
        self._socket.settimeout(timeout)
        late = (
            f"no batch for step {step} within trainer.wait_timeout={timeout:g} s: raise the limit "
            "if rollouts are slow, or see logs/rollouts.log and logs/inference*.log"
        )
        call = Call(what="next_batch", rank=self._rank, step=step, shares_prefixes=shares_prefixes)
        return self._call(call, RankBatch, late)

    def publish(self, version: int, replicas: dict[str, int]) -> None:
        """Report which vLLMs have loaded `version`. `replicas`: name -> number of its restarts."""
        self._version = version
        call = Call(what="publish", version=version, replicas=replicas)
        self._call(call, dict, self._no_answer_text)

    def evaluation(self, version: int) -> dict[str, float]:
        """Return the metrics of a version's evaluation, {} if the evaluation fails or none is due.

        All ranks must call this. Otherwise a rank waits in the next collective, which may time out.
        """
        late = (
            f"the evaluation of version {version} took longer than trainer.wait_timeout="
            f"{self._socket.gettimeout():g} s: lower evaluation.num_examples or raise the limit"
        )
        return self._call(Call(what="evaluation", version=version), dict, late)

    def record_all(self, step: int) -> tuple[str, ...]:
        """Make the rollouts process record all tokens of a step's batch. Return the rollout ids."""
        call = Call(what="record_all", rank=self._rank, step=step)
        return tuple(self._call(call, list, self._no_answer_text))

    def state(self) -> dict[str, Any]:
        """On rank 0, return the state of the rollouts process. Other ranks return {}."""
        return {} if self._rank else self._call(Call(what="state"), dict, self._no_answer_text)

    @property
    def _no_answer_text(self) -> str:
        limit = f"trainer.wait_timeout={self._socket.gettimeout():g} s"
        return f"the rollouts process did not answer within {limit}: see logs/rollouts.log"

    def _call(self, call: Call, kind: type[T], timeout_text: str) -> T:
        data = pack(call)
        try:
            self._socket.sendall(HEADER.pack(len(data)) + data)
            self._wait_for_answer()
            answer = unpack(self._read(HEADER.unpack(self._read(HEADER.size))[0]), Answer)
        except TimeoutError as error:
            raise RunFailed(timeout_text) from error
        except ConnectionError as error:
            time.sleep(_REPORT_DELAY_S)
            raise RunFailed(
                "the rollouts process closed its connection: see logs/rollouts.log"
            ) from error
        if answer.over:
            raise NoMoreBatches(answer.over, stopped=answer.stopped)
        return unpack(answer.value, kind)

    def _wait_for_answer(self) -> None:
        """Wait for an answer, or raise TimeoutError. Meanwhile push weights to restarted vLLMs."""
        timeout, poll = self._socket.gettimeout() or 0.0, select.poll()
        poll.register(self._socket, select.POLLIN)
        deadline = time.monotonic() + timeout
        while not poll.poll(_POLL_MS):
            if time.monotonic() > deadline:
                raise TimeoutError
            if self._delivery and (replicas := self._delivery.push_again()):
                # Use another connection, because this one is waiting for an answer.
                link = RolloutsLink(self._run_folder, self._rank)
                link.connect(timeout)
                with link._socket:
                    link.publish(self._version, replicas)

    def _read(self, num_bytes: int) -> memoryview:
        try:  # use np.empty, because bytearray would first fill the memory with zeros
            view, offset = np.empty(num_bytes, np.uint8).data, 0
        except (MemoryError, ValueError) as error:
            text = f"a message of {num_bytes:,} bytes does not fit into memory: lower batch_size"
            raise RunFailed(text) from error
        while offset < num_bytes:
            received = self._socket.recv_into(view[offset:])
            if received == 0:
                raise ConnectionError("the rollouts process closed the connection")
            offset += received
        return view
