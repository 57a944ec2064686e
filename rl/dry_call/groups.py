"""Dry calls of what computes with groups: advantage, aggregation, truncation, buffer, order, env.

Imports no torch. A made-up rollout has one token per unit of its turns' lengths.
"""

import inspect
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from envs.protocol import Environment, Pool
from rl.config.build import build
from rl.dry_call.report import Report, Wrong
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.credit import Crediting
from rl.rollouts.example_order import ExampleOrder

ENV_S = 2.0
_MOST_EXAMPLES = 64  # of a pool, for the order
_ROUNDS = 3
_LOOKED_UP: dict[str, tuple[list[str], list[Pool]]] = {}  # by environment, for a sweep
_OF_TRUNCATION = (
    "truncation_is_neutral",
    "truncation_lowers_rewards",
    "truncation_changes_rewards",
)


def made_up_rollout(
    reward: float | None, *turns: int, cut_off: bool = False, turn_limit: int | None = None
) -> Rollout:
    """Return a rollout of these many completion tokens in each turn, after one prompt token."""
    numbers = np.repeat(np.arange(len(turns), dtype=np.int32), turns)
    completion = np.ones(len(numbers), np.int32)
    row = TrainingRow(
        token_ids=np.concatenate([[0], completion]).astype(np.int32),
        completion_mask=np.concatenate([[False], completion > 0]),
        rollout_logprobs=np.concatenate([[0.0], -completion]).astype(np.float32),
        token_versions=np.concatenate([[-1], 0 * completion]).astype(np.int32),
        turns=np.concatenate([[-1], numbers]).astype(np.int32),
    )
    return Rollout(
        rows=(row,) if len(numbers) else (),
        messages=[{"role": "user", "content": "made up"}],
        reward=reward,
        rewards={} if reward is None else {"reward": reward},
        stop_reason=StopReason.MAX_TOKENS if cut_off else StopReason.STOP,
        turns=len(turns),
        generation_time=0.0,
        turn_limit=turn_limit,
    )


def check_advantage(report: Report, advantage: Any, group_size: int) -> dict[str, bool]:
    """Call an advantage on made-up groups; return whether it takes turns and compares rollouts."""
    # The first is not 0, because with group_size=1 a baseline would look like no advantage at all.
    whole: list[float | None] = [(1.0, 0.0, 0.5)[i % 3] for i in range(group_size)]
    ties: list[float | None] = [1.0] * group_size
    one_left: list[float | None] = [1.0, *[None] * (group_size - 1)]
    turns = [None if r is None else [r / 2] * (i % 3 + 1) for i, r in enumerate(whole)]
    per_rollout = Report()
    with per_rollout.calling("advantage", advantage, f"the rewards {whole[:3]} of a group"):
        _require_numbers(advantage(whole), group_size, "rollout")
    takes_turns = False
    if per_rollout.problems:
        by_turn = Report()
        with by_turn.calling("advantage", advantage, f"the rewards {turns[:3]} of turns"):
            _require_turns(advantage(turns), turns)
            takes_turns = True
        if not takes_turns:
            report.problems += per_rollout.problems
            return {}

    def form(rewards: Sequence[float | None]) -> list[Any]:
        return [None if r is None else [r, r] for r in rewards] if takes_turns else list(rewards)

    for rewards, what in (
        (ties, "equal rewards"),
        (one_left, "all rewards but one None, because they could not be scored"),
        ([None] * group_size, "None for each reward, because none could be scored"),
    ):
        with report.calling("advantage", advantage, what):
            given = form(rewards)
            result = advantage(given)
            _require_numbers(result, group_size, "rollout") if not takes_turns else _require_turns(
                result, given
            )
    if report.problems:
        return {}
    try:
        advantage(form([-1.0, -0.25, *[0.5] * (group_size - 2)][: max(group_size, 1)]))
        refuses_negative = False
    except Exception:  # noqa: BLE001 whatever it raises, it does not take such a reward
        refuses_negative = True
    plain = turns if takes_turns else whole
    return {
        "advantage_takes_turns": takes_turns,
        "advantage_is_reward": [*advantage(plain)] == plain,
        "advantage_compares": all(_is_zero(advantage, form([r])) for r in (1.0, 0.0, 0.37)),
        "advantage_refuses_negative": refuses_negative,
    }


def _is_zero(advantage: Any, alone: list[Any]) -> bool:
    """Return whether a rollout alone in its group has the advantage 0."""
    try:
        return not np.any(advantage(alone)[0])
    except Exception:  # noqa: BLE001 an advantage may need a larger group
        return False


