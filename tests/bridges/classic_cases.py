"""Environments of the classic API as an Environment, with the real library."""

import math

import pytest

from envs.episode import StopReason
from tests.support.bridges.playing import TWO_TURNS, bridge, play, prompt_texts, said


def test_the_two_datasets_are_the_two_splits_with_the_system_prompt():
    env = bridge("owner/letter-game", num_eval=3, num_train=5)
    train, held_out = env.examples("train"), env.examples("eval")
    assert [e.messages[1]["content"][-1] for e in train] == list("abcab")
    assert [e.messages[1]["content"][-1] for e in held_out] == list("xyz")
    assert train[0].messages[0] == {"role": "system", "content": "be brief"}
    assert (train[4].id, train[0].env) == (4, "letter-game")


def test_without_an_eval_dataset_the_last_examples_are_held_out():
    env = bridge("letter-game", args={"own_eval": False, "size": 10}, num_eval=4)
    assert [e.messages[1]["content"][-1] for e in env.examples("train")] == list("abcabc")
    assert [e.messages[1]["content"][-1] for e in env.examples("eval")] == list("abca")


def test_holding_out_everything_is_refused():
    with pytest.raises(ValueError, match=r"has 4 examples.* lower env\.num_eval"):
        bridge("letter-game", args={"own_eval": False, "size": 4}, num_eval=4).examples("train")


def test_an_episode_of_two_turns_is_one_row_and_scored_as_the_library_scores_it():
    (rollout,), client = play(bridge("letter-game"), "aaBB", "aa")
    assert prompt_texts(client)[1].endswith(TWO_TURNS)
    assert rollout.rewards == {
        "letters": 4 / 6,
        "lower": 4 / 6,
        "asked": 1.0,
        "num_turns": 2.0,
        "unlisted": 0.0,
    }
    assert rollout.reward == pytest.approx(4 / 6 + 0.5 * 4 / 6)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.MAX_TURNS, 2)
    assert [m["role"] for m in rollout.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    (row,) = rollout.rows
    assert said(rollout) == "aaBBaa"
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_a_turn_that_was_cut_off_has_that_stop_reason_although_the_library_continues():
    (rollout,), _ = play(bridge("letter-game"), "a" * 100)
    assert rollout.stop_reason is StopReason.MAX_TOKENS
    assert rollout.turns == 2


def test_a_full_context_ends_the_episode_and_is_scored():
    (rollout,), _ = play(bridge("letter-game"), "a" * 30, max_seq_len=100)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.CONTEXT, 1)
    assert rollout.reward == 1.5


def test_nan_makes_the_rollout_unscorable():
    (rollout,), _ = play(bridge("letter-game"), "nan")
    assert rollout.reward is None
    assert math.isnan(rollout.rewards["lower"])
    assert "NaN" in rollout.error


def test_an_exception_of_its_code_costs_the_rollout():
    (rollout,), _ = play(bridge("letter-game", args={"fail": True}), "a")
    assert rollout.stop_reason is StopReason.ENV_ERROR
    assert "the game is broken" in rollout.error


def test_tools_are_in_the_prompt_and_answered_by_the_library():
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "%s"}}\n</tool_call>'
    env = bridge("letter-tools")
    answers = (call % "bob", call % "ann", "q")
    (rollout,), client = play(env, *answers, max_seq_len=4096, max_tokens=200)
    first, second, third = prompt_texts(client)
    assert '"look_up"' in first
    assert "whose letter" in first
    assert "nobody is called bob" in second
    assert "<tool_response>\nq\n</tool_response>" in third
    assert rollout.reward == 1.0
    assert rollout.rewards["look_up_calls"] == rollout.tool_calls == 2
    assert len(rollout.rows) == 1


def test_a_tool_with_state_sees_its_own_episode_and_hides_its_extra_arguments():
    call = '<tool_call>\n{"name": "note", "arguments": {"letter": "%s"}}\n</tool_call>'
    env = bridge("letter-notes")
    options = {"max_seq_len": 4096, "max_tokens": 200}
    (rollout,), client = play(env, call % "q", call % "r", "done", **options)
    first, second, third = prompt_texts(client)
    assert "what to write" in first
    assert "notes" not in first
    assert "<tool_response>\n1 noted\n</tool_response>" in second
    assert "<tool_response>\n2 noted\n</tool_response>" in third
    assert rollout.reward == 1.0
    # A second episode of the same environment starts with nothing noted.
    (again,), client = play(env, call % "r", "done", **options)
    assert "1 noted" in prompt_texts(client)[1]
    assert again.reward == 0.0


def test_a_call_that_is_not_json_is_answered_with_an_error():
    env = bridge("letter-tools")
    answers = ("<tool_call>\n{look_up\n</tool_call>", "q")
    (rollout,), client = play(env, *answers, max_seq_len=4096, max_tokens=200)
    assert rollout.error == ""
    assert rollout.turns == 2
    assert "Expecting" in prompt_texts(client)[1]


def test_rewards_that_compare_a_group_are_refused():
    with pytest.raises(ValueError, match="compare the rollouts of a group"):
        bridge("letter-game", args={"grouped": True}).examples("train")
