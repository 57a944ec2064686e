"""A batch with everything that groups may have, on its way from rewards to micro-batches.

It has forks, roles, errors, replays and demonstrations.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from envs.episode import Example, StopReason
from losses.groups import Source
from rl.config.build import build, component
from rl.records import Credit, Group, Rollout, TrainingRow
from rl.rollouts.batch_credit import apply_batch_credit
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.compared import compared_columns, compared_ids
from rl.rollouts.credit import GroupCredit
from rl.rollouts.plan import plan_batch, weighted_rows
from rl.rollouts.sampled_tokens import TokenRecord
from rl.rollouts.service import train_line
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import read_rows
from tests.support.composing import chosen
from tests.support.golden import golden

WEIGHTS = {"exact": 1.0, "form": 0.5, "length": 0.0}
MEAN = component(chosen("aggregation", "sequence_mean"))
SETTINGS: dict[str, tuple[str, str, str, float]] = {  # truncation, reward, advantage, penalty
    **{name: (name, "default", "group_mean", 0.0) for name in
       ("keep", "mask", "zero_reward", "mask_zero", "penalty", "drop")},
    "each": ("zero_reward", "normalise_each", "group_mean", 0.125),
    "each by turn": ("keep", "normalise_each", "turn_group_mean", 0.0),
    "turns": ("keep", "default", "turn_group_mean", 0.125),
    "none": ("keep", "default", "none", 0.0),
    "zscore": ("mask", "default", "group_zscore", 0.25),
}  # fmt: skip


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


def by_length(group):
    """Return an advantage per token: its position minus the mean length."""
    return [[i - sum(group.lengths) / len(group.lengths) for i in range(n)] for n in group.lengths]


def credit(truncation: str, reward: str, advantage: str, penalty: float) -> GroupCredit:
    soft = {"limit": 8, "start": 0.25, "weight": 0.5} if truncation == "penalty" else {}
    return GroupCredit(
        build(chosen("truncation", truncation) | soft),
        build(chosen("reward", reward) | {"length_penalty": penalty})(),
        component(chosen("advantage", advantage)), lambda example: WEIGHTS,
        per_turn=advantage == "turn_group_mean", compares=advantage != "none",
    )  # fmt: skip


PER_TOKEN = replace(credit(*SETTINGS["keep"]), advantage=by_length, per_token=True)
MASKED, TURNS = rich_groups(credit(*SETTINGS["mask"])), rich_groups(credit(*SETTINGS["turns"]))
EVERYTHING = [*MASKED, *other_sources()]


def test_credits():
    """Reward, advantages, turn rewards and compared numbers of each rollout, by settings."""
    cases = {name: rich_groups(credit(*how)) for name, how in SETTINGS.items()}
    cases |= {"tokens": rich_groups(PER_TOKEN)}
    whiten = component(chosen("batch_credit", "whiten"))
    cases |= {"whitened": apply_batch_credit(cases["keep"], whiten)}
    found = {
        name: [[*group.credits, compared_columns(group)] for group in groups]
        for name, groups in cases.items()
    }
    golden("rollouts/credits", found)


def test_metrics_lines_and_token_files_of_a_batch(tmp_path):
    """Metrics with and without other sources, lines of rollouts/*.jsonl, and the token record."""
    some = {"new": MASKED, "one environment": MASKED[:1], "one role": MASKED[1:2]}
    some |= {"failed": MASKED[3:], "sources": [*MASKED[:2], *other_sources()]}
    some |= {"demonstration": other_sources()[1:]}
    found: dict[str, Any] = {name: batch_metrics(groups, 6) for name, groups in some.items()}
    found["lines"] = [
        {"id": id, **train_line(group, rollout, credit, group.index != 1)}
        for group in [*EVERYTHING, rich_groups(PER_TOKEN)[0]]
        for id, rollout, credit in zip(
            group.rollout_ids, group.rollouts, group.credits, strict=True
        )
    ]
    records, folder = [TokenRecord(num_groups=n) for n in (None, 2, 0)], RunFolder(tmp_path)
    drawn = [record.choose(MASKED, other_sources(), step) for record in records for step in (0, 1)]
    found["chosen"] = [[group.index for group in groups] for groups in drawn]
    found["ids"] = [records[1].ids(MASKED, groups) for groups in ([], MASKED[1:2], MASKED)]
    records[0].write(folder, 4, EVERYTHING)
    records[0].write(folder, 5, [])
    found["files"] = sorted(path.name for path in folder.tokens.iterdir())
    found["rows"] = [[each.id, each.row, each.sampled] for each in read_rows(folder, 4)]
    golden("rollouts/metrics", found)


def test_plans_of_a_batch():
    """All columns of one plan, the rows of others by rank and micro-batch, weights per turn."""
    how = {"step": 5, "metrics": {"a": 1.0}}
    whole = plan_batch(EVERYTHING, MEAN, ranks=1, tokens_per_micro_batch=60, **how)
    found: dict[str, Any] = {"ids": compared_ids(EVERYTHING), "whole": whole}
    rng = np.random.default_rng(0)  # rows with equal and nested beginnings
    forms = ["pppp" + "0" * n for n in rng.integers(2, 14, 20)]
    nested = [
        Group(i, Example(i, "e", []), 0, (rollout(1.0, row(form, 10 + 10 * (i % 4))),),
              (Credit(1.0, (float(i % 5),)),)) for i, form in enumerate(forms)
    ]  # fmt: skip
    for ranks, budget, shared, groups in product((1, 3), (24, 48), (True, False), (True, False)):
        for name, batch in {"rich": EVERYTHING, "nested": nested}.items():
            try:
                options = {"shares_prefixes": shared, "whole_groups": groups, **how}
                shares = plan_batch(
                    batch, MEAN, ranks=ranks, tokens_per_micro_batch=budget, **options
                )
                rows = [
                    [[*m.rollout_ids, *m.token_ids.shape] for m in s.micro_batches] for s in shares
                ]
            except RuntimeError as error:
                rows = str(error)
            found[f"{name}, {ranks} ranks, {budget} tokens, {shared=}, {groups=}"] = rows
    turn_mean = component(chosen("aggregation", "turn_mean"))
    found["turns"] = [vars(each) for each in weighted_rows(TURNS, turn_mean, per_turn=True)]
    found["tokens"] = [each.advantages for each in weighted_rows(rich_groups(PER_TOKEN), MEAN)]
    golden("rollouts/plans", found)
