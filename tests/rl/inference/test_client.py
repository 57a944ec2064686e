"""What the client makes of the scripted vLLM's answers and failures, and which replica it asks."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from aiohttp import ClientTimeout

from rl.inference import client as module
from rl.inference.client import RequestTally, VLLMClient
from rl.inference.completion import (
    AttemptFailed,
    Choice,
    GenerationError,
    RequestFailed,
    completion_of,
    prompt_logprobs,
)
from rl.inference.replica import Replica
from rl.inference.router import RequestGroup, Router
from rl.runtime.network import Address
from rl.sampling.clock import Clock
from tests.support.engine_faults import Abort, CutShort, Fault, Garbage, Hang, Status, TwoVersions
from tests.support.scripted import IM_END, SAMPLER, tiny_model, tiny_renderer
from tests.support.scripted_vllm import Engine, asking_for
from tests.support.served_engine import (
    GENERATE,
    PROMPT,
    SAMPLING,
    ServedEngine,
    a_group,
    served,
    serving,
)


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
    ],
)
def test_a_completion_needs_a_logprob_and_a_version_of_each_token(change, said):
    with pytest.raises(AttemptFailed, match=said):
        completion_of(choice(LIKELY, LIKELY, **change), [1])
    # The reason may be the number of a stop token, or a stop text.
    stops = [completion_of(choice(LIKELY, stop_reason=why), [1]).stop for why in (IM_END, "x")]
    assert stops == [None, "x"]


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


@pytest.mark.parametrize("fault", [Status(status=429), CutShort(times=2), Abort(times=3)])
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
        (Garbage(times=99), 3, r"vLLM's answer to /inference/v1/generate has an unexpected form"),
        (CutShort(times=99), 3, r"vLLM cannot be reached at .*vllm\.sock"),
        (Hang(seconds=2, times=99), 0, r"for sampler\.rollout_timeout=0\.2 s: raise it, or lower "),
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
    several = {"9": {"logprob": -7.0}, "2": {"logprob": -0.2}}  # vLLM may add likelier tokens
    assert prompt_logprobs({"prompt_logprobs": [None, several]}, [4, 2]) == [-0.2]


def replica(number: int, incarnation: int = 0) -> Replica:
    return Replica(f"inference{number}", Address(path=Path(f"/s{number}")), incarnation)


def numbers(router: Router) -> list[tuple[int, int]]:
    """Return number and incarnation of the replicas that may be asked."""
    replicas = [route.replica for route in router.routes]
    return [(int(one.name.removeprefix("inference")), one.incarnation) for one in replicas]


def test_a_new_group_goes_to_the_one_with_the_fewest_groups_then_requests():
    for groups, requests, chosen in (((2, 1, 1), (0, 3, 2), 2), ((2, 3, 4), (9, 0, 0), 0)):
        router = Router.with_replicas(*map(replica, range(3)))
        for route, count, pending in zip(router.routes, groups, requests, strict=True):
            route.num_groups, route.num_pending = count, pending
        assert RequestGroup(router).choose_route() is router.routes[chosen]


def test_only_replicas_with_the_newest_weights_get_requests_and_the_last_is_never_lost():
    router = Router.with_replicas(replica(0), replica(1))
    before = router.routes[0]
    assert router.lose(before, "")
    assert before.lost
    assert not router.lose(router.routes[0], "")
    router.serve([replica(0), replica(1)])  # the trainer has not noticed yet
    assert numbers(router) == [(1, 0)]
    router.serve([replica(1), replica(0, incarnation=1)])
    assert numbers(router) == [(1, 0), (0, 1)]
    router.serve([replica(0, incarnation=2)])
    assert numbers(router) == [(0, 2)]
    router.serve([])  # the last weights are asked while no replica has newer ones
    assert numbers(router) == [(0, 2)]


def test_only_a_replica_that_refuses_connections_is_gone():
    for connect in (Mock(), Mock(side_effect=TimeoutError)):  # it is slow, or its host is
        address: Any = SimpleNamespace(connect=connect)
        assert not Router().is_gone(Replica("slow", address), unanswered=True)
    assert Router().is_gone(replica(0), unanswered=True)
    assert not Router().is_gone(replica(0), unanswered=False)
    assert Router(restarted=lambda _: True).is_gone(replica(0), unanswered=False)


SLOW = Hang(seconds=60, times=99)


@asynccontextmanager
async def two_replicas(folder: Path, *faults: Fault) -> AsyncIterator[Any]:
    """Serve two engines, the first with faults; yield it, a client, its router and lost names."""
    model, lost = tiny_model(folder), list[str]()
    first, second = (ServedEngine(model, folder / f"{i}.sock", f"inference{i}") for i in range(2))
    router = Router(lambda replica, why: lost.append(replica.name))
    router.serve([first.replica, second.replica])
    async with first.serving(faults), second.serving(), first.client(router) as client:
        yield first, client, router, lost


@pytest.mark.parametrize("is_dead", [True, False])
async def test_open_and_waiting_requests_move_away_from_a_lost_replica(
    is_dead, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "file_limit", lambda: 8)  # two connections each
    async with two_replicas(tmp_path, SLOW) as (first, client, router, lost):
        groups = asyncio.gather(*(a_group(client, 3) for _ in range(4)))
        await asyncio.sleep(0.2)
        assert [client._session(route).connector.limit for route in router.routes] == [2, 2]
        if is_dead:
            await first.die()
        else:
            router.lose(router.routes[0], "")
        answers = await groups
        expected = await a_group(client, 1)
    assert all(answer == expected[0] for group in answers for answer in group)
    assert lost == ["inference0"]
    assert (first.tally.num_retried, first.tally.num_failed_in_a_row) == (0, 0)


async def test_a_cancelled_request_does_not_move(tmp_path):
    async with two_replicas(tmp_path, SLOW) as (_, client, router, lost):
        group = asyncio.create_task(a_group(client, 2))
        await asyncio.sleep(0.2)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert (lost, [route.num_pending for route in router.routes]) == ([], [0, 0])


async def test_a_replica_that_fails_every_request_is_lost_if_others_answer(tmp_path):
    broken = Status(status=404, times=31), Status(status=404, at=32, times=32)
    async with two_replicas(tmp_path, *broken) as (_, client, router, lost):
        for is_followed_by_an_answer in (True, False):
            for i in range(31):
                with pytest.raises(RequestFailed):
                    await ask(client)  # the first is the least busy, each time
                router.routes[0].num_groups += 1
                await ask(client)
                router.routes[0].num_groups -= 1
                assert (i, lost) == (i, [])
            if is_followed_by_an_answer:
                await ask(client)
        with pytest.raises(RequestFailed):
            await ask(client)
        assert lost == ["inference0"]
        await ask(client)


async def test_a_request_over_tcp_needs_the_key(tmp_path):
    routes = {GENERATE: Engine(tiny_model(tmp_path), 256).generate}
    async with serving(routes, None, asking_for("a key")) as (_, port):
        address = Address(host="127.0.0.1", port=port)
        keys = Replica("inference", address, key="a key"), Replica("inference", address)
        right, wrong = (Router.with_replicas(replica) for replica in keys)
        async with VLLMClient(wrong, model="policy", timeout=5) as client:
            with pytest.raises(RequestFailed, match="answered 401"):
                await ask(client)
        async with VLLMClient(right, model="policy", timeout=5) as client:
            assert (await ask(client))[0].token_ids
            session = client._session(*right.routes)
            # A total timeout would include the wait for a free connection.
            assert session.timeout == ClientTimeout(total=None, sock_connect=10.0, sock_read=5)
            assert 0 < (session.connector._keepalive_timeout or 0) < 5  # vLLM's own is 5 s


async def test_requests_wait_for_the_restart_of_the_only_replica_and_pause_their_clock(tmp_path):
    restarted, clock = set[int](), Clock(1.0)
    model = tiny_model(tmp_path)
    before, after = (ServedEngine(model, tmp_path / f"{name}.sock") for name in "ab")
    after.replica = replace(after.replica, incarnation=1)
    router = Router(restarted=lambda replica: replica.incarnation in restarted)
    router.serve([before.replica])

    async def timed():
        async with clock.run():
            return await a_group(client, 3)

    async with before.serving([SLOW]), after.serving(), before.client(router) as client:
        group = asyncio.create_task(timed())
        await asyncio.sleep(0.2)
        await before.die()
        restarted.add(0)
        await asyncio.sleep(1.5)  # longer than the clock runs
        assert (router.routes, group.done()) == ([], False)
        router.serve([before.replica])  # the trainer has not pushed to the new one yet
        assert router.routes == []
        router.serve([after.replica])
        assert len(await group) == 3
        router.lose(router.routes[0], "")
        last = asyncio.create_task(ask(client))
        await asyncio.sleep(0.1)
        router.end()
        with pytest.raises(RequestFailed, match="no vLLM answers, and the run is already ending"):
            await last
