"""How many multi-turn episodes one rollouts process keeps in flight: wiki-search, its real tools.

    python -m benchmarks.concurrency [--episodes 10000]

vLLM is scripted: it knows the expert's answers and takes a random 0.1 to 1 s for each, so
what is measured is everything else: rendering, parsing, tools, rows, scoring. One JSON line each:

    {"in_flight": 10000, "seconds": ..., "turns_per_s": ..., "worst_lag_s": ..., "memory_mb": ...}

`turns_per_s` is to be held against what vLLM samples; `worst_lag_s` is the longest that the
loop kept anybody waiting.
"""

import argparse
import asyncio
import json
import random
import resource
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._composing import compose
from envs.episode import Example
from envs.wiki.environment import expert
from envs.wiki.facts import shipped
from envs.wiki.index import WikiIndex
from rl.config.build import build
from rl.config.schema import Run
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.model.tokenizer import load_renderer
from rl.sampling.demonstrations import tokenize
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat

GROUP_SIZE = 16
TICK_S = 0.01


class ScriptedEngine:
    """Says what the expert would, after a while."""

    def __init__(self, rows: list[Any]) -> None:
        self._completions: dict[tuple[int, ...], list[int]] = {}  # prompt -> completion
        for row in rows:
            ids, mask = row.token_ids.tolist(), row.completion_mask
            # A turn of the expert begins where the mask rises, and all before it was its prompt.
            starts = np.flatnonzero(mask & ~np.roll(mask, 1)).tolist()
            for start in starts:
                end = start + int(np.argmin(np.append(mask[start:], False)))
                self._completions[tuple(ids[:start])] = ids[start:end]
        self.turns = 0

    def group(self) -> AbstractContextManager["ScriptedEngine"]:
        """It is the only one."""
        return nullcontext(self)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, n: int, version: int
    ) -> list[Completion]:
        """Return the expert's turn, `n` times."""
        del sampling
        await asyncio.sleep(random.uniform(0.1, 1.0))
        self.turns += n
        prompt = list(prompt_ids)
        ids = self._completions[tuple(prompt)]
        return [Completion(ids, [-0.1] * len(ids), [version] * len(ids), False, prompt)] * n


async def worst_lag(stop: asyncio.Event) -> float:
    """Return the longest that the loop was late, in seconds, until `stop`."""
    worst = 0.0
    while not stop.is_set():
        before = time.perf_counter()
        await asyncio.sleep(TICK_S)
        worst = max(worst, time.perf_counter() - before - TICK_S)
    return worst


async def measure(run: Run, num_episodes: int) -> dict[str, float]:
    """Play them all at once."""
    env, sampler = build(run.env)(), build(run.sampler)()
    model = build(run.model)()
    renderer = load_renderer(model.prepare(Path()), model.renderer)
    index = WikiIndex(shipped()[0], run.env["num_results"])
    conversations = {q.text: expert(q, index) for q in shipped()[1] if q.level in run.env["levels"]}
    known = {text: messages for text, messages in conversations.items() if messages}
    examples: list[Example] = [
        e for e in env.examples("train") if e.messages[-1]["content"] in known
    ]
    chosen = random.Random(0).choices(examples, k=num_episodes // GROUP_SIZE)
    texts = {example.messages[-1]["content"] for example in chosen}
    rows = [tokenize(renderer, known[text], run.max_seq_len)[0] for text in texts]
    engine = ScriptedEngine(rows)
    chat = RendererChat(sampler, renderer, engine, run.max_seq_len, LiveVersion(0))
    player = Player(sampler, env, chat)
    stop = asyncio.Event()
    lag = asyncio.create_task(worst_lag(stop))
    began = time.perf_counter()
    groups = await asyncio.gather(
        *(player.play_group(i, example, GROUP_SIZE) for i, example in enumerate(chosen))
    )
    seconds = time.perf_counter() - began
    stop.set()
    rewards = [rollout.reward for group in groups for rollout in group]
    assert all(reward == 1.0 for reward in rewards), "the expert is always right"
    return {
        "in_flight": len(rewards),
        "seconds": round(seconds, 2),
        "episodes_per_s": round(len(rewards) / seconds, 1),
        "turns_per_s": round(engine.turns / seconds, 1),
        "worst_lag_s": round(await lag, 3),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Measure at a tenth, and at the whole number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=10_000)
    most = parser.parse_args().episodes
    run = Run(**compose(["env=wiki-search"]))
    for count in (most // 10, most):
        print(json.dumps(asyncio.run(measure(run, count))), flush=True)


if __name__ == "__main__":
    main()
