"""What an evaluation plays and when, and each estimate worked by hand."""

import asyncio
import json
import math
from dataclasses import replace
from itertools import combinations
from statistics import stdev

import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.protocol import Environment, Pool
from rl.config.schedules import Schedules
from rl.config.schema import Run
from rl.evaluation import summary as estimates
from rl.evaluation.periodic import Evaluator, PeriodicEvaluation, evaluator_of
from rl.evaluation.play import _examples_per_pool, choose_examples, play
from rl.evaluation.summary import PlayedExample, standard_error, summarise, zero_spread
from rl.inference.live_version import LiveVersion
from rl.records import Rollout
from rl.runtime.folder import RunFolder
from rl.sampling.player import Player
from rl.sampling.strategies import Extremes
from tests.support.composing import composed
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, chat_of
from tests.support.world import run_virtually

KNOBS = {"num_examples": 3, "rollouts_per_example": 2, "temperature": 0.25, "pass_threshold": 2.0}


def examples(env: str, count: int) -> list[Example]:
    return [Example(id=i, env=env, messages=list(HI)) for i in range(count)]


def ids(chosen: list[Example]) -> list[tuple[str, int]]:
    return [(example.env, example.id) for example in chosen]


HELD_OUT = examples("scripted", 3)


class Trainer:
    """Call the evaluator as the trainer and its service do; an update takes `update_s`."""

    def __init__(self, folder, client, *, every: int, last: int, env=None) -> None:
        self.version, self.last, self.times = LiveVersion(), last, {}
        chat = replace(chat_of(client), version=self.version)
        self.player = Player(SAMPLER, env or ScriptedEnv(), chat)
        settings = PeriodicEvaluation(every=every, **KNOBS)
        self.evaluator = Evaluator(settings, self.player, HELD_OUT, RunFolder(folder), last=last)

    async def train(self, update_s: float) -> dict[int, dict[str, float]]:
        found, loop = {}, asyncio.get_running_loop()
        task = asyncio.ensure_future(self.evaluator.run())
        for step in range(self.last):
            self._publish(step)
            await asyncio.sleep(update_s)
            found[step] = await self.evaluator.wait_for_metrics(step)
            self.times[step] = loop.time()
        self._publish(self.last)
        found[self.last] = await self.evaluator.wait_for_metrics(self.last)
        task.cancel()
        return found

    def _publish(self, version: int) -> None:
        self.version.publish(version)
        self.evaluator.start(version)


def test_training_and_evaluation_follow_their_schedules_at_the_version(tmp_path):
    client, versions = ScriptedClient("good", "bad"), []

    async def score(self, episode):
        versions.append(episode.policy_version)
        return {"good": 1.0}

    env = type("Noting", (ScriptedEnv,), {"score": score})()
    trainer = Trainer(tmp_path, client, every=2, last=4, env=env)
    schedules = {
        "sampler.temperature": lambda step: 1.0 - 0.1 * step,
        "evaluation.temperature": lambda step: 0.5 + step,
        "env.max_turns": lambda step: 1 + step,
    }
    player = replace(trainer.player, schedules=Schedules(schedules))
    trainer.evaluator.player = player
    run_virtually(player.play_group_at(0, HELD_OUT[0], 1, 3))
    assert player.env.max_turns == 4
    run_virtually(trainer.evaluator._evaluation_player(2).play_group(0, HELD_OUT[0], 1))
    assert [sampling["temperature"] for _, sampling, *_ in client.requests] == [0.7, 2.5]
    assert versions == [3, 2]


def test_the_first_the_last_and_every_other_version_are_evaluated(tmp_path):
    client = ScriptedClient("good", "bad")
    trainer = Trainer(tmp_path, client, every=2, last=5)
    found = run_virtually(trainer.train(1.0))
    assert [version for version, metrics in found.items() if metrics] == [0, 2, 4, 5]
    assert found[0]["eval/reward"] == pytest.approx(2 / 6)  # one "good" of six, worth 2
    assert found[0]["eval/pass@1"] == pytest.approx(1 / 6)
    files = sorted(path.name for path in (tmp_path / "evaluations").iterdir())
    assert files == [f"version_00000{version}.jsonl" for version in (0, 2, 4, 5)]
    lines = (tmp_path / "evaluations" / files[0]).read_text().splitlines()
    assert len(lines) == 6
    assert json.loads(lines[0])["messages"][-1] == {"role": "assistant", "content": "good"}
    # Requests are salted by the version and have the temperature of the evaluation.
    assert [version for *_, version in client.requests] == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    assert {sampling["temperature"] for _, sampling, *_ in client.requests} == {0.25}
    assert trainer.player.sampler.temperature == SAMPLER.temperature


