"""A rich batch (tests/support/rich_groups.py) on its way from rewards to micro-batches."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from envs.episode import Example
from rl.config.build import build, component
from rl.records import Credit, Group
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
from tests.support.rich_groups import WEIGHTS, other_sources, rich_groups, rollout, row

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
