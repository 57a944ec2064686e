"""Made-up questions: right answers, distinct splits, the same questions in every run."""

import asyncio
import re
from itertools import islice
from random import Random

import pytest

from envs.maths.calculations import KINDS, Calculations
from envs.maths.word_problems import WordProblems
from tests.support.sandboxes import make as make_sandbox

WORDS = {"min_steps": 1, "max_steps": 5, "num_train": 500, "num_eval": 100}
CALCULATIONS = {"kinds": [*KINDS], "digits": 4, "num_train": 400, "num_eval": 50}
SOURCES = [(WordProblems, WORDS), (Calculations, CALCULATIONS)]


@pytest.mark.parametrize(("source", "options"), SOURCES)
def test_python_agrees_with_every_answer(source, options):
    box = make_sandbox()

    async def disagreements():
        questions = source(**options).load("train")
        return [q for q in questions if await box.run(q.code) != f"{q.answer}\n"]

    assert asyncio.run(disagreements()) == []
    box.close()


def test_the_solution_of_a_word_problem_leads_from_its_first_number_to_its_answer():
    for question in WordProblems(**WORDS).load("train"):
        number = re.search(r"has (\d+)", question.text)[1]
        for line in question.solution.splitlines():
            left, _, result = line.partition(" = ")
            assert left.startswith(f"{number} ")
            assert eval(left) == int(result)
            number = result
        assert number == question.answer
        assert int(number) > 0


def test_word_problems_have_the_steps_asked_for_about_equally_often():
    steps = [q.solution.count("\n") + 1 for q in WordProblems(**WORDS).load("train")]
    assert set(steps) == {1, 2, 3, 4, 5}
    assert min(steps.count(n) for n in range(1, 6)) > 70


def test_each_kind_of_calculation_occurs_about_equally_often():
    signs = {"product": r"\*", "sum": "squares", "power": "remainder", "binomial": "chosen"}
    texts = [q.text for q in Calculations(**CALCULATIONS).load("train")]
    counts = {kind: sum(bool(re.search(sign, t)) for t in texts) for kind, sign in signs.items()}
    assert sum(counts.values()) == 400
    assert min(counts.values()) > 70
    alone = Calculations(**{**CALCULATIONS, "kinds": ["power"]}).load("eval")
    assert all("remainder" in q.text for q in alone)


@pytest.mark.parametrize(("source", "options"), SOURCES)
def test_splits_and_fresh_questions_share_nothing_with_eval(source, options):
    made = source(**options)
    held_out = {q.text for q in made.load("eval")}
    train = {q.text for q in made.load("train")}
    fresh = {q.text for q in islice(made.fresh(Random(3)), 2000)}
    assert (len(held_out), len(train)) == (options["num_eval"], options["num_train"])
    assert held_out.isdisjoint(train | fresh)


@pytest.mark.parametrize(("source", "options"), SOURCES)
def test_the_same_options_give_the_same_questions(source, options):
    assert source(**options).load("train") == source(**options).load("train")
    assert source(**options).load("eval") == source(**{**options, "num_train": 5}).load("eval")
    first, again, other = (list(islice(source(**options).fresh(Random(s)), 9)) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (WordProblems, {**WORDS, "min_steps": 6}, "min_steps may not exceed"),
        (WordProblems, {**WORDS, "min_steps": 0}, "at least 1"),
        (Calculations, {**CALCULATIONS, "kinds": ["sums"]}, "sums.* one or more of product"),
        (Calculations, {**CALCULATIONS, "kinds": []}, "one or more of"),
        (Calculations, {**CALCULATIONS, "digits": 7}, "digits=7"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(source, options, message):
    with pytest.raises(ValueError, match=message):
        source(**options)


def test_asking_for_too_many_questions_is_an_error_and_not_an_endless_search():
    made = Calculations(kinds=["product"], digits=2, num_train=1, num_eval=8101)
    with pytest.raises(ValueError, match=r"num_eval=8101: .* \(8\d{3} found\); lower it"):
        made.load("eval")