@pytest.mark.parametrize(("seconds", "first"), [(3.0, 10.0), (25.0, 25.0)])
def test_the_push_waits_only_for_an_evaluation_that_is_slower(seconds, first, tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient("good", seconds=seconds), every=2, last=2)
    run_virtually(trainer.train(10.0))
    assert trainer.times == {0: first, 1: first + 10.0}


def test_every_rank_waits_for_the_same_evaluation_and_gets_the_same(tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient("good", seconds=25.0), every=2, last=2)

    async def rank(version: int, late: float) -> tuple[dict[str, float], float]:
        await asyncio.sleep(late)
        metrics = await trainer.evaluator.wait_for_metrics(version)
        return metrics, asyncio.get_running_loop().time()

    async def main():
        task = asyncio.ensure_future(trainer.evaluator.run())
        trainer._publish(0)
        answers = await asyncio.gather(rank(0, 1.0), rank(0, 2.0), rank(0, 40.0), rank(1, 3.0))
        task.cancel()
        return answers

    first, second, slow, other = run_virtually(main())
    assert first[1] == second[1] == 25.0
    assert first[0] == second[0] == slow[0] != {}
    assert (slow[1], other) == (40.0, ({}, 3.0))  # version 1 is not due


def test_tokens_of_another_version_end_the_run(tmp_path):
    class Pushed(ScriptedClient):
        def _next(self, prompt, max_tokens, version):
            return super()._next(prompt, max_tokens, version + self.given % 2)

    evaluator = Trainer(tmp_path, Pushed("good"), every=1, last=1).evaluator
    with pytest.raises(AssertionError, match=r"version 0 has tokens of \{0, 1\}"):
        run_virtually(evaluator._evaluate(0))


def test_the_ranks_get_no_metrics_of_a_failed_evaluation(tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient(RuntimeError("gone")), every=1, last=2)

    async def main():
        task = asyncio.ensure_future(trainer.evaluator.run())
        trainer.evaluator.start(0)
        ranks = await asyncio.gather(*(trainer.evaluator.wait_for_metrics(0) for _ in range(2)))
        trainer.evaluator.start(1)  # of the update that was running
        assert [*ranks, await trainer.evaluator.wait_for_metrics(1)] == [{}, {}, {}]
        with pytest.raises(ExceptionGroup) as caught:
            await task
        assert "gone" in str(caught.value.exceptions[0])

    run_virtually(main())


def test_a_run_evaluates_examples_of_the_eval_split_with_its_own_player(tmp_path):
    class Splits(ScriptedEnv):
        def examples(self, split):
            return examples(split, 4)

    client = ScriptedClient("good")
    player = Trainer(tmp_path, client, every=1, last=1).player
    # An evaluation ignores the strategy of the run, and needs no hints and no kept tokens.
    player.strategy, player.hinted_envs = Extremes(factor=3), frozenset({"scripted"})
    player.sampler = replace(SAMPLER, top_k=15)
    run = Run.of(composed("max_steps=7", "evaluation=default", "evaluation.num_examples=3"))
    evaluator = evaluator_of(run, RunFolder(tmp_path), Splits(), player)
    assert [example.env for example in evaluator.examples] == ["eval"] * 3
    assert evaluator.last == 7
    pinned = evaluator._evaluation_player(3)
    (rollout,) = run_virtually(pinned.play_group(0, HELD_OUT[0], 1))
    (row,) = rollout.rows
    assert row.hinted_prompt is None
    assert np.array_equal(np.unique(row.token_versions), [-1, 3])
    ((_, sampling, n, _),) = client.requests
    assert (n, sampling["top_k"], "logprobs" in sampling) == (1, 15, False)
    assert pinned._env_slots is player._env_slots  # env.max_concurrent is that of both together


def test_each_number_of_examples_is_divided_as_the_weights_are():
    for weights, count, expected in (
        ((1.0, 3.0), 1, [0, 1]),  # the heavier pool first
        ((1.0, 3.0), 4, [1, 3]),
        ((5.0, 3.0, 2.0), 10, [5, 3, 2]),
        ((1.0, 9.0), 9, [3, 6]),  # all six of the heavier pool, and the rest from the other
    ):
        pools = [Pool(weight, examples(str(i), 6)) for i, weight in enumerate(weights)]
        assert _examples_per_pool(pools, count) == expected


