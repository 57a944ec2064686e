"""Arithmetic that is rewarded by how likely the policy finds the right answer after its reasoning.

    reward = mean over the answer's tokens of p(token | question, reasoning)

`likely` needs no program that checks answers. RLPR, arXiv:2506.18254. `correct` is only logged.
"""

import math

from envs.arithmetic import Arithmetic
from envs.episode import Episode
from envs.protocol import Speak


class Likely(Arithmetic):
    """Questions `a op b =`. The policy's own probabilities score its reasoning."""

    REWARDS = ("correct", "likely")
    holds_conversation = True

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Sample an answer. Then compute the probability of the right answer in its place."""
        question = list(episode.example.messages)
        turn = await speak(question, None)
        said = turn.message.get("content") or ""
        reasoning = said[: len(said) - len(said.split()[-1])] if said.split() else ""
        answer = episode.example.info["answer"]
        logprobs = await speak.logprobs(question, answer, after=reasoning)
        episode.memory["likely"] = sum(map(math.exp, logprobs)) / len(logprobs)

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return `likely`, the mean probability of the answer's tokens, and `correct`."""
        return {**await super().score(episode), "likely": episode.memory.get("likely", math.nan)}
