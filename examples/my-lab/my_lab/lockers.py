"""Open lockers until a note shows the word, then say it: several turns with one tool.

    start at locker 3  ->  open_locker(3): "go to 7"  ->  open_locker(7): "word: kam"  ->  kam

Each episode has new random notes, so the policy must open lockers to find the word. The words of
the eval split occur nowhere else, so that the evaluation measures reading and not memory.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise, product
from random import Random

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, tool_call, user
from envs.protocol import Environment, check_weights
from envs.rewards import final_text
from envs.tools import ToolError

NUM_LOCKERS = 10  # numbers of one digit, so that a tiny model can copy them
WORDS = ["".join(letters) for letters in product("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz")]


def open_locker(number: int, episode: Episode) -> str:
    """Read the note in a locker.

    Args:
        number: of the locker, 0 to 9.
    """
    # The environment supplies `episode`. The policy reads the docstring and the other parameters.
    if not 0 <= number < NUM_LOCKERS:
        raise ToolError(f"there is no locker {number}")  # the policy reads this message
    episode.memory.setdefault("opened", []).append(number)
    return episode.example.info["notes"].get(number, "empty")


class Lockers(Environment):
    """An environment with trails of 1 to `max_hops` lockers. All lengths are equally likely."""

    name = "lockers"
    tools = (open_locker,)

    def __init__(
        self,
        *,
        max_hops: int,
        num_train: int,
        num_eval: int,
        max_turns: int,
        describe_tools: bool,
        reward_weights: Mapping[str, float],
    ) -> None:
        if not 1 <= max_hops <= NUM_LOCKERS:
            raise ValueError(f"max_hops={max_hops}: set it to 1 to {NUM_LOCKERS} lockers")
        if max_turns <= max_hops:
            raise ValueError(
                f"max_turns={max_turns} leaves no turn for the answer after max_hops={max_hops} "
                f"lockers: raise max_turns to {max_hops + 1} or more"
            )
        if not 0 < num_eval < len(WORDS) or num_train < 1:
            raise ValueError(
                f"num_train={num_train}, num_eval={num_eval}: set both to at least 1, and num_eval "
                f"below {len(WORDS)}, the number of words"
            )
        check_weights(reward_weights, ("correct", "walked"))
        self.reward_weights = reward_weights
        self.max_turns, self.describe_tools = max_turns, describe_tools
        self._max_hops, self._num_train, self._num_eval = max_hops, num_train, num_eval

    def examples(self, split: Split) -> list[Example]:
        # Fixed seeds, so that every run has the same examples. The run's seed changes their order.
        rng = Random(f"lockers/{split}")
        count = self._num_train if split == "train" else self._num_eval
        return [self._example(i, split, rng) for i in range(count)]

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return correct (0 or 1) and walked, the share of the trail's lockers that were opened."""
        info = episode.example.info
        answer = final_text(episode)
        opened = set(episode.memory.get("opened", []))
        return {
            "correct": float(answer == info["word"]),
            "walked": len(opened & set(info["trail"])) / len(info["trail"]),
        }

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield the expert's conversations about training words, endlessly."""
        while True:
            yield expert(self._example(0, "train", rng))

    def _example(self, number: int, split: Split, rng: Random) -> Example:
        trail = rng.sample(range(NUM_LOCKERS), rng.randint(1, self._max_hops))
        word = rng.choice(self._words[split])
        notes = {here: f"go to {there}" for here, there in pairwise(trail)}
        notes[trail[-1]] = f"word: {word}"
        return Example(
            id=number,
            env=self.name,  # not a constant, because a mixture can rename the environment
            messages=[user(f"start at locker {trail[0]}")],
            info={"trail": trail, "notes": notes, "word": word},
        )

    @cached_property
    def _words(self) -> dict[Split, list[str]]:
        """The words of each split; no word is in both splits."""
        words = Random("lockers/words").sample(WORDS, len(WORDS))
        return {"eval": words[: self._num_eval], "train": words[self._num_eval :]}


def expert(example: Example) -> list[Message]:
    """Return a conversation that follows the trail and says the word."""
    messages = list(example.messages)
    for number in example.info["trail"]:
        note = {"role": "tool", "tool_call_id": "call_0", "content": example.info["notes"][number]}
        messages += [tool_call("open_locker", number=number), note]
    return [*messages, assistant(example.info["word"])]
