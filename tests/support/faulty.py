"""An environment of two turns a fifth of whose calls go wrong: they raise, hang, return garbage.

`reply` blocks in a thread or in a coroutine, `score` in a coroutine; which call goes wrong and how
is drawn at random. Nothing else about it is unusual, so whatever a long run of it leaks or
miscounts is ours.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from envs.episode import Episode
from envs.messages import Message, user
from envs.reverse_text import ReverseText

LONGER_S = 48.0  # than any rollout_timeout it is played with; a thread cannot be ended from outside

GARBAGE_REPLIES: list[Any] = [
    "not a list",
    [{"role": "user"}],
    [{"role": "user", "content": 7}],
    [None],
    [{"role": "user", "content": "\ud800" + "x" * 10_000}],
    {"role": "user", "content": "a message and no list of them"},
    42,
]
GARBAGE_SCORES: list[Any] = [
    None,
    {"exact": math.nan, "similarity": math.nan},
    {"exact": "one", "similarity": []},
    [1.0],
    {"exact": math.inf, "similarity": -math.inf},
    0.5,
]


class FaultyReversal(ReverseText):
    """Asks for the word twice."""

    name = "faulty"
    max_turns = 2

    def __init__(
        self, *, raises: float, hangs: float, garbage: float, reward_weights: Mapping[str, float]
    ) -> None:
        """Shares of all calls of `reply` and `score`."""
        super().__init__(
            min_length=3, max_length=5, num_train=20_000, num_eval=64, reward_weights=reward_weights
        )
        self._shares = [raises, hangs, garbage, 1 - raises - hangs - garbage]
        self._rng = Random()

    def reply(self, episode: Episode, message: Message) -> Any:
        """Ask once more, if all goes well."""
        match self._fate():
            case "raises":
                raise KeyError(f"no page for {message.get('content')!r}")
            case "hangs" if self._rng.random() < 0.5:
                time.sleep(LONGER_S)
            case "hangs":
                return asyncio.sleep(math.inf)
            case "garbage":
                return self._rng.choice(GARBAGE_REPLIES)
        return [user(episode.example.messages[0]["content"])] if episode.turns == 1 else None

    async def score(self, episode: Episode) -> Any:
        """Score the last turn, if all goes well."""
        match self._fate():
            case "raises":
                raise ConnectionResetError("the judge hung up")
            case "hangs":
                await asyncio.sleep(math.inf)
            case "garbage":
                return self._rng.choice(GARBAGE_SCORES)
        return await super().score(episode)

    def _fate(self) -> str:
        return self._rng.choices(["raises", "hangs", "garbage", "well"], self._shares)[0]
