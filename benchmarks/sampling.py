"""Compare the tokens a second that reach the trainer with what vLLM samples alone.

    python -m benchmarks.sampling [--groups 32] [--group-size 16] [--repeats 3]

`vllm offline` is vLLM's own `LLM.generate`. `offbyone` sends the same prompts through server,
socket, client, parser and reward, with the same model, lengths and flags. Both get all prompts at
once, one after the other. The best round of each counts. One JSON line each:

    {"who": "vllm offline", "tokens": ..., "seconds": ..., "tokens_per_s": ...}
    {"who": "offbyone", "tokens": ..., "seconds": ..., "tokens_per_s": ..., "of_offline": ...}
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._composing import compose
from envs.episode import Example
from envs.protocol import Environment
from rl.config.build import build
from rl.config.schema import Run
from rl.dry_call.learn import run_with_facts
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import ServedPolicy, VLLMServer, only_replica, run_vllm
from rl.model.tokenizer import load_renderer
from rl.runtime.folder import RunFolder
from rl.sampling.chat import ChatSettings
from rl.sampling.player import Player
from rl.supervisor.resolve import assign_devices

VERSION = 0


def measured(who: str, rounds: list[tuple[int, float]]) -> dict[str, Any]:
    """Return the line of the round with the most tokens a second."""
    tokens, seconds = max(rounds, key=lambda one: one[0] / one[1])
    rate = round(tokens / seconds)
    return {"who": who, "tokens": tokens, "seconds": round(seconds, 2), "tokens_per_s": rate}


def offline(task: dict[str, Any]) -> None:
    """Sample with `LLM` in this process, and write the result to the file of the task."""
    from vllm import LLM, SamplingParams

    engine = LLM(**task["engine"])
    sampling = SamplingParams(**task["sampling"])
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in task["prompts"]]
    rounds = []
    for _ in range(task["repeats"] + 1):  # the first round warms up
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        rounds.append((sum(len(o.token_ids) for one in outputs for o in one.outputs), seconds))
    Path(task["result"]).write_text(json.dumps(measured("vllm offline", rounds[1:])))


async def play_rounds(
    run: Run, run_folder: RunFolder, env: Environment, examples: list[Example], repeats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Play all groups at once through the server; return the line and the prompts sent."""
    sampler = build(run.sampler)()
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
    rounds = []
    async with build(run.client)().connect(setting) as chat:
        opened = [await chat.first_prompt(list(e.messages), env.tool_specs) for e in examples]
        player = Player(sampler, env, chat)
        for _ in range(repeats + 1):  # the first round warms up
            began = time.perf_counter()
            groups = await asyncio.gather(
                *(player.play_group(i, e, run.group_size) for i, e in enumerate(examples))
            )
            seconds = time.perf_counter() - began
            assert all(rollout.reward is not None for group in groups for rollout in group)
            rounds.append((sum(r.num_completion for group in groups for r in group), seconds))
    return measured("offbyone", rounds[1:]), [prompt.token_ids for prompt in opened]


def through_server(
    run: Run, run_folder: RunFolder, groups: int, repeats: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Start vLLM as a run does, and measure through it."""
    env: Environment = build(run.env)()
    examples = list(env.examples("train")[:groups])
    policy = ServedPolicy(dtype=run.model.dtype, max_seq_len=run.max_seq_len, seed=run.seed)
    with run_vllm(build(run.inference)(), run_folder, policy) as vllm:
        vllm.set_version(VERSION)
        return asyncio.run(play_rounds(run, run_folder, env, examples, repeats))


def main() -> None:
    """Measure through the server first, then the same prompts offline."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.offline:
        offline(json.loads(Path(arguments.offline).read_text()))
        return
    size = arguments.group_size
    config = compose([f"group_size={size}", f"batch_size={size * arguments.groups}"])
    run = assign_devices(run_with_facts(config)).run
    with tempfile.TemporaryDirectory() as name:
        run_folder, task = RunFolder(Path(name) / "run"), Path(name) / "task.json"
        result = task.with_name("result.json")
        model = build(run.model)()
        run_folder.set_model(model.prepare(run_folder.built_model))
        online, prompts = through_server(run, run_folder, arguments.groups, arguments.repeats)
        sampler = build(run.sampler)()
        stops = load_renderer(run_folder.initial_model(), model.renderer).get_stop_token_ids()
        given = {
            "engine": {
                "model": str(run_folder.initial_model()),
                "dtype": run.model.dtype,
                "max_model_len": run.max_seq_len,
                "logprobs_mode": "processed_logprobs",
                "load_format": "dummy",
                **(run.inference.args or {}),
            },
            "sampling": {
                "n": size,
                "temperature": sampler.temperature,
                "max_tokens": sampler.max_tokens,
                "stop_token_ids": stops,
                "logprobs": 0,
                "detokenize": False,
            },
            "prompts": prompts,
            "repeats": arguments.repeats,
            "result": str(result),
        }
        task.write_text(json.dumps(given))
        server: VLLMServer = build(run.inference)()
        # Use another process, so that our memory and threads do not slow down the reference.
        subprocess.run(
            [sys.executable, "-m", "benchmarks.sampling", "--offline", str(task)],
            env={**os.environ, **server.environment(adapter=None)},
            check=True,
        )
        limit = json.loads(result.read_text())
    online["of_offline"] = round(online["tokens_per_s"] / limit["tokens_per_s"], 3)
    print(json.dumps(limit), json.dumps(online), sep="\n")


if __name__ == "__main__":
    main()
