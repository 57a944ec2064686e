"""Call environment, order, buffer and strategy before training, mostly with made-up values."""

import asyncio
import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from envs.episode import Example
from envs.protocol import Environment, Pool
from rl.config.build import build
from rl.dry_call.report import BadResult, Report, json_round_trip, unwrap
from rl.dry_call.rewards import made_up_rollout
from rl.records import Credit, Group, Rollout
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.example_order import ExampleOrder
from rl.rollouts.mixed_buffer import MixedBuffer
from rl.sampling.strategy import StartedGroup, Strategy, play_strategy

ENV_TIMEOUT_S = 2.0
_MAX_EXAMPLES = 16  # maximum number of examples per pool in the dry call of an example order
_ROUNDS = 3  # number of batches drawn from a buffer; an order is asked for twice as many examples
# Maps an environment's options to the result of `read_pools`, because jobs often share options.
POOLS_CACHE: dict[str, tuple[list[str], list[Pool] | None]] = {}


def check_buffer(report: Report, node: Any, count: int, max_staleness: int) -> None:
    """Test a buffer: add groups, draw batches of `count` groups, save and load its state."""
    made = build(node)
    with report.calling("buffer", made, "made-up groups", ignored=KeyError):
        buffer, index, waiting, drawn_before = made(), 0, set[int](), set[int]()
        if not 1 <= (new := buffer.num_new(count)) <= count:
            raise BadResult(f"num_new({count}) returned {new}: return 1 to {count}")
        for step in range(_ROUNDS):
            for _ in range(2 * new if step == 0 else new):
                group = _made_up_group(index, step)
                if buffer.add(group):
                    waiting.add(index)
                index += 1
            drawn = buffer.draw(step, count, max(max_staleness, 1), ())
            if drawn is not None:
                indices = [group.index for group in drawn]
                distinct = len(set(indices)) == len(indices) <= count
                if not distinct or len(waiting.intersection(indices)) != new:
                    raise BadResult(
                        f"drew the groups {indices}: draw {new} new groups that add() accepted, as "
                        f"num_new({count}) says, at most {count - new} others, and no group twice"
                    )
                again = [group for group in drawn if group.index in drawn_before]
                names, own = ("state", "load", "undo_draw"), type(buffer)
                forgets = any(getattr(own, x) is getattr(FifoBuffer, x) for x in names)
                if any(forgets or not (g.suffix and g.rollouts[0].source) for g in again):
                    raise BadResult(
                        f"drew the group {again[0].index} in two batches: as MixedBuffer does, use "
                        "rl.rollouts.buffer.replayed and define state, load and undo_draw"
                    )
                waiting.difference_update(indices)
                drawn_before.update(indices)
        buffer.metrics()
        another = made()
        another.load(json_round_trip(buffer.state()))
        another.load({})


def _made_up_group(index: int, version: int, example: Example | None = None) -> Group:
    example = example or Example(index, "made up", [{"role": "user", "content": "made up"}])
    rollouts = tuple(made_up_rollout(reward, 2, 3) for reward in (0.0, 1.0, 0.5, None))
    credits = tuple(Credit(r.reward, (r.reward or 0.0,), True) for r in rollouts)
    return Group(index, example, version, rollouts, credits)


def check_order(report: Report, node: Any, pools: list[Pool]) -> None:
    """Test an example order: draw examples, let it observe groups, save and load its state."""
    made = build(node)
    pools = [
        replace(pool, examples=list(itertools.islice(pool.examples, _MAX_EXAMPLES)))
        for pool in pools
    ]
    with report.calling("order", made, "the first examples of the environment"):
        order, another = made(), made()
        for one in (order, another):
            one.begin(pools, 0)
        for index in range(2 * _ROUNDS):
            place = order.next(index)
            order.observe(place, _made_up_group(index, 0, order.example(place)))
        order.metrics()
        another.load(json_round_trip(order.state()))
        another.example(another.next(2 * _ROUNDS))


