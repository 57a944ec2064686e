"""Play one episode of one of our environments for either API of the library `verifiers`."""

import math

from envs import threads
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.messages import Message
from envs.protocol import Environment


class PlayedEpisode:
    def __init__(self, env: Environment, example: Example) -> None:
        self.env = env.environment_of(example)
        self.episode = Episode(example, self.env.add_system_prompt(example.messages))

    async def take_turn(self, message: Message, *, cut_off: bool) -> list[Message] | None:
        """Add a turn of the policy. Return the environment's reply, or None after the last turn."""
        self.episode.messages.append(message)
        self.episode.turns += 1
        if cut_off:
            self.episode.stop_reason = StopReason.MAX_TOKENS
            return None
        reply = await threads.call(self.env.reply, self.episode, message)
        if reply is None or self.episode.turns >= self.env.max_turns:
            self.episode.stop_reason = StopReason.STOP if reply is None else StopReason.MAX_TURNS
            return None
        self.episode.messages += reply
        return reply

    async def rewards(self) -> dict[str, float]:
        """Return the named rewards. Raise ValueError if one is NaN or infinite."""
        scored = await threads.call(self.env.score, self.episode)
        rewards, _ = rewards_by_name(scored, self.episode.turns)
        if not all(map(math.isfinite, rewards.values())):
            raise ValueError(f"score returned NaN or infinity ({rewards}): return finite numbers")
        return rewards
