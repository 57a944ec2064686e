"""Token ids in, token ids out: the asyncio side of vLLM's generate route."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp

from rl.run.failure import RunFailed

_RETRIES = 3


class GenerationError(RunFailed):
    """The engine refused a request or cannot be reached; the message is for the user."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled after one prompt. P tokens of the prompt, N sampled ones."""

    token_ids: list[int]  # [N] the stop token included
    logprobs: list[float]  # [N] under the distribution that was sampled from
    versions: list[int]  # [N] policy version that sampled each token
    cut_off: bool  # ended by max_tokens instead of by the policy
    prompt_ids: list[int] = field(default_factory=list)  # [P]
    num_untracked_tokens: int = 0  # sampled by a server that gives no ids away


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
        GenerationError: refused, or out of reach after three tries.

    """

    def __init__(self, socket: Path, *, model: str, timeout: float) -> None:
        """`model`: the name that vLLM knows the policy by."""
        self._socket, self._model, self._timeout = socket, model, timeout

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            base_url="http://vllm",
            connector=aiohttp.UnixConnector(path=str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
        )
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
            "cache_salt": f"v{version}",
            "sampling_params": {**sampling, "n": n, "logprobs": 0, "detokenize": False},
        }
        answer = await self._post("/inference/v1/generate", body)
        return [_completion(choice, list(prompt_ids)) for choice in answer["choices"]]

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
        return (await self._post("/tokenize", body))["tokens"]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(_RETRIES):
            try:
                async with self._session.post(path, json=body) as response:
                    if response.status == 200:
                        return await response.json()
                    text = (await response.text())[:500]
                    if response.status == 400 and path == "/tokenize":
                        raise ValueError(f"the chat template refuses it: {text}")
                    raise GenerationError(f"vLLM answered {response.status} to {path}: {text}")
            except aiohttp.ClientConnectionError as error:
                if attempt == _RETRIES - 1:
                    raise GenerationError(
                        f"vLLM is out of reach at {self._socket}: {error}"
                    ) from error
                await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")


def _completion(choice: dict[str, Any], prompt_ids: list[int]) -> Completion:
    token_ids: list[int] = choice["token_ids"] or []
    content: list[dict[str, Any]] = (choice["logprobs"] or {}).get("content") or []
    versions = [-1] * len(token_ids)
    for span in choice["weight_versions"] or []:
        count = span["end"] - span["start"]
        versions[span["start"] : span["end"]] = [int(span["version"])] * count
    if len(content) != len(token_ids) or -1 in versions:
        raise GenerationError(
            f"vLLM returned {len(token_ids)} tokens with {len(content)} logprobs and weight "
            f"versions {choice['weight_versions']}: every token needs both"
        )
    return Completion(
        token_ids=token_ids,
        logprobs=[entry["logprob"] for entry in content],
        versions=versions,
        cut_off=choice["finish_reason"] == "length",
        prompt_ids=prompt_ids,
    )
