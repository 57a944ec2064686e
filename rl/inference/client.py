"""The asyncio client of vLLM's generate route, which accepts and returns token ids."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self, TypeVar
from uuid import uuid4

import aiohttp
import msgspec

from rl.inference.completion import (
    Answer,
    AttemptFailed,
    Completion,
    GenerationError,
    RequestFailed,
    completion_of,
)
from rl.inference.replica import refuses_connections
from rl.inference.router import Group, Route, Router
from rl.runtime.devices import open_files

T = TypeVar("T")
_RETRIES = 3
_RETRY_DELAY_S = 0.5  # seconds before the first retry; each further retry waits twice as long
_KEEP_ALIVE_S = 2.0  # seconds that idle connections stay open; vLLM closes them after 5 s
_MAX_FAILURES = 32  # maximum number of consecutive requests that failed after all their retries
_CONNECT_S = 10.0  # timeout for TCP connections, because a host that is down does not refuse them


@dataclass
class RequestTally:
    """Counts of failed requests, which the client shares with the code that logs them."""

    num_retried: int = 0
    num_failed_in_a_row: int = 0


class VLLMClient:
    """The client that sends a run's requests to its vLLM replicas; an async context manager.

    If a replica is lost and another replica serves, the client sends the unanswered requests, with
    the same prompts, to the other replica. So finished turns are not sampled again.

    Raises:
        RequestFailed: one request failed, after three retries if a retry could help.
        GenerationError: many consecutive requests failed, so the run cannot continue.
    """

    def __init__(
        self, router: Router, *, model: str, timeout: float, tally: RequestTally | None = None
    ) -> None:
        """`model`: the policy's name in vLLM; `timeout`: most seconds between reads from vLLM."""
        self._router, self._model, self._timeout = router, model, timeout
        self.salt = uuid4().hex[:8]  # unique: an external server may cache an earlier run's blocks
        self._tally = tally or RequestTally()
        self._sessions: dict[Route, aiohttp.ClientSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for route in list(self._sessions):
            self._close_session(route)
        await asyncio.gather(*self._closing)

    @contextmanager
    def group(self) -> Iterator["GroupClient"]:
        """Yield a client for requests that share prompts; it sends all requests to one replica."""
        with self._router.group() as group:
            yield GroupClient(self, group)

    async def request(
        self, path: str, body: dict[str, Any], read: Callable[[bytes], T], group: Group, n: int = 0
    ) -> T:
        """Post `body` to the route `path` and return `read(answer)`; retry temporary failures.

        `read` raises ValueError if the answer has an unexpected form.
        `n` is the number of requested completions, which counts as load of the replica.
        """
        attempt, body = 0, {"model": self._model, **body}
        while True:
            route = group.route()
            route.num_pending += n
            try:
                answer = await self._post(route, path, body, read)
            except AttemptFailed as failure:
                if await self._lose_if_gone(route, failure):
                    continue
                if failure.retryable and attempt < _RETRIES:
                    self._tally.num_retried += 1
                    await asyncio.sleep(_RETRY_DELAY_S * 2**attempt)
                    attempt += 1
                    continue
                self._count_failure(route, failure)
                raise RequestFailed(str(failure)) from failure
            finally:
                route.num_pending -= n
            route.num_failed_in_a_row = self._tally.num_failed_in_a_row = 0
            return answer

    def _count_failure(self, route: Route, failure: AttemptFailed) -> None:
        """Count a failed request. After many consecutive failures, exclude the replica or raise."""
        route.num_failed_in_a_row += 1
        self._tally.num_failed_in_a_row += 1
        if self._tally.num_failed_in_a_row >= _MAX_FAILURES:
            raise GenerationError(
                f"{_MAX_FAILURES} requests to vLLM failed in a row, the last one because "
                f"{failure}; see {route.replica.log}"
            ) from failure
        if route.num_failed_in_a_row >= _MAX_FAILURES:  # this replica fails, but other ones answer
            self._router.lose(route, f"{_MAX_FAILURES} requests failed in a row")

    async def _lose_if_gone(self, route: Route, failure: AttemptFailed) -> bool:
        """Exclude a replica that has ended; return whether another replica can answer instead."""
        if route.lost:
            return True
        if not failure.unanswered or len(self._router.routes) == 1:
            return False
        # Connect in a thread, because a connection to a host that is down blocks.
        gone = await asyncio.to_thread(refuses_connections, route.replica)
        return gone and self._router.lose(route, str(failure))

    async def _post(
        self, route: Route, path: str, body: dict[str, Any], read: Callable[[bytes], T]
    ) -> T:
        address = route.replica.address
        try:
            async with self._session(route).post(path, json=body) as response:
                status, content = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:  # the replica's host is down
            why = f"no connection to {address} within {_CONNECT_S:g} s"
            raise AttemptFailed(why, unanswered=True) from error
        except TimeoutError as error:  # do not retry, because a retry would probably time out again
            raise AttemptFailed(
                f"vLLM was silent for {self._timeout:g} s", retryable=False, unanswered=True
            ) from error
        except aiohttp.ClientError as error:
            raise AttemptFailed(
                f"vLLM is out of reach at {address} ({error!r})", unanswered=True
            ) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not route.lost or task is None or task.cancelling():
                raise
            # The request waited for a connection of the session that `_close_session` closed.
            raise AttemptFailed(f"{route.replica.name} was lost") from error
        text = content[:500].decode(errors="replace")
        if status == HTTPStatus.BAD_REQUEST and path == "/tokenize":
            raise ValueError(f"the chat template rejects the conversation: {text}")
        if status != HTTPStatus.OK:
            busy = status == HTTPStatus.TOO_MANY_REQUESTS
            retryable = busy or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise AttemptFailed(f"vLLM answered {status} to {path}: {text}", retryable=retryable)
        try:
            return read(content)
        except ValueError as error:
            raise AttemptFailed(
                f"vLLM's answer to {path} has an unexpected form ({error!r}): {text}"
            ) from error

    def _session(self, route: Route) -> aiohttp.ClientSession:
        """Return the HTTP session of a replica; the first request creates it."""
        if route not in self._sessions:
            replica = route.replica
            # Use half of the allowed open files, because RL environments also open files.
            limit = max(open_files() // 2 // len(self._router.routes), 1)
            path = replica.address.path
            connector = (
                aiohttp.UnixConnector(path=str(path), limit=limit, keepalive_timeout=_KEEP_ALIVE_S)
                if path
                else aiohttp.TCPConnector(limit=limit, keepalive_timeout=_KEEP_ALIVE_S)
            )
            # Set no total timeout, because a request may wait long for a free connection.
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=None if path else _CONNECT_S, sock_read=self._timeout
            )
            self._sessions[route] = aiohttp.ClientSession(
                replica.address.url, connector=connector, timeout=timeout, headers=replica.headers
            )
            route.close_session = lambda: self._close_session(route)
        return self._sessions[route]

    def _close_session(self, route: Route) -> None:
        """Close the connections to a replica, so that its open requests move to another replica."""
        if session := self._sessions.pop(route, None):
            task = asyncio.ensure_future(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@dataclass(frozen=True)
class GroupClient:
    """A client whose requests all go to the same replica."""

    client: VLLMClient
    group: Group

    async def generate(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, n: int, version: int
    ) -> list[Completion]:
        """Return `n` completions of the prompt.

        `sampling` uses vLLM's parameter names. `version`, the newest policy version that vLLM
        samples with, salts the prefix cache, so that key-value blocks of old weights are not used.
        """
        body = {
            "token_ids": list(prompt_ids),
            "cache_salt": f"{self.client.salt}-v{version}",
            "sampling_params": {
                **sampling,
                "n": n,
                "logprobs": 0,  # 0: vLLM returns only the logprob of the sampled token
                "detokenize": bool(sampling.get("stop")),
            },
        }

        def read(content: bytes) -> list[Completion]:
            choices = msgspec.json.decode(content, type=Answer).choices
            return [completion_of(choice, list(prompt_ids)) for choice in choices]

        completions = await self.client.request("/inference/v1/generate", body, read, self.group, n)
        route = self.group.route()
        route.num_completions += len(completions)
        route.num_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def tokenize(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return the token ids that the server's chat template produces for a conversation.

        Raise ValueError if the template rejects the conversation.
        """
        body: dict[str, Any] = {"messages": messages}
        if tools:
            body["tools"] = [{"type": "function", "function": spec} for spec in tools]
        return await self.client.request("/tokenize", body, _tokens_in, self.group)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _tokens_in(content: bytes) -> list[int]:
    return msgspec.json.decode(content, type=_Tokenized).tokens
