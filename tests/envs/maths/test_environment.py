"""Maths and MathPython: rewards, experts, calls of the tool, data sets, and grading."""

import asyncio
import json
from fractions import Fraction
from itertools import islice
from random import Random

import pytest

from envs.datasets import JsonLines
from envs.episode import Episode, Example
from envs.maths.calculations import Calculations
from envs.maths.dataset_questions import DataQuestions
from envs.maths.environment import Maths
from envs.maths.grading import Grader, final_answer, normalise, number
from envs.maths.math_python import MathPython
from envs.maths.questions import Question
from envs.messages import assistant, tool_call, user
from envs.sandbox.sandbox import Limits
from tests.support.sandboxes import OPTIONS as LIMITS
from tests.support.sandboxes import close, interpreters, settled

GRADING = {"workers": 1, "cpu_seconds": 3, "memory_mb": 1024, "allow_without_landlock": False}
GRADER = Grader(**GRADING)
CALCULATIONS = Calculations(kinds=["product", "binomial"], digits=4, num_train=30, num_eval=10)
OPTIONS = {"name": "maths", "questions": CALCULATIONS, "instruction": "Box it.", "grader": GRADER}
OPTIONS |= {"reward_weights": {"correct": 1.0, "format": 0.5}}
SANDBOX = Limits(**{**LIMITS, "call_timeout": 60.0, "cpu_seconds": 1, "max_output_chars": 200})


@pytest.fixture(autouse=True, scope="module")
def _processes_end():
    yield
    close(GRADER)


def with_python():
    return MathPython(**OPTIONS, max_turns=4, max_concurrent=8, sandbox=SANDBOX)


def scores(answer, said):
    example = Example(0, "maths", [user("?")], {"answer": answer})
    return asyncio.run(
        Maths(**OPTIONS).score(Episode(example, [user("?"), assistant(said)], turns=1))
    )


def test_rewards_of_a_transcript():
    for answer, said, correct, form in (
        *(("18", "12 + 6 = 18\n\\boxed{18}", 1, 1), ("18", "#### 18", 1, 1)),
        *(("18", "12 + 6 = 18", 1, 0), ("18", r"<think>\boxed{18}</think> 18", 1, 0)),
        ("18", r"<think>so \boxed{18}", 0, 0),  # reasoning without an end has no answer
        *(("2x", r"\boxed{x + x}", 1, 1), ("18", "", 0, 0)),
        ("18", r"\boxed{18", 1, 0),  # cut off, so the last number counts
    ):
        assert scores(answer, said) == {"correct": correct, "format": form, "unjudged": 0.0}


def test_an_answer_that_takes_too_long_to_compare_is_wrong_and_counted(monkeypatch):
    async def too_slow(*_):
        return None

    monkeypatch.setattr(GRADER, "means_same", too_slow)
    scored = scores("1", r"\boxed{10^{10^{10}}}")
    assert scored == {"correct": 0.0, "format": 1.0, "unjudged": 1.0}


def fresh(answer="42"):
    return Episode(Example(0, "maths", [], {"answer": answer}), [])


async def play(env, episode, *turns):
    """Let the environment reply to assistant messages, and return the texts of its replies."""
    texts = []
    for turn in turns:
        episode.messages.append(turn)
        reply = await env.reply(episode, turn) or []
        episode.messages += reply
        texts += [message["content"] for message in reply]
    return texts


def code(text):
    return tool_call("python", code=text)


async def test_the_expert_played_through_the_real_tool_scores_one():
    env, before = with_python(), interpreters()
    for _, call, told, last in islice(env.demonstrations(Random(0)), 8):
        episode = fresh(told["content"])
        assert await env.reply(episode, call) == [told]
        assert await play(env, episode, last) == []
        env.close(episode)
        assert await env.score(episode) == {"correct": 1.0, "format": 1.0, "unjudged": 0.0}
    assert settled(before)


async def test_each_episode_keeps_its_own_variables_also_after_a_call_that_breaks_a_limit():
    env, one, other = with_python(), fresh(), fresh()
    assert await play(env, one, code("x = 5"), code("x * 2")) == ["(no output)", "10"]
    assert (one.tool_calls, one.tool_errors) == (2, 0)
    turns = code("x"), code("while True: pass"), code("1 / 0"), code("6 * 7")
    unknown, endless, raised, right = await play(env, other, *turns)
    assert unknown.endswith("NameError: name 'x' is not defined")
    assert endless.startswith("Error: the code used up 1")
    assert "ZeroDivisionError" in raised
    assert (right, await play(env, one, code("x"))) == ("42", ["5"])
    env.close(one)
    env.close(other)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows(*numbers):
    return [{"question": f"q{n}?", "answer": str(n)} for n in numbers]


