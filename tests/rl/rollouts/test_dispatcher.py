"""Check when groups start, which step trains them, and what a resumed run plays again.

An environment that remembers has a pool that grows while it is played.
"""

import asyncio
import json
from collections import Counter
from dataclasses import asdict, replace
from random import Random

import msgspec
import pytest

from envs.mixture import Mixture
from envs.protocol import Environment
from rl.inference.live_version import LiveVersion
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.difficulty_buffer import DifficultyBuffer
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.dispatcher import Dispatcher, DispatcherState
from rl.rollouts.example_order import SequentialOrder, ShuffledOrder
from rl.rollouts.sampling_limits import FailureLimits
from rl.runtime.failure import RunFailed
from rl.sampling.player import Player
from rl.wire import NoMoreBatches
from tests.rl.rollouts.test_example_order import KNOBS
from tests.support.remembering import AboveEarlier, GrowingReversal
from tests.support.rollouts import begun, group_credit, rollout
from tests.support.scripted import SAMPLER, ScriptedClient, chat_of
from tests.support.world import EXAMPLES, GROUPS_PER_STEP, World, run_virtually


@pytest.mark.parametrize("rejects", [0.0, 0.4])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_trained_once_and_none_is_too_old(seed, max_staleness, rejects):
    """World asserts the admission rule and the staleness of every batch."""
    world = World(seed, max_staleness, rejects=rejects).run(25)
    assert list(world.batches) == list(range(25))
    assert max(Counter(world.trained).values()) == 1
    assert not {*world.trained} & {*world.rejected}
    due = {i for i, version in world.started.items() if version + max_staleness <= 24}
    assert due <= {*world.trained, *world.rejected}  # however slow they are
    counts = {"unscorable": len(world.rejected)} if rejects else {}
    assert world.dispatcher.buffer.rejected == counts
    behind = {step - g.version for step, batch in world.batches.items() for g in batch}
    assert max(behind) == max_staleness or max_staleness == max(behind) + 1 == 4


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_dispatcher_starts_as_many_groups_as_the_staleness_limit_allows(max_staleness):
    world = World(0, max_staleness)

    async def started() -> list[int]:
        task = asyncio.ensure_future(world.dispatcher.run())
        await asyncio.sleep(1)
        counts = [len(world.started)]
        assert world.dispatcher.progress() == "waiting for the first weights"
        for version in (0, 1):
            await world.dispatcher.publish(version)
            await asyncio.sleep(1000)
            counts.append(len(world.started))
        assert world.dispatcher.progress() == "batch 0: 6 of 6 rollouts, 0 in flight"
        task.cancel()
        return counts

    allowed = [0, 1 + max_staleness, 2 + max_staleness]
    assert run_virtually(started()) == [number * GROUPS_PER_STEP for number in allowed]


@pytest.mark.parametrize(("max_concurrent", "most"), [(1, 1), (5, 2), (8, 4), (1000, 15)])
def test_max_concurrent_counts_rollouts_and_leaves_room_for_one_group(max_concurrent, most):
    assert World(0, 4, max_concurrent=max_concurrent).run(10).most_running == most


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


def test_a_batch_with_a_stale_or_a_repeated_group_is_refused_and_loses_no_group():
    world = World(0, 1).run(3)
    dispatcher, (model, *_) = world.dispatcher, world.batches[2]
    before, undone = dispatcher.checkpoint(), []
    dispatcher.buffer.undo_draw = lambda: undone.append(1)
    fresh = replace(model, index=before.pending[0], version=2)
    stale, older = replace(fresh, version=1), "which are older than max_staleness=1"
    for drawn, said in (([stale], rf"the groups \[\d+\], {older}"), ([fresh] * 2, "a group twice")):
        dispatcher.buffer.draw = lambda *_, drawn=drawn: drawn
        with pytest.raises(RunFailed, match=rf"FifoBuffer\.draw returned {said}: correct"):
            run_virtually(dispatcher.take_batch(3))
        assert dispatcher.checkpoint() == before
    assert undone == [1, 1]


def test_a_checkpoint_keeps_the_groups_of_a_batch_that_could_not_be_planned():
    world, undone = World(0, 1).run(3), []
    newest, before = [group.index for group in world.batches[2]], world.dispatcher.checkpoint()
    world.dispatcher.buffer.undo_draw = lambda: undone.append(True)
    world.dispatcher.return_batch()
    after = world.dispatcher.checkpoint()
    assert undone == [True]
    assert after.pending == sorted([*before.pending, *newest])
    assert len(after.places) == len(after.pending)


