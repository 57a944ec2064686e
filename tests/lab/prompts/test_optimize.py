"""Whole searches by the real GEPA; policy and teacher are one scripted endpoint.

The last tests are of which prompt becomes a candidate, and which is the best.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from gepa.proposer.base import CandidateProposal, SubsampleEvaluation

from envs.episode import Episode, Example
from envs.reverse_text import ReverseText
from lab.prompts import outputs
from lab.prompts.describe import Attempt, describe_rollout
from lab.prompts.optimize import optimize_prompt
from lab.prompts.outputs import Candidate
from lab.prompts.search import COMPONENT, Search
from lab.prompts.settings import check_search
from rl.config.schema import ConfigError
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from tests.rl.config.test_shipped import SEARCHES
from tests.support.composing import REPO, composed
from tests.support.golden import golden, without
from tests.support.prompted_endpoint import PromptedEndpoint

START, HALF, WHOLE = "Say the word.", "Write short words backwards.", "Write the word backwards."
PROPOSALS = tuple(f"So:\n```\n{prompt}\n```" for prompt in ("Shout it.", HALF, WHOLE))
LOCAL = {"reflection.base_url": "null", "reflection.model": "null"}
LOCAL |= {"reflection.path": REPO / "models" / "tiny-wiki", "reflection.max_seq_len": 9999}


@pytest.fixture
def endpoint() -> Iterator[PromptedEndpoint]:
    with PromptedEndpoint(PROPOSALS).listening() as listening:
        yield listening


class Compared(ReverseText):
    """Compare the rollouts of a group."""

    async def score_group(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        return [{} for _ in episodes]


def faulty(broken: str, empty: str = "[]") -> dict[str, object]:
    """Return overrides of an environment that fails for words that begin with such a letter."""
    env = {"env._target_": "tests.support.faulty.FaultyReversal", "+env.fault": "raise"}
    return {**env, "+env.broken": f"'{broken}'", "+env.empty": empty}


def search(endpoint: PromptedEndpoint, folder: Path, **more: object) -> Path:
    """Search in this process and return the folder."""
    overrides = endpoint.overrides(**more, output_dir=folder, run_name="mine")
    config = composed(*overrides, primary="optimize_prompt")
    choices = {"env": "reverse-text", "client": "messages", "model": "hf"}
    best = optimize_prompt(config, overrides=overrides, choices=choices, command=["python", "o.py"])
    assert best == metadata(folder / "mine")["best_score"]
    return folder / "mine"


def read(path: Path) -> list:
    """Return a file's lines, as objects if it is .jsonl."""
    lines = path.read_text().splitlines()
    return [json.loads(line) if path.suffix == ".jsonl" else line for line in lines]


def metadata(folder: Path) -> dict:
    return json.loads((folder / "metadata.json").read_text())


@pytest.mark.parametrize("experiment", sorted(SEARCHES))
def test_every_experiment_of_its_own_composes(experiment, tmp_path):
    overrides = (experiment, f"output_dir={tmp_path}")
    found = check_search(composed(*overrides, primary="optimize_prompt"))
    assert found.env["system_prompt"]
    assert found.max_calls > 3 * found.num_val


@pytest.mark.parametrize("max_calls", [26, 42, 43])
def test_no_search_exceeds_its_budget(max_calls, endpoint, tmp_path):
    folder = search(endpoint, tmp_path, max_calls=max_calls)
    num_calls = metadata(folder)["num_calls"]
    assert num_calls == len(endpoint.policy_asked) <= max_calls
    assert f"exceed max_calls={max_calls}" in metadata(folder)["ended_by"]
    assert num_calls + 2 * 3 + 10 > max_calls


def test_a_search_finds_the_best_prompt_and_unscored_rollouts_change_no_score(
    endpoint, tmp_path, capsys, monkeypatch
):
    """Every file, every printed line, and the questions are stored."""
    monkeypatch.setenv("COLUMNS", "300")
    endpoint.proposals = ("", *PROPOSALS)  # an answer without a prompt costs one round
    more = {**faulty("aeioubcdf"), "max_calls": 200, "num_val": 20, "perfect_score": 1.0}
    more["state_columns"] = "[stop_reason,turns,rewards]"
    more |= {"reflection.temperature": 0.25, "reflection.max_tokens": 99}
    folder, screen = search(endpoint, tmp_path, **more), capsys.readouterr().out

    results = read(folder / "results.jsonl")
    # The reward is the mean of the rollouts that could be scored.
    assert results[0]["reward"] == 0 < results[1]["reward"] < results[2]["reward"] == 1
    scores = [row["info"]["scores"] for row in results]
    unscored = [i for i, score in enumerate(scores[0]) if score is None]
    assert 0 < len(unscored) < 20
    assert all([i for i, s in enumerate(own) if s is None] == unscored for own in scores)
    assert metadata(folder)["num_calls"] == len(read(folder / "rollouts.jsonl")) <= 200

    asked = [body for body in endpoint.bodies if body and body["model"] == "teacher"]
    assert {(body["temperature"], body["max_tokens"]) for body in asked} == {(0.25, 99)}

    changing = ("time", "generation_time", "seconds")
    rollouts = [
        json.dumps({k: v for k, v in line.items() if k not in changing}, sort_keys=True)
        for line in read(folder / "rollouts.jsonl")
    ]
    names = ("system_prompt.txt", "results.jsonl", "pareto_frontier.jsonl", "reflections.jsonl")
    found = [{name: read(folder / name) for name in names}, endpoint.teacher_asked[:2]]
    found += [metadata(folder), screen.splitlines(), len(rollouts), *sorted(rollouts)[::7]]
    found = json.loads(json.dumps(found).replace(endpoint.url, "<url>"))
    golden("prompts/search", without(tmp_path, found))


