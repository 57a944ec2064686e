"""The HTTP client for servers that the run did not start.

The judge, client=messages, a teacher (reference=endpoint) and optimize_prompt.py use this client.
If a request gets no answer, or one with the status 408, 429 or 5xx, the client sends the request
again, at most `max_retries` times. Every other answer is final.
"""

import asyncio
import json
import math
import os
import random
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from envs.deadline import acquire

_LONGEST_WAIT_S = 60.0
_RANDOM = random.Random()  # a separate RNG, so that retries do not change other random numbers


class HttpError(Exception):
    """The error of a request without a usable answer.

    The message is, for example, "answered 503: busy, 3 times in a row". `status` is 0 if no answer
    came. `retry_after` (seconds) is NaN unless the header Retry-After has a number.
    """

    def __init__(
        self, problem: str, status: int = 0, text: str = "", retry_after: str = ""
    ) -> None:
        super().__init__(problem)
        self.status, self.text, self.attempts, self.retry_after = status, text, 1, math.nan
        with suppress(ValueError):  # ignore a Retry-After header with a date, which is rare
            self.retry_after = float(retry_after)

    def __str__(self) -> str:
        times = f", {self.attempts} times in a row" if self.attempts > 1 else ""
        return f"{self.args[0]}{times}"


@dataclass(kw_only=True)
class HttpClient(AbstractAsyncContextManager["HttpClient"]):
    """An HTTP client that retries failed requests. It opens new connections in each event loop."""

    timeout: float  # maximum seconds from the start of a request to the end of its answer
    max_retries: int
    max_concurrent: int
    max_mib: int  # maximum size of an answer in MiB
    api_key_variable: str | None = None  # environment variable with the API key
    retry_wait: float = 0.5  # maximum seconds before the first retry, doubled with each retry
    num_retries: int = field(default=0, init=False)  # total number of retries
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    async def __aexit__(self, *_: object) -> None:
        if self._loop is asyncio.get_running_loop():
            await self._http.aclose()
            self._loop = None

    async def post(self, url: str, body: dict[str, Any]) -> str:
        """Return the answer's text. Retry temporary errors. Raise HttpError if no try succeeds."""
        attempt = 0
        while True:
            try:
                return await self.send_once("POST", url, body)
            except HttpError as error:
                error.attempts = attempt + 1
                may_succeed_later = error.status in (0, 408, 429) or error.status >= 500
                if attempt == self.max_retries or not may_succeed_later:
                    raise
                wait = self._seconds_before_retry(error.retry_after, attempt)
            attempt += 1
            self.num_retries += 1
            await asyncio.sleep(wait)

    async def send_once(self, method: str, url: str, body: dict[str, Any] | None = None) -> str:
        """Send one request. Return the answer's text. Raise HttpError unless the status is 200."""
        http, slots = self._client_and_slots()
        content = None if body is None else json.dumps(body).encode()
        await acquire(slots)
        try:
            async with (
                asyncio.timeout(self.timeout),
                http.stream(method, url, content=content) as answer,
            ):
                status, text = answer.status_code, await self._read_text(answer)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            reason = f"{type(error).__name__}: {_excerpt(str(error))}".removesuffix(": ")
            raise HttpError(f"did not answer ({reason})") from error
        finally:
            slots.release()
        if status != HTTPStatus.OK:
            text = self.remove_key(text)
            problem = f"answered {status}: {_excerpt(text)}"
            raise HttpError(problem, status, text, answer.headers.get("Retry-After", ""))
        return text

    def remove_key(self, text: str) -> str:
        """Return a server's text without the API key, which some servers repeat in errors."""
        key = os.environ.get(self.api_key_variable or "", "")
        return text.replace(key, "(the key)") if key else text

    async def _read_text(self, answer: httpx.Response) -> str:
        status = answer.status_code
        if "Content-Encoding" in answer.headers:  # a compressed answer could expand to gigabytes
            problem = "compresses its answers, which the request forbids: disable the compression"
            raise HttpError(problem, status)
        data = bytearray()
        async for chunk in answer.aiter_raw():
            data += chunk
            if len(data) > self.max_mib << 20:
                raise HttpError(f"answers with more than {self.max_mib} MiB", status)
        return data.decode("utf-8", "replace")

    def _client_and_slots(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            key = os.environ.get(self.api_key_variable or "", "")
            headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
            headers |= {"Authorization": f"Bearer {key}"} if key else {}
            # Do not follow redirects, because another server must not get the request.
            self._http = httpx.AsyncClient(
                timeout=None,  # asyncio.timeout limits the whole request
                headers=headers,
                limits=httpx.Limits(max_keepalive_connections=self.max_concurrent),
                follow_redirects=False,
            )
            self._slots, self._loop = asyncio.Semaphore(self.max_concurrent), loop
        return self._http, self._slots

    def _seconds_before_retry(self, retry_after: float, attempt: int) -> float:
        """Return `retry_after`, or a random wait (to spread retries) if it is NaN; at most 60 s."""
        if math.isnan(retry_after):
            retry_after = self.retry_wait * 2.0 ** min(attempt, 10) * _RANDOM.uniform(0.5, 1)
        return min(max(retry_after, 0.0), _LONGEST_WAIT_S)


def _excerpt(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text[:1000]).split())[:200]