class Mixture(Environment):
    """Two environments of six and four examples, weights 2 and 1, and two that give none."""

    name = "mixture"

    def pools(self, split):
        unused = [Pool(0.0, examples("c", 3)), Pool(1.0, [])]
        return [*unused, Pool(2.0, examples("a", 6)), Pool(1.0, examples("b", 4))]


def test_a_mixture_is_evaluated_by_its_weights_on_the_same_examples_each_time():
    few, again, six, many, all_of_them = (
        ids(choose_examples(Mixture(), "eval", count)) for count in (3, 3, 6, 9, 99)
    )
    assert sorted(env for env, _ in six) == ["a"] * 4 + ["b"] * 2
    assert few == again
    assert set(few) < set(many)
    assert few != sorted(few)[:3] or many != sorted(many)  # shuffled
    assert sorted(all_of_them) == ids([*examples("a", 6), *examples("b", 4)])


def test_an_environment_with_no_or_repeated_held_out_examples_is_refused_by_name():
    repeated = "3 examples of 'mine' have the id 0: give each its own id"
    none = "the environment 'scripted' has no eval examples"
    for chosen, problem in ((examples("mine", 1) * 3, repeated), ([], none)):
        env = type("Broken", (ScriptedEnv,), {"examples": lambda *_, chosen=chosen: chosen})()
        with pytest.raises(ValueError, match=problem):
            choose_examples(env, "eval", 3)


