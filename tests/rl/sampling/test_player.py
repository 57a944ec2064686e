"""Episodes that a scripted engine plays with Qwen3's real renderer: rollouts, rewards, rows.

Which errors cost a rollout, and which time counts for it. Environments that hold the conversation
ask the policy for every turn, also of several roles.
"""

import asyncio
import contextvars
import json
import logging
import math
import re
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from envs.deadline import WAITING, Deadline
from envs.episode import Example, StopReason, rewards_by_name
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import ContextFull, Environment
from rl.inference.completion import Completion, GenerationError, RequestFailed
from rl.rollouts import __main__ as main
from rl.sampling import clock as module
from rl.sampling.clock import Clock, CompletionSlots
from rl.sampling.demonstrations import DemonstrationSampler
from rl.sampling.player import Player
from rl.sampling.prompt_lengths import FittingExamples
from rl.sampling.renderer_chat import RendererChat
from rl.sampling.rewarding import with_rewards
from rl.sampling.row_builder import RowBuilder
from rl.sampling.strategies import AdaptiveSize
from rl.sampling.watchdog import Watchdog
from tests.support.fuzz import FuzzedClient
from tests.support.golden import golden
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    play,
    scoring,
    text,
    tiny_renderer,
    tiny_tokenizer,
    trained,
)
from tests.support.world import run_virtually

EXAMPLE = Example(3, "scripted", list(HI))


def failing(self, episode):
    raise KeyError("no\nline")


SCENES = {
    "one request": (ScriptedEnv(), ("good", "bad", "<think>\nhm\n</think>\n\ngood"), {"n": 3}),
    "own requests": (ScriptedEnv(), ("good", "bad"), {"n": 2, "rollout_timeout": 9.0}),
    "turns": (ScriptedEnv(("more?", "and?"), max_turns=4), ("a", "bb", "good"), {"n": 2}),
    "too many turns": (ScriptedEnv(("x",) * 5, max_turns=2), ("a", "b"), {"seed": 5}),
    "cut off": (ScriptedEnv(("x",), max_turns=2), ("y" * 40,), {"top_p": 0.5, "stop": ("</a>",)}),
    "context": (ScriptedEnv(), ("y" * 40,), {"max_seq_len": PREFIX + 5, "seed": 6, "n": 2}),
    "no room": (ScriptedEnv(), ("y",), {"max_seq_len": PREFIX}),
    "score fails": (scoring(failing), ("good",), {"max_retries": 1}),
    "no number": (scoring(lambda *_: {"good": float("nan")}), ("good",), {}),
    "turn rewards": (scoring(lambda *_: {"good": [0.5], "length": 2.0}), ("good",), {}),
}


def played(env, answers, *, n=1, max_seq_len=256, seed=None, **options):
    """Return rollouts of version 6, without their time, and what vLLM was asked."""
    client, sampler = ScriptedClient(*answers), replace(SAMPLER, **options)
    chat = chat_of(client, sampler, max_seq_len)
    rollouts = run_virtually(Player(sampler, env, chat, seed=seed).play_group_at(2, EXAMPLE, n, 6))
    asked = [[len(ids), *rest] for ids, *rest in client.requests]
    errors = [re.sub(r":\d+\)", ")", each.error) for each in rollouts]  # without line numbers
    plain = zip(rollouts, errors, strict=True)
    return [[replace(each, generation_time=0.0, error=error) for each, error in plain], asked]


def test_rollouts_and_requests_of_scripted_episodes():
    """All fields of the rollouts; length of prompt, parameters, n and version of each request."""
    found = {name: played(env, answers, **how) for name, (env, answers, how) in SCENES.items()}
    golden("sampling/rollouts", found)


def test_a_reply_that_fills_the_row_ends_an_episode():
    (rollout,) = play(ScriptedEnv(("r" * 99,), 9), ScriptedClient("x"), max_seq_len=PREFIX + 50)
    assert (rollout.stop_reason, rollout.error) == (StopReason.CONTEXT, "")
    assert (rollout.reward, rollout.num_completion, rollout.rows[0].length) == (0.0, 2, PREFIX + 2)


def seeds(env, *, seed=5, group=0, size=3, sampler=SAMPLER) -> list:
    """Return the seeds of the requests of a group, in order."""
    client = ScriptedClient("x")
    play(env, client, size, sampler=sampler, seed=seed, index=group)
    return [sampling.get("seed") for _, sampling, _, _ in client.requests]