def _require_numbers(numbers: Any, count: int, unit: str) -> None:
    if not isinstance(numbers, Sequence | np.ndarray):
        raise Wrong(
            f"returned a {type(numbers).__name__} for a group of {count}: return a list of one "
            f"number for each {unit}"
        )
    if len(numbers) != count:
        raise Wrong(f"returned {len(numbers)} numbers for {count}: return one for each {unit}")
    for number in numbers:
        if not isinstance(number, int | float | np.number) or not math.isfinite(number):
            raise Wrong(
                f"returned {number!r} in the place of a number: return a finite number for each "
                f"{unit}, 0 where there is nothing to learn"
            )


def _require_turns(result: Any, turns: Sequence[Sequence[float] | None]) -> None:
    if not isinstance(result, Sequence) or len(result) != len(turns):
        raise Wrong(f"returned no list of {len(turns)}: return a list of numbers for each rollout")
    for numbers, own in zip(result, turns, strict=True):
        if own is not None:
            _require_numbers(numbers, len(own), "turn of a rollout")


def check_aggregation(report: Report, aggregation: Any) -> dict[str, bool]:
    """Return whether an aggregation takes turns, and whether rollouts all weigh the same."""
    lengths, groups = [5, 3, 0, 8], [0, 0, 1, 1]
    by_turn = [[2, 3], [3], [], [4, 4]]
    whole = Report()
    with whole.calling("aggregation", aggregation, f"the lengths {lengths}"):
        weights = aggregation(lengths, groups)
        _require_numbers(weights, len(lengths), "rollout")
        totals = [w * n for w, n in zip(weights, lengths, strict=True) if n]
        is_equal = max(totals) - min(totals) < 1e-9
        return {"aggregation_takes_turns": False, "aggregation_weighs_sequences": is_equal}
    turns = Report()
    with turns.calling("aggregation", aggregation, f"the lengths {by_turn} of turns"):
        _require_turns(aggregation(by_turn, groups), by_turn)
        return {"aggregation_takes_turns": True, "aggregation_weighs_sequences": False}
    report.problems += whole.problems
    return {}


def check_truncation(
    report: Report, truncation: Any, shaping: Any, longest: int
) -> dict[str, bool]:
    """Return what a truncation changes; call the shaping of rewards on what it returned."""
    rollouts = [
        *(made_up_rollout(reward, 2, 3) for reward in (0.0, 1.0, None)),
        *(made_up_rollout(reward, longest, cut_off=True) for reward in (0.0, 1.0, None)),
        made_up_rollout(1.0, longest, cut_off=True, turn_limit=longest),
        made_up_rollout(0.0, longest, cut_off=True, turn_limit=longest),
        made_up_rollout(0.5),  # without a token
    ]
    pairs: list[tuple[Rollout, Credit]] = []
    # A made-up rollout has no rewards by the names of the environment, hence KeyError.
    with report.calling("truncation", truncation, "a made-up rollout", unknown=KeyError):
        for rollout in rollouts:
            credit = truncation(rollout)
            if not isinstance(credit, Credit):
                raise Wrong(
                    f"returned a {type(credit).__name__}: return Credit(reward, trains=...) of "
                    "rl/records.py"
                )
            pairs.append((rollout, credit))
    if len(pairs) < len(rollouts):
        return dict.fromkeys(_OF_TRUNCATION, False)
    example = Example(0, "made up", [{"role": "user", "content": "made up"}])
    with report.calling("reward", shaping, "a made-up group"):
        crediting = Crediting(
            truncation, shaping, lambda rewards: [0.0] * len(rewards), lambda _: {"reward": 1.0}
        )
        crediting(example, rollouts)
    rewards = [(r.reward, c.reward) for r, c in pairs if None not in (r.reward, c.reward)]
    return {
        "truncation_is_neutral": all(c == Credit(r.reward) for r, c in pairs),
        "truncation_lowers_rewards": any(after < 0 for _, after in rewards if after is not None),
        "truncation_changes_rewards": any(before != after for before, after in rewards),
    }


