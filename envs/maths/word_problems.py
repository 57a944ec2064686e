"""Generates word problems with worked solutions. They resemble GSM8K but need no download.

    Fay has 12 shells. A friend gives Fay 6 more shells. Fay sorts the shells into 2 equal heaps and
    keeps one heap. How many shells does Fay have now?          12 + 6 = 18, 18 / 2 = 9

Each step applies one operation to the current number. min_steps and max_steps set the difficulty.
"""

from collections.abc import Callable
from random import Random

from envs.maths.questions import Procedural, Question
from envs.options import check_range

NAMES = ("Ada", "Ben", "Chen", "Dara", "Emil", "Fay", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
THINGS = ("apples", "beads", "books", "coins", "marbles", "pens", "shells", "stamps")

Step = tuple[str, str, int]  # (sentence, arithmetic expression, its result)


def _receive(total: int, name: str, things: str, rng: Random) -> Step:
    n = rng.randint(2, 40)
    return f"A friend gives {name} {n} more {things}.", f"{total} + {n}", total + n


def _buy_bags(total: int, name: str, things: str, rng: Random) -> Step:
    bags, each = rng.randint(2, 9), rng.randint(2, 12)
    sentence = f"{name} buys {bags} bags with {each} {things} in each."
    return sentence, f"{total} + {bags} * {each}", total + bags * each


def _give_away(total: int, name: str, things: str, rng: Random) -> Step | None:
    if total < 3:
        return None
    n = rng.randint(1, min(total - 1, 40))
    return f"{name} gives {n} {things} to a neighbour.", f"{total} - {n}", total - n


def _multiply(total: int, name: str, things: str, rng: Random) -> Step | None:
    if total > 400:
        return None
    k = rng.randint(2, 4)
    sentence = f"At a market {name} trades every one of the {things} for {k} others."
    return sentence, f"{total} * {k}", total * k


def _share(total: int, name: str, things: str, rng: Random) -> Step | None:
    divisors = [k for k in range(2, 10) if total % k == 0 and total > k]
    if not divisors:
        return None
    k = rng.choice(divisors)
    sentence = f"{name} sorts the {things} into {k} equal heaps and keeps one heap."
    return sentence, f"{total} / {k}", total // k


STEPS: tuple[Callable[[int, str, str, Random], Step | None], ...] = (
    _receive,
    _buy_bags,
    _give_away,
    _multiply,
    _share,
)


class WordProblems(Procedural):
    """A source of word problems with min_steps..max_steps steps."""

    def __init__(self, *, min_steps: int, max_steps: int, num_train: int, num_eval: int) -> None:
        check_range(min_steps=min_steps, max_steps=max_steps)
        super().__init__(num_train=num_train, num_eval=num_eval)
        self._num_steps = range(min_steps, max_steps + 1)

    def draw(self, rng: Random) -> Question:
        """Return one question. Its solution has a line per step, and its code is one expression."""
        name, things = rng.choice(NAMES), rng.choice(THINGS)
        total = rng.randint(3, 60)
        story, lines, code = [f"{name} has {total} {things}."], [], str(total)
        num_steps = rng.choice(self._num_steps)
        while len(lines) < num_steps:
            step = rng.choice(STEPS)(total, name, things, rng)
            if step is None:
                continue
            sentence, operation, after = step
            story.append(sentence)
            lines.append(f"{operation} = {after}")
            # `operation` begins with the last total. The code computes this total instead.
            rest = operation.removeprefix(str(total)).replace("/", "//")
            code, total = f"({code}){rest}" if len(lines) > 1 else f"{code}{rest}", after
        story.append(f"How many {things} does {name} have now?")
        return Question(" ".join(story), str(total), "\n".join(lines), code)
