"""An update with shared prefixes, compared with plain torch on each row by itself."""

import dataclasses

import pytest
import torch

from tests.support.policy_setup import BUDGETS, PlainSteps, adapted, without_advantage
from tests.support.ranks import on_ranks, per_world
from tests.support.tiny_policy import flat, relative_error


def forked_rows(rows):
    """Return rows with few different tokens, so that many begin alike, and two equal rows."""
    # The advantages are small, because the policy moves by the whole gradient and must stay random.
    few = [
        dataclasses.replace(row, token_ids=row.token_ids % 3, advantages=row.advantages / 40)
        for row in rows
    ]
    longest = max(few, key=lambda row: row.length)
    return [*few, longest, without_advantage(longest)]


MODES = {
    1: (("zero0 shared", False), ("zero2 shared", False), ("zero3 shared compiled", True)),
    2: (("zero2 shared", True), ("zero3 scattered shared checkpointing", False)),
}


@per_world("mode, adapter", MODES)
@on_ranks
def test_the_update_is_the_gradient_of_rows_that_share_nothing(setup, mode, adapter):
    setup = adapted(setup) if adapter else setup
    rows = forked_rows(setup.rows)
    policy = setup.policy("float32", mode, PlainSteps())
    before = setup.everywhere(policy)
    idle = [*rows[:5], *map(without_advantage, rows[5:])]
    num_idle = sum(row.num_completion for row in idle if not row.has_advantage)
    fraction = num_idle / sum(row.num_completion for row in idle)
    given = {"lone": rows[:1], **dict.fromkeys(BUDGETS, rows), "idle": idle}
    for split, some in given.items():
        value, gradient = setup.plain(before, some)
        batch = setup.split(some, BUDGETS.get(split, 1), shared=split != "several")
        stats = policy.update(batch, setup.objective)
        after = setup.everywhere(policy)
        update = {name: before[name].double() - after[name].double() for name in before}
        before = after
        norm = float(flat(gradient).norm())
        assert norm > 0.01
        # Rounding of the weights to float32 moves the update by about 1e-6.
        assert relative_error(update, gradient) < 1e-5 + 1e-6 / norm, split
        assert stats["train/loss"] == pytest.approx(value, rel=1e-4)
        expected = {"idle": fraction, "lone": 0.0}.get(split)
        if expected is not None:
            assert stats["train/zero_gradient_fraction"] == pytest.approx(expected)


@per_world("mode", {1: ("zero0",)})
@on_ranks
def test_the_token_record_has_the_numbers_of_rows_that_share_nothing(setup, mode):
    batch, records = setup.split(forked_rows(setup.rows), BUDGETS["several"]), []
    for how in (mode, f"{mode} shared"):
        policy, seen = setup.policy("float32", how, PlainSteps()), []
        policy.update(batch, setup.objective, updates=2, observer=lambda *one: seen.append(one))  # noqa: B023
        records.append(seen)
    assert [one[:2] for one in records[0]] == [one[:2] for one in records[1]]
    assert torch.cat([numbers["grad"] for _, _, numbers in records[0]]).abs().max() > 1e-3
    for (*_, plain), (*_, shared) in zip(*records, strict=True):
        assert {"pi", "grad"} <= plain.keys() == shared.keys()
        for name, values in plain.items():
            torch.testing.assert_close(shared[name], values, rtol=1e-4, atol=1e-5)