def check_buffer(report: Report, node: Any, count: int, max_staleness: int) -> None:
    """Add groups and draw batches for a few rounds, saving and loading the state in between."""
    made = build(node)
    with report.calling("buffer", made, "made-up groups", unknown=KeyError):
        buffer, waiting, index = made(), set[int](), 0
        _require_methods(buffer, FifoBuffer, ("add", "draw", "state", "load"))
        for step in range(_ROUNDS):
            for _ in range(2 * count if step == 0 else count):
                group = _made_up_group(index, step)
                if buffer.add(group):
                    waiting.add(index)
                index += 1
            drawn = buffer.draw(step, count, max(max_staleness, 1), ())
            if drawn is not None:
                indices = [group.index for group in drawn]
                if len(indices) != count or not waiting.issuperset(indices):
                    raise Wrong(
                        f"drew {len(indices)} groups, some of them not waiting or not {count}"
                    )
                if len(set(indices)) != count:
                    raise Wrong(f"drew a group twice: {sorted(indices)}; return each group once")
                waiting.difference_update(indices)
        another = made()
        another.load(_as_saved(buffer.state()))
        another.load({})


def _made_up_group(index: int, version: int, example: Example | None = None) -> Group:
    example = example or Example(index, "made up", [{"role": "user", "content": "made up"}])
    rollouts = tuple(made_up_rollout(reward, 2, 3) for reward in (0.0, 1.0, 0.5, None))
    credits = tuple(Credit(r.reward, (r.reward or 0.0,), True) for r in rollouts)
    return Group(index, example, version, rollouts, credits)


def _require_methods(made: object, base: type, methods: Sequence[str]) -> None:
    """Raise Wrong if a method is missing, some of which are called only after a resume."""
    if missing := [name for name in methods if not callable(getattr(made, name, None))]:
        names = " and no ".join(f"{name}()" for name in missing)
        raise Wrong(f"has no {names}: derive it from {base.__module__}.{base.__qualname__}")


def _as_saved(state: Any) -> Any:
    """Return the state after it was in a checkpoint."""
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise Wrong(
            f"has a state() that a checkpoint cannot keep ({error}): return plain values, with "
            "text as keys"
        ) from error


class _First(Sequence[Example]):
    """The first examples of a pool, which need not support slices and are made when read."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return min(len(self._examples), _MOST_EXAMPLES)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._examples[index]


def check_order(report: Report, node: Any, pools: list[Pool]) -> None:
    """Take examples for a few rounds, tell the order of the groups, and save and load it."""
    made = build(node)
    pools = [replace(pool, examples=_First(pool.examples)) for pool in pools]
    with report.calling("order", made, "the first examples of the environment"):
        order, another = made(), made()
        methods = ("begin", "next", "example", "observe", "state", "load", "metrics")
        _require_methods(order, ExampleOrder, methods)
        for one in (order, another):
            one.begin(pools, 0)
        for index in range(2 * _ROUNDS):
            place = order.next(index)
            order.observe(place, _made_up_group(index, 0, order.example(place)))
        order.metrics()
        another.load(_as_saved(order.state()))
        another.example(another.next(2 * _ROUNDS))


def first_examples(report: Report, node: Any) -> list[Pool]:
    """Return the environment's training examples, none if they take longer than two seconds.

    Data that cannot be reached says so when the rollouts start: `OSError` is not a problem here.
    """
    key = repr(node)
    if key not in _LOOKED_UP:
        _LOOKED_UP[key] = _look_up(node)
    problems, pools = _LOOKED_UP[key]
    report.problems += problems
    return pools


def _look_up(node: Any) -> tuple[list[str], list[Pool]]:
    made, pools, trial = build(node), list[Pool](), Report()

    def look() -> None:
        with trial.calling("env", made):
            try:
                env = made()
                for pool in env.pools("train"):
                    if len(pool.examples) and not isinstance(pool.examples[0], Example):
                        kind = type(pool.examples[0]).__name__
                        raise Wrong(f"has examples that are a {kind}: return envs.episode.Example")
                    pools.append(pool)
            except OSError:
                pools.clear()
            except ValueError as error:  # a signal handler, which only the main thread may set
                if "main thread" not in str(error):
                    raise
                pools.clear()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(ENV_S)
    if thread.is_alive():
        return [], []
    return trial.problems, [pool for pool in pools if len(pool.examples)]


def check_methods(report: Report, env: type) -> None:
    """Compare the parameters of `score` and `reply`, which are not called, with the protocol's."""
    for name, given in (("score", 1), ("reply", 2)):
        method = getattr(env, name, None)
        static = isinstance(inspect.getattr_static(env, name, None), staticmethod)
        if method is None or static or method is getattr(Environment, name):
            continue
        code = getattr(method, "__code__", None)
        if (
            code
            and not code.co_flags & 4
            and not (
                code.co_argcount - len(method.__defaults__ or ()) <= given + 1 <= code.co_argcount
            )
        ):
            with report.calling("env", method):
                raise Wrong(
                    f"takes {code.co_argcount - 1} arguments: take "
                    f"{'the episode' if given == 1 else 'the episode and the message'}"
                )