def test_every_request_of_a_seeded_run_has_its_own_seed_and_the_same_run_repeats_it():
    env = ScriptedEnv(replies=("again",) * 2, max_turns=3)
    given = [s for run in (5, 6) for group in (0, 1) for s in seeds(env, seed=run, group=group)]
    assert len(given) == len(set(given)) == 2 * 2 * 3 * 3
    assert given[-9:] == seeds(env, seed=6, group=1)
    assert seeds(env, seed=None) == [None] * 9  # without sampler.seeded
    given = seeds(Talking(), size=2)  # two roles with two turns each
    assert len(given) == len(set(given)) == 2 * 2 * 2
    (seed,) = seeds(ScriptedEnv())  # from which vLLM counts up
    assert 0 <= seed < 2**56
    first, second = seeds(scoring(failing), size=1, sampler=replace(SAMPLER, max_retries=1))
    assert first != second


class Named(ScriptedEnv):
    """An environment of a mixture."""

    def examples(self, split):
        return [Example(0, self.name, [user(self.name)])]

    def demonstrations(self, rng):
        while True:
            yield [user(self.name), {"role": "assistant", "content": self.name}]


def test_the_environment_of_a_group_decides_its_turns_rewards_limits_and_tools():
    def find(word: str) -> str:
        """Find."""
        return word

    class Run:
        seed, max_seq_len, group_size = 0, 4096, 1

    one, two = Named(), Named(replies=("go on",), max_turns=2)
    one.sampling, two.reward_weights = {"max_tokens": 6}, {"good": 5.0}
    env = Mixture(envs={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0})
    env.environment_of(Example(0, "two", [])).tools = [find]
    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)
    found = []
    for (example,) in (pool.examples for pool in env.pools("train")):
        player = Player(SAMPLER, env, chat_of(ScriptedClient("good"), max_seq_len=4096))
        (rollout,) = run_virtually(player.play_group(0, example, 1))
        found.append((rollout.turns, rollout.reward, rollout.turn_limit))
        (shown,) = main._demonstrator(Run, sampler, env, tiny_renderer())("0", example)
        assert shown.messages[0]["content"] == example.env
        assert (b"Find." in text(shown.rows[0].token_ids)) is (example.env == "two")
    assert found == [(1, 2.0, 6), (2, 5.0, SAMPLER.max_tokens)]


def single(scored):
    """Return the rollout of an episode whose score returns this."""
    (rollout,) = play(scoring(lambda *_: scored), ScriptedClient("good"))
    return rollout


def test_a_weighted_reward_must_be_returned_and_one_without_a_weight_may_be_any_number():
    hint = "only 'goood': did you mean 'goood'\\? "
    with pytest.raises(ValueError, match=f"names 'good', but score.*{hint}"):
        single({"goood": 1.0})
    assert single({}).error.startswith("Mine.score (or score_group) did not return 'good'")
    env = scoring(lambda *_: {"good": 1.0, "off": math.nan, "log": math.inf})
    env.reward_weights = {"good": 2.0, "off": 0.0, "missing": 0.0}
    (rollout,) = play(env, ScriptedClient("good"))
    assert (rollout.reward, rollout.error) == (2.0, "")
    # After the first rollout, one that lacks a weighted reward is unscorable.
    rollout, checked = single({"good": 1.0}), set()
    assert with_rewards(ScriptedEnv(), rollout, {"good": 1.0}, checked).reward == 2.0
    strict = type("Strict", (ScriptedEnv,), {"reward_weights": {"good": 2.0, "length": -0.5}})()
    assert with_rewards(strict, rollout, {"good": 1.0, "length": 2.0}, checked).reward == 1.0
    for scored, said in (
        ({"length": 1.0}, "did not return 'good': return 0.0 where a reward does not apply"),
        ({"good": 1e308}, "sum of {'good': 1e+308} is too large: lower reward_weights"),
        ({"good": math.inf}, "returned NaN or infinity for ['good']"),
    ):
        unscored = with_rewards(ScriptedEnv(), replace(rollout, reward=None), scored, checked)
        assert (unscored.reward, unscored.rewards) == (None, scored)
        assert said in unscored.error


def by_turn(scored):
    """Return the rollout of three turns whose score returns this."""
    env = scoring(lambda *_: scored)
    env.replies, env.max_turns = ("more", "more"), 3
    (rollout,) = play(env, ScriptedClient("a", "b", "c"))
    return rollout


def test_a_reward_by_turn_is_worth_its_sum_and_a_wrong_one_costs_the_rollout():
    rollout = by_turn({"good": [1, 0.5, 0], "length": 3})
    assert (rollout.turns, rollout.reward) == (3, 3.0)  # good weighs 2
    assert rollout.rewards == {"good": 1.5, "length": 3.0}
    assert rollout.turn_rewards == {"good": (1.0, 0.5, 0.0)}
    assert rollout.rows[0].turns.max() == 2
    wrong = "returned 4 numbers for 'good' after 3 turns of the policy: return one for each turn"
    for value, said in (
        ([1] * 4, wrong),
        ([1.0, math.inf, -math.inf], "NaN or infinity for ['good']"),
        ([None] * 3, "raised"),
    ):
        rollout = by_turn({"good": value})
        assert rollout.reward is None
        assert (rollout.stop_reason == StopReason.ENV_ERROR) == ("NaN" not in said)
        assert said in rollout.error


