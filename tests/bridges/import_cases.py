"""Environments of the library as an Environment, with the generation that is installed."""

import asyncio
import os
from dataclasses import replace
from importlib.util import find_spec

import pytest

from envs.episode import StopReason
from envs.verifiers.environment import Verifiers
from rl.sampling.player import Player
from tests.support.fuzz import FuzzedClient
from tests.support.scripted import IM_END, SAMPLER, ScriptedClient, chat_of, tiny_tokenizer

CLASSIC = find_spec("verifiers.envs") is not None
GAME = "letter-game" if CLASSIC else "letter-tasks"
SIZE = {"own_eval": False, "size": 10} if CLASSIC else {"taskset": {"size": 10}}
COUNTED = {"asked": 1.0, "num_turns": 2.0} if CLASSIC else {"turns": 2.0}
classic_only = pytest.mark.skipif(not CLASSIC, reason="of the classic API")
v1_only = pytest.mark.skipif(CLASSIC, reason="of verifiers.v1")


# The end of the second prompt of a letter game after the first turn aaBB.
TWO_TURNS = (
    "<|im_start|>assistant\naaBB<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TOKENIZER = tiny_tokenizer()


def bridge(env_id, **changes):
    """An environment of the library, with all its examples."""
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": None}
    return Verifiers(id=env_id, **{**options, **changes})


def play(env, *answers, client=None, max_seq_len=1024, max_tokens=SAMPLER.max_tokens):
    """Return the rollouts of the first training example, and the engine."""
    client, sampler = client or ScriptedClient(*answers), replace(SAMPLER, max_tokens=max_tokens)
    player = Player(sampler, env, chat_of(client, sampler, max_seq_len))
    return asyncio.run(player.play_group(0, env.examples("train")[0], 1)), client


def prompt_texts(client):
    """Return the prompts that the engine received."""
    return [TOKENIZER.decode(ids) for ids, *_ in client.requests]


def said(rollout):
    """The tokens that the policy chose, all in one row, special ones left out."""
    (row,) = rollout.rows
    return TOKENIZER.decode(row.token_ids[row.completion_mask].tolist(), skip_special_tokens=True)


def letters(examples):
    return "".join(example.messages[1]["content"][-1] for example in examples)


def test_the_eval_split_is_that_of_the_library_or_the_last_examples():
    if CLASSIC:
        env = bridge(GAME, num_eval=3, num_train=5)
        assert (letters(env.examples("train")), letters(env.examples("eval"))) == ("abcab", "xyz")
    env = bridge(f"owner/{GAME}", args=SIZE, num_eval=4)
    train = env.examples("train")
    assert (letters(train), letters(env.examples("eval"))) == ("abcabc", "abca")
    assert train[0].messages[0] == {"role": "system", "content": "be brief"}
    assert (train[4].id, train[0].env) == (4, GAME)
    # Each episode of verifiers.v1 is a process.
    assert env.max_concurrent == (None if CLASSIC else 4 * len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("stream", [False] if CLASSIC else [False, True])
def test_an_episode_of_two_turns_is_one_row_and_scored_as_the_library_scores_it(stream):
    args = None if CLASSIC else {"agent": {"harness": {"stream": stream}}}
    env = bridge(GAME, args=args)
    (rollout,), client = play(env, "aaBB", "aa")
    assert rollout.error == ""
    assert prompt_texts(client)[1].endswith(TWO_TURNS)
    assert rollout.rewards == {"letters": 4 / 6, "lower": 4 / 6, **COUNTED, "unlisted": 0.0}
    assert rollout.reward == pytest.approx(4 / 6 + 0.5 * 4 / 6)
    assert env.reward_weights == {"letters": 1.0, "lower": 0.5, "unlisted": 1.0}
    stop_reason = StopReason.MAX_TURNS if CLASSIC else StopReason.STOP
    assert (rollout.stop_reason, rollout.turns) == (stop_reason, 2)
    (row,) = rollout.rows
    assert said(rollout) == "aaBBaa"
    assert set(row.token_versions[row.completion_mask]) == {7}


def test_a_cut_off_turn_a_full_context_and_a_limit_of_turns_are_the_stop_reasons():
    (rollout,), _ = play(bridge(GAME), "a" * 100)  # the library continues
    assert (rollout.stop_reason, rollout.turns) == (StopReason.MAX_TOKENS, 2)
    (rollout,), _ = play(bridge(GAME), "a" * 30, max_seq_len=100)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.CONTEXT, 1)
    # The harness of verifiers.v1 fails, and its library does not score the episode.
    assert (rollout.reward, rollout.error) == (1.5 if CLASSIC else 0.0, "")
    if not CLASSIC:
        (rollout,), _ = play(bridge(GAME, args={"agent": {"max_turns": 1}}), "aa")
        found = (rollout.stop_reason, rollout.turns, rollout.reward)
        assert found == (StopReason.MAX_TURNS, 1, 1.5)


def test_an_exception_of_its_code_costs_the_rollout():
    env = bridge(GAME, args={"fail": True} if CLASSIC else None)
    (rollout,), _ = play(env, "break")
    assert rollout.stop_reason is StopReason.ENV_ERROR
    assert ("the game is broken" if CLASSIC else "the judge is broken") in rollout.error


@classic_only
def test_tools_are_in_the_prompt_and_answered_by_the_library():
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "%s"}}\n</tool_call>'
    broken = "<tool_call>\n{look_up\n</tool_call>"
    answers = (call % "bob", broken, call % "ann", "q")
    client = FuzzedClient([[*TOKENIZER.encode(answer), IM_END] for answer in answers])
    (rollout,), _ = play(bridge("letter-tools"), client=client, max_seq_len=4096, max_tokens=200)
    first, second, third, fourth = prompt_texts(client)
    assert '"look_up"' in first
    assert "whose letter" in first
    assert "nobody is called bob" in second
    assert "Expecting" in third  # the call is not JSON
    assert "<tool_response>\nq\n</tool_response>" in fourth
    assert (rollout.reward, rollout.error, rollout.tool_calls) == (1.0, "", 3)
    assert len(rollout.rows) == 1


