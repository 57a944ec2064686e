"""Multi-turn environment: the policy sorts a list of names that grows every turn.

    sort: dob an kit   ->   an dob kit          add: fe   ->   an dob fe kit

Every answer is the whole sorted list, with spaces between the names. The names are random strings
of a-z. Both splits are drawn with fixed seeds. No list of the eval split occurs in training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain, islice
from math import perm
from random import Random
from string import ascii_lowercase

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, user, without_reasoning
from envs.options import PositiveFloat, PositiveInt, check_range
from envs.protocol import Environment, check_weights

REWARDS = ("exact", "similarity")
Names = list[list[str]]  # one list of names per turn


@dataclass(kw_only=True, eq=False)
class AlphabetSort(Environment):
    """The environment alphabet-sort. conf/env/alphabet-sort.yaml explains the options."""

    name = "alphabet-sort"

    min_turns: int
    max_turns: int = field()
    num_names: PositiveInt
    names_per_turn: PositiveInt
    min_length: int
    max_length: int
    similarity_power: PositiveFloat
    num_train: PositiveInt
    num_eval: PositiveInt
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        min_length, max_length = self.min_length, self.max_length
        check_range(min_turns=self.min_turns, max_turns=self.max_turns)
        check_range(min_length=min_length, max_length=max_length)
        total = self._total_names(self.max_turns)
        capacity = sum(len(ascii_lowercase) ** n for n in range(min_length, max_length + 1))
        if capacity < 4 * total:  # otherwise `_draw_names` would draw many names twice
            raise ValueError(
                f"only {capacity} names of {min_length} to {max_length} letters exist, but "
                f"{total} different names per episode need at least {4 * total}: raise max_length "
                "or lower num_names"
            )
        count = perm(capacity, self._total_names(self.min_turns))
        if count < 2 * self.num_eval:
            raise ValueError(
                f"num_eval={self.num_eval} leaves too few lists for training, because only {count} "
                "lists of names exist: raise max_length or num_names, or lower num_eval"
            )
        check_weights(self.reward_weights, REWARDS)

    def _total_names(self, turns: int) -> int:
        return self.num_names + (turns - 1) * self.names_per_turn

    def examples(self, split: Split) -> list[Example]:
        lists = self._eval_lists if split == "eval" else self._train_lists
        return [
            Example(id=i, env=self.name, messages=[_question(names, 0)], info={"names": names})
            for i, names in enumerate(lists)
        ]

    async def reply(
        self,
        episode: Episode,
        message: Message,  # noqa: ARG002 (the next names do not depend on the answer)
    ) -> list[Message] | None:
        names = episode.example.info["names"]
        return [_question(names, episode.turns)] if episode.turns < len(names) else None

    async def score(self, episode: Episode) -> dict[str, list[float]]:
        """Return each turn's rewards divided by the number of turns, so each reward sums to 0..1.

        Before the division, `exact` is 1 if the list is correct, else 0. `similarity` is the
        similarity (0..1) to the correct list, raised to the power similarity_power.
        """
        answers = _answers(episode.example.info["names"])
        turns = [m["content"] or "" for m in episode.messages if m["role"] == "assistant"]
        lists = [without_reasoning(turn).split() for turn in turns]
        pairs = list(zip(lists, answers, strict=False))
        ratios = [SequenceMatcher(None, names, answer, False).ratio() for names, answer in pairs]
        return {
            "exact": [(names == answer) / len(answers) for names, answer in pairs],
            "similarity": [ratio**self.similarity_power / len(answers) for ratio in ratios],
        }

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        for names in self._draw_train_names(rng):
            answers = [assistant(" ".join(answer)) for answer in _answers(names)]
            pairs = [(_question(names, turn), answer) for turn, answer in enumerate(answers)]
            yield [message for pair in pairs for message in pair]

    @cached_property
    def _eval_lists(self) -> list[Names]:
        rng = Random("alphabet-sort/eval")
        return [self._draw_names(rng) for _ in range(self.num_eval)]

    @cached_property
    def _train_lists(self) -> list[Names]:
        return list(islice(self._draw_train_names(Random("alphabet-sort/train")), self.num_train))

    def _draw_train_names(self, rng: Random) -> Iterator[Names]:
        held_out = {str(names) for names in self._eval_lists}
        while True:
            names = self._draw_names(rng)
            if str(names) not in held_out:
                yield names

    def _draw_names(self, rng: Random) -> Names:
        count = self._total_names(rng.choice(range(self.min_turns, self.max_turns + 1)))
        drawn: dict[str, None] = {}  # a set of names that keeps their order
        while len(drawn) < count:
            length = rng.randint(self.min_length, self.max_length)
            drawn["".join(rng.choices(ascii_lowercase, k=length))] = None
        names, step = list(drawn), self.names_per_turn
        later = range(self.num_names, count, step)
        return [names[: self.num_names], *(names[start : start + step] for start in later)]


def _question(names: Names, turn: int) -> Message:
    return user(f"{'add' if turn else 'sort'}: {' '.join(names[turn])}")


def _answers(names: Names) -> Names:
    return [sorted(chain(*names[: turn + 1])) for turn in range(len(names))]