def test_numbers_of_any_kind():
    for value, whole, part in (
        (True, 1.0, None),
        (np.float32(0.5), 0.5, None),
        (np.array([1, 2, 3]), 6.0, (1.0, 2.0, 3.0)),
        ([0.1, 0.2, 0.3], 0.6, (0.1, 0.2, 0.3)),  # the sum is rounded once
    ):
        assert rewards_by_name({"r": value}, 3) == ({"r": whole}, {"r": part} if part else {})


def rows_of(*turns):
    """Rows of (prompt, completion) turns: token t has logprob -t / 8, turn i version i + 5."""
    rows = RowBuilder()
    for i, (prompt, completion) in enumerate(turns):
        logprobs, versions = [-t / 8 for t in completion], [i + 5] * len(completion)
        rows.add_turn(Completion(completion, logprobs, versions, False, prompt))
    return rows


def test_turns_whose_prompts_extend_are_one_row_with_the_values_of_each_token():
    """The third turn forks, and the fourth extends the fork."""
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([9], [7, 8]), ([9, 7, 8, 5], [10])]
    first, second = rows_of(*turns).freeze()
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert trained(first) == [3, 4, 6]
    assert first.num_completion == 3
    assert first.rollout_logprobs.tolist() == [0, 0, -3 / 8, -4 / 8, 0, -6 / 8]
    assert first.token_versions.tolist() == [-1, -1, 5, 5, -1, 6]
    assert first.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert first.turns.dtype == np.int32
    assert (second.token_ids.tolist(), trained(second)) == ([9, 7, 8, 5, 10], [7, 8, 10])
    assert second.turns.tolist() == [-1, 2, 2, -1, 3]
    # An empty completion is nothing to train on.
    (row,) = rows_of(([1, 2], [3]), ([7, 8], [])).freeze()
    assert row.token_ids.tolist() == [1, 2, 3]
    assert RowBuilder().freeze() == ()
    # A prompt that rewrites history, or is shorter, forks, and no token is trained twice.
    for rewritten in ([1, 2, 3, 0, 5], [1, 2, 3]):
        first, second = rows_of(([1, 2], [3, 4]), (rewritten, [6, 7])).freeze()
        assert (first.token_ids.tolist(), trained(first)) == ([1, 2, 3, 4], [3, 4])
        assert (second.token_ids.tolist(), trained(second)) == ([*rewritten, 6, 7], [6, 7])
        assert second.token_versions[-2:].tolist() == [6, 6]


def test_kept_tokens_stand_at_the_tokens_that_were_sampled_from_them():
    rows = RowBuilder()
    begun = Completion([3, 4], [0, -1], [-1, 5], False, [1, 2], num_masked=1, kept=[[], [4]])
    rows.add_turn(begun)
    rows.add_turn(Completion([6, 7], [-1, -1], [5, 5], False, [1, 2, 3, 4, 5], kept=[[6, 8], [7]]))
    rows.add_turn(Completion([2], [-1], [6], False, [9]))
    first, fork = rows.freeze()
    assert trained(first) == [4, 6, 7]
    assert first.kept.tolist() == [[4, -1], [6, 8], [7, -1]]
    assert first.kept.dtype == np.int32
    assert fork.kept is None


def examples(*lengths: int, env: str = "scripted") -> list[Example]:
    """Return prompts of these lengths in tokens, without tools."""
    return [Example(i, env, [user("x" * (n - PREFIX + 2))]) for i, n in enumerate(lengths)]


def fitting(given, env=None, max_seq_len=100, max_prompt_len=None) -> FittingExamples:
    chat = chat_of(ScriptedClient(), max_seq_len=max_seq_len)
    return FittingExamples(given, env or ScriptedEnv(), chat, max_seq_len, max_prompt_len)


@pytest.mark.parametrize(
    ("max_prompt_len", "problem"),
    [
        (None, "fill max_seq_len=100: raise max_seq_len (and model.max_seq_len, if it is"),
        (80, "have more tokens than sampler.max_prompt_len=80: raise it, or set sampler"),
    ],
)
def test_a_prompt_that_is_too_long_is_replaced_and_counted(max_prompt_len, problem, caplog):
    prompts = examples(50, max_prompt_len or 99, (max_prompt_len or 99) + 1, 120)
    with caplog.at_level(logging.WARNING):
        assert {e.id for e in fitting(prompts, None, 100, max_prompt_len)} == {0, 1}
    assert "1 of 3 prompts of env 'scripted' that were drawn are replaced, because" in caplog.text
    assert problem in caplog.text
    assert "2 of 4 prompts" in caplog.text