@classic_only
def test_rewards_that_compare_a_group_are_refused():
    with pytest.raises(ValueError, match="compare the rollouts of a group"):
        bridge(GAME, args={"grouped": True}).examples("train")


@v1_only
def test_each_run_of_an_agent_is_a_role_with_its_own_reward():
    rollouts, _ = play(bridge("letter-race"), "a", "bb", "aaa", "a", max_tokens=4)
    roles = [("writer", "a"), ("rival", "bb"), ("writer-2", "aaa"), ("judge", "a")]
    assert [(r.role, said(r)) for r in rollouts] == roles
    assert [r.rewards["longest"] for r in rollouts[:3]] == [0.0, 0.0, 1.0]
    # letters + lower / 2 + longest
    assert [r.reward for r in rollouts] == [1.5, 0.5, 2.5, None]
    assert rollouts[3].error == ""  # the environment does not train the judge


@v1_only
def test_an_endless_taskset_needs_num_train():
    assert len(bridge("plain-tasks", num_train=3, num_eval=2).examples("train")) == 3
    with pytest.raises(ValueError, match=r"has no end: set env\.num_train to"):
        bridge("plain-tasks").examples("train")


@v1_only
def test_the_harness_has_no_shell_and_none_of_our_paths_unless_the_configuration_asks_for_them():
    from envs.verifiers.v1 import env_config

    agent = env_config("plain_tasks", {}).agent
    assert (agent.harness.id, agent.runtime.type) == ("null", "subprocess")
    # The harness null is a script with packages of its own.
    assert agent.harness.env == {"PYTHONPATH": ""}
    args = {"writer": {"harness": {"env": {"PYTHONPATH": "mine", "A": "b"}}}}
    race = env_config("letter_race", args)
    assert race.writer.harness.env == {"PYTHONPATH": "mine", "A": "b"}
    assert race.rival.harness.env == {"PYTHONPATH": "", "C": "d"}  # what it declares remains
