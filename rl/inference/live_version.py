"""Which policy version is live: one object, made first and shared by everybody who asks."""

import asyncio


class LiveVersion:
    """The newest policy version that vLLM is known to sample with.

    Attributes:
        number: of the version; -1 before the first push.

    """

    def __init__(self, number: int = -1) -> None:
        self.number = number
        self._any = asyncio.Event()
        if number >= 0:
            self._any.set()

    def publish(self, number: int) -> None:
        """These weights are live from now on."""
        self.number = number
        self._any.set()

    async def first(self) -> int:
        """Wait until vLLM serves any version (whoever waits has the deadline), and return it."""
        await self._any.wait()
        return self.number