def test_a_resumed_run_first_plays_interrupted_groups_at_their_old_places():
    state = DispatcherState(next_index=9, pending=[4, 7], places=[(0, 8), (0, 3)])
    world = World(0, 1, step=2, state=state)
    again = reloaded(world.dispatcher)
    assert (again.next_index, again.pending, again.places) == (9, [4, 7], [(0, 8), (0, 3)])
    assert list(world.run(3).started)[:3] == [4, 7, 9]
    played = {group.index: group.example.id for batch in world.batches.values() for group in batch}
    assert (played[4], played[7]) == (8, 3)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_an_order_observes_each_finished_group_once_at_its_place(max_staleness):
    world, observed = World(0, max_staleness, rejects=0.3), []
    order = world.dispatcher.order

    def observe(place, group):
        assert order.example(place) is group.example
        observed.append(group.index)

    order.observe = observe
    world.run(12)
    assert {*world.trained, *world.rejected} <= {*observed}  # and those that wait in the buffer
    assert len(observed) == len(set(observed))


def reloaded(dispatcher: Dispatcher) -> DispatcherState:
    """Return the state of the dispatcher's checkpoint after a round trip through JSON."""
    saved = json.loads(json.dumps(asdict(dispatcher.checkpoint())))
    return msgspec.convert(saved | {"of an older version": {}}, DispatcherState)


def test_a_checkpoint_keeps_the_state_of_the_advantage():
    first, resumed = group_credit(AboveEarlier()), group_credit(AboveEarlier())
    first(EXAMPLES[0], [rollout(1.0)])
    state = reloaded(World(0, 0, stateful={"advantage": first}).dispatcher)
    World(0, 0, stateful={"advantage": resumed}, state=state)
    World(0, 0, stateful={"advantage": resumed})  # a new run has no state to load
    assert resumed.state() == {"scripted": [1.0, 1]}


def test_the_run_fails_with_the_most_common_error_if_no_rollout_can_be_scored():
    async def play_group(index, example, group_size, version):
        errors = ["Env.score raised KeyError: 'a' (env.py:3)", f"rare {index}"]
        return tuple(rollout(None, lengths=(), fields={"error": error}) for error in errors)

    world = World(0, 1)
    world.dispatcher.play_group = play_group
    with pytest.raises(ExceptionGroup) as caught:
        world.run(1)
    assert str(caught.value.exceptions[0]) == (
        "none of the last 32 rollouts could be scored. Correct the most frequent error (16 "
        "rollouts): Env.score raised KeyError: 'a' (env.py:3)"
    )


async def _batches(world: World, count: int, every: int = 3) -> None:
    """Take batches, all of which have groups of which every third can be trained on."""
    task = asyncio.ensure_future(world.dispatcher.run())
    for step in range(count):
        await world.dispatcher.publish(step)
        batch = await world.dispatcher.take_batch(step)
        assert [group.index % every for group in batch] == [0] * GROUPS_PER_STEP
    task.cancel()


def playing(reward_of, buffer=None) -> World:
    """Return a world of groups of two with these rewards, which finish in order."""

    async def play_group(index, example, group_size, version):
        await asyncio.sleep(1 + index / 1000)
        rewards = reward_of(index)
        return tuple(rollout(r, fields={"error": "broken" * (r is None)}) for r in rewards)

    world = World(0, 1, buffer=buffer)
    world.dispatcher.play_group = play_group
    return world


def picky(reward_of) -> World:
    """Return a world whose buffer wants rewards that differ and are not all high."""
    bounds = {"min_reward_variance": None, "min_reward": None, "max_reward": 0.9}
    return playing(reward_of, DifficultyBuffer(min_spread=0.5, **bounds))


def test_one_scored_rollout_in_some_groups_or_one_group_in_64_keeps_the_run_alive():
    world = playing(lambda index: (None if index % 3 else 1.0, None))
    run_virtually(_batches(world, 4))
    world = picky(lambda index: (0.0, float(index % 60 == 0)))
    run_virtually(_batches(world, 1, every=60))
    assert len(world.rejected) > 64


def test_64_rejected_groups_in_a_row_end_the_run_with_their_reasons():
    """The limit is 8 batches of at least 8 groups; a batch of this world has 3."""
    world = picky(lambda index: (1.0, 1.0) if index % 4 else (0.0, 0.0))
    with pytest.raises(NoMoreBatches) as end:
        world.run(1)
    assert str(end.value).startswith("the buffer rejected the last 64 groups (whole run: ")
    assert "16 zero_spread" in str(end.value)
    assert "48 too_easy): the task may be too easy or hard for this policy" in str(end.value)
    assert not end.value.stopped
    assert len(world.rejected) == 64
    limits = FailureLimits(group_size=1, groups_per_step=20)
    ends = [limits.record_decision(accepted=False, counts={}) for _ in range(8 * 20)]
    assert (ends.count(None), limits._errors.maxlen) == (8 * 20 - 1, 20)


