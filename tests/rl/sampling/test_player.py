"""Playing episodes with a scripted engine, a scripted environment and Qwen3's real renderer."""

import pytest

from envs.episode import Example, StopReason
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    play,
    tiny_renderer,
)
from tests.support.virtual_time import run_virtually


def test_a_single_turn_group_shares_one_request():
    client = ScriptedClient("good", "bad", "good")

    rollouts = play(ScriptedEnv(), client, 3)

    ((prompt, sampling, n, version),) = client.requests
    assert (n, version, sampling["max_tokens"], sampling["temperature"]) == (3, 7, 32, 0.5)
    assert IM_END in sampling["stop_token_ids"]
    assert [rollout.reward for rollout in rollouts] == [2.0, 0.0, 2.0]
    assert [rollout.stop_reason for rollout in rollouts] == [StopReason.STOP] * 3
    for rollout, said in zip(rollouts, ["good", "bad", "good"], strict=True):
        (row,) = rollout.rows
        assert row.token_ids.tolist() == [*prompt, *said.encode(), IM_END]
        assert row.token_ids[row.completion_mask].tolist() == [*said.encode(), IM_END]
        assert row.rollout_logprobs[-1] == -IM_END / 8
        assert set(row.token_versions[row.completion_mask].tolist()) == {7}
        assert rollout.messages[-1] == {"role": "assistant", "content": said}


def test_a_rollout_knows_the_limit_of_its_turns_which_an_environment_may_have_for_itself():
    env = ScriptedEnv()
    assert play(env, ScriptedClient("good"))[0].turn_limit == SAMPLER.max_tokens == 32
    env.sampling = {"max_tokens": 6}
    client = ScriptedClient("good")
    assert play(env, client)[0].turn_limit == client.requests[0][1]["max_tokens"] == 6


def test_a_multi_turn_rollout_is_one_row_with_exactly_the_sampled_tokens():
    client = ScriptedClient("one", "two", "good")

    (rollout,) = play(ScriptedEnv(("more", "again"), max_turns=5), client)

    (row,) = rollout.rows
    assert (rollout.turns, rollout.stop_reason, rollout.reward) == (3, StopReason.STOP, 2.0)
    sampled = [*b"one", IM_END, *b"two", IM_END, *b"good", IM_END]
    assert row.token_ids[row.completion_mask].tolist() == sampled
    last_prompt = client.requests[-1][0]
    assert row.token_ids.tolist() == [*last_prompt, *b"good", IM_END]
    assert [m["content"] for m in rollout.messages] == ["hi", "one", "more", "two", "again", "good"]


def test_a_reply_that_the_bridge_refuses_forks_the_row():
    class Rewriting(ScriptedEnv):
        async def reply(self, episode, message):
            if episode.turns > 1:
                return None
            return [{"role": "assistant", "content": "x"}, {"role": "user", "content": "go"}]

    (rollout,) = play(
        Rewriting(max_turns=3), ScriptedClient("<think>\nhm\n</think>\n\nyes", "good")
    )

    assert (rollout.turns, rollout.reward) == (2, 2.0)
    assert [int(row.num_completion) for row in rollout.rows] == [
        len("<think>\nhm\n</think>\n\nyes") + 1,
        len("good") + 1,
    ]


@pytest.mark.parametrize(
    ("reason", "env", "answer", "max_seq_len", "sampled"),
    [
        (StopReason.STOP, ScriptedEnv(), "good", 256, 5),
        (StopReason.MAX_TOKENS, ScriptedEnv(), "x" * 99, 256, 32),
        (StopReason.CONTEXT, ScriptedEnv(), "x" * 99, PREFIX + 10, 10),
        (StopReason.CONTEXT, ScriptedEnv(), "x", PREFIX, 0),
        (StopReason.CONTEXT, ScriptedEnv(("r" * 99,), 9), "x", PREFIX + 50, 2),
        (StopReason.MAX_TURNS, ScriptedEnv(("more",) * 9, 3), "x", 256, 6),
        (StopReason.MAX_TURNS, ScriptedEnv(("more",)), "x", 256, 2),
    ],
    ids=["stop", "one long turn", "row full", "no room", "reply fills it", "turns", "one turn"],
)
def test_an_episode_says_why_it_ended(reason, env, answer, max_seq_len, sampled):
    (rollout,) = play(env, ScriptedClient(answer), max_seq_len=max_seq_len)

    assert (rollout.stop_reason, rollout.error) == (reason, "")
    assert rollout.reward is not None
    assert sum(row.num_completion for row in rollout.rows) == sampled
    assert all(len(row.token_ids) <= max_seq_len for row in rollout.rows)


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_group_renders_its_opening_once_and_a_turn_is_parsed_once(max_turns):
    class Counting(RendererChat):
        opened, parsed = 0, 0

        async def first_prompt(self, messages, tools):
            Counting.opened += 1
            return await super().first_prompt(messages, tools)

        def message(self, prompt, completion):
            Counting.parsed += 1
            return super().message(prompt, completion)

    env = ScriptedEnv(("b?", "c?")[: max_turns - 1], max_turns)
    client = ScriptedClient("good")
    chat = Counting(SAMPLER, tiny_renderer(), client, 256, LiveVersion(7))
    example = Example(id=3, env=env.name, messages=list(HI))

    rollouts = run_virtually(Player(SAMPLER, env, chat).play_group(0, example, 4))

    assert [rollout.turns for rollout in rollouts] == [max_turns] * 4
    assert (Counting.opened, Counting.parsed) == (1, 4 * max_turns)
