"""A language model as a judge, asked through any OpenAI-compatible endpoint.

    rewards:
      judged:
        _target_: envs.judge.Judge
        url: http://localhost:8000/v1
        ...                                  conf/env/composed.yaml lists the options

If the judge does not answer, or its answer has no score, it raises JudgeError. That costs the
rollout (env_error, counted) and never counts as a reward of 0.
"""

import os
import re
from string import Formatter

from envs.episode import Episode
from envs.http_client import HttpClient, HttpError, may_succeed_later
from envs.messages import parse_json
from envs.rewards import answers_of, final_text

FIELDS = ("question", "answer", "said")
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_LARGEST_ANSWER_MIB = 4
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class JudgeError(RuntimeError):
    """The judge gave no score. The message says what to do."""


class Judge:
    """Ask a model whether an answer is right, or how good it is. Also a reward of `Composed`."""

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
        """Check the options; connect at the first question.

        Args:
            url: URL of the API, with /v1.
            model: name under which the API serves the judge.
            api_key_variable: name of the environment variable that holds the key; None: no key.
            prompt: question to the judge; {question}, {answer} and {said} are filled in.
            max_score: None: the judge says yes or no. A number: it gives 0 to that many points.
            temperature: sampling temperature of the judge.
            max_tokens: most tokens of one answer.
            timeout: seconds for one request, from its start to the end of the answer.
            max_retries: further requests after a failed one.
            retry_wait: seconds before the first retry; each further retry waits twice as long.
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
        self._http = HttpClient(
            timeout=timeout,
            max_retries=max_retries,
            max_concurrent=max_concurrent,
            max_mib=_LARGEST_ANSWER_MIB,
            api_key_variable=api_key_variable,
            retry_wait=retry_wait,
        )

    async def __call__(self, episode: Episode) -> float:
        """Return the score, in 0..1, of the policy's last message."""
        questions = [m["content"] for m in episode.example.messages if m["role"] == "user"]
        answer = " or ".join(answers_of(episode)) if "{answer}" in self._prompt else ""
        return await self.score(questions[-1] if questions else "", answer, final_text(episode))

    async def score(self, question: str, answer: str, text: str) -> float:
        """Return 1 for yes and 0 for no, or the share of max_score. Raise JudgeError if neither."""
        prompt = self._prompt.format(question=question, answer=answer, said=text)
        body = {**self._body, "messages": [{"role": "user", "content": prompt}]}
        try:
            text = await self._http.post(self._url, body)
        except HttpError as error:
            hint = ": is it running?" if may_succeed_later(error.status) else ""
            raise JudgeError(f"the judge at {self._url} {error}{hint}") from error
        return self._verdict(self._content(text))

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

    def _verdict(self, text: str) -> float:
        """Return the first score of the last line that has one."""
        pattern = _VERDICT if self._max_score is None else _NUMBER
        # From the end, because a judge reasons first and decides last.
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