def of_file(path, **changes):
    options = {"eval_path": None, "num_eval": 2, "prompt": "question", "answer": "answer"}
    return DataQuestions(dataset=JsonLines(path=path, **{**options, **changes}))


def test_a_question_of_the_eval_file_is_not_trained_on(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(1, 2, 3, 4))
    source = of_file(path, eval_path=write(tmp_path / "b.jsonl", rows(3, 9, 4)))
    assert len(source.load("eval")) == 2  # num_eval
    assert {q.text for q in source.load("eval")} < {"q3?", "q4?", "q9?"}
    assert [q.text for q in source.load("train")] == ["q1?", "q2?"]
    assert {q.text for q in islice(source.sample_questions(Random(0)), 200)} == {"q1?", "q2?"}


def test_worked_steps_are_split_from_the_answer_as_in_gsm8k(tmp_path):
    told = "She sells 48/2 = <<48/2=24>>24, not <<48/3=16>>16.\n"
    told += "Together 48+24 = <<48+24=72>>72.\n#### 72"
    asked = [{"role": "system", "content": "s"}, user("x")]
    path = write(tmp_path / "a.jsonl", [{"q": " How many? ", "a": told}, {"q": asked, "a": 5}])
    source = of_file(path, num_eval=1, prompt="q", answer="a")
    assert {*source.load("train"), *source.load("eval")} == {
        Question("How many?", "72", "She sells 48/2 = 24, not 16.\nTogether 48+24 = 72."),
        Question("x", "5"),
    }
    bare = write(tmp_path / "c.jsonl", [{"question": "a"}, {"question": "b"}])
    with pytest.raises(ValueError, match=r"question 0 has no answer: set dataset\.answer"):
        of_file(bare, answer=None, num_eval=1).load("train")


def test_the_final_answer_of_a_text():
    for text, answer in (
        *((r"5 is \boxed{}", ""), (r"\boxed{a \{ b} }", r"a \{ b")),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{3}, and \boxed{4", "3"),  # cut off, so it does not count
        (r"\boxed{" * 100_000 + r"\boxed{8} and 9", "8"),
        *((r"#### 1 and \boxed{2}", "2"), ("#### 1, no:\n#### 2", "2"), ("#### ", None)),
        *(("it costs $1,234.50!", "1,234.50"), ("-$5", "-5"), ("10-3", "3"), ("it is .5", ".5")),
        (r"<think>\boxed{1}</think> none", None),
    ):
        assert final_answer(text) == answer


def test_the_value_of_a_number():
    for answer, value in (
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
    ):
        assert number(normalise(answer)) == value


def test_numbers_and_equal_texts_need_no_process():
    for gold, said, same in (
        *(("18", "18.00", True), ("18", "19", False), ("18", "", False)),
        *(("18", "9" * 501 + "x", False), ("1", "0" * 499 + "1", True)),
        ("1", "0" * 500 + "1", False),  # beyond 500 characters only the same text counts
        *(("1/2", "0.5", True), ("1/3", "0.33", False), ("x + 1", "x+1", None)),
    ):
        before = interpreters()
        if same is not None:
            assert asyncio.run(GRADER.means_same(gold, said)) is same
        assert asyncio.run(GRADER.means_same(said, said)) is bool(said)
        assert interpreters() == before


def test_formulas_are_compared_by_meaning():
    for gold, said, same in (
        *(("x + 1", "1 + x", True), ("x + 1", "1 - x", False), ("2x", "2", False)),
        *((r"\sqrt{8}", r"2\sqrt{2}", True), (r"\frac{\pi}{2}", r"\pi/2", True)),
        *(("(1, 2)", "(1,2)", True), ("(1, 2)", "(2, 1)", False), ("1/2", r"\dfrac12", True)),
        *((r"\{1, 2\}", r"\{2, 1\}", True), ("5", "x = 5", True), ("50", r"50\%", True)),
        *(("18", "18, 19", False), ("7", "}{", False), ("1", "\ufffd \\", False)),
        ("x", "__import__('os')._exit(0)", False),
    ):
        assert asyncio.run(GRADER.means_same(gold, said)) is same


def test_an_endless_comparison_does_not_affect_others():
    grader = Grader(**GRADING)

    async def judge():
        pairs = [("2", r"\sum_{n=1}^{10^{12}} 1/n"), ("1", "10^{10^{10}}"), ("x + y", "y + x")]
        return await asyncio.gather(*(grader.means_same(*pair) for pair in pairs))

    assert asyncio.run(judge()) == [None, None, True]
    close(grader)


async def test_each_worker_compares_one_answer_at_a_time():
    before = interpreters()
    grader = Grader(**{**GRADING, "workers": 2})
    same = await asyncio.gather(*(grader.means_same("x + 3", f"{n} + x") for n in range(6)))
    assert same == [n == 3 for n in range(6)]
    assert len(interpreters() - before) == 2
    close(grader)
    assert settled(before)
