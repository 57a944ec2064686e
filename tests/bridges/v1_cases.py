"""Tasksets and harnesses of verifiers.v1 as an Environment, with the real library."""

import os

import pytest

from envs.episode import StopReason
from envs.verifiers.v1 import env_config
from tests.support.bridges.playing import TWO_TURNS, bridge, play, prompt_texts, said


def test_the_tasks_are_the_examples_and_the_last_are_held_out():
    env = bridge("owner/letter-tasks", args={"taskset": {"size": 10}}, num_eval=4)
    assert [e.messages[1]["content"][-1] for e in env.examples("train")] == list("abcabc")
    assert env.max_concurrent == 4 * len(os.sched_getaffinity(0))  # each is a process
    assert [e.messages[1]["content"][-1] for e in env.examples("eval")] == list("abca")
    assert env.examples("train")[0].messages[0] == {"role": "system", "content": "be brief"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_episode_of_two_turns_is_one_row_and_scored_as_the_library_scores_it(stream):
    env = bridge("letter-tasks", args={"agent": {"harness": {"stream": stream}}})
    (rollout,), client = play(env, "aaBB", "aa")
    assert rollout.error == ""
    assert prompt_texts(client)[1].endswith(TWO_TURNS)
    assert rollout.rewards == {"letters": 4 / 6, "lower": 4 / 6, "turns": 2.0, "unlisted": 0.0}
    assert rollout.reward == pytest.approx(4 / 6 + 0.5 * 4 / 6)
    assert env.reward_weights == {"letters": 1.0, "lower": 0.5, "unlisted": 1.0}
    assert (rollout.stop_reason, rollout.turns) == (StopReason.STOP, 2)
    (row,) = rollout.rows
    assert said(rollout) == "aaBBaa"
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_every_rollout_of_a_group_is_played_by_itself():
    rollouts, client = play(bridge("letter-tasks"), "aa", size=3)
    assert [r.reward for r in rollouts] == [1.5] * 3
    assert len(client.requests) == 6


def test_its_limit_of_turns_is_the_stop_reason():
    (rollout,), _ = play(bridge("letter-tasks", args={"agent": {"max_turns": 1}}), "aa")
    assert (rollout.stop_reason, rollout.turns, rollout.reward) == (StopReason.MAX_TURNS, 1, 1.5)


def test_a_turn_that_was_cut_off_has_that_stop_reason_although_the_library_continues():
    (rollout,), _ = play(bridge("letter-tasks"), "a" * 100)
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    assert rollout.turns == 2


def test_a_full_context_ends_the_episode_even_if_the_harness_fails():
    (rollout,), _ = play(bridge("letter-tasks"), "a" * 30, max_seq_len=100)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.CONTEXT, 1)
    assert (rollout.reward, rollout.error) == (0.0, "")  # it was not scored


def test_an_exception_of_its_code_costs_the_rollout():
    (rollout,), _ = play(bridge("letter-tasks"), "break")
    assert rollout.stop_reason is StopReason.ENV_ERROR
    assert "the judge is broken" in rollout.error


def test_an_endless_taskset_needs_num_train():
    assert len(bridge("plain-tasks", num_train=3, num_eval=2).examples("train")) == 3
    with pytest.raises(ValueError, match=r"never ends: .* env\.num_train="):
        bridge("plain-tasks").examples("train")


def test_a_policy_in_training_has_a_shell_only_if_the_configuration_asks_for_it():
    agent = env_config("plain_tasks", {}).agent
    assert (agent.harness.id, agent.runtime.type) == ("null", "subprocess")
    asked = env_config("plain_tasks", {"agent": {"harness": {"id": "bash"}}}).agent
    assert (asked.harness.id, asked.runtime.type) == ("bash", "prime")  # as the library has it


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("owner/no-such-env", "no module no_such_env: install the environment's package"),
        ("letter-game", r"written for the classic API, verifiers==0.1.14, but verifiers 0.4.0 is"),
    ],
)
def test_a_missing_package_is_refused_with_one_sentence(env_id, message):
    with pytest.raises(ValueError, match=message):
        bridge(env_id).examples("train")
