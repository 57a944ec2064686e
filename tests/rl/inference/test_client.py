"""What the client makes of vLLM's answers and of its failures; the scripted server plays vLLM."""

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from rl.inference import client as module
from rl.inference.client import RequestTally, VLLMClient
from rl.inference.completion import (
    AttemptFailed,
    Choice,
    GenerationError,
    RequestFailed,
    completion_of,
)
from tests.support.engine_faults import Abort, CutShort, Hang, Status, TwoVersions
from tests.support.replicas import router_to
from tests.support.scripted import HI, IM_END, SAMPLER, tiny_renderer
from tests.support.served_engine import PROMPT, SAMPLING, served, serving

REPO = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_DELAY_S", 0.001)


async def ask(client: VLLMClient, *, n: int = 1, **sampling: Any) -> list[module.Completion]:
    with client.group() as group:
        return await group.generate(PROMPT, {**SAMPLING, **sampling}, n=n, version=7)


async def test_every_token_has_the_version_of_its_own_span_and_only_a_limit_cuts_off(tmp_path):
    async with served(tmp_path, TwoVersions()) as vllm, vllm.client() as client:
        vllm.engine._push("7")
        (pushed,) = await ask(client)  # version 7 arrives while it is sampled
        (whole,), (short,) = await ask(client), await ask(client, max_tokens=1)
    half = len(pushed.token_ids) // 2
    assert half
    assert pushed.versions == [6] * half + [7] * (len(pushed.token_ids) - half)
    assert whole.versions == [7] * len(whole.token_ids)
    assert len(pushed.logprobs) == len(pushed.token_ids)
    assert (short.cut_off, len(short.token_ids)) == (True, 1)
    assert (whole.cut_off, whole.token_ids[-1], whole.prompt_ids) == (False, IM_END, PROMPT)


LIKELY = [(5, -0.1), (7, math.log(1 - math.exp(-0.1))), (9, -9999.0)]


def choice(*likely: list[tuple[int, float]], **change: Any) -> Choice:
    """Return a choice whose tokens are the first of these (token, logprob) lists."""
    content = [
        {
            **dict(zip(("token_id", "logprob"), tokens[0], strict=True)),
            "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1} for t, p in tokens],
        }
        for tokens in likely
    ]
    made = {"token_ids": [tokens[0][0] for tokens in likely], "logprobs": {"content": content}}
    made["weight_versions"] = [{"start": 0, "end": len(likely), "version": "3"}]
    text = json.dumps(made | {"finish_reason": "stop", **change})
    return msgspec.json.decode(text, type=Choice)


def test_the_kept_tokens_are_those_that_vllm_did_not_mask_and_a_part_of_them_ends_the_run():
    found = completion_of(choice(LIKELY, [(4, 0.0), (5, -9999.0)]), [1], returns_kept=True)
    assert found.kept == [[5, 7], [4]]
    assert found.token_ids == [5, 4]
    assert completion_of(choice(LIKELY), [1]).kept == ()
    # 1e-4 of the probability may be missing, because float32 logprobs do not add up to 1.
    almost, part = ([(5, math.log(p)), (7, math.log(0.3))] for p in (0.69995, 0.6998))
    assert completion_of(choice(almost), [1], returns_kept=True).kept == [[5, 7]]
    message = "more tokens than the 2 that it returned, which have only 0.999800 of the probability"
    with pytest.raises(GenerationError, match=f"{message}.*or lower sampler.top_k"):
        completion_of(choice(part), [1], returns_kept=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish_reason": "abort"}, "finish_reason=abort"),
        ({"finish_reason": "error"}, "finish_reason=error"),
        ({"logprobs": None}, "2 tokens with 0 logprobs"),
        ({"weight_versions": None}, "2 tokens with 2 logprobs and weight versions None"),
        ({"stop_reason": IM_END}, None),  # the number of a stop token, not a stop string
        ({"stop_reason": "x"}, "x"),
    ],
)
def test_a_completion_needs_a_logprob_and_a_version_of_each_token(change, said):
    changed = choice(LIKELY, LIKELY, **change)
    if "stop_reason" in change:
        assert completion_of(changed, [1]).stop == said
    else:
        with pytest.raises(AttemptFailed, match=said):
            completion_of(changed, [1])


async def test_a_limited_sampler_asks_for_the_kept_tokens(tmp_path):
    def sampling(**changes: Any) -> Any:
        return replace(SAMPLER, **changes).sampling(tiny_renderer()).get("logprobs")

    assert (sampling(), sampling(top_p=0.9), sampling(top_k=200)) == (None, None, None)
    assert sampling(top_k=20, top_p=0.9) == 40
    assert sampling(top_k=2) == 20  # in bfloat16, more than 2 * top_k logits may be equal
    assert sampling(top_k=20, presence_penalty=0.5) is None
    assert sampling(top_k=20, allow_biased_ratio=True) is None
    async with served(tmp_path) as vllm, vllm.client() as client:
        await ask(client)
        with pytest.raises(GenerationError, match="more tokens than the 1 that it returned"):
            await ask(client, logprobs=40)
    assert [body["sampling_params"]["logprobs"] for body in vllm.bodies] == [0, 40]


async def test_the_prefix_cache_is_salted_with_the_version(tmp_path):
    async with served(tmp_path) as vllm, vllm.client() as client:
        with client.group() as group:
            for version in (7, 8):
                await group.generate(PROMPT, SAMPLING, n=2, version=version)
    (run, first), (same, second) = [body["cache_salt"].split("-") for body in vllm.bodies]
    assert (first, second) == ("v7", "v8")
    # A server may outlive the run, and its blocks of other weights must not match.
    assert run == same == client.salt
    async with vllm.client() as later:
        assert later.salt != run
    assert [body["sampling_params"]["n"] for body in vllm.bodies] == [2, 2]


