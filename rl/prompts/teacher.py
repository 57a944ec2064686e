"""Asks the teacher for a better prompt, once for each question: what it said is in a journal."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rl.inference.completion import Completion
from rl.prompts.journal import Journal
from rl.run.failure import RunFailed
from rl.sampling.chat import Chat, Prompt

QUESTION = ("asked",)
_MOST_EMPTY = 4  # answers in a row without a prompt


class NoPrompt(RuntimeError):
    """The teacher answered, and not with a prompt."""


@dataclass
class Teacher:
    """What GEPA calls with a question.

    GEPA takes whatever a teacher raises for bad luck and goes on, at the budget's expense. So what
    will not pass by itself is kept in `failure`, and ends the search.
    """

    chat: Chat
    runner: asyncio.Runner
    journal: Journal
    timeout: float
    failure: RunFailed | None = None
    _num_empty: int = field(default=0, init=False)

    def __call__(self, prompt: str | list[dict[str, Any]]) -> str:
        """Return what it said."""
        question = str(prompt)  # a list only where there are images
        if self.failure is not None:
            raise self.failure
        record = self.journal.take({"asked": question})
        if record is None:
            record = self.journal.add({"asked": question, **self._ask(question)})
        said = record["said"].rpartition("</think>")[2].strip()
        if said and not record["cut_off"]:
            self._num_empty = 0
            return said
        self._num_empty += 1
        if self._num_empty == _MOST_EMPTY:
            why = "was cut off" if record["cut_off"] else "said nothing"
            self._fail(
                f"the reflection model {why}, {_MOST_EMPTY} times in a row: raise "
                "reflection.max_tokens, or take another model"
            )
        raise NoPrompt("the reflection model's answer has no whole prompt")

    def _ask(self, question: str) -> dict[str, object]:
        try:
            prompt, completion = self.runner.run(self._completed(question))
        except TimeoutError:
            self._fail(
                f"the reflection model did not answer within reflection.timeout={self.timeout:g} s"
            )
        except (RunFailed, ValueError) as error:
            self._fail(str(error))
        if completion is None or (completion.cut_off and self.chat.full(completion)):
            self._fail(
                f"the reflection model has no room left to answer: what it is shown has "
                f"{len(question):,} characters. Lower minibatch_size, or take a model with a "
                "longer context (reflection.max_seq_len; model.max_seq_len for the policy itself)"
            )
        content = self.chat.message(prompt, completion).get("content") or ""
        return {"said": content, "cut_off": completion.cut_off}

    async def _completed(self, question: str) -> tuple[Prompt, Completion | None]:
        prompt = await self.chat.open([{"role": "user", "content": question}], None)
        if self.chat.room(prompt) <= 0:
            return prompt, None
        async with asyncio.timeout(self.timeout):
            return prompt, (await self.chat.generate(prompt, 1))[0]

    def _fail(self, sentence: str) -> NoReturn:
        self.failure = RunFailed(sentence)
        raise self.failure
