"""The off-policy policy: what is started when, what is trained when, what a resumed run does."""

import asyncio
import json
from collections import Counter
from dataclasses import asdict

import msgspec
import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.protocol import Pool
from rl.records import Rollout
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.dispatcher import DispatcherState
from rl.rollouts.example_order import ExampleOrder, ShuffledOrder
from rl.rollouts.prospects import RolloutsFailed
from rl.wire import NoMoreBatches
from tests.support.orders import begun
from tests.support.virtual_time import run_virtually
from tests.support.world import GROUPS_PER_STEP, ROW, World


@pytest.mark.parametrize("rejects", [0.0, 0.3])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_admission_and_staleness_hold_and_nothing_deadlocks(seed, max_staleness, rejects):
    world = World(seed, max_staleness, rejects=rejects).run(25)

    assert list(world.batches) == list(range(25))


@pytest.mark.parametrize("seed", range(5))
def test_without_staleness_every_token_is_of_the_version_that_it_trains(seed):
    world = World(seed, 0).run(10)

    for step, batch in world.batches.items():
        assert {int(group.version) for group in batch} == {step}


def test_staleness_is_used_where_it_is_allowed():
    world = World(0, 4).run(25)

    behind = {step - g.version for step, batch in world.batches.items() for g in batch}
    assert max(behind) > 1


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_as_much_is_started_as_is_allowed(max_staleness):
    world = World(0, max_staleness)

    async def wait() -> list[int]:
        started = []
        task = asyncio.ensure_future(world.dispatcher.run())
        await asyncio.sleep(1)
        started.append(len(world.started))
        for version in (0, 1):
            await world.dispatcher.publish(version)
            await asyncio.sleep(1000)
            started.append(len(world.started))
        task.cancel()
        return started

    assert run_virtually(wait()) == [
        0,
        (1 + max_staleness) * GROUPS_PER_STEP,
        (2 + max_staleness) * GROUPS_PER_STEP,
    ]


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_group_is_trained_once_however_slow_it_is(seed, max_staleness):
    world = World(seed, max_staleness, rejects=0.2).run(25)

    assert max(Counter(world.trained).values()) == 1
    due = {i for i, version in world.started.items() if version + max_staleness <= 24}
    assert due <= {*world.trained, *world.rejected}
    assert not {*world.trained} & {*world.rejected}


def test_rejected_groups_are_replaced_counted_and_shown():
    world = World(1, 1, rejects=0.4).run(25)

    assert len(world.trained) == 25 * GROUPS_PER_STEP
    assert len(world.rejected) > 10
    assert world.dispatcher.buffer.rejected == {"unscorable": len(world.rejected)}


@pytest.mark.parametrize(("max_concurrent", "most"), [(1, 1), (5, 2), (8, 4), (1000, 15)])
def test_max_concurrent_counts_rollouts_and_leaves_room_for_one_group(max_concurrent, most):
    assert World(0, 4, max_concurrent=max_concurrent).run(10).most_running == most


def test_the_same_seed_makes_the_same_batches_and_another_seed_others():
    def content(world: World) -> list:
        return [
            (step, group.index, group.example.id, group.version, group.credits)
            for step, batch in world.batches.items()
            for group in batch
        ]

    first, again, other = (World(seed, 1, rejects=0.2).run(12) for seed in (3, 3, 4))

    assert content(first) == content(again)
    assert content(first) != content(other)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_loses_no_example_and_trains_none_twice(seed, max_staleness):
    whole = World(seed, max_staleness, rejects=0.2).run(14)
    before = World(seed, max_staleness, rejects=0.2).run(6)
    state = before.dispatcher.checkpoint()
    after = World(seed, max_staleness, rejects=0.2, step=6, state=state).run(14)

    assert before.trained == whole.trained[: len(before.trained)]
    done = [*before.trained, *before.rejected, *after.trained, *after.rejected]
    final = after.dispatcher.checkpoint()
    assert sorted([*done, *final.pending]) == list(range(final.next_index))
    assert set(state.pending) <= {*done, *final.pending}
    if max_staleness == 0:
        assert sorted(done) == sorted([*whole.trained, *whole.rejected])


def test_interrupted_groups_come_first_at_their_old_places_whatever_the_order_gives_now():
    state = DispatcherState(next_index=9, pending=[4, 7], places=[(0, 8), (0, 3)])
    world = World(0, 1, step=2, state=msgspec.convert(asdict(state), DispatcherState))
    again = world.dispatcher.checkpoint()
    assert (again.next_index, again.pending, again.places) == (9, [4, 7], [(0, 8), (0, 3)])

    assert list(world.run(3).started)[:3] == [4, 7, 9]
    played = {group.index: group.example.id for batch in world.batches.values() for group in batch}
    assert (played[4], played[7]) == (8, 3)