def test_after_a_stop_no_batch_follows_and_no_group_is_rejected_or_lost():
    """The supervisor stops the run after a second crash of vLLM, whose open requests then fail."""

    async def stopped(world):
        over = asyncio.Event()

        async def play_group(index, example, group_size, version):
            if index < 2 * GROUPS_PER_STEP:
                return (rollout(1.0),) * group_size
            await over.wait()
            return (rollout(None, lengths=(), fields={"error": "no vLLM"}),) * group_size

        world.dispatcher.play_group = play_group
        running = asyncio.ensure_future(world.dispatcher.run())
        await world.dispatcher.publish(0)
        await world.dispatcher.take_batch(0)
        await world.dispatcher.publish(1)
        await asyncio.sleep(1)  # the groups of the next batch are ready by now
        await world.dispatcher.stop()
        with pytest.raises(NoMoreBatches) as end:
            await world.dispatcher.take_batch(1)
        over.set()
        await asyncio.sleep(1)
        running.cancel()
        return end.value.stopped, world.rejected, world.dispatcher.checkpoint().pending

    # A resumed run plays the groups of the batches 1 and 2 again.
    assert run_virtually(stopped(World(0, 1))) == (True, [], [3, 4, 5, 6, 7, 8])


GROUPS, SIZE = 2, 2


def growing() -> GrowingReversal:
    """Return an environment that makes examples of what the policy says."""
    sizes = {"min_length": 3, "max_length": 5, "num_train": 3, "num_eval": 1}
    return GrowingReversal(**sizes, reward_weights={"exact": 1.0})


class Hashed(ScriptedClient):
    """Answers with a text that depends only on the prompt and on the place in the request."""

    def _next(self, prompt, max_tokens, version):
        rng = Random(f"{prompt}:{self.given % SIZE}")
        self.answers = ["x" * rng.randrange(1, 20)]
        return super()._next(prompt, max_tokens, version)


async def _train(env, order, first, last, state):
    """Return what each step trained, the begun versions and the last step's checkpoint."""
    versions = []
    version = LiveVersion(listeners=[env.begin_version, versions.append])
    chat = replace(chat_of(Hashed("", seconds=1.0)), version=version)
    credit = group_credit(weights=env.reward_weights)
    dispatcher = Dispatcher(
        Player(SAMPLER, env, chat).play_group_at,
        begun(order, env.pools("train"), 0),
        lambda example, rollouts, version: credit(example, rollouts),
        FifoBuffer(),
        **{"group_size": SIZE, "groups_per_step": GROUPS, "max_staleness": 0},
        **{"max_concurrent": 64, "step": first, "version": version, "stateful": {"env": env}},
        state=state or DispatcherState(),
    )
    running = asyncio.ensure_future(dispatcher.run())
    batches, saved = [], None
    await dispatcher.publish(first)
    for step in range(first, last):
        groups = await dispatcher.take_batch(step)
        batches.append([(g.index, g.example.messages[0]["content"], g.rewards) for g in groups])
        saved = reloaded(dispatcher)
        await dispatcher.publish(step + 1)
    running.cancel()
    return batches, versions, saved


def train(env, order, first, last, state=None):
    return run_virtually(_train(env, order, first, last, state))


@pytest.mark.parametrize("order", [SequentialOrder, ShuffledOrder])
def test_a_resumed_run_plays_what_the_uninterrupted_run_plays(order):
    whole, resumed = growing(), growing()
    batches, versions, _ = train(whole, order(), 0, 12)
    before, *_, state = train(growing(), order(), 0, 5)
    assert before == batches[:5]
    after, resumed_versions, _ = train(resumed, order(), 5, 12, state)
    assert after == batches[5:]
    assert resumed.state() == whole.state()
    assert len(whole.examples("train")) > 6
    played = {text for batch in batches for _, text, _ in batch}
    first = {example.messages[0]["content"] for example in growing().examples("train")}
    assert len(played - first) > 2  # examples that the play itself has added
    assert (versions, resumed_versions) == (list(range(13)), list(range(5, 13)))


def test_an_order_with_statistics_sees_the_grown_pool_when_it_resumes():
    *_, state = train(growing(), DifficultyOrder(**KNOBS), 0, 5)
    assert state.order["sizes"] > [3]
    batches, *_ = train(growing(), DifficultyOrder(**KNOBS), 5, 8, state)
    assert len(batches) == 3


def test_a_mixture_remembers_for_each_of_its_environments_and_a_state_needs_load():
    first, second = ({"a": growing(), "b": growing()} for _ in range(2))
    mixture = Mixture(envs=first, weights={"a": 1.0, "b": 1.0})
    first["a"]._said.add("new")
    first["b"]._said.add("other")
    mixture.begin_version(3)
    Mixture(envs=second, weights={"a": 1.0, "b": 1.0}).load(mixture.state())
    assert [env.state() for env in second.values()] == [env.state() for env in first.values()]
    assert [env.state()["added"] for env in second.values()] == [["new"], ["other"]]
    forgetful = type("Forgetful", (Environment,), {"state": lambda _: {"a": 1}})()
    with pytest.raises(ValueError, match=r"Forgetful has state\(\) but no load\(\): define load"):
        forgetful.load(forgetful.state())
