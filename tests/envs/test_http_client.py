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


@pytest.mark.parametrize(
    ("answer", "times", "told"),
    [
        ((500, "out of\nmemory"), 3, "answered 500: out of memory, 3 times in a row"),
        ((500, "\x1b[2Jboo"), 3, "answered 500: [2Jboo, 3 times in a row"),
        ((408, "late"), 3, "answered 408: late, 3 times in a row"),
        ((401, "no such key"), 1, "answered 401: no such key"),
        ((307, "", {"Location": "http://127.0.0.1:9/"}), 1, "answered 307: "),
        ((200, BOMB, {"Content-Encoding": "gzip"}), 1, "compresses its answers"),
        ((200, b" " * ((1 << 20) + 1)), 1, "answers with more than 1 MiB"),
    ],
    ids=["busy", "escape", "late", "refusal", "redirect", "bomb", "endless"],
)
async def test_an_answer_that_cannot_be_used_is_an_error_of_one_line(answer, times, told):
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


def test_a_client_can_be_used_in_one_event_loop_after_another():
    client = HttpClient(**OPTIONS)
    with Answers((500, ""), (200, "yes")).serving() as url:
        assert [asyncio.run(client.post(url, {})) for _ in range(2)] == ["yes", "yes"]
    assert client.num_retries == 1
    # The server has gone, and the error is not that of a closed loop.
    with pytest.raises(HttpError, match=r"did not answer \(ConnectError: .*, 3 times in a row"):
        asyncio.run(client.post(url, {}))


class Theirs(ChatEndpoint):
    option, raises = "client.url", RuntimeError


def endpoint(url: str) -> Theirs:
    return Theirs(url=url, model="them", api_key_variable="THEIR_KEY", max_retries=0)


async def ask(server: Answers):
    with server.serving() as url:
        async with endpoint(url + "/").client(max_concurrent=1, timeout=5.0) as client:
            return await endpoint(url + "/").ask(client, messages=[])


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, "bad key", ": bad key: the server refused the key in THEIR_KEY: export the right"),
        (500, "oh no", ": oh no"),
    ],
)
async def test_a_refusal_names_the_address_and_the_remedy(status, body, told, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "secret")
    with pytest.raises(RuntimeError, match=rf"/v1/ answered {status}{told}") as caught:
        await ask(Answers((status, body)))
    assert str(caught.value).startswith("client.url=http://127.0.0.1:")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        *("<html>", "[" * 5000, b"\xff\xfe", [], {"error": "x"}, {"choices": []}),
        *({"choices": {"message": 1}}, {"choices": [{"message": "hi"}]}, completion(["yes"])),
        {**completion("x"), "usage": 7},
    ],
)
async def test_an_answer_of_another_form_is_refused(body):
    with pytest.raises(RuntimeError, match=r"not answer as the OpenAI API .* with '") as caught:
        await ask(Answers((200, body)))
    assert str(caught.value).isprintable()


async def test_a_conversation_beyond_the_context_has_no_answer():
    server = Answers((400, "This model's maximum context length is 16 tokens"))
    assert (await ask(server), server.paths) == (None, ["/v1/chat/completions"])
    with pytest.raises(RuntimeError, match="no context"):
        await ask(Answers((400, "this server takes no context")))


async def test_access_is_refused_by_a_wrong_key_and_by_silence_alone():
    async def check(server: Answers, timeout: float = 5.0) -> None:
        with server.serving() as url:
            async with endpoint(url).client(max_concurrent=1, timeout=timeout) as client:
                await endpoint(url).check_access(client)

    await check(Answers((200, "[]")))
    await check(listless := Answers((404, "no such route")))
    assert listless.paths == ["/v1/models"]
    for status, told in ((401, "refused the key in T"), (403, "refuses this model to the key")):
        with pytest.raises(RuntimeError, match=told):
            await check(Answers((status, "")))
    with pytest.raises(RuntimeError, match="check that the server runs"):
        await check(Answers((200, "[]"), seconds=1.0), timeout=0.3)


