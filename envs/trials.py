"""Variants of reverse-text for the report card of a loss (sweeps/report_card.yaml).

With `turns` above 1, each turn of an episode has its own word, and rewards are means over turns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user
from envs.reverse_text import ReverseText

_LONGEST = 32  # if answers have this many characters on average, the reward `length` is 1
# Reward name -> probability that the reward is 1 minus `exact` instead of `exact`.
_FLIPS = {"flipped_10": 0.1, "flipped_30": 0.3}


@dataclass(kw_only=True, eq=False)
class Trials(ReverseText):
    """Reverse-text with four more options, which sweeps/report_card.yaml explains."""

    name = "trials"
    REWARDS = ("exact", "copied", "length", *_FLIPS)

    turns: int
    copied: float
    uneven: float
    copy_tasks: float

    def __post_init__(self) -> None:
        weights = self.reward_weights
        self.reward_weights = {name: weight for name, weight in weights.items() if weight}
        super().__post_init__()
        self.max_turns = self.turns

    def examples(self, split: Split) -> list[Example]:
        words = self._eval_words if split == "eval" else self._train_words
        if split == "train":
            words = [self._uneven_word(index, word) for index, word in enumerate(words)]
        examples = []
        for index in range(len(words)):
            own_words = [words[(index + turn) % len(words)] for turn in range(self.turns)]
            is_copy = split == "eval" and self.copy_tasks > 0 and index % 2 == 1
            info = {"words": own_words, "is_copy": is_copy}
            examples.append(Example(index, self.name, [_question(own_words[0], is_copy)], info))
        return examples

    def _uneven_word(self, index: int, word: str) -> str:
        """Replace `word` by its first letter or `word * 4`, for a share `uneven` of all indices."""
        if index % 10 >= 10 * self.uneven:
            return word
        return word[0] if index % 2 else word * 4

    async def reply(self, episode: Episode, message: Message) -> list[Message] | None:  # noqa: ARG002
        words = episode.example.info["words"]
        return [_question(words[episode.turns])] if episode.turns < self.turns else None

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return the rewards. Only examples that ask for copies have `kept`, equal to `copied`."""
        info = episode.example.info
        said = [str(m.get("content")) for m in episode.messages if m["role"] == "assistant"]
        pairs = list(zip(said, info["words"], strict=False))
        backwards = sum(text == word[::-1] for text, word in pairs) / self.turns
        copies = sum(text == word for text, word in pairs) / self.turns
        # Seed every draw, because episodes end in any order and a resumed run repeats some of them.
        seed = f"{episode.policy_version}:{episode.example.id}:{episode.number}"
        return {
            "exact": backwards,
            "copied": copies,
            "length": min(sum(map(len, said)) / self.turns / _LONGEST, 1.0),
            **{
                name: 1 - backwards if Random(f"{name}:{seed}").random() < share else backwards
                for name, share in _FLIPS.items()
            },
            **({"kept": copies} if info["is_copy"] else {}),
        }

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield conversations with `turns` words, one in each turn."""
        single = super().demonstrations(rng)
        while True:
            conversation: list[Message] = []
            is_copy = rng.random() < self.copy_tasks
            for _ in range(self.turns):
                answer = next(single)[1]["content"]
                copies = is_copy or rng.random() < self.copied
                question = _question(answer[::-1], is_copy)
                conversation += [question, assistant(answer[::-1] if copies else answer)]
            yield conversation


def _question(word: str, is_copy: bool = False) -> Message:
    return user(f"{'copy' if is_copy else 'reverse'}: {word}")
