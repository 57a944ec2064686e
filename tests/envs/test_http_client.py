"""The HTTP client, the chat endpoint on it and the judge, with servers that fail or are hostile."""

import asyncio
import gzip
import time
from time import monotonic

import pytest

from envs.chat_endpoint import ChatEndpoint
from envs.episode import Episode, Example
from envs.http_client import HttpClient, HttpError
from envs.judge import Judge, JudgeError
from envs.messages import assistant, user
from tests.support.answers import Answers, completion

OPTIONS = {"timeout": 5.0, "max_retries": 2, "max_concurrent": 4, "max_mib": 1, "retry_wait": 0.01}
BOMB = gzip.compress(bytes(10**7))


async def post(server: Answers, **changes) -> str:
    with server.serving() as url:
        async with HttpClient(**{**OPTIONS, **changes}) as client:
            return await client.post(f"{url}/x", {"a": 1})


async def test_an_answer_that_cannot_be_used_is_an_error_of_one_line():
    for answer, times, told in (
        ((500, "out of\nmemory"), 3, "answered 500: out of memory, 3 times in a row"),
        ((408, "\x1b[2Jlate"), 3, "answered 408: [2Jlate, 3 times in a row"),
        ((401, "no such key"), 1, "answered 401: no such key"),
        ((307, "", {"Location": "http://127.0.0.1:9/"}), 1, "answered 307: "),
        ((200, BOMB, {"Content-Encoding": "gzip"}), 1, "compresses its answers"),
        ((200, b" " * ((1 << 20) + 1)), 1, "answers with more than 1 MiB"),
    ):
        server = Answers(answer)
        with pytest.raises(HttpError) as caught:
            await post(server)
        assert str(caught.value).startswith(told)
        assert str(caught.value).isprintable()
        assert len(server.bodies) == times


async def test_a_busy_server_is_asked_again_after_the_time_that_it_asks_for(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server = Answers((429, "", {"Retry-After": "0.3"}), (503, ""), (200, "y" * (1 << 20)))
    began = monotonic()
    assert await post(server, retry_wait=0.2, api_key_variable="MY_KEY") == "y" * (1 << 20)
    assert monotonic() - began >= 0.3 + 0.2  # half of the second backoff of 0.4 s at least
    waits = [HttpClient(**OPTIONS)._seconds_before_retry(asked, 0) for asked in (-1.0, 99.0)]
    assert waits == [0.0, 60.0]  # a server may not ask for more
    assert server.bodies == [{"a": 1}] * 3
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}


async def test_the_timeout_limits_the_whole_answer_and_not_each_piece():
    def trickle():
        for _ in range(50):
            time.sleep(0.05)
            yield b" "

    for server in (Answers((200, trickle())), Answers((200, "yes"), seconds=1.0)):
        with pytest.raises(HttpError, match=r"did not answer \(TimeoutError\)"):
            await post(server, timeout=0.3, max_retries=0)


async def test_at_most_max_concurrent_requests_are_in_flight():
    server = Answers((200, "yes"), seconds=0.05)
    with server.serving() as url:
        async with HttpClient(**{**OPTIONS, "max_concurrent": 3}) as client:
            await asyncio.gather(*(client.post(url, {}) for _ in range(12)))
    assert server.most_at_once == 3


class Theirs(ChatEndpoint):
    option, raises = "client.url", RuntimeError


def endpoint(url: str) -> Theirs:
    return Theirs(url=url, model="them", api_key_variable="THEIR_KEY", max_retries=0)


async def ask(server: Answers):
    with server.serving() as url:
        async with endpoint(url + "/").client(max_concurrent=1, timeout=5.0) as client:
            return await endpoint(url + "/").ask(client, messages=[])


async def test_an_answer_of_another_form_is_refused_without_the_key(monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "hunter2")
    for status, body in (
        *((200, "<html>hunter2"), (200, b"\xff\xfehunter2"), (200, {"hunter2": 1, "choices": []})),
        *((200, {"choices": [{"message": "hunter2"}]}), (200, completion(["hunter2"]))),
        (401, "wrong key: hunter2"),
    ):
        told = "not answer as the OpenAI API .* with '"
        said = told if status == 200 else r"wrong key: \(the key\)"
        with pytest.raises(RuntimeError, match=said) as caught:
            await ask(Answers((status, body)))
        assert str(caught.value).isprintable()
        assert "hunter2" not in str(caught.value)