class Remembering(ExampleOrder):
    """Draws what it was told; notes what it observes."""

    def begin(self, pools, seed):
        super().begin(pools, seed)
        self.asked, self.observed = [], []

    def next(self, index):
        self.asked.append(index)
        return 0, index % len(self.pools[0].examples)

    def observe(self, place, group):
        assert self.example(place) is group.example
        self.observed.append(group.index)

    def state(self):
        return {"observed": self.observed}

    def load(self, state):
        self.observed = list(state.get("observed", []))


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_an_order_is_asked_once_for_each_group_and_observes_each_that_finished(max_staleness):
    world = World(0, max_staleness, rejects=0.3, order=Remembering()).run(12)
    order = world.dispatcher.order
    assert order.asked == sorted(world.started) == list(range(len(order.asked)))
    finished = {*world.trained, *world.rejected}
    assert finished <= set(order.observed)  # those that wait in the buffer, too
    assert len(order.observed) == len(set(order.observed))

    saved = json.loads(json.dumps(asdict(world.dispatcher.checkpoint())))
    state = msgspec.convert(saved, DispatcherState)
    after = World(0, max_staleness, rejects=0.3, order=Remembering(), step=12, state=state).run(20)
    assert set(order.observed) <= set(after.dispatcher.order.observed)
    # What was pending is played at its place: the order is asked for the groups after it alone.
    assert after.dispatcher.order.asked[0] == state.next_index


def difficulty() -> DifficultyOrder:
    weights = {"easy_weight": 0.1, "normal_weight": 0.8, "hard_weight": 0.1}
    return DifficultyOrder(easy_threshold=0.8, hard_threshold=0.2, **weights)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_resumed_run_has_the_same_pools_and_plays_pending_groups_at_their_places(
    seed, max_staleness
):
    before = World(seed, max_staleness, rejects=0.2, order=difficulty()).run(8)
    saved = json.loads(json.dumps(asdict(before.dispatcher.checkpoint())))
    state = msgspec.convert(saved, DispatcherState)
    after = World(seed, max_staleness, rejects=0.2, order=difficulty(), step=8, state=state)
    assert after.dispatcher.order.metrics() == before.dispatcher.order.metrics()
    assert asdict(after.dispatcher.checkpoint()) == asdict(state)

    after.run(14)
    places = dict(zip(state.pending, state.places, strict=True))
    for batch in after.batches.values():
        for group in batch:
            if group.index in places:
                assert after.dispatcher.order.example(places[group.index]) is group.example
    assert len(after.trained) == 6 * GROUPS_PER_STEP


def test_when_nothing_can_be_scored_the_run_stops_with_the_commonest_error():
    async def play_group(index, example, group_size):
        errors = ["Env.score raised KeyError: 'a' (env.py:3)", f"rare {index}"]
        return tuple(
            Rollout((), [], None, {}, StopReason.ENV_ERROR, 1, 0.0, error) for error in errors
        )

    world = World(0, 1)
    world.dispatcher.play_group = play_group
    with pytest.raises(ExceptionGroup) as caught:
        world.run(1)
    assert str(caught.value.exceptions[0]) == (
        "none of the last 32 rollouts could be scored. "
        "16 of them: Env.score raised KeyError: 'a' (env.py:3)"
    )


def test_one_rollout_that_is_scored_now_and_then_keeps_the_run_alive():
    async def play_group(index, example, group_size):
        await asyncio.sleep(1)
        rewards = (1.0 if index % 3 == 0 else None, None)
        return tuple(
            Rollout((ROW,), [], r, {}, StopReason.STOP, 1, 0.0, "" if r else "broken")
            for r in rewards
        )

    world = World(0, 1)
    world.dispatcher.play_group = play_group
    run_virtually(_batches(world, 4))


async def _batches(world: World, count: int) -> None:
    task = asyncio.ensure_future(world.dispatcher.run())
    for step in range(count):
        await world.dispatcher.publish(step)
        batch = await world.dispatcher.batch(step)
        assert [group.index % 3 for group in batch] == [0] * GROUPS_PER_STEP
    task.cancel()


async def _until_the_end(world: World, steps: list[int]) -> None:
    """Take batches for ever, noting the steps that had one."""
    task = asyncio.ensure_future(world.dispatcher.run())
    try:
        for step in range(1000):
            await world.dispatcher.publish(step)
            await world.dispatcher.batch(step)
            steps.append(step)
    finally:
        task.cancel()


