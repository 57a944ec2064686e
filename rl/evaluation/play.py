"""Sample the rollouts of an evaluation: n examples of a split with k rollouts each.

    examples ---> Player ---> PlayedExample (an example and its rollouts) ---> Summary (summary.py)

The examples do not depend on the seed of a run, so that runs can be compared.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from envs.episode import Example, Split
from envs.protocol import Environment, Pool
from rl.evaluation.summary import PlayedExample
from rl.records import Rollout
from rl.runtime.files import json_line


def choose_examples(env: Environment, split: Split, num_examples: int) -> list[Example]:
    """Return up to `num_examples` examples. Raise ValueError if none exist or eval ids repeat."""
    pools = [pool for pool in env.pools(split) if pool.examples and pool.weight > 0]
    if not pools:
        raise ValueError(f"the environment {env.name!r} has no {split} examples: add some")
    chosen: list[Example] = []
    for pool, count in zip(pools, _examples_per_pool(pools, num_examples), strict=True):
        order = list(range(len(pool.examples)))
        random.Random("evaluation").shuffle(order)
        chosen += [pool.examples[i] for i in order[:count]]
    (name, number), count = Counter((one.env, one.id) for one in chosen).most_common(1)[0]
    if split == "eval" and count > 1:  # a report would count them as one example
        raise ValueError(f"{count} examples of {name!r} have the id {number}: give each its own id")
    return chosen


def _examples_per_pool(pools: Sequence[Pool], num_examples: int) -> list[int]:
    counts = [0] * len(pools)
    for _ in range(min(num_examples, sum(len(pool.examples) for pool in pools))):
        not_full = [i for i, pool in enumerate(pools) if counts[i] < len(pool.examples)]
        counts[min(not_full, key=lambda i: (counts[i] + 1) / pools[i].weight)] += 1
    return counts


async def play(
    play_group: Callable[[int, Example, int], Awaitable[tuple[Rollout, ...]]],
    examples: Sequence[Example],
    rollouts_per_example: int,
    *,
    max_concurrent: int,
    done: Callable[[PlayedExample], None] = lambda _: None,
) -> list[PlayedExample]:
    """Sample `rollouts_per_example` rollouts of each example; return them in the examples' order.

    At most max(`max_concurrent`, `rollouts_per_example`) rollouts run in parallel. `play` calls
    `done` with each finished example. An exception of `play_group` ends the evaluation.
    """
    # At least one group may run, even if it has more than max_concurrent rollouts.
    slots = asyncio.Semaphore(max(1, max_concurrent // rollouts_per_example))

    async def play_one(index: int, example: Example) -> PlayedExample:
        async with slots:
            rollouts = await play_group(index, example, rollouts_per_example)
        played = PlayedExample(example, rollouts)
        done(played)
        return played

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(play_one(i, example)) for i, example in enumerate(examples)]
    return [task.result() for task in started]


def write_rollouts(
    path: Path, played: Sequence[PlayedExample], extra_keys: Callable[[Example], Any] = lambda _: {}
) -> None:
    """Write a JSON line per rollout. `extra_keys(example)` is added to the example's lines."""
    pairs = ((one, extra_keys(one.example), r) for one in played for r in one.rollouts)
    path.write_text("".join(json_line(eval_line(one, r) | keys) for one, keys, r in pairs))


def eval_line(played: PlayedExample, rollout: Rollout) -> dict[str, object]:
    return {
        **rollout_line(played.example, rollout),
        "tool_errors": rollout.tool_errors,
        "tokens": rollout.num_completion,
        "generation_time": rollout.generation_time,
    }


def rollout_line(example: Example, rollout: Rollout) -> dict[str, object]:
    return {
        "example": example.id,
        "env": example.env,
        "messages": rollout.messages,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        **({"turn_rewards": rollout.turn_rewards} if rollout.turn_rewards else {}),
        **({"role": rollout.role} if rollout.role else {}),
        "stop_reason": rollout.stop_reason,
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "error": rollout.error,
    }
