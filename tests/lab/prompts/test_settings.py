"""conf/optimize_prompt.yaml: every choice composes, and impossible settings are refused."""

import pytest

from lab.prompts.settings import check_search
from rl.config.schema import ConfigError
from tests.lab.evaluation.test_settings import HUB, REMOTE
from tests.rl.config.test_shipped import SEARCHES
from tests.support.composing import composed


@pytest.fixture
def search(tmp_path):
    def search(*overrides):
        config = composed(*overrides, f"output_dir={tmp_path}", primary="optimize_prompt")
        return check_search(config)

    return search


@pytest.fixture
def only_problem(search):
    def only_problem(*overrides):
        with pytest.raises(ConfigError) as caught:
            search(*overrides)
        (problem,) = caught.value.problems
        return problem

    return only_problem


@pytest.mark.parametrize("experiment", sorted(SEARCHES))
def test_every_experiment_of_its_own_composes(experiment, search):
    found = search(experiment)
    assert found.env["system_prompt"]
    assert found.max_calls > 3 * found.num_val


def test_a_remote_policy_needs_no_vllm_and_a_teacher_of_ours_one(search):
    assert search(*REMOTE).inference is None
    assert search(*REMOTE, "reflection.path=some/teacher").inference


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("max_calls=0", "max_calls=0, but it must be >= 1"),
        ("reflection.timeout=0", "reflection.timeout=0, but it must be > 0"),
        ("sampler=demonstrations", "this program samples from the policy"),
        ("+reflection.url=x", "reflection.url is not a key of lab.prompts.teacher.Reflect"),
        ("reflection.api_key_variable=sk-123", "reflection.api_key_variable does not name "),
        ("state_columns=turns", 'state_columns is "turns", expected list'),
        ("resume=true run_name=none", "resume=true, but"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_sentence(override, said, only_problem):
    assert only_problem(*HUB, *override.split()).startswith(said)


def test_a_search_goes_on_as_the_same_search_but_may_get_more_to_spend(
    search, only_problem, tmp_path
):
    mine = [*HUB, "run_name=mine"]
    settings = search(*mine, "max_calls=500")
    settings.folder.mkdir()
    settings.save(settings.folder / "config.yaml")
    search(*mine, "minibatch_size=5")  # a search without a rollout holds no name
    (tmp_path / "mine" / "rollouts.jsonl").touch()
    assert "already holds a run: use resume=true to continue it" in only_problem(*mine)
    more = ["max_calls=900", "num_rounds=9", "reflection.timeout=9", "sampler.max_concurrent=4"]
    search(*mine, "resume=true", *more)
    said = only_problem(*mine, "resume=true", "minibatch_size=5")
    assert "minibatch_size was 3 and is 5" in said