async def test_access_is_refused_by_a_wrong_key_and_by_silence_alone():
    async def check(server: Answers, timeout: float = 60.0) -> None:
        with server.serving() as url:
            async with endpoint(url).client(max_concurrent=1, timeout=timeout) as client:
                await endpoint(url).check_access(client)

    await check(listless := Answers((404, "no such route")))
    assert listless.paths == ["/v1/models"]
    with pytest.raises(RuntimeError, match="refused the key in T"):
        await check(Answers((401, "")))
    with pytest.raises(RuntimeError, match="check that the server runs"):
        await check(Answers((200, "[]"), seconds=1.0), timeout=0.3)


PROMPT = "Q: {question} A: {answer} Said: {said}. {{yes or no}}"
JUDGE = {"model": "judge", "api_key_variable": None, "prompt": PROMPT, "max_score": None}
JUDGE |= {"temperature": 0.0, "max_tokens": 16, "timeout": 5.0, "max_retries": 2}
JUDGE |= {"retry_wait": 0.01, "max_concurrent": 4}


def saying(text: str) -> Answers:
    answer = completion(text)
    answer["choices"][0]["finish_reason"] = "length" if text.endswith("…") else "stop"
    return Answers((200, answer))


async def judged(server: Answers, **changes) -> float:
    with server.serving() as url:
        return await Judge(url=url, **{**JUDGE, **changes}).score("1+1?", "2", "two {x}")


async def test_a_judge_is_asked_about_an_episode_with_its_prompt_and_options(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    opening = [{"role": "system", "content": "S"}, user("0+1?"), user("1+1?")]
    episode = Episode(Example(0, "e", opening, {"answer": ["2", "two"]}), list(opening))
    episode.messages.append(assistant("<think>no</think> two {x}"))
    with (server := saying("No.")).serving() as url:
        assert await Judge(url=url, **{**JUDGE, "api_key_variable": "MY_KEY"})(episode) == 0.0
    text = "Q: 1+1? A: 2 or two Said: two {x}. {yes or no}"
    expected = {"model": "judge", "temperature": 0.0, "max_tokens": 16, "messages": [user(text)]}
    assert server.bodies == [expected]
    assert server.headers[0]["Authorization"] == "Bearer secret"


async def test_the_score_is_the_first_of_the_last_line_that_has_one():
    for text, max_score, score in (
        *(("Yes, because no other is.", None, 1.0), ("Not yes at first.\nVerdict: NO", None, 0.0)),
        *(("<think>no, no</think>\nyes\n", None, 1.0), ("yesterday: no", None, 0.0)),
        *(("7/10", 10.0, 0.7), ("3 reasons.\nScore: 2.5", 5.0, 0.5)),
        *(("0", 1.0, 0.0), ("10", 10.0, 1.0)),
        *(("Yes.\nNo other is…", None, 1.0), ("- _No_, because yes…", None, 0.0)),
    ):
        assert await judged(saying(text), max_score=max_score) == pytest.approx(score)


async def test_an_answer_without_a_score_is_an_error_and_no_reward():
    for text, max_score, problem in (
        ("maybe", None, "ask for yes or no in .* ends in 'maybe'"),
        ("good", 10.0, "ask for 0 to 10 in .* ends in 'good'"),
        ("11", 10.0, "gave 11 points, not 0 to 10"),
        ("\u22121", 10.0, "gave -1 points, not 0 to 10"),
        ("3 reasons speak for it…", 10.0, r"or raise judge\.max_tokens, which ended the answer"),
    ):
        with pytest.raises(JudgeError, match=problem):
            await judged(saying(text), max_score=max_score)


async def test_a_judge_without_an_answer_gives_no_reward():
    with pytest.raises(JudgeError, match=r"judge\.url=http.*answered 401: .*: the request had no"):
        await judged(Answers((401, "no such key")))
    with pytest.raises(JudgeError, match=r"judge\.model=judge: the prompt exceeds the context"):
        await judged(Answers((400, "maximum context length is 16 tokens")))


def test_impossible_options_are_refused_with_a_remedy():
    for changes, problem in (
        ({"prompt": "{question} {answer}"}, r"use \{said\} "),
        ({"api_key_variable": "NOT_THERE"}, "api_key_variable=NOT_THERE is not set"),
        ({"url": "localhost:8000"}, "judge.url=localhost:8000 is not an address"),
    ):
        with pytest.raises(ValueError, match=problem):
            Judge(**{"url": "http://x/v1", **JUDGE, **changes})
