"""The policy version that vLLM samples with, in one object that all tasks of a process share."""

from dataclasses import dataclass


@dataclass(eq=False)
class LiveVersion:
    """The newest policy version that vLLM samples with; `number` is -1 before the first push."""

    number: int = -1

    def publish(self, number: int) -> None:
        """Record that vLLM samples with policy version `number` from now on."""
        self.number = number
