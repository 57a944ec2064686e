"""Calls the rollouts process from a trainer rank."""

import socket
import time
from typing import Any, TypeVar

from rl.records import RankBatch
from rl.runtime.endpoint import Endpoint
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack

T = TypeVar("T")

_CAUSE_FIRST_S = 1.0  # lets the other process report first: the oldest report is shown


class RolloutsLink:
    """Blocking calls of one rank; every wait has a deadline."""

    def __init__(self, run_folder: RunFolder, rank: int) -> None:
        self._run_folder, self._rank = run_folder, rank
        self._socket = socket.socket()  # replaced by `connect`

    def connect(self, timeout: float) -> None:
        """Wait until the rollouts process listens, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket = self._connected(timeout)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"the rollouts process did not listen within {timeout:g} s; "
                        "see logs/rollouts.log"
                    ) from error
                time.sleep(0.1)  # the socket appears when the environment is loaded
            else:
                return

    def _connected(self, timeout: float) -> socket.socket:
        """Return a connection to the reported port, else to the socket on this host."""
        listening = Endpoint.read(self._run_folder, "rollouts")
        if listening is None:
            return Address(path=self._run_folder.private.rollouts_socket).connect(timeout)
        connection = listening.address.connect(timeout)
        key = self._run_folder.private.key.read_bytes()
        # Because a batch may take long.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.sendall(HEADER.pack(len(key)) + key)
        return connection

    def next_batch(self, step: int, timeout: float) -> RankBatch:
        """Return this rank's share of a step, waiting at most `timeout` seconds for it.

        Raises:
            NoMoreBatches: there is no further batch.

        """
        self._socket.settimeout(timeout)
        late = (
            f"no batch for step {step} within trainer.wait_timeout={timeout:g} s: rollouts are "
            "slower than that, or stuck; see logs/rollouts.log and logs/inference*.log"
        )
        return self._call(Call(what="next_batch", rank=self._rank, step=step), RankBatch, late)

    def publish(self, version: int, replicas: dict[str, int]) -> None:
        """Report that vLLM has these weights, so that more groups may start.

        `replicas`: the incarnation of each vLLM that has them, by name.
        """
        call = Call(what="publish", version=version, replicas=replicas)
        self._call(call, dict, self._silent)

    def evaluation(self, version: int) -> dict[str, float]:
        """Wait for the evaluation of a version and return its metrics; {} if it is not due.

        Every rank asks, so that no rank takes this wait for a hanging rank.
        """
        late = (
            f"the evaluation of version {version} took longer than trainer.wait_timeout="
            f"{self._socket.gettimeout():g} s: lower evaluation.num_examples, or raise that one"
        )
        return self._call(Call(what="evaluation", version=version), dict, late)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the rollouts process."""
        return self._call(Call(what="state"), dict, self._silent)

    @property
    def _silent(self) -> str:
        waited = self._socket.gettimeout()
        return f"the rollouts process did not answer within {waited:g} s; see logs/rollouts.log"

    def _call(self, call: Call, kind: type[T], late: str) -> T:
        data = pack(call)
        try:
            self._socket.sendall(HEADER.pack(len(data)) + data)
            answer = unpack(self._read(HEADER.unpack(self._read(HEADER.size))[0]), Answer)
        except TimeoutError as error:
            raise RunFailed(late) from error
        except ConnectionError as error:
            time.sleep(_CAUSE_FIRST_S)  # what ended the other process is the cause
            raise RunFailed(
                "the rollouts process closed its connection; see logs/rollouts.log"
            ) from error
        if answer.over:
            raise NoMoreBatches(answer.over, stopped=answer.stopped)
        return unpack(answer.value, kind)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, offset = memoryview(data), 0
        while offset < count:
            received = self._socket.recv_into(view[offset:])
            if received == 0:  # the other process closed the connection
                raise ConnectionError("end of file")
            offset += received
        return data
