"""Two roles of one policy play a zero-sum game: each role sets a word that the other reverses.

    first:  a word -> abc         second:  reverse: abc -> cba
    first:  reverse: xyz -> zyx   second:  a word -> xyz

A role's points are the share of right letters in its reversal, minus 1 if its word is against the
rules. The role with more points wins, so the rewards of both have the sum 0. Each role is
compared with the same role of the other episodes. Self-play: SPIRAL, arXiv:2506.24119.
my_lab/match.py plays a run's last checkpoint against its first policy.
"""

from collections.abc import Iterator
from random import Random
from string import ascii_lowercase

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user
from envs.protocol import Environment, Speak

ROLES = ("first", "second")


class Duel(Environment):
    """The game. Examples differ only in their id, because the policy chooses the words."""

    name = "duel"
    holds_conversation = True
    reward_weights = {"won": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, *, min_length: int, max_length: int, num_train: int, num_eval: int) -> None:
        self._lengths = range(min_length, max_length + 1)
        self._sizes = {"train": num_train, "eval": num_eval}

    def examples(self, split: Split) -> list[Example]:
        return [Example(i, self.name, [user("a word")]) for i in range(self._sizes[split])]

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Let each role in turn set a word, and let the other role reverse it."""
        points = episode.memory["points"] = dict.fromkeys(ROLES, 0.0)
        talks: dict[str, list[Message]] = {role: [] for role in ROLES}

        async def say(role: str, text: str) -> str:
            talks[role].append(user(text))
            spoken = await speak(talks[role], None, role=role)
            talks[role].append(spoken.message)
            return spoken.message.get("content") or ""

        for setter, solver in (ROLES, ROLES[::-1]):
            word = await say(setter, "a word")
            if len(word) not in self._lengths or set(word) - set(ascii_lowercase):
                points[setter] -= 1
                word = "abc"  # the rules give the other role an easy word
            answer = await say(solver, f"reverse: {word}")
            right = sum(a == b for a, b in zip(answer, reversed(word), strict=False))
            points[solver] += right / max(len(word), len(answer))

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return the rewards, by name, of the role `episode.role`."""
        points = episode.memory["points"]
        (other,) = {*ROLES} - {episode.role}
        margin = points[episode.role] - points[other]
        return {"won": float((margin > 0) - (margin < 0)), "points": points[episode.role]}

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield conversations with the two turns of a role: it sets a word and reverses another."""
        while True:
            one, two = (
                "".join(rng.choices(ascii_lowercase, k=rng.choice(self._lengths))) for _ in ROLES
            )
            sets = [user("a word"), assistant(one)]
            solves = [user(f"reverse: {two}"), assistant(two[::-1])]
            # The reversal is usually last, because the warm start corrupts the last answer.
            yield solves + sets if rng.random() < 0.25 else sets + solves
