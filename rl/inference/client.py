"""An asyncio client for vLLM's route /inference/v1/generate, which takes and returns token ids."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar
from uuid import uuid4

import aiohttp
import msgspec

from rl.inference.completion import (
    AttemptFailed,
    Completion,
    GenerateAnswer,
    GenerationError,
    RequestFailed,
    completion_of,
    prompt_logprobs,
    scoring_request,
)
from rl.inference.router import RequestGroup, Route, Router
from rl.runtime.devices import file_limit

T = TypeVar("T")
_GENERATE = "/inference/v1/generate"
_RETRIES = 3
_RETRY_DELAY_S = 0.5  # seconds before the first retry; doubled before each further retry
_KEEP_ALIVE_S = 2.0  # close idle connections after this time, because vLLM closes them after 5 s
# The run ends after this many failed requests in a row, counted over all replicas. The router stops
# using one replica after this many failed requests in a row to it, while other replicas answer.
_MAX_FAILURES = 32
_CONNECT_S = 10.0  # seconds to wait for a TCP connection; a host that is down never answers


@dataclass
class RequestTally:
    num_retried: int = 0
    num_failed_in_a_row: int = 0


class VLLMClient(AbstractAsyncContextManager["VLLMClient"]):
    """An async context manager that sends the requests of a run to its vLLM replicas.

    If a replica dies, the client sends the unanswered requests to another replica, or to the same
    replica after its restart.

    Raises:
        RequestFailed: a request and its three retries failed, or its error was not temporary.
        GenerationError: 32 requests in a row failed. The run ends.
    """

    def __init__(
        self, router: Router, *, model: str, timeout: float, tally: RequestTally | None = None
    ) -> None:
        """`model`: the policy's name in vLLM; `timeout`: seconds that a request waits for data."""
        self._router, self._model, self._timeout = router, model, timeout
        # Without a new cache salt, an external server may reuse key-value blocks of an earlier run.
        self.salt = uuid4().hex[:8]
        self._tally = tally or RequestTally()
        self._sessions: dict[Route, aiohttp.ClientSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def __aexit__(self, *_: object) -> None:
        for route in list(self._sessions):
            self._close_session(route)
        await asyncio.gather(*self._closing)

    @contextmanager
    def group(self) -> Iterator["GroupClient"]:
        """Yield a client that sends all requests of a group of rollouts to one replica."""
        group = RequestGroup(self._router)
        try:
            yield GroupClient(self, group)
        finally:
            group.release_route()

    async def request(
        self,
        path: str,
        body: dict[str, Any],
        read: Callable[[bytes], T],
        group: RequestGroup,
        n: int = 0,  # number of requested completions
    ) -> T:
        """Post `body` to the route `path` and return `read(answer)`. Retry temporary failures."""
        attempt, body = 0, {"model": self._model, **body}
        while True:
            route = await group.wait_for_route()
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
                raise RequestFailed(f"{failure} (details: {route.replica.log})") from failure
            finally:
                route.num_pending -= n
            route.num_failed_in_a_row = self._tally.num_failed_in_a_row = 0
            return answer

    def _count_failure(self, route: Route, failure: AttemptFailed) -> None:
        route.num_failed_in_a_row += 1
        self._tally.num_failed_in_a_row += 1
        if self._tally.num_failed_in_a_row >= _MAX_FAILURES:
            raise GenerationError(
                f"{_MAX_FAILURES} requests to vLLM failed in a row, the last one because "
                f"{failure}: read {route.replica.log} for the cause"
            ) from failure
        # Stop using a replica whose last 32 requests failed while other replicas answered.
        if route.num_failed_in_a_row >= _MAX_FAILURES:
            self._router.lose(route, f"{_MAX_FAILURES} requests failed in a row")

    async def _lose_if_gone(self, route: Route, failure: AttemptFailed) -> bool:
        if route.lost:
            return True
        # Use a thread, because connecting to a host that is down would block the event loop.
        gone = await asyncio.to_thread(
            self._router.is_gone, route.replica, unanswered=failure.unanswered
        )
        return gone and self._router.lose(route, str(failure))

    async def _post(
        self, route: Route, path: str, body: dict[str, Any], read: Callable[[bytes], T]
    ) -> T:
        address = route.replica.address
        try:
            async with self._session(route).post(path, json=body) as response:
                status, content = response.status, await response.read()
        except aiohttp.ConnectionTimeoutError as error:  # probably the replica's host is down
            why = f"no connection to {address} within {_CONNECT_S:g} s: check its host and network"
            raise AttemptFailed(why, unanswered=True) from error
        except TimeoutError as error:
            limit = f"sampler.rollout_timeout={self._timeout:g} s"
            why = f"vLLM sent nothing for {limit}: raise it, or lower sampler.max_concurrent"
            raise AttemptFailed(why, retryable=False, unanswered=True) from error
        except aiohttp.ClientError as error:
            raise AttemptFailed(
                f"vLLM cannot be reached at {address} ({error})", unanswered=True
            ) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if not route.lost or task is None or task.cancelling():
                raise
            # `_close_session` makes aiohttp cancel the requests that wait for a connection.
            raise AttemptFailed(f"the run no longer uses {route.replica.name}") from error
        text = content[:500].decode(errors="replace")
        if status == HTTPStatus.BAD_REQUEST and path == "/tokenize":
            raise ValueError(f"the model's chat template rejects the conversation: {text}")
        if status != HTTPStatus.OK:
            busy = status == HTTPStatus.TOO_MANY_REQUESTS
            retryable = busy or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise AttemptFailed(f"vLLM answered {status} to {path}: {text}", retryable=retryable)
        try:
            return read(content)
        except ValueError as error:
            raise AttemptFailed(
                f"vLLM's answer to {path} has an unexpected form ({error!r}): use the version of "
                f"vLLM in pyproject.toml. The answer: {text}"
            ) from error

    def _session(self, route: Route) -> aiohttp.ClientSession:
        if route not in self._sessions:
            replica = route.replica
            # Use at most half of the allowed open files, because environments open files, too.
            limit = max(file_limit() // 2 // len(self._router.routes), 1)
            path = replica.address.path
            kind = partial(aiohttp.UnixConnector, str(path)) if path else aiohttp.TCPConnector
            connector = kind(limit=limit, keepalive_timeout=_KEEP_ALIVE_S)
            # Set no total timeout, because it would include the wait for a free connection.
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=None if path else _CONNECT_S, sock_read=self._timeout
            )
            self._sessions[route] = aiohttp.ClientSession(
                replica.address.url, connector=connector, timeout=timeout, headers=replica.headers
            )
            route.close_session = lambda: self._close_session(route)
        return self._sessions[route]

    def _close_session(self, route: Route) -> None:
        if session := self._sessions.pop(route, None):
            task = asyncio.ensure_future(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


@dataclass(frozen=True)
class GroupClient:
    client: VLLMClient
    group: RequestGroup

    async def generate(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, n: int, version: int
    ) -> list[Completion]:
        """Return `n` completions of the prompt. `version`: the policy version vLLM has loaded."""
        body = {
            "token_ids": list(prompt_ids),
            "cache_salt": f"{self.client.salt}-v{version}",  # reuse no cache of older weights
            "sampling_params": {
                "logprobs": 0,  # 0: vLLM returns only the logprob of the sampled token
                **sampling,
                "n": n,
                "detokenize": bool(sampling.get("stop")),
            },
        }

        def read_completions(content: bytes) -> list[Completion]:
            choices = msgspec.json.decode(content, type=GenerateAnswer).choices
            returns_kept = sampling.get("logprobs", 0) > 0
            return [completion_of(choice, list(prompt_ids), returns_kept) for choice in choices]

        completions = await self.client.request(_GENERATE, body, read_completions, self.group, n)
        if route := self.group.chosen:
            route.num_completions += len(completions)
            route.num_tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    async def score(
        self, token_ids: Sequence[int], count: int, *, version: int
    ) -> tuple[list[float], int]:
        """Return logprobs of the last `count` tokens at temperature 1, and their policy version."""
        body = scoring_request(token_ids)
        body["sampling_params"]["logprobs"] = 0  # `completion_of` needs the sampled token's logprob

        def read_logprobs(content: bytes) -> tuple[list[float], int]:
            (choice,) = msgspec.json.decode(content, type=GenerateAnswer).choices
            logprobs = prompt_logprobs(msgspec.json.decode(content), token_ids)
            return logprobs[len(logprobs) - count :], completion_of(choice, []).versions[0]

        while True:
            logprobs, now = await self.client.request(_GENERATE, body, read_logprobs, self.group, 1)
            # If the version is unchanged, vLLM loaded no weights while it computed the logprobs.
            if now == version:
                return logprobs, version
            version = now

    async def tokenize(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the conversation as token ids, rendered with the server's chat template."""
        body: dict[str, Any] = {"messages": messages}
        if template_options:
            body["chat_template_kwargs"] = template_options
        if tools:
            body["tools"] = [{"type": "function", "function": spec} for spec in tools]
        decode = msgspec.json.Decoder(_TokenizeAnswer).decode
        return (await self.client.request("/tokenize", body, decode, self.group)).tokens


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[int]
