"""conf/optimize_prompt.yaml: every choice composes, and impossible settings are refused."""

from pathlib import Path

import pytest

from lab.prompts.settings import PromptOptimization, check_search
from rl.config.schema import ConfigError
from tests.lab.evaluation.test_settings import HUB, REMOTE
from tests.rl.config.test_shipped import SEARCHES
from tests.support.composing import composed


def search(*overrides: str, output_dir: Path) -> PromptOptimization:
    return check_search(composed(*overrides, f"output_dir={output_dir}", primary="optimize_prompt"))


def only_problem(*overrides: str, output_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        search(*overrides, output_dir=output_dir)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("experiment", sorted(SEARCHES))
def test_every_experiment_of_its_own_composes(experiment: str, tmp_path: Path) -> None:
    found = search(experiment, output_dir=tmp_path)
    assert found.env["system_prompt"]
    assert found.max_calls > 3 * found.num_val


def test_a_remote_policy_needs_no_vllm_and_a_teacher_of_ours_one(tmp_path: Path) -> None:
    assert search(*REMOTE, output_dir=tmp_path).inference is None
    assert search(*REMOTE, "reflection.path=some/teacher", output_dir=tmp_path).inference


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([*HUB, "max_calls=0"], "max_calls=0, but it must be >= 1"),
        ([*HUB, "reflection.timeout=0"], "reflection.timeout=0, but it must be > 0"),
        ([*HUB, "sampler=demonstrations"], "this program samples from the policy"),
        ([*HUB, "+reflection.url=x"], "reflection.url is not a key of lab.prompts.teacher.Reflect"),
        (
            [*HUB, "reflection.api_key_variable=sk-123"],
            "reflection.api_key_variable does not name ",
        ),
        ([*HUB, "state_columns=turns"], 'state_columns is "turns", expected list'),
        ([*HUB, "resume=true", "run_name=none"], "resume=true, but"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_sentence(
    overrides: list[str], said: str, tmp_path: Path
) -> None:
    assert only_problem(*overrides, output_dir=tmp_path).startswith(said)


def saved(folder: Path, *overrides: str) -> None:
    settings = search(*HUB, *overrides, "run_name=mine", output_dir=folder)
    settings.folder.mkdir()
    settings.save(settings.folder / "config.yaml")


def test_a_search_without_a_rollout_holds_no_name(tmp_path: Path) -> None:
    saved(tmp_path)
    search(*HUB, "run_name=mine", "minibatch_size=5", output_dir=tmp_path)


def test_a_search_goes_on_as_the_same_search_but_may_get_more_to_spend(tmp_path: Path) -> None:
    saved(tmp_path, "max_calls=500")
    (tmp_path / "mine" / "rollouts.jsonl").touch()
    again = [*HUB, "run_name=mine"]

    assert "already holds a run: use resume=true to continue it" in only_problem(
        *again, output_dir=tmp_path
    )
    more = ["max_calls=900", "num_rounds=9", "reflection.timeout=9", "sampler.max_concurrent=4"]
    search(*again, "resume=true", *more, output_dir=tmp_path)
    said = only_problem(*again, "resume=true", "minibatch_size=5", output_dir=tmp_path)
    assert "minibatch_size was 3 and is 5" in said
