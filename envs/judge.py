"""A language model as a judge, asked through any OpenAI-compatible endpoint.

    rewards:
      judged:
        _target_: envs.judge.Judge
        url: http://localhost:8000/v1
        ...                                  conf/env/composed.yaml lists the knobs

A judge that cannot be asked, or whose verdict cannot be read, is no verdict: it raises, which costs
that rollout (env_error, counted) and never counts as a reward of 0.
"""

import asyncio
import os
import random
import re
from string import Formatter

import httpx

from envs.episode import Episode
from envs.messages import parse_json
from envs.rewards import answers_of, final_text

FIELDS = ("question", "answer", "said")
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_LARGEST_ANSWER = 4 << 20  # bytes
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class JudgeError(RuntimeError):
    """The judge gave no verdict; one sentence that says what to do."""


class Judge:
    """Asks a model whether an answer is right, or how good it is. A reward of `Composed` too."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_variable: str | None,
        prompt: str,
        max_score: float | None,
        temperature: float,
        max_tokens: int,
        timeout: float,
        max_retries: int,
        retry_wait: float,
        max_concurrent: int,
    ) -> None:
        """Nothing is connected before the first question.

        Args:
            url: of the API, with /v1.
            model: the name it serves the judge under.
            api_key_variable: name of the environment variable that holds the key; None: no key.
            prompt: what the judge is asked; {question}, {answer}, {said} are filled in.
            max_score: None: the judge says yes or no. A number: it gives 0 to that many points.
            temperature: of the judge.
            max_tokens: longest verdict.
            timeout: seconds for one request, from its start to the end of the answer.
            max_retries: further requests after one that failed.
            retry_wait: seconds before the first of them; each later one waits twice as long.
            max_concurrent: requests at once.

        """
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url}: the judge's must begin with http:// or https://")
        names = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
        if "said" not in names or names - set(FIELDS):
            raise ValueError(
                f"the judge's prompt has the fields {sorted(names)}: it may have {{question}}, "
                "{answer} and must have {said}; write other braces twice"
            )
        if api_key_variable is not None and not os.environ.get(api_key_variable):
            raise ValueError(
                f"api_key_variable={api_key_variable}: this environment variable is not set; "
                "export the judge's key in it, or set api_key_variable=null where none is needed"
            )
        if max_score is not None and max_score <= 0:
            raise ValueError(f"max_score={max_score}: more than 0 points, or null for yes and no")
        if max_concurrent < 1 or max_retries < 0 or timeout <= 0 or retry_wait < 0:
            raise ValueError(
                f"max_concurrent={max_concurrent}, max_retries={max_retries}, timeout={timeout:g}, "
                f"retry_wait={retry_wait:g}: at least 1, 0, more than 0 and at least 0, please"
            )
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._prompt, self._max_score = prompt, max_score
        self._key, self._timeout = api_key_variable, timeout
        self._max_retries, self._retry_wait = max_retries, retry_wait
        self._max_concurrent = max_concurrent
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, episode: Episode) -> float:
        """Return the score, in 0..1, of what the policy said last."""
        questions = [m["content"] for m in episode.example.messages if m["role"] == "user"]
        answer = " or ".join(answers_of(episode)) if "{answer}" in self._prompt else ""
        return await self.score(questions[-1] if questions else "", answer, final_text(episode))

    async def score(self, question: str, answer: str, text: str) -> float:
        """Return 1 for yes and 0 for no, or the share of max_score.

        Raises:
            JudgeError: it could not be asked, or said neither.

        """
        prompt = self._prompt.format(question=question, answer=answer, said=text)
        return self._verdict(await self._ask([{"role": "user", "content": prompt}]))

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        http, places = self._connection()
        problem = ""
        for attempt in range(self._max_retries + 1):
            if attempt:  # at random, lest all that failed together come back together
                await asyncio.sleep(self._retry_wait * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            try:
                async with places, asyncio.timeout(self._timeout):
                    status, text = await self._post(http, messages)
            except (httpx.TransportError, TimeoutError) as error:
                problem = f"did not answer ({type(error).__name__}: {error})".replace(": )", ")")
                continue
            problem = f"answered {status}: {' '.join(text.split())[:200]}"
            if status == httpx.codes.OK:
                return self._content(text)
            if status not in (408, 429) and status < 500:
                raise JudgeError(f"the judge at {self._url} {problem}")  # asking again is no use
        raise JudgeError(
            f"the judge at {self._url} {problem}, {self._max_retries + 1} times in a row: is it up?"
        )

    async def _post(
        self, http: httpx.AsyncClient, messages: list[dict[str, str]]
    ) -> tuple[int, str]:
        """Return status and text of an answer, up to a size that no verdict has."""
        body, data = {**self._body, "messages": messages}, bytearray()
        async with http.stream("POST", self._url, json=body) as answer:
            if "Content-Encoding" in answer.headers:  # a few bytes may be gigabytes here
                raise JudgeError(
                    f"the judge at {self._url} compresses its answers though it was asked not to: "
                    "turn that off"
                )
            async for chunk in answer.aiter_raw():
                data += chunk
                if len(data) > _LARGEST_ANSWER:
                    raise JudgeError(
                        f"the judge at {self._url} answers with more than "
                        f"{_LARGEST_ANSWER >> 20} MiB: that is no verdict"
                    )
        return answer.status_code, data.decode("utf-8", "replace")

    def _content(self, text: str) -> str:
        try:
            content = parse_json(text)["choices"][0]["message"]["content"] or ""
            if not isinstance(content, str):
                raise TypeError("the content is no text")
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise JudgeError(
                f"the judge at {self._url} is no OpenAI-compatible endpoint, it answered: "
                f"{text[:200]}"
            ) from error
        return content

    def _connection(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """Return what belongs to the loop that runs, made anew for another one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            key = os.environ.get(self._key, "") if self._key else ""
            headers = {"Accept-Encoding": "identity"}
            headers |= {"Authorization": f"Bearer {key}"} if key else {}
            limits = httpx.Limits(max_keepalive_connections=self._max_concurrent)
            self._http = httpx.AsyncClient(
                timeout=self._timeout, headers=headers, limits=limits, follow_redirects=False
            )
            self._places, self._loop = asyncio.Semaphore(self._max_concurrent), loop
        return self._http, self._places

    def _verdict(self, text: str) -> float:
        """Read the first verdict of the last line that has one."""
        pattern = _VERDICT if self._max_score is None else _NUMBER
        # From the end: a judge reasons first and decides last.
        lines = reversed(text.rpartition("</think>")[2].splitlines())
        verdict = next((match for line in lines if (match := pattern.search(line))), None)
        scale = "yes or no" if self._max_score is None else f"0 to {self._max_score:g}"
        if verdict is None:
            raise JudgeError(f"the judge was to say {scale}, and said: {text.strip()[-200:]!r}")
        if self._max_score is None:
            return float(verdict[0].lower() == "yes")
        points = float(verdict[0])
        if not 0 <= points <= self._max_score:
            raise JudgeError(f"the judge was to give {scale} points, and gave {points:g}")
        return points / self._max_score
