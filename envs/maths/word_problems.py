"""Generate word problems with worked solutions. They resemble GSM8K but need no download.

    Fay has 12 shells. A friend gives Fay 6 more shells. Fay sorts the shells into 2 equal heaps and
    keeps one heap. How many shells does Fay have now?          12 + 6 = 18, 18 / 2 = 9

min_steps and max_steps set how many steps a problem has, and so its difficulty.
"""

from collections.abc import Callable, Sequence
from random import Random

from envs.maths.questions import GeneratedQuestions, Question
from envs.options import PositiveInt, check_range

NAMES = ("Ada", "Ben", "Chen", "Dara", "Emil", "Fay", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena")
THINGS = ("apples", "beads", "books", "coins", "marbles", "pens", "shells", "stamps")

# (current total, rng) -> numbers for {0} and {1} in STEPS; [] if the step is impossible
Draw = Callable[[int, Random], Sequence[int]]


def _divisors(total: int) -> list[int]:
    return [k for k in range(2, 10) if total % k == 0 and total > k]


# (sentence, operation, function that draws the numbers {0} and {1} in both)
STEPS: tuple[tuple[str, str, Draw], ...] = (
    (
        "A friend gives {name} {0} more {things}.",
        "{total} + {0}",
        lambda _, rng: [rng.randint(2, 40)],
    ),
    (
        "{name} buys {0} bags with {1} {things} in each.",
        "{total} + {0} * {1}",
        lambda _, rng: [rng.randint(2, 9), rng.randint(2, 12)],
    ),
    (
        "{name} gives {0} {things} to a neighbour.",
        "{total} - {0}",
        lambda total, rng: [rng.randint(1, min(total - 1, 40))] if total >= 3 else [],
    ),
    (
        "At a market {name} trades every one of the {things} for {0} others.",
        "{total} * {0}",
        lambda total, rng: [rng.randint(2, 4)] if total <= 400 else [],
    ),
    (
        "{name} sorts the {things} into {0} equal heaps and keeps one heap.",
        "{total} / {0}",
        lambda total, rng: [rng.choice(_divisors(total))] if _divisors(total) else [],
    ),
)


class WordProblems(GeneratedQuestions):
    """A source of word problems with min_steps..max_steps steps."""

    def __init__(
        self, *, min_steps: int, max_steps: int, num_train: PositiveInt, num_eval: PositiveInt
    ) -> None:
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
            sentence, operation, draw = rng.choice(STEPS)
            if not (numbers := draw(total, rng)):
                continue
            story.append(sentence.format(*numbers, name=name, things=things))
            # The code contains all earlier steps, but a solution's line contains only their result.
            nested = f"({code})" if lines else code
            code = operation.replace("/", "//").format(*numbers, total=nested)
            before, total = total, eval(code)
            lines.append(f"{operation.format(*numbers, total=before)} = {total}")
        story.append(f"How many {things} does {name} have now?")
        return Question(" ".join(story), str(total), "\n".join(lines), code)
