r"""Questions with a mathematical answer and a Python interpreter: several turns.

    What is 48213 * 90217?
      python(code="48213 * 90217")   ->   4349632221
    \boxed{4349632221}

Each episode has an interpreter of its own, which keeps its variables until the episode ends.
"""

from collections.abc import Mapping

from envs.episode import Episode
from envs.maths.environment import Maths, boxed
from envs.maths.grading import Grader
from envs.maths.questions import Question, Questions
from envs.messages import Message, assistant, tool_call
from envs.options import check_at_least
from envs.sandbox.sandbox import START_TIMEOUT, Limits, Sandbox, try_out


class MathPython(Maths):
    """Maths with the tool `python`."""

    def __init__(
        self,
        *,
        name: str,
        questions: Questions,
        instruction: str,
        grader: Grader,
        reward_weights: Mapping[str, float],
        max_turns: int,
        max_concurrent: int | None,
        sandbox: Limits,
    ) -> None:
        """`max_concurrent` bounds the interpreters, each with up to sandbox.memory_mb."""
        super().__init__(
            name=name,
            questions=questions,
            instruction=instruction,
            grader=grader,
            reward_weights=reward_weights,
        )
        check_at_least(1, max_turns=max_turns, max_concurrent=max_concurrent)
        self.max_turns, self.max_concurrent = max_turns, max_concurrent
        self.tools = [self.python]
        self.tool_timeout = START_TIMEOUT + sandbox.call_timeout
        self._limits = sandbox

    def check_machine(self) -> None:
        super().check_machine()
        try_out(self._limits)

    async def python(self, code: str, episode: Episode) -> str:
        """Run Python code and return what it prints and the value of its last line.

        Variables are kept between calls.

        Args:
            code: the code.
        """
        sandbox = episode.memory.setdefault("python", Sandbox(self._limits))
        return (await sandbox.run(code)).rstrip("\n") or "(no output)"

    def close(self, episode: Episode) -> None:
        """End the episode's interpreter."""
        if sandbox := episode.memory.pop("python", None):
            sandbox.close()

    def _expert(self, question: Question) -> list[Message]:
        """Return one call of the tool and the answer; empty if the question has no code."""
        call = tool_call("python", code=question.code)
        told = {"role": "tool", "tool_call_id": "call_0", "content": question.answer}
        return [call, told, assistant(boxed(question.answer))] if question.code else []
