"""The judge: what it asks, which score it reads in an answer, and which answers are errors."""

import pytest

from envs.episode import Episode, Example
from envs.judge import Judge, JudgeError
from envs.messages import user
from tests.support.answers import Answers, completion

PROMPT = "Q: {question} A: {answer} Said: {said}. {{yes or no}}"
OPTIONS = {"model": "judge", "api_key_variable": None, "prompt": PROMPT, "max_score": None}
OPTIONS |= {"temperature": 0.0, "max_tokens": 16, "timeout": 5.0, "max_retries": 2}
OPTIONS |= {"retry_wait": 0.01, "max_concurrent": 4}


def saying(text: str) -> Answers:
    return Answers((200, completion(text)))


async def ask(server: Answers, **changes) -> float:
    with server.serving() as url:
        return await Judge(url=url, **{**OPTIONS, **changes}).score("1+1?", "2", "two {x}")


async def test_the_prompt_is_filled_in_and_the_request_has_the_options():
    server, text = saying("yes"), "Q: 1+1? A: 2 Said: two {x}. {yes or no}"
    assert await ask(server) == 1.0
    expected = {"model": "judge", "temperature": 0.0, "max_tokens": 16, "messages": [user(text)]}
    assert server.bodies == [expected]
    assert "Authorization" not in server.headers[0]
    limits = {"timeout": 7.0, "retry_wait": 3.0, "max_concurrent": 2, "max_retries": 5}
    client = Judge(url="http://host/v1", **{**OPTIONS, **limits})._http
    assert {name: getattr(client, name) for name in limits} == limits


async def test_as_a_reward_it_is_asked_about_an_episode(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    opening = [{"role": "system", "content": "S"}, user("0+1?"), user("1+1?")]
    example = Example(0, "e", opening, {"answer": ["2", "two"]})
    said = {"role": "assistant", "content": "<think>no</think> two"}
    server = saying("No.")
    with server.serving() as url:
        judge = Judge(url=url, **{**OPTIONS, "api_key_variable": "MY_KEY"})
        assert await judge(Episode(example, [*opening, said])) == 0.0
        # A prompt without {answer} needs no answer.
        bare = Judge(url=url, **{**OPTIONS, "prompt": "Q: {question} Said: {said}"})
        assert await bare(Episode(Example(0, "e", []), [said])) == 0.0
    assert server.bodies[1]["messages"] == [user("Q:  Said: two")]
    prompt = server.bodies[0]["messages"][0]["content"]
    assert prompt.startswith("Q: 1+1? A: 2 or two Said: two. ")
    assert server.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("text", "max_score", "score"),
    [
        *(("Yes, because no other is.", None, 1.0), ("**no**", None, 0.0)),
        ("Is it right? Not yes at first.\nVerdict: NO", None, 0.0),
        *(("<think>no, no</think>\nyes\n", None, 1.0), ("yesterday: no", None, 0.0)),
        *(("7/10", 10.0, 0.7), ("3 reasons.\nScore: 2.5", 5.0, 0.5)),
        *(("0", 1.0, 0.0), ("10", 10.0, 1.0)),
    ],
)
async def test_the_score_is_the_first_of_the_last_line_that_has_one(text, max_score, score):
    assert await ask(saying(text), max_score=max_score) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "max_score", "problem"),
    [
        ("maybe", None, "ask for yes or no in .* ends in 'maybe'"),
        ("", None, "ask for yes or no in .* ends in ''"),
        ("good", 10.0, "ask for 0 to 10 in .* ends in 'good'"),
        ("11", 10.0, "gave 11 points, not 0 to 10"),
        ("-1", 10.0, "gave -1 points, not 0 to 10"),
        ("\u22121", 10.0, "gave -1 points, not 0 to 10"),
    ],
)
async def test_an_answer_without_a_score_is_an_error_and_no_reward(text, max_score, problem):
    with pytest.raises(JudgeError, match=problem):
        await ask(saying(text), max_score=max_score)


async def test_a_judge_that_does_not_answer_gives_no_reward():
    with pytest.raises(JudgeError, match=r"judge\.url=http.*answered 401: .*: the request had no"):
        await ask(Answers((401, "no such key")))
    with pytest.raises(JudgeError, match=r"judge\.model=judge: the prompt exceeds the context"):
        await ask(Answers((400, "maximum context length is 16 tokens")))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": "{question} {answer}"}, r"use \{said\} "),
        ({"prompt": "{said} {json}"}, r"\['json', 'said'\]: use"),
        ({"api_key_variable": "NOT_THERE"}, "NOT_THERE: this environment variable is not set"),
        ({"url": "localhost:8000"}, "judge.url=localhost:8000 is not an address"),
        ({"max_retries": -1}, "max_retries=-1: set it to at least 0"),
        ({"max_score": 0.0}, "set it above 0"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(changes, problem):
    with pytest.raises(ValueError, match=problem):
        Judge(**{"url": "http://x/v1", **OPTIONS, **changes})
