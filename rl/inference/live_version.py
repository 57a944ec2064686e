"""The policy version that vLLM has loaded, shared by the tasks of the rollouts process."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class LiveVersion:
    number: int = -1  # -1 before the first push
    listeners: list[Callable[[int], None]] = field(default_factory=list)  # called by `publish`

    def publish(self, number: int) -> None:
        self.number = number
        for listener in self.listeners:
            listener(number)