def test_an_environment_that_scores_nothing_ends_the_search(endpoint, tmp_path):
    with pytest.raises(RunFailed) as caught:
        search(endpoint, tmp_path, **faulty("abcdefghijklmnopqrstuvwxyz"))
    parts = ("none of the 10 rollouts of a batch has a reward", "the scorer is down")
    for part in (*parts, "best prompt so far:  python o.py", "resume=true"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"env.system_prompt": "null"}, "the environment 'reverse-text' has no system prompt"),
        ({"max_calls": 25}, "max_calls=25 is too low for one round: scoring the first prompt"),
        ({"state_columns": "[turn, turns]"}, "state_columns contains turn, which no rollout has"),
        ({"env._target_": f"{__name__}.Compared"}, "reverse-text compares rollouts of a group"),
        (LOCAL, "reflection.max_seq_len=9999, but"),
        ({"reflection.template": "x"}, "reflection.template lacks <curr_param> and <side_info>"),
    ],
)
def test_an_impossible_search_is_refused_before_the_first_request(more, said, endpoint, tmp_path):
    with pytest.raises(ConfigError) as caught:
        search(endpoint, tmp_path, **more)
    (problem,) = caught.value.problems
    assert said in problem
    assert not endpoint.policy_asked


def test_an_unusable_teacher_is_reported_before_the_first_rollout(endpoint, tmp_path):
    nobody = {"reflection.base_url": "http://127.0.0.1:9/v1"}
    with pytest.raises(RunFailed, match=r"reflection\.base_url=http://127\S+ did not answer"):
        search(endpoint, tmp_path, **nobody)
    assert not endpoint.policy_asked


@pytest.mark.parametrize(
    ("answer", "why"),
    [("<think>well</think>", "has no text"), (f"{PROPOSALS[-1]} Or…", "was cut off")],
)
def test_four_unusable_answers_of_the_teacher_end_the_search(answer, why, endpoint, tmp_path):
    endpoint.proposals = (answer,)
    with pytest.raises(RunFailed) as caught:
        search(endpoint, tmp_path, max_calls=400)
    said = f"the reflection model's answer {why}, 4 times in a row: raise reflection.max_tokens"
    assert said in str(caught.value)
    assert len(endpoint.teacher_asked) == 4
    assert len(endpoint.policy_asked) == 10 + 2 * 3


def test_a_resumed_search_begins_with_the_best_prompt_and_the_calls_left(endpoint, tmp_path):
    folder = search(endpoint, tmp_path, num_rounds=2)
    assert (folder / "system_prompt.txt").read_text() == f"{HALF}\n"
    num_before = len(endpoint.policy_asked)
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write('{"half a line')  # of a killed search

    with pytest.raises(ConfigError, match="already holds a run: use resume=true to continue it"):
        search(endpoint, tmp_path)
    with pytest.raises(ConfigError, match="minibatch_size was 3 and is 5"):
        search(endpoint, tmp_path, minibatch_size=5, resume="true")
    search(endpoint, tmp_path, num_rounds=9, resume="true")
    assert endpoint.policy_asked[num_before][0] == HALF
    assert (folder / "system_prompt.txt").read_text() == f"{WHOLE}\n"
    assert metadata(folder)["num_calls"] == len(endpoint.policy_asked) + 1 <= 80
    assert len((folder / "rollouts.jsonl").open().readlines()) == metadata(folder)["num_calls"]
    with pytest.raises(ConfigError, match="were played before, scoring the first prompt takes 10"):
        search(endpoint, tmp_path, max_calls=80, num_rounds=9, resume="true")


EXAMPLE = Example(0, "e", [])


def searching() -> Search:
    return Search(None, None, None, None, None, None, None)


def test_the_teacher_reads_all_turns_the_thoughts_and_whether_a_rollout_was_cut_off():
    first = {"role": "assistant", "content": "Ola?", "reasoning_content": "Let me see."}
    turns, record = [first, {"role": "user", "content": "yes"}], {"stop_reason": "max_tokens"}
    told = describe_rollout(Attempt(EXAMPLE, turns, {**record, "reward": 0.5}), ["thinking"])
    assert told["completion"] == "assistant: Ola?\nuser: yes"
    assert told["thinking"] == "Let me see."
    assert told["error"] == "the rollout was cut off: max_tokens"


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


def test_the_printed_commands_evaluate_and_train_the_policy_of_the_search_with_its_prompt(tmp_path):
    given = ["experiment=e", "env.system_prompt=Hm.", "+env@env.envs.x=gsm8k", "adapter_path=a"]
    choices = {"env": "mixture", "model": "qwen3-0.6b", "client": "renderer"}
    evaluate, train = outputs.next_commands(RunFolder(tmp_path), given, choices, 50)
    kept = "env=mixture model=qwen3-0.6b +env@env.envs.x=gsm8k"
    prompt = f"env.system_prompt={tmp_path}/system_prompt.txt"
    assert evaluate == f"python evaluate.py {kept} adapter_path=a {prompt} num_examples=500"
    assert train == f"python train.py {kept} {prompt}"
