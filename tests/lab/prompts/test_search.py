"""When a prompt becomes a candidate."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation
from rich.console import Console

from envs.episode import Example
from lab.prompts.describe import Attempt
from lab.prompts.search import COMPONENT, Search, SearchEnded
from rl.runtime.folder import RunFolder
from rl.terminal.progress import Progress

EXAMPLE = Example(id=0, env="e", messages=[])


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
            search.on_valset_evaluated({**event, "is_best_program": number == 1})
        progress.advance(90)
    assert "best 0.750 (start 0.250), 3 candidates" in capsys.readouterr().out
    search.settings = SimpleNamespace(perfect_score=0.75)
    assert search._is_over(None)


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