@pytest.mark.parametrize(
    "fault",
    [Status(status=500, times=2), Status(status=429), CutShort(times=2), Abort(), Abort(times=3)],
)
async def test_a_passing_failure_is_retried_and_counted(fault, tmp_path, monkeypatch):
    sleep, delays = asyncio.sleep, []
    monkeypatch.setattr(asyncio, "sleep", lambda s: delays.append(s) or sleep(0))
    async with served(tmp_path, fault) as vllm, vllm.client() as client:
        completions = await ask(client, n=2)
    assert [c.token_ids[-1] for c in completions] == [IM_END] * 2  # whole ones
    assert vllm.tally == RequestTally(num_retried=fault.times)
    assert [s for s in delays if s] == [0.001, 0.002, 0.004][: fault.times]


@pytest.mark.parametrize(
    ("fault", "retried", "sentence"),
    [
        (Status(status=500, times=99), 3, r"vLLM answered 500 to /inference/v1/generate: .*scri"),
        (Status(status=400, times=99), 0, r"vLLM answered 400"),
        (CutShort(times=99), 3, r"vLLM cannot be reached at .*vllm\.sock"),
        (Hang(seconds=2, times=99), 0, r"for sampler\.rollout_timeout=0\.2 s: raise it, or lower "),
        (Abort(times=99), 3, r"vLLM ended a completion with finish_reason=abort"),
    ],
)
async def test_a_lasting_failure_is_an_error_of_one_request(fault, retried, sentence, tmp_path):
    async with served(tmp_path, fault) as vllm, vllm.client(timeout=0.2) as client:
        with pytest.raises(RequestFailed, match=rf"{sentence}.* \(details: logs/inference\.log\)"):
            await ask(client)
    assert vllm.tally == RequestTally(num_retried=retried, num_failed_in_a_row=1)


async def test_32_failures_in_a_row_end_the_run(tmp_path):
    faults = Status(status=404, times=31), Status(status=404, at=32, times=32)
    async with served(tmp_path, *faults) as vllm, vllm.client() as client:
        for answered in (True, False):
            for _ in range(31):
                with pytest.raises(RequestFailed):
                    await ask(client)
            if answered:
                await ask(client)
        with pytest.raises(GenerationError, match="32 requests to vLLM failed in a row") as end:
            await ask(client)
    assert not isinstance(end.value, RequestFailed)


async def test_a_malformed_answer_is_an_error_of_one_request(tmp_path):
    answers = iter(['{"choices": [{}]}', '{"choi', "[]", '{"choices": null}', "[1]" * 9] * 9)

    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(text=next(answers))

    client = VLLMClient(router_to(tmp_path / "s"), model="policy", timeout=5)
    async with serving({"/{path:.*}": nonsense}, tmp_path / "s"), client:
        for _ in range(5):
            with pytest.raises(RequestFailed, match="has an unexpected form"):
                await ask(client)
        with client.group() as group, pytest.raises(RequestFailed, match="has an unexpected form"):
            await group.tokenize(list(HI), None)


MANY = """
import asyncio, json, resource, sys
from pathlib import Path
soft, hard = int(sys.argv[2]), int(sys.argv[3])
from rl.inference.client import RequestTally, VLLMClient
from rl.runtime.devices import raise_file_limit
from tests.support.replicas import router_to
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_file_limit()

async def main():
    tally = RequestTally()
    router = router_to(Path(sys.argv[1]))
    async with VLLMClient(router, model="policy", timeout=60, tally=tally) as client:
        prompt, sampling = map(json.loads, sys.argv[4:])
        with client.group() as group:
            requests = (group.generate(prompt, sampling, n=1, version=0) for _ in range(300))
            answers = len(await asyncio.gather(*requests))
        print(answers, tally.num_retried, resource.getrlimit(resource.RLIMIT_NOFILE)[0])

asyncio.run(main())
"""


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 64, 64), (64, 1000, 1000)])
async def test_requests_beyond_the_limit_of_open_files_wait(soft, hard, raised, tmp_path):
    async with served(tmp_path, Hang(seconds=0.02, times=9999)) as vllm:
        given = [soft, hard, json.dumps(PROMPT), json.dumps(SAMPLING)]
        command = [sys.executable, "-c", MANY, str(vllm.socket), *map(str, given)]
        options = {"cwd": REPO, "capture_output": True, "text": True, "check": False}
        done = await asyncio.to_thread(subprocess.run, command, **options)
    assert done.stdout.split() == ["300", "0", str(raised)], done.stderr[-2000:]


async def test_given_tokens_are_scored_with_weights_of_one_version(tmp_path):
    async with served(tmp_path) as vllm, vllm.client() as client:
        vllm.engine._version = "8"  # a push that the rollouts process does not know yet
        with client.group() as group:
            logprobs, version = await group.score(PROMPT, 2, version=7)
            assert (len(logprobs), version) == (2, 8)
            assert len(vllm.bodies) == 2  # the push may have come in the middle of the first
            assert logprobs == (await group.score(PROMPT, 2, version=8))[0]
            assert len(vllm.bodies) == 3
            every, _ = await group.score(PROMPT, len(PROMPT) - 1, version=8)
        assert every[-2:] == logprobs
        asked = vllm.bodies[0]["sampling_params"]
        assert (asked["prompt_logprobs"], asked["max_tokens"], asked["temperature"]) == (0, 1, 1.0)
