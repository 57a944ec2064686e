"""Compare the tokens a second that reach the trainer with what vLLM samples alone.

    python -m benchmarks.sampling [--groups 32]

`vllm offline` is vLLM's own `LLM.generate`. `offbyone` sends the same prompts through server,
socket, client, parser and reward, with the same model, lengths and flags. Both get all prompts at
once, one after the other. The best round of each counts.
"""

import argparse
import asyncio
import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from typing import Any

from benchmarks._measuring import folder_with, say
from rl.config.build import build
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import ServedPolicy, only_replica, run_vllm
from rl.model.tokenizer import load_renderer
from rl.runtime.folder import RunFolder
from rl.sampling.chat import ChatSettings
from rl.sampling.player import Player
from rl.supervisor.resolve import assign_devices
from tests.support.composing import composed

GROUP_SIZE, REPEATS, VERSION = 16, 3, 0
Rounds = list[tuple[int, float]]  # tokens and seconds of each round


def best_rate(rounds: Rounds) -> int:
    """Return the most tokens a second of a round; the first one warms up."""
    return round(max(tokens / seconds for tokens, seconds in rounds[1:]))


def offline(
    variables: dict[str, str], engine: dict[str, Any], options: dict[str, Any], prompts: list[Any]
) -> Rounds:
    """Sample with `LLM` in this process."""
    os.environ |= variables
    from vllm import LLM, SamplingParams

    llm, sampling, rounds = LLM(**engine), SamplingParams(**options), []
    given: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        outputs = llm.generate(given, sampling, use_tqdm=False)
        took = time.perf_counter() - began
        rounds.append((sum(len(o.token_ids) for one in outputs for o in one.outputs), took))
    llm.llm_engine.engine_core.shutdown()  # this process waits for vLLM's process when it ends
    return rounds


async def online(run: Run, run_folder: RunFolder, groups: int) -> tuple[Rounds, list[Any]]:
    """Play all groups at once through the server; return the rounds and the prompts sent."""
    env, sampler = build(run.env)(), build(run.sampler)()
    examples, rounds = list(env.examples("train")[:groups]), []
    setting = ChatSettings(
        sampler=sampler,
        max_seq_len=run.max_seq_len,
        is_multi_turn=env.is_multi_turn,
        version=LiveVersion(VERSION),
        router=Router.with_replicas(only_replica(run_folder)),
        served_as="policy",
        model=run_folder.initial_model(),
        renderer=build(run.model)().renderer,
    )
    async with build(run.client)().connect(setting) as chat:
        opened = [await chat.first_prompt(list(e.messages), env.tool_specs) for e in examples]
        player = Player(sampler, env, chat)
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            played = [player.play_group(i, one, GROUP_SIZE) for i, one in enumerate(examples)]
            rollouts = list(chain.from_iterable(await asyncio.gather(*played)))
            took = time.perf_counter() - began
            assert all(rollout.reward is not None for rollout in rollouts)
            rounds.append((sum(rollout.num_completion for rollout in rollouts), took))
    return rounds, [prompt.token_ids for prompt in opened]


def main() -> None:
    """Measure through the server first, then the same prompts offline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=32)
    groups = parser.parse_args().groups
    config = composed(f"group_size={GROUP_SIZE}", f"batch_size={GROUP_SIZE * groups}")
    run = assign_devices(run_with_facts(config)).run
    server, sampler, model = build(run.inference)(), build(run.sampler)(), build(run.model)()
    with folder_with(run.model) as folder:
        policy = ServedPolicy(dtype=run.model.dtype, max_seq_len=run.max_seq_len, seed=run.seed)
        with run_vllm(server, folder, policy) as vllm:
            vllm.set_version(VERSION)
            ours, prompts = asyncio.run(online(run, folder, groups))
        engine = {
            "model": str(folder.initial_model()),
            "dtype": run.model.dtype,
            "max_model_len": run.max_seq_len,
            "logprobs_mode": "processed_logprobs",
            "load_format": "dummy",
            **(run.inference.args or {}),
        }
        renderer = load_renderer(folder.initial_model(), model.renderer)
        options = {
            "n": GROUP_SIZE,
            "temperature": sampler.temperature,
            "max_tokens": sampler.max_tokens,
            "stop_token_ids": renderer.get_stop_token_ids(),
            "logprobs": 0,
            "detokenize": False,
        }
        variables = server.environment(adapter=None)
        # Another process has memory and threads of its own.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            alone = pool.submit(offline, variables, engine, options, prompts).result()
    limit, reached = best_rate(alone), best_rate(ours)
    say(who="vllm offline", tokens_per_s=limit)
    say(who="offbyone", tokens_per_s=reached, of_offline=reached / limit)


if __name__ == "__main__":
    main()