def test_prompts_are_measured_at_the_start_with_the_tools_of_their_own_environment():
    said = "all 2 prompts of env 'scripted' fill max_seq_len=40: .* The shortest has 50 tokens"
    with pytest.raises(ValueError, match=said):
        fitting(examples(60, 50), None, 40)

    def find(word: str) -> str:
        """Find a word."""
        return word

    env = ScriptedEnv()
    env.tools = [find]
    fitting(examples(50), None, 256)
    with pytest.raises(ValueError, match="fill max_seq_len=256"):
        fitting(examples(50), env, 256)
    # A conversation that its environment holds has no prompt to measure.
    envs = {"one": ScriptedEnv(), "two": holding(None)}
    env = Mixture(envs=envs, weights={"one": 1.0, "two": 1.0})
    assert {e.id for e in fitting(examples(50, 300, env="one"), env)} == {0}
    assert {e.id for e in fitting(examples(300, 300, env="two"), env)} == {0, 1}


def test_the_replacement_does_not_depend_on_what_was_measured_before(caplog):
    prompts = examples(*[50, 300] * 20)
    drawn = [example.id for example in fitting(prompts)]
    assert len(caplog.records) == 5  # for the 1st, 2nd, 4th, 8th and 16th that is too long
    backwards = fitting(prompts)
    assert drawn == [backwards[i].id for i in reversed(range(40))][::-1]
    assert drawn[::2] == list(range(0, 40, 2))  # each prompt that fits keeps its position
    assert len(set(drawn[1::2])) > 5  # not one example for all prompts that are too long


FAILED = RequestFailed("vLLM answered 500 to /inference/v1/generate")


@pytest.mark.parametrize(("turns", "answering", "seconds"), [(1, 50, 20), (2, 61, 0)])
def test_the_time_of_the_server_counts_towards_the_timeout(turns, answering, seconds):
    async def score(self, episode):
        await asyncio.sleep(seconds)
        return {"good": 1.0}

    env = type("Mine", (ScriptedEnv,), {"score": score})(max_turns=turns)
    rollouts = play(env, ScriptedClient("bad", seconds=answering), 2)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.TIMEOUT] * 2


def test_an_error_of_an_environment_costs_one_rollout_and_names_the_line():
    async def reply(self, episode, message):
        if episode.text == "bad":
            json.loads("\n\nno json")  # fails within a library

    broken, fine = play(
        type("Raising", (ScriptedEnv,), {"reply": reply})(), ScriptedClient("bad", "good"), 2
    )
    assert (fine.stop_reason, fine.reward, fine.error) == (StopReason.STOP, 2.0, "")
    assert (broken.stop_reason, broken.reward) == (StopReason.ENV_ERROR, None)
    assert broken.rows[0].num_completion == 4
    line = reply.__code__.co_firstlineno + 2
    error = rf"Raising\.reply raised JSONDecodeError: .+ \(test_player\.py:{line}\)"
    assert re.fullmatch(error, broken.error)  # . is no line break


def raising(error: BaseException):
    def score(*_):
        raise error

    return scoring(score)


def holding(play) -> ScriptedEnv:
    """Return an environment that holds the conversation."""
    return type("Holding", (ScriptedEnv,), {"holds_conversation": True, "play": play})()


async def _misuse(self, episode, speak):
    await speak(list(HI), None)
    with suppress(Exception):
        await speak([{"no": "role"}], None)


MALFORMED = type("Mine", (ScriptedEnv,), {"reply": lambda *_: [{"content": "no role"}]})


@pytest.mark.parametrize(
    ("env", "error"),
    [
        (raising(OSError("a\n\n  b")), "Mine.score raised OSError: a b (test_player.py:"),
        (raising(asyncio.CancelledError("x")), "Mine.score raised CancelledError: x"),
        (raising(TimeoutError("own")), "Mine.score raised TimeoutError: own ("),
        (MALFORMED(max_turns=3), "Mine.reply raised "),
        (holding(_misuse), "Holding.play raised KeyError: 'role'"),
    ],
)
def test_every_error_of_an_environment_is_named(env, error, caplog):
    with caplog.at_level(logging.WARNING):
        rollouts = play(env, ScriptedClient("good"), 2)
    for rollout in rollouts:
        assert (rollout.stop_reason, rollout.reward) == (StopReason.ENV_ERROR, None)
        assert rollout.error.startswith(error)
    assert caplog.text.count(f"scripted: {error}") == 1  # at once, and only once


