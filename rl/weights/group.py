"""Push weights by collectives. Rank 0 forms a separate group with the workers of each replica.

A dead replica therefore affects no other replica. A restarted replica gets a new group.

The trainer broadcasts in a thread while its request makes vLLM receive the weights. The trainer
waits for thread and request at most trainer.wait_timeout each, so neither can block it forever.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any, ClassVar, TypeVar

from rl.inference.routes import VLLMRoutes
from rl.runtime.failure import RunFailed
from rl.weights.transport import Sender

T = TypeVar("T")


@dataclass(kw_only=True)
class GroupSender(Sender):
    """The base class of senders that have rank 0 in a group with the workers of each replica."""

    library: ClassVar[str]  # "gloo" or "nccl", for error messages

    def open(self, timeout: float) -> None:
        super().open(timeout)
        self._groups: dict[str, Any] = {}

    def rendezvous(self, vllm: VLLMRoutes, size: int) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Return (readers' arguments, function by which rank 0 joins a group of `size` ranks)."""
        raise NotImplementedError

    def broadcast_to(self, name: str) -> None:
        """Send the packed weights to the group of the replica `name`."""
        raise NotImplementedError

    def leave(self, name: str) -> None:
        """Drop the group of the replica `name`, if there is one."""
        self._groups.pop(name, None)

    def connect(self, vllm: VLLMRoutes) -> None:
        """Form a group with all workers of a vLLM. If vLLM has restarted, drop its old group."""
        name = vllm.replica.name
        self.leave(name)
        arguments, join = self.rendezvous(vllm, 1 + vllm.num_workers())
        joined = run_in_thread(join)
        self.open_readers(vllm, arguments)
        self._groups[name] = self._wait_for(joined, f"the workers of {name} to join the group")

    def send(self, vllm: VLLMRoutes, version: int) -> None:
        name = vllm.replica.name
        sent = run_in_thread(lambda: self.broadcast_to(name))
        try:
            super().send(vllm, version)
            self._wait_for(sent, f"{name} to receive the weights")
        except RunFailed:
            self.leave(name)
            raise

    def _wait_for(self, future: Future[T], awaited: str) -> T:
        try:
            return wait_for(future, self._timeout, awaited)
        except (LookupError, OSError, RuntimeError) as error:
            what = f"sync={self.library} cannot reach vLLM"
            raise RunFailed(f"{what}: {error}; see logs/inference*") from error


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, so that the process can exit while a collective hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 (`wait_for` raises it in the waiting thread)
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def wait_for(future: Future[T], timeout: float, awaited: str) -> T:
    """Return the future's result or raise its error. Raise RuntimeError after `timeout` seconds."""
    try:
        return future.result(timeout)
    except TimeoutError as error:
        limit = f"trainer.wait_timeout={timeout:g} s"
        raise RuntimeError(f"waited longer than {limit} for {awaited}") from error
