"""/chat/completions of any OpenAI-compatible server, asked again where that may help.

Whoever has such a server names its knobs as the user knows them (`Keys`), for what is wrong is said
in their words.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from envs.messages import parse_json
from rl.inference.client import may_pass
from rl.inference.completion import GenerationError

_LONGEST_PAUSE_S = 60.0
_LARGEST_ANSWER = 32 << 20  # bytes
_LOOK = aiohttp.ClientTimeout(total=20.0)


@dataclass(frozen=True)
class Keys:
    """What the configuration calls an endpoint's knobs."""

    url: str
    group: str  # of the others
    limit: str  # of requests at once

    @property
    def remedies(self) -> dict[int, str]:
        """What to do, by status; {key} is the variable of the key."""
        return {
            401: f"the server refused the key in {{key}}: set that variable, or {self.group}."
            "api_key_variable",
            403: f"the server refuses this model to the key in {{key}}: use another {self.group}."
            "model or key",
            404: f"the server knows no model {self.group}.model={{model}} (or {self.url} is not "
            "its .../v1)",
        }


CLIENT = Keys("client.url", "client", "lower sampler.max_concurrent or ")


@dataclass(frozen=True, kw_only=True)
class ChatEndpoint:
    """Where a server is, which model, and the name of its key's variable."""

    url: str
    model: str
    api_key_variable: str
    max_retries: int
    keys: Keys = CLIENT

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"{self.where} is no address: write http://host:port/v1, as the server's "
                "OpenAI-compatible API is found"
            )

    @property
    def where(self) -> str:
        """The key and the address."""
        return f"{self.keys.url}={self.url}"

    @asynccontextmanager
    async def session(self, *, limit: int, timeout: float) -> AsyncIterator[aiohttp.ClientSession]:
        """Open the connections; a missing key is left out, for local servers want none."""
        key = os.environ.get(self.api_key_variable)
        async with aiohttp.ClientSession(
            # Uncompressed: what is small on the wire could be gigabytes here.
            headers={"Accept-Encoding": "identity"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=limit),
            timeout=aiohttp.ClientTimeout(total=timeout),
        ) as session:
            yield session

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Ask which models there are, which costs nothing: is it up, and does it take the key?

        Raises:
            GenerationError: it is not, or does not. Any other answer is none of our business.

        """
        try:
            url = f"{self.url.rstrip('/')}/models"
            async with session.get(url, allow_redirects=False, timeout=_LOOK) as response:
                if response.status in (401, 403):
                    text = await _text(response, self.where)
                    raise GenerationError(self._problem(response.status, text))
        except (aiohttp.ClientError, TimeoutError) as error:
            why = f"is out of reach ({error or type(error).__name__})"
            raise GenerationError(self._problem(0, why)) from error

    async def post(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        """Return the answer; None where the conversation is longer than the model can read.

        Raises:
            GenerationError: the server cannot be used; one sentence.

        """
        status, text = 0, ""
        for attempt in range(self.max_retries + 1):
            try:
                url = f"{self.url.rstrip('/')}/chat/completions"
                # No redirects: the key in the headers is for this server alone.
                async with session.post(url, json=body, allow_redirects=False) as response:
                    status, text = response.status, await _text(response, self.where)
                    pause = _pause(response.headers.get("Retry-After"), attempt)
            except aiohttp.ClientError as error:
                status, text, pause = 0, f"is out of reach ({error})", _pause(None, attempt)
            if status == 200:
                return _decoded(text, self.where)
            if status == 400 and "context length" in text.lower().replace("_", " "):
                return None
            if (status != 0 and not may_pass(status)) or attempt == self.max_retries:
                break
            await asyncio.sleep(pause)
        raise GenerationError(self._problem(status, text))

    def _problem(self, status: int, text: str) -> str:
        if status == 0:
            return f"{self.where} {text}: is the server running, and is that its address?"
        # It goes to a terminal, which would obey control characters.
        printable = "".join(c if c.isprintable() else " " for c in text[:1000])
        excerpt = " ".join(printable.split())[:200]
        if remedy := self.keys.remedies.get(status):
            hint = remedy.format(key=self.api_key_variable, model=self.model)
            return f"{self.where} answered {status}: {hint}. It said: {excerpt}"
        if status == 429:
            return (
                f"{self.where} answered 429 (too many requests) {self.max_retries + 1} times: "
                f"{self.keys.limit}raise {self.keys.group}.max_retries. It said: {excerpt}"
            )
        return f"{self.where} answered {status}: {excerpt}"


def _decoded(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise GenerationError(f"{where} did not answer with JSON: {text[:200]!r}") from error


async def _text(response: aiohttp.ClientResponse, where: str) -> str:
    """The answer, up to a size that no completion has. Compressed ones were not asked for."""
    if "Content-Encoding" in response.headers:
        raise GenerationError(
            f"{where} compresses its answers though it was asked not to, and what is small on the "
            "wire may be gigabytes here: turn that off"
        )
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > _LARGEST_ANSWER:
            raise GenerationError(
                f"{where} answers with more than {_LARGEST_ANSWER >> 20} MiB: that is no completion"
            )
    return data.decode("utf-8", "replace")


def _pause(retry_after: str | None, attempt: int) -> float:
    """Seconds to wait: what the server asks for, else 0.5, 1, 2, ...; never above a minute."""
    try:
        pause = float(retry_after) if retry_after else math.nan
    except ValueError:  # a date, which hardly any server sends
        pause = math.nan
    if math.isnan(pause):
        pause = 0.5 * 2.0 ** min(attempt, 10)
    return min(max(pause, 0.0), _LONGEST_PAUSE_S)