def graded(reward_of):
    """Plays groups of two with these rewards; they finish in order."""

    async def play_group(index, example, group_size):
        await asyncio.sleep(1 + index / 1000)
        return tuple(Rollout((ROW,), [], r, {}, StopReason.STOP, 1, 0.0) for r in reward_of(index))

    return play_group


BOUNDS = dict.fromkeys(["min_reward_variance", "min_reward", "max_reward"])


def difficulty_buffer(**bounds: float) -> DifficultyBuffer:
    return DifficultyBuffer(**{**BOUNDS, "min_spread": 0.5, **bounds})


def picky(play_group) -> World:
    world = World(0, 1)
    world.dispatcher.play_group = play_group
    world.dispatcher.buffer = difficulty_buffer(max_reward=0.9)
    return world


def test_groups_that_teach_little_are_replaced_by_the_next_ones():
    world = picky(graded(lambda index: (0.0, float(index % 3 == 0))))
    run_virtually(_batches(world, 4))

    # Groups 0, 3, 6 ... are trained: the last of four batches of three cannot be before 33.
    assert world.rejected[:4] == [1, 2, 4, 5]
    assert not [index for index in world.rejected if index % 3 == 0]
    assert world.dispatcher.buffer.rejected == {"zero_spread": len(world.rejected)}
    assert len(world.rejected) >= 22


def test_when_nothing_passes_the_buffer_there_are_no_more_batches_and_it_says_why():
    """After 8 batches of at least 8 groups: here batches are of 3, so 64 groups."""
    world = picky(graded(lambda index: (1.0, 1.0) if index % 4 else (0.0, 0.0)))
    with pytest.raises(NoMoreBatches) as end:
        world.run(1)
    assert str(end.value).startswith("the buffer rejected the last 64 groups (in all: ")
    assert "16 zero_spread" in str(end.value)
    assert "48 too_easy" in str(end.value)
    assert str(end.value).endswith(
        "): the task is too easy or too hard for this policy. Use buffer=fifo or other examples"
    )
    assert not end.value.solved
    assert len(world.rejected) == 64


def test_groups_without_a_token_are_not_called_too_hard():
    """The last row alone counts, not what was rejected before it."""
    trained = 4

    async def play_group(index, example, group_size):
        await asyncio.sleep(1 + index / 1000)
        rows = (ROW,) if index < trained else ()
        reward = (index % 2) if index < trained else 0.0
        return tuple(
            Rollout(rows, [], reward if i else 0.0, {}, StopReason.CONTEXT, 1, 0.0)
            for i in range(group_size)
        )

    world = picky(play_group)
    with pytest.raises(NoMoreBatches) as end:
        world.run(5)
    assert "(in all: 2 zero_spread, 64 without_tokens)" in str(end.value)
    assert str(end.value).endswith(
        "): nothing in them could be trained on. A rollout without a token has a prompt that "
        "fills max_seq_len: raise it, or use other examples"
    )
    assert not end.value.solved


@pytest.mark.parametrize(
    ("later", "solved"),
    [((1.0, 1.0), True), ((0.0, 0.0), False), ((0.5, 0.5), False), ((None, None), False)],
)
def test_a_task_whose_groups_are_all_as_good_as_can_be_is_solved_and_not_a_failure(later, solved):
    world = picky(graded(lambda index: (0.0, 1.0) if index < 6 else later))
    steps: list[int] = []
    with pytest.raises(NoMoreBatches) as end:
        run_virtually(_until_the_end(world, steps))
    assert steps == [0, 1]  # what was learned before
    assert end.value.solved == solved
    assert str(end.value).startswith("the task is solved: the buffer rejected the ") == solved


def test_rewards_that_never_differed_prove_nothing_solved_unless_an_earlier_run_saw_others():
    for seen, solved in (([], False), ([0.0, 1.0], True), ([0.0, 2.0], False)):
        world = picky(graded(lambda index: (1.0, 1.0)))
        world.dispatcher._prospects.reward_ranges = {"scripted": seen} if seen else {}
        with pytest.raises(NoMoreBatches) as end:
            world.run(1)
        assert end.value.solved == solved


