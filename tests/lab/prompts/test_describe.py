"""What the teacher is told of a rollout."""

import pytest

from envs.episode import Example
from envs.messages import assistant, tool_call, user
from envs.protocol import Environment
from lab.prompts.describe import Attempt, check_columns, describe_rollout, starting_prompt

SYSTEM = {"role": "system", "content": "Search."}
EXAMPLE = Example(0, "e", [SYSTEM, user("who?")], info={"answer": "Ola", "level": 2})


def attempt(*turns: dict, **record: object) -> Attempt:
    rest = {"reward": 0.5, "stop_reason": "stop", "rewards": {"exact": 0.0}, "turns": 1, **record}
    return Attempt(EXAMPLE, [*turns], {"messages": [SYSTEM, user("who?"), *turns], **rest})


def test_one_turn_is_told_as_it_was_said():
    told = {"query": "who?", "completion": "Per", "expected_answer": "Ola", "reward": 0.5}
    assert describe_rollout(attempt(assistant("Per")), []) == told


def test_a_conversation_is_told_with_its_calls_their_mistakes_and_their_answers():
    call = tool_call("find", query="Ola")
    answers = [{"role": "tool", "content": text} for text in ("page 3", "Error: query is missing")]
    turns = [call, answers[0], tool_call("find"), answers[1], assistant("Ola")]
    told = describe_rollout(attempt(*turns), [])
    assert told["completion"].splitlines() == [
        *("assistant: find", '{"query": "Ola"}', "tool: page 3", "assistant: find"),
        *("tool: Error: query is missing", "assistant: Ola"),
    ]


def test_a_rollout_that_was_cut_off_says_so_and_one_without_an_answer_has_none():
    told = describe_rollout(attempt(assistant("P"), stop_reason="max_tokens"), [])
    assert told["error"] == "the rollout was cut off: max_tokens"
    unknown = Attempt(Example(id=0, env="e", messages=[]), [], attempt(assistant("P")).record)
    assert "expected_answer" not in describe_rollout(unknown, [])


def test_columns_are_of_the_rollout_of_the_example_and_what_was_thought():
    turns = [{**assistant(x), "reasoning_content": f"Let me see {x}."} for x in ("Per", "Ola")]
    columns = ["rewards", "level", "thinking", "turn_rewards"]
    told = describe_rollout(attempt(*turns, turn_rewards=[0, 1]), columns)
    assert (told["rewards"], told["turn_rewards"]) == ('{"exact": 0.0}', "[0, 1]")
    assert (told["level"], told["thinking"]) == (2, "Let me see Per.\nLet me see Ola.")
    assert "Let me see" not in told["completion"]


def test_a_search_starts_from_the_system_prompt_that_all_examples_share():
    bare = Example(1, "e", [user("who?")])
    assert starting_prompt(Environment(), [EXAMPLE, EXAMPLE]) == "Search."
    for examples, has in (([EXAMPLE, bare], "different system prompts"), ([bare], "no system pro")):
        with pytest.raises(ValueError, match=f"the environment 'environment' has {has}"):
            starting_prompt(Environment(), examples)


def test_a_column_that_nothing_has_is_refused_with_those_that_there_are():
    check_columns(["level", "turns", "thinking"], [EXAMPLE])
    problem = r"contains levle, which no rollout has: choose from rewards, .*answer, level"
    with pytest.raises(ValueError, match=problem):
        check_columns(["levle"], [EXAMPLE])
