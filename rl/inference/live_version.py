"""Which policy version vLLM samples with: one object that all tasks of a process share."""

import asyncio


class LiveVersion:
    """The newest policy version that vLLM samples with; `number` is -1 before the first push."""

    def __init__(self, number: int = -1) -> None:
        self.number = number
        self._any = asyncio.Event()
        if number >= 0:
            self._any.set()

    def publish(self, number: int) -> None:
        """Record that vLLM samples with this version from now on."""
        self.number = number
        self._any.set()

    async def first(self) -> int:
        """Wait until vLLM serves any version and return it; the caller sets the timeout."""
        await self._any.wait()
        return self.number
