"""Maths and MathPython: rewards, experts, calls of the tool in the real sandbox, and data sets."""

import asyncio
import json
from itertools import islice
from random import Random

import pytest

from envs.datasets import JsonLines
from envs.episode import Episode, Example
from envs.maths.calculations import Calculations
from envs.maths.dataset_questions import DataQuestions
from envs.maths.environment import Maths
from envs.maths.grading import Grader
from envs.maths.math_python import MathPython
from envs.maths.questions import Question, QuestionSource
from envs.maths.word_problems import WordProblems
from envs.messages import assistant, tool_call, user
from envs.sandbox.sandbox import Limits
from tests.support.sandboxes import OPTIONS as LIMITS
from tests.support.sandboxes import close, interpreters, settled

GRADER = Grader(workers=1, cpu_seconds=5, memory_mb=1024, allow_without_landlock=False)
KINDS = ["product", "sum", "power", "binomial"]
CALCULATIONS = Calculations(kinds=KINDS, digits=4, num_train=30, num_eval=10)
PROBLEMS = WordProblems(min_steps=1, max_steps=3, num_train=50, num_eval=20)
OPTIONS = {"name": "maths", "questions": PROBLEMS, "instruction": "Box it.", "grader": GRADER}
OPTIONS |= {"reward_weights": {"correct": 1.0, "format": 0.5}}
SANDBOX = Limits(**{**LIMITS, "call_timeout": 60.0, "cpu_seconds": 1, "max_output_chars": 200})


@pytest.fixture(autouse=True, scope="module")
def _processes_end():
    yield
    close(GRADER)


def make(**changes):
    return Maths(**{**OPTIONS, **changes})


def with_python(questions=CALCULATIONS):
    further = {"max_turns": 4, "max_concurrent": 8, "sandbox": SANDBOX}
    return MathPython(**{**OPTIONS, "questions": questions, **further})


def scores(answer, said):
    example = Example(0, "maths", [user("?")], {"answer": answer})
    return asyncio.run(make().score(Episode(example, [user("?"), assistant(said)], turns=1)))


@pytest.mark.parametrize(
    ("answer", "said", "correct", "form"),
    [
        *(("18", "12 + 6 = 18\n\\boxed{18}", 1, 1), ("18", "#### 18", 1, 1)),
        *(("18", "12 + 6 = 18", 1, 0), ("18", r"<think>\boxed{18}</think> 18", 1, 0)),
        ("18", r"<think>so \boxed{18}", 0, 0),  # reasoning without an end has no answer
        ("18", r"without <think>: \boxed{18}", 1, 1),
        ("18", r"<think>\boxed{18}</think>\boxed{17}", 0, 1),
        *(("18", r"\boxed{19}, no, \boxed{18}", 1, 1), ("18", r"\boxed{18}, no, \boxed{19}", 0, 1)),
        ("2x", r"\boxed{x + x}", 1, 1),
        ("18", r"\boxed{18", 1, 0),  # cut off, so the last number counts
        *(("18", r"18 is not \boxed{}", 0, 0), ("18", "", 0, 0)),
        ("18", "\ufffd\ufffd {}{ \\boxed", 0, 0),
    ],
)
def test_rewards_of_a_transcript(answer, said, correct, form):
    assert scores(answer, said) == {"correct": correct, "format": form, "unjudged": 0.0}


def test_an_answer_that_takes_too_long_to_compare_is_wrong_and_counted(monkeypatch):
    async def too_slow(*_):
        return None

    monkeypatch.setattr(GRADER, "means_same", too_slow)
    scored = scores("1", r"\boxed{10^{10^{10}}}")
    assert scored == {"correct": 0.0, "format": 1.0, "unjudged": 1.0}


def test_the_expert_scores_one_and_shows_no_eval_question():
    env = make()
    held_out = {e.messages[0]["content"] for e in env.examples("eval")}
    for question, solution in islice(env.demonstrations(Random(0)), 50):
        assert question["content"] not in held_out
        assert question["content"].endswith("?\nBox it.")
        answer = solution["content"].rpartition("= ")[2].partition("\n")[0]
        assert scores(answer, solution["content"])["correct"] == 1.0
        assert scores(answer, "no idea")["correct"] == 0.0


def test_questions_without_a_solution_cannot_be_imitated(monkeypatch):
    class Given(QuestionSource):
        def load(self, split):
            return [Question("6 * 7?", "42")]

        def check(self):
            raise ValueError("no such file")

    env = make(questions=Given(), instruction="")
    assert env.examples("train")[0].messages == [user("6 * 7?")]
    with pytest.raises(ValueError, match=r"come without solutions.*model.warm_start=null"):
        next(env.demonstrations(Random(0)))
    monkeypatch.setattr(GRADER, "check_machine", lambda: None)
    with pytest.raises(ValueError, match="no such file"):
        env.check_machine()


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
    assert len({e.messages[0]["content"] for e in env.examples("train")}) == 30
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


def test_word_problems_can_be_played_with_the_tool_as_well():
    env = with_python(WordProblems(min_steps=2, max_steps=4, num_train=5, num_eval=5))
    for _, call, told, _ in islice(env.demonstrations(Random(1)), 20):
        assert eval(call["tool_calls"][0]["function"]["arguments"]["code"]) == int(told["content"])


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


def test_questions_without_answers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="row 1 has no value in the column 'reply'"):
        of_file(write(tmp_path / "a.jsonl", rows(1, 2)), answer="reply").check()
    bare = write(tmp_path / "c.jsonl", [{"question": "a"}, {"question": "b"}])
    with pytest.raises(ValueError, match=r"question 0 has no answer: set dataset\.answer"):
        of_file(bare, answer=None, num_eval=1).load("train")