def check_strategy(
    report: Report, node: Any, group_size: int, env: Any, pools: Sequence[Pool]
) -> None:
    """Test a strategy with made-up rewards. Check that it suits the environment of each pool."""
    made, rollouts = build(node), []
    with report.calling("strategy", made, "attempts with made-up rewards"):
        made().num_first(group_size)
        for example in (pool.examples[0] for pool in pools):
            _check_environment(made(), build(env)().environment_of(example), example)
        strategy, memories, fields = made(), set[str](), set[str]()

        class WatchedRollout(Rollout):
            def __getattribute__(self, name: str) -> Any:
                fields.add(name)
                return super().__getattribute__(name)

        async def play_groups() -> None:
            for index, rewards in enumerate(([0.0], [0.0, 1.0], [None])):
                endless = itertools.cycle(rewards)

                async def play_one(*_: Any, endless: Any = endless, **__: Any) -> Rollout:
                    return WatchedRollout(**vars(made_up_rollout(next(endless), 3, 2)))

                group = StartedGroup(index, _made_up_group(index, 0).example)
                rollouts.extend(await play_strategy(strategy, group, play_one, group_size))
                memories.add(repr(vars(strategy)))  # only now, because group 0 may create a client

        asyncio.run(play_groups())
        if not rollouts or not all(isinstance(rollout, Rollout) for rollout in rollouts):
            raise BadResult("returned no rollouts: return rollouts that `play_one` returned")
        # If `retries` was read too, `dataclasses.replace` probably read all fields.
        if not strategy.reads_rewards and "reward" in fields and "retries" not in fields:
            raise BadResult("reads rewards: set reads_rewards = True, so that reports note it")
        if type(strategy).state is Strategy.state and len(memories) > 1:
            raise BadResult("remembers groups, but not after a resume: define state() and load()")
        made().load(json_round_trip(strategy.state()))


def _check_environment(strategy: Strategy, env: Environment, example: Example) -> None:
    if strategy.needs_hints:
        env.teacher_messages(example, list(example.messages))
    if strategy.reads_rewards and env.scores_groups:
        raise BadResult(
            f"reads rewards, but score_group of env {env.name!r} computes them later: use "
            "strategy=independent"
        )


def selects_by_rewards(config: Mapping[str, Any]) -> bool:
    """Return whether order, buffer or strategy may choose examples or rollouts by their rewards."""
    orders, buffers, plays = (unwrap(build(config[x])) for x in ("order", "buffer", "strategy"))
    return (
        getattr(orders, "observe", None) is not ExampleOrder.observe
        or getattr(buffers, "draw", None) not in (FifoBuffer.draw, MixedBuffer.draw)
        or any(
            getattr(buffers, x, None) is not getattr(FifoBuffer, x) for x in ("add", "why_useless")
        )
        or getattr(plays, "reads_rewards", True)
        or not getattr(plays, "fixed_size", False)
    )


def read_pools(node: Any) -> tuple[list[str], list[Pool] | None]:
    """Return (errors, training pools) of an environment, from POOLS_CACHE if it has them.

    The pools are None after a failure, or if reading them takes over two seconds. An `OSError` is
    not reported, because the rollouts process reports missing data when it starts.
    """
    if (key := repr(node)) in POOLS_CACHE:
        return POOLS_CACHE[key]
    made, trial = build(node), Report()
    found: list[list[Pool] | None] = [None]

    def read_examples() -> None:
        with trial.calling("env", made, ignored=OSError):
            try:
                env = made()
                pools = env.pools("train")
                for pool in pools:
                    if len(pool.examples) and not isinstance(pool.examples[0], Example):
                        kind = type(pool.examples[0]).__name__
                        raise BadResult(f"has examples of type {kind}: use envs.episode.Example")
                found[0] = pools
            except ValueError as error:  # signal.signal raises it outside the main thread
                if "main thread" not in str(error):
                    raise
                found[0] = []
                return
        # Draw a demonstration, so that `own_files` (learn.py) lists the files that drawing imports.
        with suppress(Exception):
            next(env.demonstrations(Random(0)), None)

    thread = threading.Thread(target=read_examples, daemon=True)
    thread.start()
    thread.join(ENV_TIMEOUT_S)
    POOLS_CACHE[key] = trial.problems, found[0]
    return POOLS_CACHE[key]


def check_methods(report: Report, env: type) -> None:
    """Check that methods of `env` accept the protocol's arguments, without calling them."""
    for method_name, names in (
        ("score", ["the episode"]),
        ("score_group", ["the episodes"]),
        ("reply", ["the episode", "the message"]),
        ("teacher_messages", ["the example", "the messages", "the episode", "the group"]),
    ):
        method = inspect.getattr_static(env, method_name, None)
        if not inspect.isfunction(method):
            continue
        with report.calling("env", method):
            try:
                inspect.signature(method).bind(None, *names)
            except TypeError as error:
                why = f"cannot be called ({error}): its parameters must be {' and '.join(names)}"
                raise BadResult(why) from None
