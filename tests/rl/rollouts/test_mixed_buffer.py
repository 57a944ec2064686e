"""A batch has new groups, groups of earlier batches with their old versions, and demonstrations.

It has the oldest new groups and waits for those that a later batch could not hold.
"""

import json
import math
from collections import Counter
from dataclasses import asdict, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from envs.episode import Example
from envs.messages import assistant, user
from losses.aggregation import token_mean
from losses.groups import Source
from rl.records import Credit, Group, RankBatch
from rl.rollouts import __main__ as main
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.dispatcher import DispatcherState
from rl.rollouts.mixed_buffer import MixedBuffer
from rl.rollouts.plan import plan_batch
from rl.rollouts.service import train_line
from rl.sampling.demonstrations import DemonstrationSampler
from rl.wire import pack, unpack
from tests.support.composing import composed
from tests.support.rollouts import graded, rollout, row
from tests.support.scripted import ScriptedEnv, text, tiny_model
from tests.support.world import World

SHOWN = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)


def buffer(**options) -> MixedBuffer:
    plain = {"replay_share": 0.5, "demonstration_share": 0.0, "capacity": 8, "max_staleness": 3}
    return MixedBuffer(**{**plain, "demonstrations": SHOWN, **options})


def group(index: int, version: int, rewards=(1.0, 0.0), advantages=(0.5, -0.5)) -> Group:
    made = graded(rewards, advantages, index, version)
    return replace(made, example=Example(0, "e", [], {"secret": object()}))


def ids(groups: list[Group]) -> list[str]:
    return [group.rollout_ids[0] for group in groups]


def test_batches_by_hand():
    """Half of a batch of two is replayed, and a group may be at most three versions old."""
    mixed, groups = buffer(), [group(index, index) for index in range(6)]
    for each in groups:
        mixed.add(each)
    assert mixed.num_new(2) == 1
    assert ids(mixed.draw(0, 2, 1, ())) == ["000000.0"]  # nothing to replay yet
    drawn, first = mixed.draw(1, 2, 1, ()), groups[0]
    assert ids(drawn) == ["000001.0", "000000.0@1"]
    again = drawn[1]  # with its rewards, advantages and tokens
    assert (again.version, again.credits, again.rewards) == (0, first.credits, first.rewards)
    assert all(a.rows is b.rows for a, b in zip(again.rollouts, first.rollouts, strict=True))
    second = ids(mixed.draw(2, 2, 1, ()))
    assert second[0] == "000002.0"
    assert second[1] in ("000000.0@2", "000001.0@2")
    assert mixed.metrics() == {"stored": 3, "expired": 0}
    assert ids(mixed.draw(5, 2, 2, ()))[1] == "000002.0@5"  # versions 0 and 1 are too old
    assert mixed.metrics() == {"stored": 2, "expired": 2}
    # The oldest groups leave a full store.
    mixed = buffer(capacity=2)
    for step in range(4):
        mixed.add(group(step, step))
        mixed.draw(step, 2, 0, ())
    mixed.add(group(4, 4))
    assert ids(mixed.draw(4, 2, 0, ()))[1] in ("000002.0@4", "000003.0@4")


def test_a_batch_that_no_step_trains_changes_nothing_of_what_is_stored():
    mixed = buffer(capacity=2, max_staleness=1)
    for index in range(3):
        mixed.add(group(index, index))
        mixed.draw(index, 2, 0, ())
    mixed.add(group(3, 4))
    before = mixed.state()
    mixed.draw(4, 2, 0, ())
    assert mixed.state() != before
    mixed.undo_draw()
    assert mixed.state() == before