@pytest.mark.parametrize("status", [401, 400, 200])
async def test_a_key_that_the_server_repeats_is_in_no_message(status, monkeypatch):
    monkeypatch.setenv("THEIR_KEY", "hunter2")
    with pytest.raises(RuntimeError, match=r"\(the key\)") as caught:
        await ask(Answers((status, "wrong key: hunter2")))
    assert "hunter2" not in str(caught.value)


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


async def test_the_prompt_is_filled_in_and_the_request_has_the_options():
    server, text = saying("yes"), "Q: 1+1? A: 2 Said: two {x}. {yes or no}"
    assert await judged(server) == 1.0
    expected = {"model": "judge", "temperature": 0.0, "max_tokens": 16, "messages": [user(text)]}
    assert server.bodies == [expected]
    assert "Authorization" not in server.headers[0]
    limits = {"timeout": 7.0, "retry_wait": 3.0, "max_concurrent": 2, "max_retries": 5}
    client = Judge(url="http://host/v1", **{**JUDGE, **limits})._http_client
    assert {name: getattr(client, name) for name in limits} == limits


async def test_as_a_reward_it_is_asked_about_an_episode(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    opening = [{"role": "system", "content": "S"}, user("0+1?"), user("1+1?")]
    example = Example(0, "e", opening, {"answer": ["2", "two"]})
    said = assistant("<think>no</think> two")
    server = saying("No.")
    with server.serving() as url:
        judge = Judge(url=url, **{**JUDGE, "api_key_variable": "MY_KEY"})
        assert await judge(Episode(example, [*opening, said])) == 0.0
        # A prompt without {answer} needs no answer.
        bare = Judge(url=url, **{**JUDGE, "prompt": "Q: {question} Said: {said}"})
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
        *(("Yes.\nNo other is…", None, 1.0), ("- _No_, because yes…", None, 0.0)),
    ],
)
async def test_the_score_is_the_first_of_the_last_line_that_has_one(text, max_score, score):
    assert await judged(saying(text), max_score=max_score) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "max_score", "problem"),
    [
        ("maybe", None, "ask for yes or no in .* ends in 'maybe'"),
        ("", None, "ask for yes or no in .* ends in ''"),
        ("good", 10.0, "ask for 0 to 10 in .* ends in 'good'"),
        ("11", 10.0, "gave 11 points, not 0 to 10"),
        ("-1", 10.0, "gave -1 points, not 0 to 10"),
        ("\u22121", 10.0, "gave -1 points, not 0 to 10"),
        ("3 reasons speak for it…", 10.0, r"or raise judge\.max_tokens, which ended the answer"),
        ("I see no error…", None, r"or raise judge\.max_tokens"),
        ("<think>yes…", None, r"or raise judge\.max_tokens"),
    ],
)
async def test_an_answer_without_a_score_is_an_error_and_no_reward(text, max_score, problem):
    with pytest.raises(JudgeError, match=problem):
        await judged(saying(text), max_score=max_score)


async def test_a_judge_that_does_not_answer_gives_no_reward():
    with pytest.raises(JudgeError, match=r"judge\.url=http.*answered 401: .*: the request had no"):
        await judged(Answers((401, "no such key")))
    with pytest.raises(JudgeError, match=r"judge\.model=judge: the prompt exceeds the context"):
        await judged(Answers((400, "maximum context length is 16 tokens")))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": "{question} {answer}"}, r"use \{said\} "),
        ({"prompt": "{said} {json}"}, r"\['json', 'said'\]: use"),
        ({"api_key_variable": "NOT_THERE"}, "api_key_variable=NOT_THERE is not set"),
        ({"url": "localhost:8000"}, "judge.url=localhost:8000 is not an address"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(changes, problem):
    with pytest.raises(ValueError, match=problem):
        Judge(**{"url": "http://x/v1", **JUDGE, **changes})
