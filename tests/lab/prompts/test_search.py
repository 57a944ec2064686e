"""What the teacher is told of a rollout, and when a prompt becomes a candidate."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation
from rich.console import Console

from envs.episode import Example
from envs.messages import assistant, tool_call, user
from envs.protocol import Environment
from lab.prompts.describe import Attempt, check_columns, describe_rollout, starting_prompt
from lab.prompts.outputs import Candidate
from lab.prompts.search import COMPONENT, Search, SearchEnded
from rl.runtime.folder import RunFolder
from rl.terminal.progress import Progress

SYSTEM = {"role": "system", "content": "Search."}
EXAMPLE = Example(0, "e", [SYSTEM, user("who?")], info={"answer": "Ola", "level": 2})


def attempt(*turns: dict, **record: object) -> Attempt:
    rest = {"reward": 0.5, "stop_reason": "stop", "rewards": {"exact": 0.0}, "turns": 1, **record}
    return Attempt(EXAMPLE, [*turns], {"messages": [SYSTEM, user("who?"), *turns], **rest})


def test_a_conversation_is_told_with_its_calls_their_mistakes_and_their_answers():
    call = tool_call("find", query="Ola")
    answers = [{"role": "tool", "content": text} for text in ("page 3", "Error: query is missing")]
    turns = [call, answers[0], tool_call("find"), answers[1], assistant("Ola")]
    told = describe_rollout(attempt(*turns), [])
    assert told["completion"].splitlines() == [
        *("assistant: find", '{"query": "Ola"}', "tool: page 3", "assistant: find"),
        *("tool: Error: query is missing", "assistant: Ola"),
    ]


def test_one_turn_is_told_as_it_was_said_and_whether_it_was_cut_off():
    told = {"query": "who?", "completion": "Per", "expected_answer": "Ola", "reward": 0.5}
    assert describe_rollout(attempt(assistant("Per")), []) == told
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


def evaluated(rewards: list[float | None]) -> SubsampleEvaluation:
    attempts = [Attempt(EXAMPLE, [], {"reward": reward}) for reward in rewards]
    return SubsampleEvaluation(scores=[0.5] * len(rewards), outputs=attempts)


@pytest.mark.parametrize(
    ("before", "after", "accepted"),
    [
        ([0.0, 1.0], [1.0, 1.0], True),
        ([0.0, 1.0], [1.0, 0.0], False),  # no more than before
        ([1.0, 0.0, 0.0], [None, 0.0, 1.0], True),  # of the two that both scored
        ([None, 0.0], [1.0, 0.0], False),  # the parent may have been as good there
        ([None, 1.0], [1.0, None], False),  # nothing to compare
    ],
)
def test_a_prompt_is_compared_with_its_parent_on_examples_that_both_scored(before, after, accepted):
    evaluations = {"eval_before": evaluated(before), "eval_after": evaluated(after)}
    proposal = CandidateProposal({COMPONENT: "new"}, [0], **evaluations)
    known = SimpleNamespace(program_candidates=[{COMPONENT: "old"}])
    assert searching().should_accept(proposal, known) is accepted
    known.program_candidates.append({COMPONENT: "new"})
    assert not searching().should_accept(proposal, known)


def test_the_best_prompt_is_not_the_newest(capsys):
    with Progress(Console(), 100, "calls") as progress:
        search = replace(searching(), progress=progress, save=lambda candidates: None)
        for number, score in enumerate((0.25, 0.75, 0.5)):
            search._validated = number, [score]
            event = {"candidate": {COMPONENT: "p"}, "candidate_idx": number, "parent_ids": [0]}
            search.on_valset_evaluated(event)
        progress.advance(90)
    assert "best 0.750 (start 0.250), 3 candidates" in capsys.readouterr().out
    search.settings = SimpleNamespace(perfect_score=0.75)
    assert search._is_over(None)


def test_a_prompt_whose_hard_examples_fail_does_not_reach_the_perfect_score():
    search = searching()
    search.candidates = [Candidate("p", [], 0, scores) for scores in ([1.0, 0.0], [1.0, None])]
    search.settings = SimpleNamespace(perfect_score=1.0, num_rounds=1)
    assert search._is_over(SimpleNamespace(i=0))
    assert search.ended_by == "num_rounds=1"


def test_only_unusable_answers_in_a_row_end_the_search_and_a_late_one_at_once(tmp_path):
    answers = [*[("", False)] * 3, ("p", False), *[("", False)] * 3, ("cut", True)]
    search = replace(searching(), run_folder=RunFolder(tmp_path))
    search._answer = lambda question: None
    for number, answer in enumerate(answers):
        search.runner = SimpleNamespace(run=lambda _, answer=answer: answer)
        if number == 3:
            assert search.reflect("?") == "p"
            continue
        error = SearchEnded if number == 7 else ValueError
        with pytest.raises(error, match="the reflection model"):
            search.reflect("?")

    def late(_):
        raise TimeoutError

    search.runner = SimpleNamespace(run=late)
    search.reflecting = SimpleNamespace(sampler=SimpleNamespace(rollout_timeout=9.0))
    with pytest.raises(SearchEnded, match=r"within reflection\.timeout=9 s: raise"):
        search.reflect("?")


def searching() -> Search:
    return Search(None, None, None, None, None, None, None)
