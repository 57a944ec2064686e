"""A batch with everything that groups may have: forks, roles, errors, replays, demonstrations."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from losses.groups import Source
from rl.records import Credit, Group, Rollout, TrainingRow

WEIGHTS = {"exact": 1.0, "form": 0.5, "length": 0.0}


def row(form: str, seed: int, version: int = 3, hint: list[int] | None = None) -> TrainingRow:
    """Return a row from a form such as "ppp00rr11": prompt, turn 0, reply, turn 1.

    Rows of one decade of `seed` have the same prompt. Turn t has the version `version` + t.
    """
    turns = np.array([int(c) if c.isdigit() else -1 for c in form], np.int32)
    chosen, places = turns >= 0, np.arange(len(form))
    ids = np.where(np.cumsum(chosen) > 0, 20 + 3 * seed + places, seed // 10 + places)
    return TrainingRow(
        ids.astype(np.int32), chosen,
        np.where(chosen, -(places + 1 + seed % 10) / 16, 0).astype(np.float32),
        np.where(chosen, version + turns, -1).astype(np.int32), turns,
        None if hint is None else np.array(hint, np.int32),
    )  # fmt: skip


def rollout(reward: float | None, *rows: TrainingRow, stop: str = "stop", **fields: Any) -> Rollout:
    turns = 1 + max((int(each.turns.max()) for each in rows), default=-1)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"{reward}"}]
    plain = {"rewards": {}, "turns": turns, "generation_time": 0.5, "turn_limit": 4}
    return Rollout(rows, said, reward, stop_reason=StopReason(stop), **(plain | fields))


def rich_groups(credit: Any) -> list[Group]:
    """Return groups of two environments, with roles, and of failures, with these credits."""
    words = (
        rollout(1.5, row("ppp0000", 10), rewards={"exact": 1.0, "form": 1.0, "length": 4.0},
                turn_rewards={"form": (1.0,)}),
        rollout(0.25, row("ppp00rr11", 11), row("pppppp22", 12, 4), stop="max_tokens",
                rewards={"exact": 0.0, "form": 0.5, "length": 6.0}, generation_time=2.0,
                turn_rewards={"form": (0.5, 0.0, 0.0), "exact": (0.0, 0.25, math.nan)},
                tool_calls=3, tool_errors=1, retries=2),
        rollout(None, stop="env_error", error="Words.score raised ValueError: no", retries=1),
        rollout(0.5, row("ppp000000", 13, 2), stop="context", blocked_time=1.5,
                rewards={"exact": 0.5, "form": math.inf, "length": 6.0}),
    )  # fmt: skip
    maths = (
        rollout(1.0, row("pp0r1r2", 20, hint=[7, 8, 9]), rewards={"exact": 1.0, "form": 0.0}),
        rollout(1.0, row("pp0r1", 21, 4), stop="max_turns", rewards={"exact": 1.0}),
        rollout(0.0, row("pp00000", 22), stop="timeout", rewards={"exact": 0.0, "form": 0.0}),
    )
    duel = (("ppp0r1", "asker", 1.0), ("p00r0", "solver", 0.0), ("ppp0", "asker", 0.5),
            ("p0r11", "solver", 1.0))  # fmt: skip
    duels = [
        rollout(r, row(f, 30 + i), role=who, rewards={"exact": r})
        for i, (f, who, r) in enumerate(duel)
    ]
    failed = (rollout(None, row("p0", 40), stop="engine_error", error="vLLM"),) * 2
    named = [("words", words), ("maths", maths), ("duel", tuple(duels)), ("words", failed)]
    examples = [
        Example(100 + i, name, [{"role": "user", "content": "hi"}])
        for i, (name, _) in enumerate(named)
    ]
    return [
        Group(i, example, 3, rollouts, credit(example, rollouts))
        for i, (example, (_, rollouts)) in enumerate(zip(examples, named, strict=True))
    ]


def other_sources() -> list[Group]:
    """Return a replayed group of version 1 and a demonstration."""
    old = tuple(
        replace(rollout(reward, row(form, 50, 1)), source=Source.REPLAY)
        for reward, form in ((1.0, "pp00"), (0.0, "pp0r11"))
    )
    text = replace(row("pp000", 60), token_versions=np.full(5, -1, np.int32))
    shown = replace(rollout(1.0, text), source=Source.DEMONSTRATION)
    return [
        Group(
            7, Example(7, "words", []), 1, old, (Credit(1.0, (0.5,)), Credit(0.0, (-0.5,))), "@5"
        ),
        Group(-2, Example(-1, "words", []), 5, (shown,), (Credit(None, (0.0,), compared=()),)),
    ]
