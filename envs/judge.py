"""A language model as a judge, asked through any OpenAI-compatible endpoint.

    rewards:
      judged:
        _target_: envs.judge.Judge
        url: http://localhost:8000/v1
        ...                                  conf/env/wiki-search-judged.yaml has all options

If the judge does not answer, or its answer has no score, it raises JudgeError. That costs the
rollout (env_error, counted) and never counts as a reward of 0.
"""

import os
import re
from string import Formatter

from envs.chat_endpoint import ChatEndpoint
from envs.episode import Episode
from envs.messages import user
from envs.options import check_at_least
from envs.rewards import answers_of, final_text

FIELDS = ("question", "answer", "said")
_YES_OR_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
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
        """Check the options; conf/env/wiki-search-judged.yaml explains them."""
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
        check_at_least(1, max_concurrent=max_concurrent)
        check_at_least(0, max_retries=max_retries)
        self._endpoint = ChatEndpoint(
            url=url,
            model=model,
            api_key_variable=api_key_variable,
            max_retries=max_retries,
            option="judge.url",
            raises=JudgeError,
        )
        self._sampling = {"temperature": temperature, "max_tokens": max_tokens}
        self._prompt, self._max_score = prompt, max_score
        self._client = self._endpoint.client(
            max_concurrent=max_concurrent, timeout=timeout, retry_wait=retry_wait
        )

    async def __call__(self, episode: Episode) -> float:
        """Return the score, in 0..1, of the policy's last message."""
        questions = [m["content"] for m in episode.example.messages if m["role"] == "user"]
        right = " or ".join(answers_of(episode)) if "{answer}" in self._prompt else ""
        return await self.score(questions[-1] if questions else "", right, final_text(episode))

    async def score(self, question: str, answer: str, text: str) -> float:
        """Return 1 for yes and 0 for no, or the share of max_score. Raise JudgeError if neither."""
        prompt = self._prompt.format(question=question, answer=answer, said=text)
        said = await self._endpoint.ask(self._client, messages=[user(prompt)], **self._sampling)
        if said is None:
            raise JudgeError(f"judge.model={self._endpoint.model} has no room for the prompt")
        return self._score_in(said.choices[0].message.content or "")

    def _score_in(self, text: str) -> float:
        """Return the first score of the last line that has one."""
        pattern = _YES_OR_NO if self._max_score is None else _NUMBER
        # From the end, because a judge reasons first and decides last.
        lines = reversed(text.rpartition("</think>")[2].splitlines())
        found = next((match for line in lines if (match := pattern.search(line))), None)
        scale = "yes or no" if self._max_score is None else f"0 to {self._max_score:g}"
        if found is None:
            raise JudgeError(f"the judge was to say {scale}, and said: {text.strip()[-200:]!r}")
        if self._max_score is None:
            return float(found[0].lower() == "yes")
        points = float(found[0])
        if not 0 <= points <= self._max_score:
            raise JudgeError(f"the judge was to give {scale} points, and gave {points:g}")
        return points / self._max_score
