"""A reverse-text environment and a loss that fail now and then."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from envs.episode import Episode, Example, Split
from envs.reverse_text import ReverseText
from losses.cispo import cispo
from losses.tokens import TokenLoss, Tokens

FIRST_NAN = 4  # number of the first call in a process whose loss is NaN
_CALLS = count()


@dataclass(kw_only=True, eq=False)
class FaultyReversal(ReverseText):
    """Fail for words that begin with a letter of `broken`: by default a fifth of the words."""

    name = "faulty"

    fault: str  # slow, hang, raise or not-a-number
    broken: str = "aeiou"
    empty: Sequence[str] = ()  # splits without examples

    def examples(self, split: Split) -> list[Example]:
        return [] if split in self.empty else super().examples(split)

    async def score(self, episode: Episode) -> dict[str, float]:
        if episode.example.info["answer"][-1] in self.broken:
            match self.fault:
                case "slow":
                    await asyncio.sleep(0.5)
                case "hang":
                    await asyncio.sleep(3600)
                case "raise":
                    raise RuntimeError("the scorer is down")
                case "not-a-number":
                    return {"exact": float("nan"), "similarity": 0.0}
        return await super().score(episode)


def nan_once(tokens: Tokens, *, clip_low: float, clip_high: float, calls: int = 1) -> TokenLoss:
    """Return CISPO's loss, NaN in so many calls, unless REPAIRED is set in the environment."""
    loss = cispo(tokens, clip_low=clip_low, clip_high=clip_high)
    # The calls of the dry call, which have at most 8 tokens, do not count.
    number = next(_CALLS) if len(tokens.turns) > 8 else -1
    if not FIRST_NAN <= number < FIRST_NAN + calls or os.environ.get("REPAIRED"):
        return loss
    return TokenLoss(loss.loss * float("nan"), loss.metrics)


def nan_from_then_on(tokens: Tokens, *, clip_low: float, clip_high: float) -> TokenLoss:
    """Return CISPO's loss, NaN from one call on."""
    return nan_once(tokens, clip_low=clip_low, clip_high=clip_high, calls=10**9)