def test_an_error_of_the_server_ends_the_run_and_a_failed_request_costs_its_rollout():
    with pytest.raises(GenerationError, match="answered 500"):
        play(ScriptedEnv(), ScriptedClient(GenerationError("vLLM answered 500")), 2)
    client, sampler = ScriptedClient(FAILED), replace(SAMPLER, max_retries=1)
    (rollout,) = play(ScriptedEnv(), client, sampler=sampler)
    assert (rollout.stop_reason, rollout.reward) == (StopReason.ENGINE_ERROR, None)
    assert (rollout.error, rollout.retries) == (str(FAILED), 1)
    # If a shared request failed, each rollout sends its own.
    rollouts = play(ScriptedEnv(), ScriptedClient(FAILED, "good", FAILED, "bad"), group_size=3)
    assert [rollout.reward for rollout in rollouts] == [2.0, None, 0.0]


def test_a_cancelled_group_is_no_error_of_the_environment():
    class Hanging(ScriptedEnv):
        async def score(self, episode):
            asyncio.current_task().cancel()
            return await super().score(await asyncio.sleep(1, episode))

    with pytest.raises(asyncio.CancelledError):
        play(Hanging(), ScriptedClient("good"))


def test_waiting_for_the_limit_of_an_environment_does_not_count_towards_the_timeout():
    inside, most = [], []

    async def score(self, episode):
        inside.append(episode)
        most.append(len(inside))
        await asyncio.sleep(50)  # of 60
        inside.remove(episode)
        return {"good": 1.0}

    env = scoring(score)
    env.max_concurrent = 2
    rollouts = play(env, ScriptedClient("good"), 12)
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 12
    assert max(most) == 2


@pytest.mark.parametrize(("max_turns", "seats", "highest"), [(1, 4, 3), (2, 4, 4), (1, 2, 3)])
def test_waiting_for_a_seat_in_vllm_does_not_count_towards_the_timeout(max_turns, seats, highest):
    most = [0, 0]

    class Counting(RendererChat):
        async def generate(self, prompt, n, seed=None):
            most[0] += n
            most[1] = max(most)
            completions = await super().generate(prompt, n, seed)
            most[0] -= n
            return completions

    chat = chat_of(ScriptedClient("good", seconds=50), kind=Counting, slots=CompletionSlots(seats))
    player = Player(SAMPLER, ScriptedEnv(max_turns=max_turns), chat)

    async def groups():
        return await asyncio.gather(*(player.play_group(i, EXAMPLE, 3) for i in range(5)))

    rollouts = [rollout for group in run_virtually(groups()) for rollout in group]
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 15
    assert most[1] == highest


def test_every_episode_is_closed_and_each_error_is_logged(caplog):
    closed = []

    async def score(self, episode):
        if episode.text == "bad":
            raise OSError("broken")
        await asyncio.sleep(0 if episode.text == "good" else 1e9)
        return await ScriptedEnv.score(self, episode)

    def close(self, episode):
        closed.append(episode.text)
        raise OSError("already closed")

    env = type("Closing", (ScriptedEnv,), {"score": score, "close": close})()
    good, bad, hung = play(env, ScriptedClient("good", "bad", "hang"), 3)
    assert sorted(closed) == ["bad", "good", "hang"]
    assert [r.stop_reason for r in (good, bad, hung)] == ["stop", "env_error", "timeout"]
    assert (hung.reward, hung.rows[0].num_completion) == (None, 5)  # it keeps its tokens
    assert "sampler.rollout_timeout=60 s" in hung.error
    assert good.reward == 2.0
    assert [caplog.text.count(said) for said in ("broken", "rollout_timeout=60 s")] == [1, 1]


class Ranked(ScriptedEnv):
    """Rank the answers by length, the shortest first; `good` is only logged."""

    reward_weights = {"rank": 2.0}  # noqa: RUF012 as environments write it

    async def score(self, episode):
        if episode.text == "bad":
            raise KeyError("bad")
        return await super().score(episode)

    async def score_group(self, episodes):
        lengths = sorted(len(episode.text) for episode in episodes)
        return [{"rank": -lengths.index(len(episode.text))} for episode in episodes]


def test_the_rewards_of_the_group_join_those_of_each_episode_and_failed_ones_are_left_out():
    four, failed, good, two = play(Ranked(), ScriptedClient("four", "bad", "good!", "two"), 4)
    assert [rollout.reward for rollout in (four, good, two)] == [-2.0, -4.0, 0.0]
    assert good.rewards == {"good": 0.0, "length": 5.0, "rank": -2.0}
    assert failed.reward is None
    assert "KeyError" in failed.error


