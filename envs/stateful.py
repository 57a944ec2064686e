"""The base class of objects whose state is in each checkpoint."""

from typing import Any


class Stateful:
    """Base class. A subclass that remembers something between calls overrides both methods."""

    def state(self) -> dict[str, Any]:
        """Return the object's state as JSON values, for a checkpoint. The default is empty."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a result of `state`. A resumed run calls this method before its first episode."""
        if state:
            raise ValueError(f"{type(self).__name__} has state() but no load(): define load()")