@pytest.mark.parametrize(("max_concurrent", "expected"), [(4, 2.0), (1, 4.0)])
def test_every_example_is_played_and_no_more_at_once_than_allowed(max_concurrent, expected):
    client, told = ScriptedClient("good", "bad", "bad", "good", seconds=1.0), []
    player = Player(SAMPLER, ScriptedEnv(), chat_of(client))

    async def timed():
        limits = {"max_concurrent": max_concurrent, "done": told.append}
        played = await play(player.play_group, examples("scripted", 4), 2, **limits)
        return played, asyncio.get_running_loop().time()

    played, seconds = run_virtually(timed())
    assert seconds == expected  # two groups of two at a time, or one
    assert [one.example.id for one in played] == [0, 1, 2, 3]
    assert [one.rewards for one in played] == [[2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    assert len(told) == 4


def rollout(reward: float | None, **known) -> Rollout:
    facts = {"rewards": {} if reward is None else {"good": reward}, "generation_time": 0.0}
    facts |= {"messages": [{"role": "assistant", "content": "x"}], "stop_reason": StopReason.STOP}
    return Rollout(**{"rows": (), "reward": reward, "turns": 1, **facts, **known})


def played(env: str, *rollouts: Rollout) -> PlayedExample:
    return PlayedExample(Example(id=0, env=env, messages=[]), rollouts)


def test_roles_of_an_example_are_not_compared_with_each_other():
    """In a zero-sum game one of two roles always wins, which is no second attempt."""
    game = (rollout(1.0, role="x"), rollout(0.0, role="o"))
    summary = summarise([played("a", *game), played("a", *game, *game)], threshold=1.0)
    assert summary.passes == {1: 0.5, 2: 0.5}  # pass@2 of the example with two games
    assert summary.zero_spread == 1.0  # each role had the same reward in both games
    assert (summary.reward, summary.num_examples, summary.num_rollouts) == (0.5, 2, 6)


def test_a_summary_by_hand():
    first = [rollout(1.0, num_untracked_tokens=4), rollout(0.0, num_untracked_tokens=8, turns=3)]
    second = [
        rollout(1.0, stop_reason=StopReason.MAX_TOKENS, tool_calls=4, tool_errors=2),
        rollout(None, error="it broke", stop_reason=StopReason.ENV_ERROR),
    ]
    summary = summarise([played("a", *first), played("a", *second)], threshold=1.0)
    assert (summary.num_examples, summary.num_rollouts, summary.num_scored) == (2, 4, 3)
    assert summary.reward == summary.rewards["good"] == pytest.approx(2 / 3)
    assert summary.reward_standard_error == pytest.approx(math.sqrt(2 * (1 / 9 + 1 / 9)) / 3)
    assert summary.passes == {1: pytest.approx(3 / 4), 2: pytest.approx(1.0)}
    assert summary.zero_spread == 0.0
    assert (summary.mean_length, summary.max_length, summary.turns) == (3.0, 8, 1.5)
    assert (summary.truncated, summary.tool_calls, summary.tool_errors) == (0.25, 1.0, 0.5)
    assert summary.stop_reasons == {"stop": 0.5, "max_tokens": 0.25, "env_error": 0.25}
    assert summary.errors == {"it broke": 1}
    assert summary.envs == {}
    assert summary.metrics()["eval/errors"] == 0.25
    assert summary.metrics()["eval/pass@2"] == 1.0
    without_reward = summarise([played("a", second[1])], threshold=1.0).metrics()
    assert "eval/reward" not in without_reward  # because it was not measured


def test_a_turn_is_averaged_over_the_scored_rollouts_that_have_it():
    """An unscored rollout only adds to `nonfinite`. Each environment has its own means."""
    short, long = rollout(1.0, turn_rewards={"good": (1.0,)}), rollout(2.0, rewards={"good": 2.0})
    long = replace(long, turn_rewards={"good": (0.5, 0.5, 1.0)})
    broken = {"rewards": {"good": math.nan, "form": 9.0}, "error": "score returned NaN"}
    broken["turn_rewards"] = {"good": (9.0, math.nan)}
    groups = [played("a", short, long, rollout(None)), played("b", rollout(None, **broken), long)]
    summary = summarise(groups, threshold=1.0)
    of_a = {"good": 1.5, "good/turn_0": 0.75, "good/turn_1": 0.5, "good/turn_2": 1.0}
    of_b = {"good": 2.0, "good/turn_0": 0.5, "good/turn_1": 0.5, "good/turn_2": 1.0}
    counts = {"good/nonfinite": 1.0, "good/turn_1/nonfinite": 1.0}
    assert summary.envs["a"].rewards == of_a
    assert [*of_a] == [*summary.envs["a"].rewards]  # in the order of the turns
    assert summary.envs["b"].rewards == of_b | counts
    both = of_a | counts | {"good": 5 / 3, "good/turn_0": 2 / 3}
    named = {n: v for n, v in summary.metrics().items() if n.startswith("eval/reward/")}
    assert named == pytest.approx({f"eval/reward/{name}": value for name, value in both.items()})


def test_the_standard_error_is_clustered():
    # mean 1/2; sums of deviations 1, -1, 0; sqrt(3/2 * (1 + 1 + 0)) / 6
    groups = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert standard_error(groups) == pytest.approx(math.sqrt(3) / 6)
    # With groups of one size it is the error of the means of groups.
    groups = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    means = [sum(group) / 3 for group in groups]
    assert standard_error(groups) == pytest.approx(stdev(means) / math.sqrt(4))
    assert math.isnan(standard_error([[1.0, 0.0], []]))


def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass():
    for passed, n, k in ((1, 4, 1), (1, 4, 2), (3, 4, 2), (0, 4, 4), (1, 4, 4), (2, 5, 3)):
        group = [1.0] * passed + [0.0] * (n - passed)
        draws = list(combinations(group, k))
        share = sum(max(draw) for draw in draws) / len(draws)
        assert estimates.pass_at_k([group], k, threshold=1.0) == pytest.approx(share)


def test_pass_at_k_averages_examples_and_leaves_out_those_with_too_few_rollouts():
    groups = [[1.0, 0.0], [0.0, 0.0], [1.0]]
    first, second, third = (estimates.pass_at_k(groups, k, threshold=1.0) for k in (1, 2, 3))
    assert (first, second) == (pytest.approx((1 / 2 + 0 + 1) / 3), pytest.approx(1 / 2))
    assert math.isnan(third)
    for most, powers in ((1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])):  # for which k it is shown
        assert [*summarise([played("a", *[rollout(1.0)] * most)], threshold=1.0).passes] == powers


def test_spread_needs_two_rollouts():
    assert zero_spread([[1.0, 1.0], [1.0, 0.0], [0.5, 0.5], [1.0]]) == pytest.approx(2 / 3)
    assert math.isnan(zero_spread([[1.0], [0.0]]))
    assert zero_spread([[0.3, 0.1 + 0.2], [1.0, 1.001]]) == 0.5  # rounding errors are no spread