def test_a_plain_score_group_runs_in_a_thread_and_does_not_hold_up_the_loop():
    def blocking(self, episodes):
        asyncio.run(asyncio.sleep(0))  # raises in the thread of the event loop
        return [{"rank": 1.0} for _ in episodes]

    env = type("Mine", (Ranked,), {"score_group": blocking})()
    # In real time, because virtual time does not wait for threads.
    player = Player(SAMPLER, env, chat_of(ScriptedClient("a")))
    rollouts = asyncio.run(player.play_group(0, EXAMPLE, 2))
    assert [rollout.reward for rollout in rollouts] == [2.0, 2.0]


async def _hangs(self, episodes):
    await asyncio.sleep(1e6)


async def _one_is_wrong(self, episodes):
    return [{"rank": math.nan if episode.text == "b" else 1.0} for episode in episodes]


@pytest.mark.parametrize(
    ("score_group", "rewards", "said"),
    [
        (_hangs, [None, None], "score_group took longer than sampler.rollout_timeout=60 s"),
        (lambda *_: [{"rank": 1.0}], [None, None], "score_group returned 1 results for 2 episodes"),
        (_one_is_wrong, [2.0, None], "NaN or infinity for ['rank']"),
    ],
)
def test_an_error_of_score_group_costs_the_group_and_a_wrong_reward_its_rollout(
    score_group, rewards, said, caplog
):
    env = type("Mine", (Ranked,), {"score_group": score_group})()
    rollouts = play(env, ScriptedClient("a", "b"), 2)
    assert caplog.text.count(said) == 1
    assert [rollout.reward for rollout in rollouts] == rewards
    for rollout in rollouts:
        assert (said in rollout.error) == (rollout.reward is None)
        failed = rewards == [None, None]
        assert rollout.stop_reason == (StopReason.ENV_ERROR if failed else StopReason.STOP)


def played_with(block):
    """Return two rollouts, of which `block` delays the score of the first, and the reports."""

    async def score(self, episode):
        if episode.text == "bad":
            block()
        return await ScriptedEnv.score(self, episode)

    async def play():
        chat = chat_of(ScriptedClient("bad", "good"))
        with Watchdog(sentences.append, patience=0.2, interval=0.05) as watchdog:
            return await Player(SAMPLER, scoring(score), chat, watchdog).play_group(0, EXAMPLE, 2)

    sentences = []
    return asyncio.run(play()), sentences


def test_a_score_that_blocks_is_named_with_its_line_and_counted_and_the_run_goes_on():
    (bad, good), sentences = played_with(lambda: time.sleep(1))
    assert (good.reward, bad.reward) == (2.0, 0.0)
    assert (bad.blocked_time > 0.2, good.blocked_time) == (True, 0.0)
    message = r"all rollouts have been blocked for .* s by .*\(test_player\.py:\d+\)"
    assert re.match(message, sentences[0])
    assert played_with(lambda: None)[1] == []