@pytest.mark.parametrize(("points", "solved"), [(10.0, True), (5.0, False)])
def test_a_mixture_is_solved_when_each_part_is_by_its_own_rewards(points, solved):
    """Words earn 0 to 1, points 0 to 10: a mean over both is half of the best at best."""
    pools = [Pool(1.0, [Example(i, name, []) for i in range(4)]) for name in ("words", "points")]
    world = picky(graded(lambda index: ()))
    order = world.dispatcher.order = begun(ShuffledOrder(), pools, 0)
    at_first = {"words": (0.0, 1.0), "points": (0.0, 10.0)}
    later = {"words": (1.0, 1.0), "points": (points, points)}

    async def play_group(index, example, group_size):
        rewards = (at_first if index < 6 else later)[example.env]
        return await graded(lambda _: rewards)(index, example, group_size)

    world.dispatcher.play_group = play_group
    world.dispatcher.buffer = difficulty_buffer()
    assert {order.pools[order.next(i)[0]].examples[0].env for i in range(6)} == set(later)
    with pytest.raises(NoMoreBatches) as end:
        run_virtually(_until_the_end(world, []))
    assert end.value.solved == solved


def test_a_resumed_run_goes_on_counting_and_a_buffer_keeps_its_state():
    class Learning(DifficultyBuffer):
        """Keeps something of its own."""

        bar = 0.25

        def state(self):
            return {**super().state(), "bar": self.bar}

        def load(self, state):
            super().load(state)
            self.bar = state.get("bar", self.bar)

    def buffer() -> Learning:
        return Learning(**{**BOUNDS, "min_spread": 0.5})

    before = picky(graded(lambda index: (0.0, float(index % 3 == 0))))
    before.dispatcher.buffer = buffer()
    before.dispatcher.buffer.bar = 0.75
    run_virtually(_batches(before, 2))
    saved = json.loads(json.dumps(asdict(before.dispatcher.checkpoint())))

    state = msgspec.convert(saved, DispatcherState)
    after = World(0, 1, step=2, state=state, buffer=buffer())

    assert after.dispatcher.buffer.bar == 0.75
    assert after.dispatcher.buffer.rejected == before.dispatcher.buffer.rejected != {}
    assert after.dispatcher.checkpoint() == state
    assert state.reward_ranges == {"scripted": [0.0, 1.0]}
    assert DispatcherState(**{"next_index": 1, "pending": []}).buffer == {}  # of an older run


def test_one_group_in_64_that_passes_keeps_the_run_alive():
    world = picky(graded(lambda index: (0.0, float(index % 60 == 0))))
    run_virtually(_batches(world, 1))

    assert len(world.rejected) > 64


def test_what_a_group_raises_ends_the_run():
    async def play_group(index, example, group_size):
        raise OSError("vLLM is out of reach")

    world = World(0, 1)
    world.dispatcher.play_group = play_group
    with pytest.raises(ExceptionGroup) as caught:
        world.run(1)
    assert isinstance(caught.value.exceptions[0], OSError)


def test_progress_says_what_is_waited_for():
    world = World(0, 1)
    assert world.dispatcher.progress() == "waiting for the first weights"
    world.dispatcher.version.publish(0)
    assert world.dispatcher.progress() == "batch 0: 0 of 6 rollouts, 0 in flight"
    world = World(0, 1)
    world.run(3)
    assert world.dispatcher.progress().startswith("batch 3: ")


def test_after_a_stop_there_is_no_batch_though_groups_are_ready():
    async def stopped_after_one(world):
        running = asyncio.ensure_future(world.dispatcher.run())
        await world.dispatcher.publish(0)
        await world.dispatcher.batch(0)
        await asyncio.sleep(1000)  # the groups of the next batch are ready by now
        await world.dispatcher.stop()
        with pytest.raises(NoMoreBatches) as end:
            await world.dispatcher.batch(1)
        running.cancel()
        return end.value.solved, len(world.dispatcher.checkpoint().pending)

    solved, pending = run_virtually(stopped_after_one(World(0, 1)))
    assert solved
    assert pending == 3  # which a resumed run plays again


@pytest.mark.parametrize(
    ("state", "stored"),
    [
        ({"easy": [np.int64(3)], "mean": np.float32(0.5)}, {"easy": [3], "mean": 0.5}),
        ({"seen": np.arange(3)}, {"seen": [0, 1, 2]}),
    ],
)
def test_a_state_with_numpy_in_it_is_stored_as_plain_numbers(state, stored):
    world = World(0, 1)
    world.dispatcher.order.state = lambda: state
    assert world.dispatcher.checkpoint().order == stored


@pytest.mark.parametrize("state", [{"seen": {1, 2}}, {(0, 1): 3}, {"rng": object()}])
def test_a_state_that_json_cannot_hold_is_said_with_its_owner(state):
    world = World(0, 1)
    world.dispatcher.buffer.state = lambda: state
    with pytest.raises(RolloutsFailed, match=r"Buffer.state\(\) cannot be written to a checkpoint"):
        world.dispatcher.checkpoint()
