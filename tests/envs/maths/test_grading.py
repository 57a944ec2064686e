"""Grading: equal answers, the final answer of a text, and the limits of a comparison."""

import asyncio
from fractions import Fraction

import pytest

from envs.maths.grading import Grader, final_answer, normalise, number
from tests.support.sandboxes import close, interpreters, settled

OPTIONS = {"workers": 1, "cpu_seconds": 3, "memory_mb": 1024, "allow_without_landlock": False}


@pytest.fixture(scope="module")
def grader():
    made = Grader(**OPTIONS)
    yield made
    close(made)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *((r"so \boxed{18}", "18"), (r"5 is \boxed{}", ""), (r"\boxed{a \{ b} }", r"a \{ b")),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\text{no }\{1, 2\}}", r"\text{no }\{1, 2\}"),
        (r"\boxed{3}, and \boxed{4", "3"),  # cut off, so it does not count
        (r"\boxed{" * 100_000 + r"\boxed{8} and 9", "8"),
        *(("steps\n#### 1,234\n", "1,234"), (r"#### 1 and \boxed{2}", "2")),
        *(("#### 1, no:\n#### 2", "2"), ("#### ", None), ("", None)),
        *(("it costs $1,234.50!", "1,234.50"), ("1,2 and 3,45", "45"), ("so \u22125", "\u22125")),
        *(("-$5", "-5"), ("10-3", "3"), ("it is .5", ".5")),
        *((r"<think>\boxed{1}</think> none", None), (r"<think>\boxed{1}</think> \boxed{2}", "2")),
    ],
)
def test_the_final_answer_of_a_text(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        *(("-3", -3), ("\u22123", -3), ("- 3", -3), (".5", Fraction(1, 2)), ("18.", 18)),
        *(("1,234,567", 1234567), ("1{,}234", 1234), ("12,34", None), ("1e9", None)),
        (r"1\,234", None),  # digits with a space between them are two numbers
        *(("3/4", Fraction(3, 4)), (r"\frac{3}{4}", Fraction(3, 4)), ("1 1/2", Fraction(3, 2))),
        *((r"1\frac{1}{2}", Fraction(3, 2)), (r"-1\frac{1}{2}", Fraction(-3, 2)), ("2 0/3", 2)),
        *(("1/0", None), (r"1\frac{1}{0}", None)),
        # possibly a product, which the grammar decides
        *(("2x", None), ("2 x", None), ("18cm", None)),
        *((r"\$18", 18), ("$18$", 18), ("18 dollars", 18), (r"18\text{ cm}", 18)),
        *(("18 or 19", None), ("", None), ("$", None)),
    ],
)
def test_the_value_of_a_number(answer, value):
    assert number(normalise(answer)) == value


@pytest.mark.parametrize(
    ("gold", "said", "same"),
    [
        *(("18", "18.00", True), ("18", "19", False), ("18", "", False)),
        *(("18", "9" * 501 + "x", False), ("1", "0" * 499 + "1", True)),
        ("1", "0" * 500 + "1", False),  # beyond 500 characters only the same text counts
        *(("1/2", "0.5", True), ("1/3", "0.33", False), ("x + 1", "x+1", None)),
    ],
)
def test_numbers_and_equal_texts_need_no_process(gold, said, same, grader):
    before = interpreters()
    if same is not None:
        assert asyncio.run(grader.means_same(gold, said)) is same
    assert asyncio.run(grader.means_same(said, said)) is bool(said)
    assert interpreters() == before


@pytest.mark.parametrize(
    ("gold", "said", "same"),
    [
        *(("x + 1", "1 + x", True), ("x + 1", "1 - x", False), ("2x", "2", False)),
        *((r"\sqrt{8}", r"2\sqrt{2}", True), (r"\frac{\pi}{2}", r"\pi/2", True)),
        *(("(1, 2)", "(1,2)", True), ("(1, 2)", "(2, 1)", False), ("1/2", r"\dfrac12", True)),
        *((r"\{1, 2\}", r"\{2, 1\}", True), ("5", "x = 5", True), ("50", r"50\%", True)),
        *(("18", "18, 19", False), ("7", "}{", False), ("1", "\ufffd \\", False)),
        ("x", "__import__('os')._exit(0)", False),
    ],
)
def test_formulas_are_compared_by_meaning(gold, said, same, grader):
    assert asyncio.run(grader.means_same(gold, said)) is same


def test_an_endless_comparison_does_not_affect_others():
    grader = Grader(**OPTIONS)

    async def judge():
        pairs = [("2", r"\sum_{n=1}^{10^{12}} 1/n"), ("1", "10^{10^{10}}"), ("x + y", "y + x")]
        return await asyncio.gather(*(grader.means_same(*pair) for pair in pairs))

    assert asyncio.run(judge()) == [None, None, True]
    close(grader)


async def test_each_worker_compares_one_answer_at_a_time():
    before = interpreters()
    grader = Grader(**{**OPTIONS, "workers": 2})
    same = await asyncio.gather(*(grader.means_same("x + 3", f"{n} + x") for n in range(6)))
    assert same == [n == 3 for n in range(6)]
    assert len(interpreters() - before) == 2
    close(grader)
    assert settled(before)