async def waits(clock: Clock, seconds: float, *, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    with clock.pause():
        await asyncio.sleep(seconds)


def test_the_clock_runs_while_no_turn_waits_and_only_within_its_blocks():
    async def left() -> tuple[float, float]:
        clock, tool = Clock(10.0), Deadline(5.0)
        async with clock.run():
            await asyncio.gather(waits(clock, 3.0, after=2.0), waits(clock, 8.0, after=3.5))
            async with tool.run():
                with WAITING.get()():  # pauses the inner and the outer deadline
                    await asyncio.sleep(30.0)
                await asyncio.sleep(4.0)
        await asyncio.sleep(5.0)
        async with clock.run():
            await asyncio.sleep(1.0)
        return clock.left, tool.left

    assert run_virtually(left()) == pytest.approx((10.0 - 2.0 - 4.0 - 1.0, 5.0 - 4.0))


def test_a_turn_that_another_task_asks_for_pauses_the_clock_of_its_own_episode():
    class Restarting(ScriptedClient):
        async def generate(self, *args, **options):
            with WAITING.get()():
                await asyncio.sleep(100)  # for longer than sampler.rollout_timeout
            return await super().generate(*args, **options)

    async def talk(self, episode, speak):
        await asyncio.create_task(speak(list(HI), None), context=contextvars.Context())

    (rollout,) = play(holding(talk), Restarting("good"))
    assert (rollout.error, rollout.turns) == ("", 1)


def test_the_time_of_the_server_is_that_of_all_requests_without_their_waits(monkeypatch):
    now = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(module, "time", now)

    async def engine_time():
        clock, slots = Clock(10.0), CompletionSlots(1)
        async with clock.run(), slots.hold(1):
            requests = [asyncio.create_task(request(clock, slots, s)) for s in (2, 3)]
            await asyncio.sleep(100)
        await asyncio.gather(*requests)
        return clock.engine_time

    async def request(clock, slots, seconds):
        async with clock.hold_slots(slots):
            await asyncio.sleep(seconds)

    assert run_virtually(engine_time()) == pytest.approx(5.0)


class Driving(Environment):
    """Ask for a turn after each of `replies`, and score 1."""

    name = "driving"
    holds_conversation = True
    reward_weights = {"one": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self, *replies):
        self.replies = replies

    async def play(self, episode, speak):
        messages = list(HI)
        spoken = await speak(messages, None)
        for reply in self.replies:
            messages = [*messages, self.repeat(spoken.message), user(reply)]
            spoken = await speak(messages, None)

    def repeat(self, message):
        return message

    async def score(self, episode):
        return {"one": 1.0}


def changed(*replies, **methods):
    """Return a Driving environment with these replies and methods."""
    return type("Mine", (Driving,), methods)(*replies)


def test_a_text_is_scored_after_the_prompt_and_is_not_trained():
    async def talk(self, episode, speak):
        spoken = await speak(list(HI), None)
        assert (spoken.prompt_tokens, spoken.completion_tokens) == (PREFIX, len("good") + 1)
        logprobs = await speak.logprobs(list(HI), "42", after="so ")
        episode.memory["known"] = logprobs, spoken.message["content"]

    async def score(self, episode):
        logprobs, said = episode.memory["known"]
        return {"one": sum(logprobs) if said == "good" else 9.0}

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=talk, score=score), client)
    (row,) = rollout.rows
    assert text(trained(row)) == b"good"
    ((token_ids, version),) = client.scored
    assert (bytes(token_ids[-5:]), version) == (b"so 42", 7)
    assert token_ids[:-5] == row.token_ids[: len(token_ids) - 5].tolist()  # the turn's prompt
    assert rollout.reward == -(ord("4") + ord("2")) / 8


@pytest.mark.parametrize(("count", "num_scored"), [(255 - PREFIX, 1), (256 - PREFIX, 0)])
def test_a_text_that_does_not_fit_ends_the_episode(count, num_scored):
    """The limit is 256 tokens, and vLLM samples one after the text."""

    async def talk(self, episode, speak):
        await speak(list(HI), None)
        await speak.logprobs(list(HI), "9" * count)

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=talk), client)
    assert (rollout.reward, len(client.scored)) == (1.0, num_scored)
    assert rollout.stop_reason == (StopReason.STOP if num_scored else StopReason.CONTEXT)


def test_a_changed_history_forks_the_rollout_at_every_turn_and_additional_keys_do_not():
    def repeat(self, message):
        added = dict.fromkeys(("refusal", "tool_calls"))
        return {"role": "assistant", "content": message["content"], **added}

    def say_something_else(self, message):
        return {"role": "assistant", "content": "something else"}

    (rollout,) = play(changed("more", "again", repeat=repeat), ScriptedClient("good"))
    assert (len(rollout.rows), rollout.turns, rollout.error) == (1, 3, "")
    forking = changed("more", "again", repeat=say_something_else)
    (rollout,) = play(forking, ScriptedClient("good"))
    assert (len(rollout.rows), rollout.num_completion) == (3, 3 * len("good?"))


@pytest.mark.parametrize(
    ("given", "repeated", "num_rows"),
    [('{"a": 1}', '{ "a":1}', 1), ('{"a": 1}', '{"a": 2}', 2), ("{}", "", 1)],
)
def test_the_arguments_of_a_tool_call_may_be_repeated_as_json_text(given, repeated, num_rows):
    def repeat(self, message):
        function = {"name": "look", "arguments": repeated}
        calls = [message["tool_calls"][0] | {"function": function}]
        assert message["content"] == ""  # some clients repeat an empty text as null
        return {**message, "content": None, "tool_calls": calls}

    env = changed("more", repeat=repeat)
    call = f'<tool_call>\n{{"name": "look", "arguments": {given}}}\n</tool_call>'
    said = [[*tiny_tokenizer().encode(text), IM_END] for text in (call, "good")]
    (rollout,) = play(env, FuzzedClient(said))
    assert (len(rollout.rows), rollout.tool_calls, rollout.turns) == (num_rows, 1, 2)


def test_the_policy_sees_the_tools_of_a_later_turn():
    first, second = ([{"name": name, "description": "", "parameters": {}}] for name in ("f1", "f2"))

    async def changing(self, episode, speak):
        spoken = await speak(list(HI), first)
        await speak([*HI, spoken.message, user("more")], second)

    client = ScriptedClient("good")
    (rollout,) = play(changed(play=changing), client, max_seq_len=4096)
    assert len(rollout.rows) == 2  # the history was rendered again
    later = text(client.requests[1][0])
    assert (b"f1" in later, b"f2" in later) == (False, True)


