r"""Multi-turn mathematical questions with a Python interpreter as a tool.

    What is 48213 * 90217?
      python(code="48213 * 90217")   ->   4349632221
    \boxed{4349632221}

Each episode has its own interpreter, which keeps its variables between calls.
"""

from dataclasses import dataclass, field

from envs.episode import Episode
from envs.maths.environment import Maths, boxed
from envs.maths.questions import Question
from envs.messages import Message, assistant, tool_call
from envs.options import PositiveInt
from envs.sandbox.sandbox import START_TIMEOUT, Limits, Sandbox, check_sandbox


@dataclass(kw_only=True, eq=False)
class MathPython(Maths):
    max_turns: PositiveInt = field()
    max_concurrent: PositiveInt | None = field()  # also limits the number of interpreter processes
    sandbox: Limits

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tools = [self.python]
        self.tool_timeout = START_TIMEOUT + self.sandbox.call_timeout

    def check_machine(self) -> None:
        super().check_machine()
        check_sandbox(self.sandbox)

    async def python(self, code: str, episode: Episode) -> str:
        """Run Python code and return what it prints and the value of its last line.

        Variables are kept between calls.

        Args:
            code: the code.
        """
        sandbox = episode.memory.setdefault("python", Sandbox(self.sandbox))
        return (await sandbox.run(code)).rstrip("\n") or "(no output)"

    def close(self, episode: Episode) -> None:
        if sandbox := episode.memory.pop("python", None):
            sandbox.close()

    def _expert_turns(self, question: Question) -> list[Message]:
        call = tool_call("python", code=question.code)
        result = {"role": "tool", "tool_call_id": "call_0", "content": question.answer}
        return [call, result, assistant(boxed(question.answer))] if question.code else []
