"""What is played, and each estimate worked by hand, and then against what it estimates."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import stdev
from typing import Any

import pytest

from envs.episode import Example, StopReason
from envs.protocol import Environment, Pool
from rl.evaluation import summary as estimates
from rl.evaluation.play import _examples_per_pool, choose_examples, play, write_rollouts
from rl.evaluation.summary import PlayedExample, standard_error, summarise, zero_spread
from rl.inference.live_version import LiveVersion
from rl.records import Rollout
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer
from tests.support.virtual_time import run_virtually


class Mixture(Environment):
    """Two environments of six and four examples, weights 2 and 1, and two that give none."""

    name = "mixture"

    def pools(self, split):
        unused = [Pool(0.0, examples("c", 3)), Pool(1.0, [])]
        return [*unused, Pool(2.0, examples("a", 6)), Pool(1.0, examples("b", 4))]


def examples(env: str, count: int) -> list[Example]:
    hi = {"role": "user", "content": "hi"}
    return [Example(id=i, env=env, messages=[hi]) for i in range(count)]


def ids(chosen: list[Example]) -> list[tuple[str, int]]:
    return [(example.env, example.id) for example in chosen]


@pytest.mark.parametrize(
    ("weights", "count", "expected"),
    [
        ((1.0, 3.0), 1, [0, 1]),  # the heavier pool first
        ((1.0, 3.0), 3, [1, 2]),
        ((1.0, 3.0), 4, [1, 3]),
        ((5.0, 3.0, 2.0), 2, [1, 1, 0]),
        ((5.0, 3.0, 2.0), 10, [5, 3, 2]),
        ((1.0, 9.0), 9, [3, 6]),  # all six of the heavier pool, and the rest from the other
    ],
)
def test_each_number_of_examples_is_divided_as_the_weights_are(weights, count, expected):
    pools = [Pool(weight, examples(str(i), 6)) for i, weight in enumerate(weights)]
    assert _examples_per_pool(pools, count) == expected


def test_a_mixture_is_evaluated_by_its_weights_on_the_same_examples_each_time():
    few, again, six, many, all_of_them = (
        ids(choose_examples(Mixture(), "eval", count)) for count in (3, 3, 6, 9, 99)
    )
    assert sorted(env for env, _ in six) == ["a"] * 4 + ["b"] * 2
    assert few == again
    assert set(few) < set(many)
    assert few != sorted(few)[:3] or many != sorted(many)  # shuffled
    assert sorted(all_of_them) == ids([*examples("a", 6), *examples("b", 4)])


class Lazy(Sequence):
    """A million examples, made as they are asked for."""

    def __init__(self):
        self.made = []

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index) -> Any:
        self.made.append(index)
        return Example(id=index, env="scripted", messages=[])


def test_only_the_chosen_examples_of_a_split_are_made():
    lazy = Lazy()
    env = type("Many", (ScriptedEnv,), {"examples": lambda self, split: lazy})()
    assert ids(choose_examples(env, "eval", 3)) == [("scripted", index) for index in lazy.made]
    assert len(lazy.made) == 3


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ([], "the environment 'scripted' has no eval examples"),
        (examples("mine", 1) * 3, "3 examples of 'mine' have the id 0: give each its own id"),
    ],
)
def test_an_environment_with_no_or_repeated_held_out_examples_is_refused_by_name(chosen, problem):
    env = type("Broken", (ScriptedEnv,), {"examples": lambda self, split: chosen})()
    with pytest.raises(ValueError, match=problem):
        choose_examples(env, "eval", 3)


@pytest.mark.parametrize(("max_concurrent", "expected"), [(4, 2.0), (3, 4.0), (1, 4.0)])
def test_every_example_is_played_and_no_more_at_once_than_allowed(max_concurrent, expected):
    client = ScriptedClient("good", "bad", "bad", "good", seconds=1.0)
    chat = RendererChat(SAMPLER, tiny_renderer(), client, 256, LiveVersion(0))
    player, told = Player(SAMPLER, ScriptedEnv(), chat), []

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


def test_what_was_not_measured_is_no_metric():
    lost = (rollout(None, error=error) for error in ("rare", "often", "often"))
    summary = summarise([played("a", *lost)], threshold=1.0)
    assert [*summary.errors.items()] == [("often", 2), ("rare", 1)]
    assert "eval/reward" not in summary.metrics()
    assert summary.metrics()["eval/errors"] == 1.0


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


def test_rollouts_are_written_one_a_line_with_their_rewards_by_turn(tmp_path):
    by_turn = replace(rollout(1.0), turn_rewards={"found": (0.5, 0.5)})
    write_rollouts(tmp_path / "rollouts.jsonl", [played("a", by_turn, rollout(None))])
    lines = [json.loads(x) for x in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [1.0, None]
    assert [line.get("turn_rewards") for line in lines] == [{"found": [0.5, 0.5]}, None]
    assert lines[0]["messages"] == [{"role": "assistant", "content": "x"}]


def test_the_standard_error_is_clustered():
    # mean 1/2; sums of deviations 1, -1, 0; sqrt(3/2 * (1 + 1 + 0)) / 6
    groups = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert standard_error(groups) == pytest.approx(math.sqrt(3) / 6)
    # With groups of one size it is the error of the means of groups.
    groups = [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    means = [sum(group) / 3 for group in groups]
    assert standard_error(groups) == pytest.approx(stdev(means) / math.sqrt(4))
    assert math.isnan(standard_error([[1.0, 0.0], []]))


@pytest.mark.parametrize(
    ("passed", "n", "k"),
    [(1, 4, 1), (1, 4, 2), (2, 4, 2), (3, 4, 2), (0, 4, 4), (1, 4, 4), (2, 5, 3), (2, 5, 5)],
)
def test_pass_at_k_is_the_share_of_all_draws_of_k_that_hold_a_pass(passed, n, k):
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
