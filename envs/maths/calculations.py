"""Generate calculations that are hard to do mentally but easy in Python.

product   48213 * 90217         sum        of the squares of the numbers from a to b
power     7^1234 mod 97         binomial   n choose k, modulo m
"""

import math
from collections.abc import Callable, Sequence
from random import Random

from envs.maths.questions import GeneratedQuestions, Question
from envs.options import PositiveInt


def _draw_product(rng: Random, digits: int) -> Question:
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return Question(f"What is {a} * {b}?", str(a * b), code=f"{a} * {b}")


def _sum_of_squares(n: int) -> int:
    return n * (n + 1) * (2 * n + 1) // 6


def _draw_sum(rng: Random, digits: int) -> Question:
    first = rng.randrange(1, 10 ** (digits - 1))
    last = first + rng.randrange(10, 10**digits)
    answer = _sum_of_squares(last) - _sum_of_squares(first - 1)
    return Question(
        f"What is the sum of the squares of the whole numbers from {first} to {last}?",
        str(answer),
        code=f"sum(k**2 for k in range({first}, {last + 1}))",
    )


def _draw_power(rng: Random, digits: int) -> Question:
    base, exponent = rng.randrange(2, 100), rng.randrange(10 ** (digits - 1), 10**digits)
    modulus = rng.randrange(11, 1000)
    return Question(
        f"What is the remainder when {base}^{exponent} is divided by {modulus}?",
        str(pow(base, exponent, modulus)),
        code=f"pow({base}, {exponent}, {modulus})",
    )


def _draw_binomial(rng: Random, digits: int) -> Question:
    n = rng.randrange(10 * digits, 100 * digits)
    k = rng.randrange(2, n // 2)
    modulus = rng.randrange(11, 1000)
    return Question(
        f"In how many ways can {k} of {n} different things be chosen, modulo {modulus}?",
        str(math.comb(n, k) % modulus),
        code=f"import math\nmath.comb({n}, {k}) % {modulus}",
    )


KINDS: dict[str, Callable[[Random, int], Question]] = {
    "product": _draw_product,
    "sum": _draw_sum,
    "power": _draw_power,
    "binomial": _draw_binomial,
}


class Calculations(GeneratedQuestions):
    def __init__(
        self, *, kinds: Sequence[str], digits: int, num_train: PositiveInt, num_eval: PositiveInt
    ) -> None:
        if not kinds or set(kinds) - set(KINDS):
            raise ValueError(f"kinds={list(kinds)}: list one or more of {' '.join(KINDS)}")
        if not 2 <= digits <= 6:
            raise ValueError(f"digits={digits}: set it to 2, 3, 4, 5 or 6")
        super().__init__(num_train=num_train, num_eval=num_eval)
        self._kinds, self._num_digits = tuple(kinds), digits

    def draw(self, rng: Random) -> Question:
        return KINDS[rng.choice(self._kinds)](rng, self._num_digits)
