"""Define a reverse-text environment that fails in one way for words with certain first letters."""

import asyncio
from dataclasses import dataclass

from envs.episode import Episode
from envs.reverse_text import ReverseText

SLOW_S = 0.5


@dataclass(kw_only=True, eq=False)
class FaultyReversal(ReverseText):
    """Fail for about a fifth of the words; `fault`: slow, hang, raise or nan."""

    name = "faulty"

    fault: str

    async def score(self, episode: Episode) -> dict[str, float]:
        if episode.example.info["answer"][-1] in "aeiou":
            match self.fault:
                case "slow":
                    await asyncio.sleep(SLOW_S)
                case "hang":
                    await asyncio.sleep(3600)
                case "raise":
                    raise RuntimeError("the scorer is down")
                case "not-a-number":
                    return {"exact": float("nan"), "similarity": 0.0}
        return await super().score(episode)