def test_a_full_context_ends_the_episode_even_if_the_environment_catches_it():
    async def catching(self, episode, speak):
        with suppress(ContextFull):
            await Driving.play(self, episode, speak)

    endless, client = Driving(*["more"] * 20), ScriptedClient("good")
    # The second prompt has 50 tokens, and the third has 79.
    for env, limit in ((endless, 60), (changed("more", "again", play=catching), 60), (endless, 50)):
        (rollout,) = play(env, client, max_seq_len=limit)
        assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.CONTEXT)
    assert [len(prompt) for prompt, *_ in client.requests] == [PREFIX, 50] * 2 + [PREFIX]


class Talking(Environment):
    """Two roles speak by turns; `scores` gives each its rewards."""

    name = "talking"
    holds_conversation = True
    reward_weights = {"won": 1.0}  # noqa: RUF012 as environments write it
    scores = {"first": {"won": 1.0}, "second": {"won": 0.0}}  # noqa: RUF012

    async def play(self, episode, speak):
        talks = {"first": [user("one")], "second": [user("two")]}
        for _ in range(2):
            for role, messages in talks.items():
                spoken = await speak(messages, None, role=role)
                messages += [spoken.message, user("go on")]
        episode.memory["rounds"] = 2

    async def score(self, episode):
        assert episode.memory["rounds"] == 2  # the roles share the memory
        return self.scores[episode.role]


def talking(**attributes):
    return type("Mine", (Talking,), attributes)()


def test_each_role_has_its_own_rollout_and_alternating_turns_do_not_fork():
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d"))
    found = [(r.role, r.reward, r.turns) for r in (first, second)]
    assert found == [("first", 1.0, 2), ("second", 0.0, 2)]
    assert [[text(trained(row)) for row in r.rows] for r in (first, second)] == [[b"ac"], [b"bd"]]
    assert [m["content"] for m in second.messages] == ["two", "b", "go on", "d"]
    assert [row.turns.max() for r in (first, second) for row in r.rows] == [1, 1]
    assert first.others == ()
    assert {r.stop_reason for r in (first, second)} == {StopReason.STOP}
    first, second = play(Talking(), ScriptedClient("a", "b", "c", "d" * 40))
    assert (first.stop_reason, second.stop_reason) == (StopReason.STOP, StopReason.MAX_TOKENS)


def test_a_role_without_a_reward_is_counted_and_the_other_role_keeps_its_own():
    for given, said in (
        ({}, "returned no reward for the role 'second': return NaN if this role must not"),
        ({"won": [1.0, math.nan]}, "returned NaN or infinity for ['won']"),
        ({"won": math.nan}, ""),  # the environment does not train this role
    ):
        env = talking(scores={"first": {"won": 1.0}, "second": given})
        first, second = play(env, ScriptedClient("a"))
        assert (first.reward, first.error, second.reward) == (1.0, "", None)
        assert said in second.error
        assert bool(second.error) == bool(said)


def test_roles_share_the_number_of_their_episode_and_strategies_read_a_reward_that_is_no_nan():
    async def score(self, episode):
        return {"won": math.nan if episode.role == "first" else float(episode.number)}

    strategy = AdaptiveSize(max_rounds=3)  # ends after the first round in which rewards differ
    rollouts = play(talking(score=score), ScriptedClient("a"), 2, strategy=strategy)
    found = [(r.role, r.reward) for r in rollouts]
    assert found == [("second", 0.0), ("first", None), ("second", 1.0), ("first", None)]
    assert [r.messages[0]["content"] for r in rollouts] == ["two", "one"] * 2


def test_a_wrong_name_of_one_role_and_score_group_of_several_roles_are_refused():
    env = talking(scores={"first": {"won": 1.0}, "second": {"lost": 1.0}})
    with pytest.raises(ValueError, match=r"names 'won', but score.* returned only 'lost'"):
        play(env, ScriptedClient("a"))
    compared = talking(score_group=lambda _, episodes: [{"won": 1.0} for _ in episodes])
    for rollout in play(compared, ScriptedClient("a")):
        assert rollout.error.startswith("several roles spoke, which score_group does not allow")


@pytest.mark.parametrize("answered", [(), ("a",)])
def test_a_failed_request_of_any_role_costs_the_episode_even_if_it_is_caught(answered):
    async def swallow(self, episode, speak):
        with suppress(RequestFailed):
            await Talking.play(self, episode, speak)

    client = ScriptedClient(*answered, RequestFailed("vLLM answered 500"))
    for rollout in play(talking(play=swallow), client):
        assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENGINE_ERROR)
