"""Which prompt becomes a candidate, which is the best, and the commands that are printed."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation

from envs.episode import Example
from envs.messages import tool_call
from lab.evaluation.settings import check_evaluation
from lab.prompts import outputs
from lab.prompts.describe import Attempt, describe_rollout
from lab.prompts.outputs import Candidate
from lab.prompts.search import COMPONENT, Search
from rl.config.check import check
from rl.runtime.folder import RunFolder
from tests.lab.evaluation.test_settings import HUB
from tests.support.composing import composed

EXAMPLE = Example(0, "e", [])


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


def test_a_prompt_whose_hard_examples_fail_does_not_reach_the_perfect_score():
    search = searching()
    search.candidates = [Candidate("p", [], 0, scores) for scores in ([1.0, 0.0], [1.0, None])]
    search.settings = SimpleNamespace(perfect_score=1.0, num_rounds=1)
    assert search._is_over(SimpleNamespace(i=0))
    assert search.ended_by == "num_rounds=1"
    search.candidates.append(Candidate("p", [], 0, [1.0, 1.0]))
    assert search._is_over(SimpleNamespace(i=0))
    assert search.ended_by == "the validation reached perfect_score=1"


def test_the_teacher_reads_calls_thoughts_and_whether_a_rollout_was_cut_off():
    first = {**tool_call("find", query="Ola"), "reasoning_content": "Let me see."}
    record = {"reward": 0.5, "stop_reason": "max_tokens"}
    attempt = Attempt(EXAMPLE, [first, {"role": "tool", "content": "page 3"}], record)
    told = describe_rollout(attempt, ["thinking"])
    assert told["completion"].splitlines() == [
        *("assistant: find", '{"query": "Ola"}', "tool: page 3")
    ]
    assert told["thinking"] == "Let me see."
    assert told["error"] == "the rollout was cut off: max_tokens"


def searching() -> Search:
    return Search(None, None, None, None, None, None, None)


LOCAL = {"env": "reverse-text", "model": "hf", "client": "renderer"}
HARD = ["+env@env.envs.hard=arithmetic", "+env.weights.hard=1"]
SEARCH = ["max_calls=9", "reflection.base_url=http://x/v1", "run_name=a", "env.system_prompt=Hm."]


def candidates(*scores):
    made = outputs.Candidate
    return [made(f"prompt {i}", [0] * (i > 0), 10 * i, own) for i, own in enumerate(scores)]


def test_the_gain_is_the_mean_difference_of_what_both_scored_with_its_standard_error():
    found = candidates([0.0, 0.5, None], [1.0, 1.0, 0.0])
    mean, error = outputs.gain(found)
    assert mean == pytest.approx((1.0 + 0.5) / 2)
    # The differences 1 and 0.5 have the variance 0.125; of their mean, half of it.
    assert error == pytest.approx(math.sqrt(0.125 / 2))
    assert [one.mean for one in found] == [0.25, pytest.approx(2 / 3)]
    assert math.isnan(outputs.gain(candidates([0.0], [1.0]))[1])
    assert outputs.gain(candidates([0.5, 0.5])) == (0.0, 0.0)


def test_a_prompt_that_is_no_better_replaces_none_and_gains_nothing_from_rollouts_that_fail():
    assert outputs.index_of_best(candidates([0.5, 0.5], [1.0, 0.0])) == 0
    assert outputs.index_of_best(candidates([0.5, 0.5], [1.0, 0.5], [0.5, 1.0])) == 1
    found = candidates([1.0, 1.0, 0.0, None], [1.0, None, None, 1.0], [1.0, 0.5, 1.0, 0.0])
    assert outputs.compared_means(found) == pytest.approx([2 / 3, 2 / 3, 2.5 / 3])
    assert outputs.index_of_best(found) == 2
    assert outputs.index_of_best(found[:2]) == 0


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "system_prompt.txt").write_text("Better.\n")
    return RunFolder(tmp_path / "mine")


def composed_by(line, tmp_path):
    python, program, *overrides = shlex.split(line)
    assert python == "python"
    return composed(*overrides, f"output_dir={tmp_path}", primary=Path(program).stem)


@pytest.mark.parametrize(
    ("overrides", "choices"),
    [
        (HUB, {}),
        (["experiment=optimize-gsm8k"], {"env": "gsm8k", "model": "qwen3-0.6b"}),
        (["env=mixture", *HARD, *HUB], {"env": "mixture"}),
    ],
)
def test_the_printed_commands_evaluate_and_train_the_same_policy_with_the_found_prompt(
    overrides, choices, folder, tmp_path
):
    search = composed(*overrides, *SEARCH, primary="optimize_prompt")
    choices = LOCAL | choices
    evaluate, train = outputs.next_commands(folder, [*overrides, *SEARCH], choices, 50)
    evaluation, run = composed_by(evaluate, tmp_path), composed_by(train, tmp_path)

    check_evaluation(evaluation)
    check(run)
    assert evaluation["num_examples"] == 500
    for config in (evaluation, run):
        assert config["model"] == search["model"]
        prompt = str(folder.path / "system_prompt.txt")
        assert config["env"] == search["env"] | {"system_prompt": prompt}
