"""The policy version that vLLM has loaded, as one object for all tasks of the rollouts process."""

from dataclasses import dataclass


@dataclass(eq=False)
class LiveVersion:
    """The newest policy version that vLLM has loaded; `number` is -1 before the first push."""

    number: int = -1

    def publish(self, number: int) -> None:
        """Record that vLLM has loaded policy version `number`."""
        self.number = number