def test_which_groups_are_stored():
    for options, rewards, advantages, changes, stored in (
        ({}, (1.0, 0.0), (0.5, -0.5), {}, 1),
        ({}, (1.0, 0.0), (0.5, -0.5), {"trains": False}, 0),
        ({}, (1.0, 1.0), (0.0, 0.0), {}, 0),  # no advantage
        ({}, (0.0, 0.0), (0.0, 0.0), {"compared": ()}, 1),  # nothing compared, as with a critic
        ({"replay_share": 0.0}, (1.0, 0.0), (0.5, -0.5), {}, 0),
    ):
        mixed, one = buffer(**options), group(0, 0, rewards, advantages)
        mixed.add(replace(one, credits=tuple(replace(c, **changes) for c in one.credits)))
        mixed.draw(0, 1 + bool(mixed.shares[0]), 0, ())
        assert mixed.metrics()["stored"] == stored


def test_shares_are_rounded_to_groups_and_leave_some_to_new_rollouts():
    def num_new(replay: float, shown: float, count: int = 4) -> int:
        return buffer(replay_share=replay, demonstration_share=shown).num_new(count)

    assert num_new(0.0, 0.0) == 4
    assert num_new(0.25, 0.25) == 2
    assert num_new(0.01, 0.01) == 2  # at least one each
    with pytest.raises(ValueError, match="leave no new groups in a batch of 4 groups"):
        num_new(0.5, 0.5)
    with pytest.raises(ValueError, match="leave no new groups in a batch of 1 groups"):
        num_new(0.01, 0.0, count=1)


SHOWN_ROW = row(-1, 0, version=-1)


def test_the_sources_of_a_batch_in_its_credits_lines_plan_and_metrics():
    mixed = buffer(replay_share=0.3, demonstration_share=0.3)
    shown = (rollout(1.0, SHOWN_ROW, fields={"source": Source.DEMONSTRATION}),) * 2
    seeds = {"demonstration 0": shown, "demonstration 3": shown}
    mixed.demonstrate = lambda seed, example: seeds.pop(seed)
    batch = []
    for step in (0, 1):
        mixed.add(group(step, step, (1.0, step / 2)))
        batch = mixed.draw(step, 3, 0, ())
    assert ids(batch) == ["000001.0", "000000.0@1", "-00004.0"]
    shown = batch[2]
    assert (shown.example.env, shown.version) == ("e", 1)
    assert [(c.reward, c.advantages, c.trains) for c in shown.credits] == [(None, (0.0,), True)] * 2
    lines = [train_line(g, g.rollouts[0], g.credits[0], used=True) for g in batch]
    assert [line.get("source") for line in lines] == [None, "replay", "demonstration"]
    assert [line["versions"] for line in lines] == [[1], [0], []]
    # The loss sees the source and the staleness of each token.
    shares = {"step": 1, "ranks": 2, "tokens_per_micro_batch": 8, "metrics": {}}
    batches = plan_batch(batch, token_mean, **shares)
    found = Counter()
    for share in batches:
        for micro in unpack(pack(share), RankBatch).micro_batches:
            mask = micro.completion_mask & (micro.token_weights > 0)
            versions = micro.token_versions[mask].tolist()
            found.update(zip(micro.source[mask].tolist(), versions, strict=True))
            np.testing.assert_allclose(micro.token_weights[mask], 1 / 6)  # one denominator
    assert found == {(Source.POLICY, 1): 2, (Source.REPLAY, 0): 2, (Source.DEMONSTRATION, -1): 2}
    assert math.isnan(batch_metrics(batch[2:], 1)["train/reward"])  # only demonstrations


