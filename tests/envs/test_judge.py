"""The judge: what it asks a real endpoint, how it reads the verdict, what it does without one."""

import asyncio
import gzip
import re
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from envs.episode import Episode, Example
from envs.judge import Judge, JudgeError

KNOBS = {
    "model": "judge",
    "api_key_variable": None,
    "prompt": "Q: {question} A: {answer} Said: {said}. {{yes or no}}",
    "max_score": None,
    "temperature": 0.0,
    "max_tokens": 16,
    "timeout": 5.0,
    "max_retries": 2,
    "retry_wait": 0.01,
    "max_concurrent": 4,
}


class Endpoint:
    """An OpenAI-compatible server that says `answers[i]` to request i, the last for ever after.

    A pair is an HTTP status and a body.
    """

    def __init__(self, *answers, seconds=0.0):
        self.answers, self.seconds = list(answers), seconds
        self.requests, self.headers, self.at_once, self.most_at_once = [], [], 0, 0

    async def chat(self, request):
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.seconds)
        self.at_once -= 1
        if isinstance(answer, tuple):
            status, text, *headers = answer
            body = text if isinstance(text, bytes) else text.encode()
            return web.Response(status=status, body=body, headers=headers[0] if headers else {})
        message = {"role": "assistant", "content": answer}
        return web.json_response({"choices": [{"message": message}]})


