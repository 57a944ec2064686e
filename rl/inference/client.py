"""Token ids in, token ids out: the asyncio side of vLLM's generate route."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import aiohttp
import msgspec

from rl.run.failure import RunFailed
from rl.run.http_status import may_pass
from rl.run.open_files import open_files

T = TypeVar("T")
_RETRIES = 3
_FIRST_PAUSE_S = 0.5  # before the first retry; then twice as long each time
_KEEP_ALIVE_S = 2.0  # vLLM closes idle connections after 5 s, and a request must not meet that
_MOST_FAILED_IN_A_ROW = 32  # requests, each with its retries
_BROKEN_OFF = ("abort", "error")  # finish reasons that are vLLM's, not the policy's


class GenerationError(RunFailed):
    """The server cannot be used; the message is for the user."""


class RequestFailed(GenerationError):
    """One request failed in spite of its retries: that costs its rollout, not the run."""


class _Failed(Exception):
    """One attempt at a request failed; `passing`: the next one may do better."""

    def __init__(self, message: str, *, passing: bool = True) -> None:
        super().__init__(message)
        self.passing = passing


@dataclass
class RequestTally:
    """How the requests of a run went; shared with whoever logs it."""

    num_retried: int = 0
    num_failed_in_a_row: int = 0


@dataclass(frozen=True)
class Completion:
    """What the server sampled after one prompt. P tokens of the prompt, N sampled ones."""

    token_ids: list[int]  # [N] the stop token included
    logprobs: list[float]  # [N] under the distribution that was sampled from
    versions: list[int]  # [N] policy version that sampled each token
    cut_off: bool  # ended by max_tokens instead of by the policy
    prompt_ids: list[int] = field(default_factory=list)  # [P]
    num_untracked_tokens: int = 0  # sampled by a server that gives no ids away
    stop: str | None = None  # the text of sampler.stop that ended it, whose tokens are included


class Client(Protocol):
    """The one call that the sampler makes."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, n: int, version: int
    ) -> list[Completion]:
        """Return `n` completions of the prompt.

        `sampling` has vLLM's names; `version` is the newest policy version known to be live: it
        salts the prefix cache, so that no key-value block outlives the weights that made it.
        """
        ...


class VLLMClient:
    """Talks to vLLM over its Unix socket. An async context manager.

    Raises:
        RequestFailed: one request failed, after three retries where they might have helped.
        GenerationError: many failed in a row: there is no point in going on.

    """

    def __init__(
        self, socket: Path, *, model: str, timeout: float, tally: RequestTally | None = None
    ) -> None:
        """`model`: the name that vLLM knows the policy by; `timeout`: seconds of its silence."""
        self._socket, self._model, self._timeout = socket, model, timeout
        self._tally = tally or RequestTally()

    async def __aenter__(self) -> Self:
        # Half of what may be open: the environments want files, too, and vLLM has our limits.
        connector = aiohttp.UnixConnector(
            path=str(self._socket), limit=max(open_files() // 2, 1), keepalive_timeout=_KEEP_ALIVE_S
        )
        # No limit in all: a request may wait for its connection, which is no fault of vLLM's.
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self._timeout)
        self._session = aiohttp.ClientSession("http://vllm", connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, n: int, version: int
    ) -> list[Completion]:
        """Return `n` completions of the prompt (see `Client.generate`)."""
        body = {
            "model": self._model,
            "token_ids": list(prompt_ids),
            "cache_salt": f"v{version}",  # older weights' key-value blocks are not found again
            # 0 further logprobs: that of the sampled token comes anyway.
            "sampling_params": {
                **sampling,
                "n": n,
                "logprobs": 0,
                "detokenize": bool(sampling.get("stop")),
            },
        }

        def read(answer: Any) -> list[Completion]:
            return [_completion(choice, list(prompt_ids)) for choice in answer["choices"]]

        return await self._ask("/inference/v1/generate", body, read)

    async def tokenize(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> list[int]:
        """Return the prompt that the server's own chat template makes of a conversation.

        Raises:
            ValueError: the template does not take this conversation.

        """
        body: dict[str, Any] = {"model": self._model, "messages": messages}
        if tools:
            body["tools"] = [{"type": "function", "function": spec} for spec in tools]
        return await self._ask("/tokenize", body, lambda answer: list(answer["tokens"]))

    async def _ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer; what fails is tried again where that may help."""
        for attempt in range(_RETRIES + 1):
            try:
                answer = await self._post(path, body, read)
            except _Failed as failure:
                if failure.passing and attempt < _RETRIES:
                    self._tally.num_retried += 1
                    await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
                    continue
                self._tally.num_failed_in_a_row += 1
                if self._tally.num_failed_in_a_row >= _MOST_FAILED_IN_A_ROW:
                    raise GenerationError(
                        f"{_MOST_FAILED_IN_A_ROW} requests to vLLM failed in a row, the last one "
                        f"because {failure}; see logs/inference.log"
                    ) from failure
                raise RequestFailed(str(failure)) from failure
            self._tally.num_failed_in_a_row = 0
            return answer
        raise AssertionError("unreachable")

    async def _post(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        try:
            async with self._session.post(path, json=body) as response:
                status, content = response.status, await response.read()
        except TimeoutError as error:  # another attempt would take as long
            raise _Failed(f"vLLM was silent for {self._timeout:g} s", passing=False) from error
        except aiohttp.ClientError as error:
            raise _Failed(f"vLLM is out of reach at {self._socket} ({error!r})") from error
        text = content[:500].decode(errors="replace")
        if status == HTTPStatus.BAD_REQUEST and path == "/tokenize":
            raise ValueError(f"the chat template refuses it: {text}")
        if status != HTTPStatus.OK:
            raise _Failed(f"vLLM answered {status} to {path}: {text}", passing=may_pass(status))
        try:
            return read(msgspec.json.decode(content))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _Failed(f"vLLM's answer to {path} makes no sense ({error!r}): {text}") from error


def _completion(choice: dict[str, Any], prompt_ids: list[int]) -> Completion:
    token_ids: list[int] = choice["token_ids"] or []
    content: list[dict[str, Any]] = (choice["logprobs"] or {}).get("content") or []
    if choice["finish_reason"] in _BROKEN_OFF:
        # vLLM's fault: to train on it would blame the policy for where it was cut.
        raise _Failed(f"vLLM ended a completion with finish_reason={choice['finish_reason']}")
    versions = [-1] * len(token_ids)
    for span in choice["weight_versions"] or []:
        count = span["end"] - span["start"]
        versions[span["start"] : span["end"]] = [int(span["version"])] * count
    if len(content) != len(token_ids) or -1 in versions:
        raise _Failed(
            f"vLLM returned {len(token_ids)} tokens with {len(content)} logprobs and weight "
            f"versions {choice['weight_versions']}: every token needs both"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=[entry["logprob"] for entry in content],
        versions=versions,
        cut_off=choice["finish_reason"] == "length",
        prompt_ids=prompt_ids,
        stop=stop if isinstance(stop := choice.get("stop_reason"), str) else None,
    )
