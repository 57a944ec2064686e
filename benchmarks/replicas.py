"""Measure how many episodes a second one rollouts process plays on one vLLM and on two.

    python -m benchmarks.replicas [--episodes 100 1000 10000]

Scripted servers (tests/support), each in its own process, answer at once, so the numbers show our
routing, HTTP, decoding and playing of alphabet-sort. `of_one` divides the rate by that on one
replica; with fewer cores than processes it shows the cost of routing. `of_bare_loop` divides the
requests a second by those of a loop that posts the same requests to one server and reads the JSON.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from benchmarks._measuring import folder_with, play, say
from rl.config.build import build
from rl.config.nodes import replica_names
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.inference.client import VLLMClient
from rl.inference.live_version import LiveVersion
from rl.inference.replica import Replica
from rl.inference.router import Router
from rl.inference.routes import VLLMRoutes, wait_until_healthy
from rl.inference.server import ServedPolicy, vllm_command
from rl.model.tokenizer import load_renderer
from rl.runtime.child import Child, Reaper, Start
from rl.runtime.devices import raise_file_limit
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.composing import composed
from tests.support.scripted_vllm import ScriptedVLLM

GROUP_SIZE = 10
START_S = 60.0


@contextmanager
def served(folder: RunFolder, number: int) -> Iterator[list[Replica]]:
    """Start `number` scripted servers, and end them with the block."""
    server: Any = ScriptedVLLM(replicas=number, listen="unix", startup_timeout=START_S, args={})
    policy = ServedPolicy(dtype="float32", max_seq_len=512, seed=0)
    folder.private.make()
    with ExitStack() as stack:
        stack.callback(folder.private.clear)
        reaper, replicas = stack.enter_context(Reaper()), []
        for name in replica_names(number):
            replica = Replica(name, Address(folder.private.vllm_socket_of(name)))
            command, env = vllm_command(server, folder, replica, policy)
            log = folder.log_of(name)
            stack.enter_context(Child(Start(name, command, log, env), reaper))
            wait_until_healthy(replica, START_S)
            with VLLMRoutes(replica, timeout=START_S) as vllm:
                vllm.set_version(0)
            replicas.append(replica)
        yield replicas


class Recording(VLLMClient):
    """Keep the bodies of all requests."""

    bodies: list[dict[str, Any]]

    async def request(self, path: str, body: dict[str, Any], *rest: Any, **further: Any) -> Any:
        """Send the request and keep its body."""
        self.bodies.append(body)
        return await super().request(path, body, *rest, **further)


async def played(
    run: Run, folder: RunFolder, replicas: list[Replica], num_episodes: int
) -> tuple[float, list[dict[str, Any]]]:
    """Play all episodes at once; return the seconds and the requests."""
    env, sampler = build(run.env)(), build(run.sampler)()
    sampler = replace(sampler, rollout_timeout=3600.0, max_tokens=64)
    renderer = load_renderer(folder.initial_model(), build(run.model)().renderer)
    every = env.examples("train")
    examples = [every[i % len(every)] for i in range(num_episodes // GROUP_SIZE)]
    client = Recording(Router.with_replicas(*replicas), model="policy", timeout=3600.0)
    client.bodies = []
    async with client:
        chat = RendererChat(sampler, renderer, client, run.max_seq_len, LiveVersion(0))
        took, rollouts = await play(Player(sampler, env, chat), examples, GROUP_SIZE)
    assert not any(rollout.error for rollout in rollouts)
    return took, client.bodies


async def bare_loop(replica: Replica, bodies: list[dict[str, Any]]) -> float:
    """Post all requests to one server at once, read the JSON, and return the seconds."""
    connector = aiohttp.UnixConnector(path=str(replica.address.path), limit=100)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession("http://x", connector=connector, timeout=timeout) as session:

        async def post(body: dict[str, Any]) -> None:
            body = {"model": "policy", **body}
            async with session.post("/inference/v1/generate", json=body) as response:
                json.loads(await response.read())

        began = time.perf_counter()
        await asyncio.gather(*map(post, bodies))
        return time.perf_counter() - began


def main() -> None:
    """Measure every number of episodes on one replica and on two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, nargs="*", default=[100, 1000, 10_000])
    counts = parser.parse_args().episodes
    raise_file_limit()
    run = run_with_facts(composed("env=alphabet-sort", "model.warm_start=null"))
    rates: dict[int, float] = {}
    with folder_with(run.model) as folder:
        for number in (1, 2):
            with served(folder, number) as replicas:
                asyncio.run(played(run, folder, replicas, counts[0]))  # warms up
                for count in counts:
                    took, bodies = asyncio.run(played(run, folder, replicas, count))
                    bare = asyncio.run(bare_loop(replicas[0], bodies))
                    say(
                        episodes=count,
                        replicas=number,
                        requests=len(bodies),
                        episodes_per_s=count / took,
                        of_one=count / took / rates.setdefault(count, count / took),
                        of_bare_loop=bare / took,
                    )


if __name__ == "__main__":
    main()
