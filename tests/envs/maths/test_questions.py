"""Made-up questions: right answers, and equal shares of every kind."""

import asyncio
import re

import pytest

from envs.maths.calculations import Calculations
from envs.maths.word_problems import WordProblems
from tests.envs.test_procedural import make
from tests.support.sandboxes import make as make_sandbox


@pytest.mark.parametrize("source", [WordProblems, Calculations])
def test_python_agrees_with_every_answer(source):
    box = make_sandbox()

    async def disagreements():
        questions = make(source).load("train")
        return [q for q in questions if await box.run(q.code) != f"{q.answer}\n"]

    assert asyncio.run(disagreements()) == []
    box.close()


def test_the_solution_of_a_word_problem_leads_from_its_first_number_to_its_answer():
    for question in make(WordProblems).load("train"):
        number = re.search(r"has (\d+)", question.text)[1]
        for line in question.solution.splitlines():
            left, _, result = line.partition(" = ")
            assert left.startswith(f"{number} ")
            assert eval(left) == int(result)
            number = result
        assert number == question.answer
        assert int(number) > 0


def test_word_problems_have_the_steps_asked_for_about_equally_often():
    steps = [q.solution.count("\n") + 1 for q in make(WordProblems).load("train")]
    assert set(steps) == {1, 2, 3, 4, 5}
    assert min(steps.count(n) for n in range(1, 6)) > 70


def test_each_kind_of_calculation_occurs_about_equally_often():
    signs = {"product": r"\*", "sum": "squares", "power": "remainder", "binomial": "chosen"}
    texts = [q.text for q in make(Calculations).load("train")]
    counts = {kind: sum(bool(re.search(sign, t)) for t in texts) for kind, sign in signs.items()}
    assert sum(counts.values()) == 400
    assert min(counts.values()) > 70
    alone = make(Calculations, kinds=["power"]).load("eval")
    assert all("remainder" in q.text for q in alone)


def test_asking_for_too_many_questions_is_an_error_and_not_an_endless_search():
    made = Calculations(kinds=["product"], digits=2, num_train=1, num_eval=8101)
    with pytest.raises(
        ValueError, match=r"num_eval=8101, but only 8\d{3} different .* lower num_eval"
    ):
        made.load("eval")