@asynccontextmanager
async def serving(endpoint):
    """The URL of a real server."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1/"
    finally:
        await runner.cleanup()


async def ask(endpoint, **changes):
    async with serving(endpoint) as url:
        return await Judge(url=url, **{**KNOBS, **changes}).score("1+1?", "2", "two {x}")


async def test_the_prompt_is_filled_in_and_the_request_is_what_the_knobs_say():
    endpoint = Endpoint("yes")
    assert await ask(endpoint) == 1.0
    assert endpoint.requests == [
        {
            "model": "judge",
            "temperature": 0.0,
            "max_tokens": 16,
            "messages": [
                {"role": "user", "content": "Q: 1+1? A: 2 Said: two {x}. {yes or no}"},
            ],
        }
    ]
    assert "Authorization" not in endpoint.headers[0]


async def test_as_a_reward_it_is_asked_about_an_episode(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    opening = [{"role": "system", "content": "S"}, {"role": "user", "content": "1+1?"}]
    example = Example(0, "e", opening, {"answer": ["2", "two"]})
    said = {"role": "assistant", "content": "<think>no</think> two"}
    endpoint = Endpoint("No.")
    async with serving(endpoint) as url:
        judge = Judge(url=url, **{**KNOBS, "api_key_variable": "MY_KEY"})
        assert await judge(Episode(example, [*opening, said])) == 0.0
    prompt = endpoint.requests[0]["messages"][0]["content"]
    assert prompt.startswith("Q: 1+1? A: 2 or two Said: two. ")
    assert endpoint.headers[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("text", "max_score", "score"),
    [
        ("Yes, because no other is.", None, 1.0),
        ("**no**", None, 0.0),
        ("Is it right? Not yes at first.\nVerdict: NO", None, 0.0),
        ("<think>no, no</think>\nyes\n", None, 1.0),
        ("yesterday: no", None, 0.0),
        ("7/10", 10.0, 0.7),
        ("3 reasons.\nScore: 2.5", 5.0, 0.5),
        ("0", 1.0, 0.0),
    ],
)
async def test_a_verdict_is_the_first_of_the_last_line_that_has_one(text, max_score, score):
    assert await ask(Endpoint(text), max_score=max_score) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "max_score", "problem"),
    [
        ("maybe", None, "was to say yes or no, and said: 'maybe'"),
        ("", None, "was to say yes or no, and said: ''"),
        ("good", 10.0, "was to say 0 to 10, and said: 'good'"),
        ("11", 10.0, "was to give 0 to 10 points, and gave 11"),
        ("-1", 10.0, "was to give 0 to 10 points, and gave -1"),
    ],
)
async def test_what_is_no_verdict_is_an_error_and_no_reward(text, max_score, problem):
    with pytest.raises(JudgeError, match=problem):
        await ask(Endpoint(text), max_score=max_score)


async def test_a_judge_that_is_busy_for_a_while_is_asked_again():
    endpoint = Endpoint((503, ""), (429, ""), "yes")
    assert await ask(endpoint) == 1.0
    assert len(endpoint.requests) == 3


async def test_a_judge_that_stays_away_is_an_error_that_says_how_often_it_was_asked():
    endpoint = Endpoint((500, "out of\nmemory"))
    with pytest.raises(JudgeError, match="answered 500: out of memory, 3 times in a row"):
        await ask(endpoint)
    assert len(endpoint.requests) == 3
    slow = Endpoint("yes", seconds=1.0)
    with pytest.raises(JudgeError, match=r"did not answer \(TimeoutError\): is it running"):
        await ask(slow, timeout=0.05, max_retries=0)
    async with serving(Endpoint("yes")) as url:
        gone = Judge(url=url, **KNOBS)
    with pytest.raises(JudgeError, match=r"did not answer \(ConnectError: .*, 3 times in a row"):
        await gone.score("q", "a", "s")


async def test_a_judge_that_refuses_is_not_asked_again():
    endpoint = Endpoint((401, "no such key"))
    with pytest.raises(JudgeError, match="chat/completions answered 401: no such key"):
        await ask(endpoint)
    assert len(endpoint.requests) == 1
    with pytest.raises(JudgeError, match="is no OpenAI-compatible endpoint, it answered: hello"):
        await ask(Endpoint((200, "hello")))


async def test_at_most_max_concurrent_questions_are_in_flight():
    endpoint = Endpoint("yes", seconds=0.02)
    async with serving(endpoint) as url:
        judge = Judge(url=url, **{**KNOBS, "max_concurrent": 3})
        scores = await asyncio.gather(*(judge.score("q", "a", str(i)) for i in range(12)))
    assert scores == [1.0] * 12
    assert endpoint.most_at_once == 3


def test_it_can_be_used_from_one_loop_after_another():
    async def twice():
        async with serving(Endpoint("yes")) as url:
            first.append(Judge(url=url, **KNOBS))
            return await first[-1].score("q", "a", "s")

    first = []
    assert asyncio.run(twice()) == 1.0
    with pytest.raises(JudgeError, match="did not answer"):  # and not: attached to another loop
        asyncio.run(first[0].score("q", "a", "s"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt": "{question} {answer}"}, r"must have \{said\}"),
        ({"prompt": "{said} {json}"}, r"\['json', 'said'\]: it may have"),
        ({"api_key_variable": "NOT_THERE"}, "NOT_THERE: this environment variable is not set"),
        ({"url": "localhost:8000"}, "must begin with http"),
        ({"max_score": 0.0}, "more than 0 points"),
        ({"max_concurrent": 0}, "max_concurrent=0"),
    ],
)
def test_impossible_knobs_are_refused_with_a_remedy(changes, problem):
    with pytest.raises(ValueError, match=problem):
        Judge(**{"url": "http://x/v1", **KNOBS, **changes})


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            (200, gzip.compress(bytes(10**7)), {"Content-Encoding": "gzip"}),
            "compresses its answers",
        ),
        ((200, b" " * (5 << 20)), "answers with more than 4 MiB"),
        ((307, "", {"Location": "http://127.0.0.1:9/"}), "answered 307"),
        ((200, "[" * 5000), "is no OpenAI-compatible endpoint, it answered: [[["),
        ((200, b"\xff\xfe"), "is no OpenAI-compatible endpoint, it answered: "),
        ((200, '{"choices": [{"message": {"content": ["yes"]}}]}'), "is no OpenAI-compatible"),
        ((200, '{"choices": {"message": 1}}'), "is no OpenAI-compatible endpoint"),
    ],
    ids=["bomb", "endless", "redirect", "deep", "no UTF-8", "parts", "no list"],
)
async def test_an_endpoint_that_means_harm_is_a_sentence(answer, told):
    with pytest.raises(JudgeError, match=re.escape(told)):
        await ask(Endpoint(answer), max_retries=0)


async def test_the_timeout_is_of_the_whole_answer_not_of_each_piece():
    async def trickle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(50):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    endpoint = Endpoint("yes")
    endpoint.chat = trickle
    with pytest.raises(JudgeError, match=r"did not answer \(TimeoutError\)"):
        await ask(endpoint, timeout=0.3, max_retries=0)