def test_several_demonstrations_of_a_batch_differ_and_have_the_environments_of_new_groups():
    mixed, asked = buffer(replay_share=0.0, demonstration_share=0.5), []
    mixed.demonstrate = lambda *given: asked.append(given) or (rollout(1.0, SHOWN_ROW),)
    examples = [Example(0, env, []) for env in "ab"]
    for index, example in enumerate(examples):
        mixed.add(replace(group(index, 2), example=example))
    drawn = mixed.draw(2, 4, 0, ())
    assert asked == [("demonstration 8", examples[0]), ("demonstration 9", examples[1])]
    assert [(g.index, g.example.env) for g in drawn[2:]] == [(-9, "a"), (-10, "b")]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_new_once_and_replayed_groups_respect_their_own_limit(seed, max_staleness):
    """World asserts admission, and the versions of every token, new or replayed."""
    limits = {"capacity": 99, "max_staleness": max_staleness + 4}
    mixed = buffer(replay_share=0.34, **limits)
    world = World(seed, max_staleness, rejects=0.2, buffer=mixed).run(25)
    assert world.num_new == 2
    assert max(Counter(world.trained).values()) == 1
    assert all(len(batch) == 3 for step, batch in world.batches.items() if step)
    replays = [(s, g) for s, batch in world.batches.items() for g in batch if g.suffix]
    assert {source for _, g in replays for source in {r.source for r in g.rollouts}} == {1}
    first = {g.index: s for s, batch in world.batches.items() for g in batch if not g.suffix}
    assert all(first[g.index] < step for step, g in replays)
    assert mixed.metrics()["expired"] > 0


def content(world: World, first: int) -> list:
    """Return the batches from a step on, with all arrays as bytes."""
    return [(s, [pack(g) for g in batch]) for s, batch in world.batches.items() if s >= first]


@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_replays_the_groups_of_the_uninterrupted_run(seed):
    def mixed() -> MixedBuffer:
        return buffer(replay_share=0.34, capacity=5, max_staleness=6)

    whole = World(seed, 0, rejects=0.2, buffer=mixed()).run(14)
    killed = World(seed, 0, rejects=0.2, buffer=mixed()).run(6)
    saved = json.loads(json.dumps(asdict(killed.dispatcher.checkpoint())))
    state = msgspec.convert(saved, DispatcherState)
    resumed = World(seed, 0, rejects=0.2, buffer=mixed(), step=6, state=state).run(14)
    assert content(resumed, 6) == content(whole, 6)
    assert resumed.dispatcher.buffer.metrics() == whole.dispatcher.buffer.metrics()


def test_demonstrations_have_the_chat_format_of_the_rollouts(tmp_path):
    model = ("model=hf", "model.path=x", "model.renderer=qwen3", "model.max_tokens=32")
    options = "model.renderer_options={enable_thinking: false}"
    config = composed(*model, options, "buffer=demonstrations")
    nodes = {key: config[key] for key in ("model", "buffer")}
    run: Any = SimpleNamespace(**nodes, seed=0, group_size=1, max_seq_len=256)
    told = repeat([user("hi"), assistant("yo")])
    env = type("Showing", (ScriptedEnv,), {"demonstrations": lambda *_: told})()
    made = main._buffer(run, SimpleNamespace(initial_model=lambda: tiny_model(tmp_path)), env)
    (shown,) = made.demonstrate("0", Example(0, env.name, []))
    assert b"\n\n\n\nyo" in text(shown.rows[0].token_ids)


def difficulty_buffer(**bounds: float) -> DifficultyBuffer:
    names = ("min_spread", "min_reward_variance", "min_reward", "max_reward")
    return DifficultyBuffer(**{**dict.fromkeys(names), "min_spread": 0.0, **bounds})


def filled(*groups: tuple[int, int]) -> FifoBuffer:
    buffer = FifoBuffer()
    for index, version in groups:
        assert buffer.add(graded((1.0, 0.0), index=index, version=version))
    return buffer


def drawn(buffer: FifoBuffer, *settings) -> list[int] | None:
    """Return the drawn indices. `settings`: step, count, staleness limit, running versions."""
    groups = buffer.draw(*settings)
    return None if groups is None else [group.index for group in groups]


