"""How the shipped strategies make a group, and what is refused."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from envs.episode import Example, StopReason
from losses.aggregation import sequence_mean
from rl.dry_call.rewards import made_up_rollout
from rl.records import Group
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampling_limits import FailureLimits
from rl.sampling.branch import Branch
from rl.sampling.strategies import AdaptiveSize, Extremes, HintWhenAllFail
from rl.sampling.strategy import Independent, StartedGroup, Strategy, play_strategy
from tests.support import scripted
from tests.support.rollouts import row
from tests.support.scripted import IM_END, SAMPLER, ScriptedClient, ScriptedEnv, scoring
from tests.support.virtual_time import run_virtually
from tests.support.world import World

GROUP = StartedGroup(0, Example(3, "made up", []))


def made(strategy, rewards, size):
    """Return the rewards of the group, and the seeds and hints of all attempts."""
    asked = []

    async def play_one(example, *, seed, prefix=None, prefix_trains=False, hint=None):
        asked.append((seed, hint))
        return made_up_rollout(rewards[seed], 1)

    rollouts = asyncio.run(play_strategy(strategy, GROUP, play_one, size))
    return [rollout.reward for rollout in rollouts], asked


EXTREMES, ADAPTIVE = Extremes(factor=2), AdaptiveSize(max_rounds=3)
HINT = HintWhenAllFail(num_hinted=2, failed_reward=0.0)


@pytest.mark.parametrize(
    ("strategy", "rewards", "group", "num_played", "num_hinted"),
    [
        # The best and the worst of twice as many attempts.
        (EXTREMES, [0, 3, 1, 2], [3, 0], 4, 0),
        (EXTREMES, [0, 3, 1, 2, 5, 4], [5, 4, 0], 6, 0),
        (EXTREMES, [1, 1, 1, 1], [1, 1], 4, 0),
        (EXTREMES, [None, 3, 1, 2], [3, 1], 4, 0),
        (EXTREMES, [None, 3, None, None], [3, None], 4, 0),
        (EXTREMES, [None] * 4, [None, None], 4, 0),
        (EXTREMES, [1, 2], [2], 2, 0),
        # Rounds of two attempts, until rewards differ.
        (ADAPTIVE, [0, 1, 9, 9, 9, 9], [0, 1], 2, 0),
        (ADAPTIVE, [0, 0, 1, 0, 9, 9], [0, 0, 1, 0], 4, 0),
        (ADAPTIVE, [0, 0, 0, 0, 0, 0], [0] * 6, 6, 0),
        (ADAPTIVE, [1, None, None, 1, 1, 1], [1, None, None, 1, 1, 1], 6, 0),
        (ADAPTIVE, [None, None, 0, 1, 9, 9], [None, None, 0, 1], 4, 0),
        # Attempts with a hint replace the last ones, if all have failed.
        (HINT, [0, 0, 0, 1, 1], [0, 1, 1], 3, 2),
        (HINT, [0, -1, None, 1, 0], [0, 1, 0], 3, 2),
        (HINT, [0, 0.5, 0, 9, 9], [0, 0.5, 0], 3, 0),  # one has not failed
        (HINT, [None, None, None, 9, 9], [None] * 3, 3, 0),  # none has failed
        (HINT, [0, 1], [1], 1, 1),  # more than the group has
    ],
)
def test_which_attempts_form_the_group(strategy, rewards, group, num_played, num_hinted):
    seeds = [(i, None if i < num_played else "") for i in range(num_played + num_hinted)]
    size = 2 if strategy is ADAPTIVE else len(group)
    assert made(strategy, rewards, size) == (group, seeds)


def play(strategy, client, env, size, sampler=SAMPLER, seed=None):
    return scripted.play(env, client, size, sampler=sampler, strategy=strategy, seed=seed)


def texts(rollouts):
    return [[m["content"] for m in r.messages if m["role"] == "assistant"] for r in rollouts]


def branch(**options):
    return Branch(**{"branches": 2, "at": "token", "window": 1, "prefix_trains": True, **options})


def test_branches_begin_at_the_least_likely_token_or_turn():
    # ScriptedClient gives a token the logprob -id/8, so the least likely of "azb" is the end, and
    # with a window of two "b" and the end.
    for window, kept in {1: "azb", 2: "az", 3: "a"}.items():
        rollouts = play(branch(window=window), ScriptedClient("azb", "!"), ScriptedEnv(), 3)
        assert texts(rollouts) == [["azb"], [f"{kept}!"], [f"{kept}!"]]
        (root, *branches) = (rollout.rows[0] for rollout in rollouts)
        count = root.length - len("azb") - 1 + len(kept)
        for each in branches:
            for name in ("token_ids", "rollout_logprobs", "token_versions"):
                values = getattr(each, name)[:count]
                assert values.tolist() == getattr(root, name)[:count].tolist(), name
            assert each.num_completion == len(kept) + 2
    masked = play(branch(prefix_trains=False), ScriptedClient("azb", "!"), ScriptedEnv(), 3)
    assert [rollout.num_completion for rollout in masked] == [4, 2, 2]  # only their own tokens
    client = ScriptedClient("one", "ab", "xy", "!", "!", "!", "!")
    env = ScriptedEnv(replies=("r1", "r2"), max_turns=3)
    rollouts = play(branch(at="turn"), client, env, 3)
    # The first token of "xy" is less likely than that of "ab", and the first turn does not count.
    assert texts(rollouts) == [["one", "ab", "xy"], *[["one", "ab", "!"]] * 2]
    alone = play(branch(at="turn"), ScriptedClient("a", "b"), ScriptedEnv(), 3)
    assert texts(alone) == [["a"], ["b"], ["b"]]  # one turn only: the rest begin at the start


def test_the_uncertainty_is_the_mean_of_a_window_that_ends_with_its_turn():
    logprobs = -np.array([0, 9, 4, 1, 1, 0, 3], np.float32)  # the first token is not branched
    played = replace(row(-1, 0, 0, 0, 0, -1, 1), rollout_logprobs=logprobs)
    rollout = replace(made_up_rollout(1.0, 2), rows=(played,))
    # With a window of two: (4 + 1) / 2 and (1 + 1) / 2 in the first turn, and 3 in the second.
    assert branch(window=2).position(rollout) == (1, 0)
    assert branch(window=1).position(rollout) == (0, 1)
    assert branch(window=1, at="turn").position(rollout) == (1, 0)

    # A turn that begins with given tokens is not branched.
    async def given(self, group, play_one, size):
        return [await play_one(group.example, seed=i, prefix="zz") for i in range(size)]

    for rollout in play(own(given), ScriptedClient("azb"), ScriptedEnv(), 2):
        assert branch().position(rollout) is None


@pytest.mark.parametrize(("size", "roots"), [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_branches_are_shared_among_the_roots(size, roots):
    client = ScriptedClient(*(f"{i}" for i in range(20)))
    rollouts = play(branch(), client, ScriptedEnv(), size)
    begins = [said[0] for (said,) in texts(rollouts)]
    assert begins == [str(i if i < roots else i % roots) for i in range(size)]


def test_a_root_that_failed_gets_no_branch():
    failed = play(branch(), ScriptedClient(TimeoutError()), ScriptedEnv(), 3)
    assert [r.stop_reason for r in failed] == [StopReason.TIMEOUT] * 3
    # The first root has no token after its first one, so all branches begin in the second root.
    rollouts = play(branch(), ScriptedClient("", "azb", "!"), ScriptedEnv(), 6)
    assert texts(rollouts) == [[""], ["azb"], *[["azb!"]] * 4]


def test_all_requests_of_a_seeded_group_have_different_seeds_and_attempts_share_them():
    client, again = ScriptedClient("a"), ScriptedClient("a")
    assert len(play(Independent(), client, ScriptedEnv(), 4, seed=1)) == 4
    play(Extremes(factor=2), again, ScriptedEnv(), 2, seed=1)
    for requests in (client.requests, again.requests):
        assert [(s["seed"], n) for _, s, n, _ in requests] == [(client.requests[0][1]["seed"], 4)]
    client = ScriptedClient("a", "b")
    play(branch(), client, ScriptedEnv(("more",), 2), 6, seed=1)
    play(AdaptiveSize(max_rounds=3), client, ScriptedEnv(("more",), 2), 2, seed=2)
    given = [sampling["seed"] for _, sampling, _, _ in client.requests]
    assert len(given) == len(set(given))


def own(play, **constants):
    return type("Mine", (Strategy,), {"play": play, **constants})()


async def _repeats(self, group, play_one, size):
    return [await play_one(group.example, seed=0) for _ in range(size)]


async def _too_many(self, group, play_one, size):
    return [await play_one(group.example, seed=i) for i in range(size + 1)]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (own(_repeats), "plays two attempts with seed=0: use another seed"),
        (own(_too_many), "returned 3 rollouts for group_size=2: return 2 or none"),
    ],
)
def test_repeated_seeds_and_wrong_sizes_end_the_run(strategy, message):
    with pytest.raises(ValueError, match=f"Mine {message}"):
        play(strategy, ScriptedClient("a"), ScriptedEnv(), 2)


def test_a_strategy_may_return_none_or_another_number():
    async def none(self, group, play_one, size):
        return []

    assert play(own(none), ScriptedClient("a"), ScriptedEnv(), 2) == ()
    sizes = own(_too_many, fixed_size=False)
    assert len(play(sizes, ScriptedClient("a"), ScriptedEnv(), 2)) == 3


class Ranked(ScriptedEnv):
    async def score_group(self, episodes):
        return [{"good": float(rank)} for rank, _ in enumerate(episodes)]


def test_groups_are_scored_after_a_strategy_that_reads_no_rewards():
    rollouts = play(branch(branches=1), ScriptedClient("a"), Ranked(), 4)
    assert [rollout.rewards["good"] for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0]
    hints = HintWhenAllFail(num_hinted=1, failed_reward=0.0)
    for reading in (Extremes(factor=2), AdaptiveSize(max_rounds=2), hints):
        said = f"{type(reading).__name__} reads the rewards of attempts, but score_group"
        with pytest.raises(ValueError, match=said):
            play(reading, ScriptedClient("a"), Ranked(), 4)


def test_unscored_attempts_stay_in_the_group_and_are_branched():
    numbers = iter(range(99))

    async def score(self, episode):
        if next(numbers) == 0:
            raise RuntimeError("broken")
        return {"good": 1.0}

    sampler = replace(SAMPLER, max_retries=0)
    rollouts = play(branch(), ScriptedClient("az", "!"), scoring(score), 3, sampler)
    assert [rollout.reward for rollout in rollouts] == [None, 2.0, 2.0]
    assert all(row.token_ids[-1] == IM_END for r in rollouts for row in r.rows)


def test_a_batch_may_have_groups_of_any_size_and_none_is_counted():
    world, sizes = World(0, 1), {}

    async def play_group(index, example, group_size, version):
        sizes[index] = (0, 1, 2, 5)[index % 4]
        return tuple(made_up_rollout(float(i), 2) for i in range(sizes[index]))

    world.dispatcher.play_group = play_group

    async def batch():
        running = asyncio.create_task(world.dispatcher.run())
        await world.dispatcher.publish(0)
        groups = await world.dispatcher.take_batch(0)
        running.cancel()
        return groups

    groups = run_virtually(batch())
    assert [len(group.rollouts) for group in groups] == [sizes[g.index] for g in groups]
    assert {len(group.rollouts) for group in groups} == {1, 2, 5}
    assert world.dispatcher.buffer.rejected["without_rollouts"] >= 1
    settings = {"step": 0, "ranks": 1, "tokens_per_micro_batch": 64, "metrics": {}}
    (share,) = plan_batch(groups, sequence_mean, **settings)
    weights = sum(micro.token_weights[micro.completion_mask].sum() for micro in share.micro_batches)
    assert (len(share.rewards), weights) == (8, pytest.approx(1.0))
    assert np.bincount(share.group_ids).tolist() == [len(group.rollouts) for group in groups]


@pytest.mark.parametrize(("groups_per_step", "count"), [(1, 64), (9, 72)])
def test_a_strategy_that_never_returns_a_rollout_ends_the_run_with_its_reason(
    groups_per_step, count
):
    limits = FailureLimits(group_size=2, groups_per_step=groups_per_step)
    group = Group(0, GROUP.example, 0, (), ())
    buffer, end = FifoBuffer(), None
    for _ in range(count):
        assert end is None
        limits.record_group(group)
        end = limits.record_decision(accepted=buffer.add(group), counts=buffer.rejected)
    assert f"(whole run: {count} without_rollouts)" in str(end)
    assert "If most are without_rollouts, use another strategy" in str(end)