def test_the_oldest_are_drawn_first_and_a_batch_waits_for_those_that_later_ones_could_not_hold():
    buffer = filled((5, 2), (3, 1), (4, 2), (2, 1))
    assert drawn(buffer, 2, 3, 1, []) == [2, 3, 4]
    assert len(buffer) == 1
    # Under version 0, 2 groups a batch, at most 2 steps old: six groups are due by step 2.
    buffer = filled((0, 0), (1, 0), (6, 1), (7, 1))
    assert drawn(buffer, 0, 2, 2, [0, 0, 0, 0]) == [0, 1]
    assert drawn(buffer, 1, 2, 2, [0, 0, 0, 0]) is None
    buffer.add(graded((1.0, 0.0), index=2))
    assert drawn(buffer, 1, 2, 2, [0, 0, 0]) is None
    buffer.add(graded((1.0, 0.0), index=3))
    assert drawn(buffer, 1, 2, 2, [0, 0]) == [2, 3]
    # A batch waits for a running group that would be too old for the next one.
    for running, waits in (([1], True), ([2], False), ([3, 0], True)):
        assert (filled((0, 2), (1, 2)).draw(2, 2, 1, running) is None) == waits


def test_a_group_without_a_token_is_rejected():
    buffer, whole = difficulty_buffer(), graded((1.0, 0.0))
    empty = tuple(replace(rollout, rows=()) for rollout in whole.rollouts)
    assert not buffer.add(replace(whole, rollouts=empty))
    assert buffer.add(replace(whole, rollouts=(whole.rollouts[0], empty[1])))
    assert buffer.rejected == {"without_tokens": 1}


def test_the_first_reason_rejects_a_group_and_is_counted():
    for rewards, why in (
        ((), "without_rollouts"),
        ((None, None), "unscorable"),
        ((0.0, 0.0, None), "too_hard"),  # checked before zero spread
        ((0.0, 0.25, None), ""),  # mean 0.125, no longer below
        ((0.75, 1.0), ""),  # mean 0.875, not above
        ((0.9, 1.0), "too_easy"),
        ((0.5, 0.625), "zero_spread"),
        ((0.5, 0.75), ""),  # the least spread that is wanted
        ((0.5, None), "zero_spread"),  # one score has no spread
    ):
        buffer = difficulty_buffer(min_spread=0.25, min_reward=0.125, max_reward=0.875)
        assert buffer.why_useless(graded(rewards)) == why
        assert buffer.add(graded(rewards)) == (not why)
        assert buffer.rejected == ({why: 1} if why else {})
        assert len(buffer) == (not why)


SPREAD = {"min_spread": 1e-6, "max_reward": 0.9}
VARIANCE = {"min_spread": 1e-6, "min_reward_variance": 0.1875}


def test_spread_and_variance_are_those_of_the_shaped_rewards():
    for bounds, rewards, shaped, why in (
        (SPREAD, (0.0, 1.0), (None, 1.0), "zero_spread"),  # one was dropped
        (SPREAD, (0.5, 0.5), (0.5, 0.25), ""),  # they differ by a penalty
        (SPREAD, (1.0, 1.0), (0.0, 0.5), "too_easy"),  # the difficulty is that of plain rewards
        # 0.25: p * (1 - p), and not 0.5, which n - 1 would give
        (VARIANCE, (1.0, 1.0), (0.0, 1.0), ""),
        (VARIANCE, (1.0,) * 4, (0.0, 0.0, 0.0, 1.0), ""),  # 0.1875, the least that is wanted
        (VARIANCE, (1.0,) * 5, (0.0, 0.0, 0.0, 0.0, 1.0), "low_variance"),  # 0.16
        (VARIANCE, (1.0, 1.0), (0.5, 0.5), "zero_spread"),  # the first reason
    ):
        credits = tuple(Credit(reward, (0.0,)) for reward in shaped)
        buffer = difficulty_buffer(**bounds)
        assert buffer.why_useless(replace(graded(rewards), credits=credits)) == why


def test_a_group_in_which_every_rollout_is_masked_is_rejected():
    cut, whole = Credit(1.0, (1.0,), trains=False), Credit(0.0, (-1.0,))
    buffer, masked = difficulty_buffer(min_spread=1e-6), graded((1.0, 0.0))
    assert buffer.why_useless(replace(masked, credits=(cut, whole))) == ""
    assert buffer.why_useless(replace(masked, credits=(cut, cut))) == "untrained"
    assert FifoBuffer().why_useless(replace(masked, credits=(cut, cut))) == ""
