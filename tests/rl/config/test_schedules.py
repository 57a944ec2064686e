"""Schedules: values by hand, and what reaches a component; endpoints.toml: names of addresses."""

from dataclasses import dataclass
from functools import partial

import pytest

from rl.config.check import check
from rl.config.schedules import Schedules, join_schedules, split_schedules
from rl.config.schema import ConfigError, Run
from rl.schedule import cosine, linear, pieces
from tests.support.composing import changed, composed

LINEAR = {"_target_": "rl.schedule.linear", "start": 1.0, "end": 0.6, "steps": 50}
HOW = "{_target_:rl.schedule.linear,start:1.0,end:0.6,steps:50}"


def test_values_by_hand():
    for schedule, values in (
        (partial(linear, start=1.0, end=0.6, steps=4), [1.0, 0.9, 0.8, 0.7, 0.6, 0.6]),
        (partial(cosine, start=2.0, end=0.0, steps=4), [2, 1.70711, 1, 0.29289, 0, 0]),
        (partial(pieces, values={0: 3.0, 2: 1.0, 5: 4.0}), [3, 3, 1, 1, 1, 4, 4]),
    ):
        assert list(map(schedule, range(len(values)))) == pytest.approx(values, abs=1e-5)


@pytest.fixture(scope="module")
def plain():
    return composed("evaluation=default", "env=reverse-text")


def test_a_schedule_is_refused_with_the_step_or_the_keys(plain):
    for key, node, said in (
        ("sampler.temperature", {"end": -0.2}, "at step 50: sampler.temperature=-0.2, but"),
        ("sampler.temperature", {"end": -0.2, "steps": 150}, "at step 150: sampler."),  # the last
        ("env.reward_weights.exact", {}, "env.reward_weights.exact cannot be a schedule, but "),
        ("loss.clip_low", {"end": 6.0}, "at step 50: loss.clip_low=6.0 is not below loss."),
        ("truncation.limit", {}, "truncation.limit is not a key of rl.rollouts.truncation.keep"),
        ("kl.beta", {"_target_": "rl.schedule.pieces", "values": {2: 1.0}}, "has no step 0"),
        ("sampler.temperature", {"stop": 1}, "stop is not a key of rl.schedule.linear"),
        ("sampler.temperature", {"_target_": "rl.schedule.liner"}, "did you mean linear?"),
    ):
        with pytest.raises(ConfigError) as caught:
            check(changed(plain, {key: node if "values" in node else {**LINEAR, **node}}))
        assert said in str(caught.value)


def test_a_problem_that_no_schedule_causes_is_reported_once_and_without_a_step(plain):
    with pytest.raises(ConfigError) as caught:
        check(changed(plain, {"sampler.temperature": LINEAR, "batch_size": 7}))
    (problem,) = caught.value.problems
    assert problem.startswith("batch_size=7 is not a multiple of group_size")


def test_the_command_line_sets_a_schedule_and_the_saved_configuration_has_it(tmp_path):
    config = composed("evaluation=default", f"sampler.temperature={HOW}", "max_steps=50")
    check(config)
    run = Run.of(split_schedules(config))
    assert (run.sampler.temperature, run.evaluation["temperature"]) == (1.0, 1.0)
    run.save(tmp_path / "config.yaml")
    assert Run.load(tmp_path / "config.yaml") == run
    assert join_schedules(run.plain())["sampler"] == config["sampler"]


def test_the_number_beside_a_schedule_is_its_largest_but_an_environments_is_its_first(plain):
    rising = {**LINEAR, "start": 3, "end": 9}
    nodes = {"env.max_length": rising, "kl.beta": {**LINEAR, "start": 0.0}}
    config = split_schedules(changed(plain, nodes))
    assert (config["env"]["max_length"], config["kl"]["beta"]) == (3, 0.6)
    assert Schedules.of(config).options("env", 20) == {"max_length": 5}  # 5.4, for an integer
    assert Schedules.of(config).values(25) == pytest.approx({"env.max_length": 6, "kl.beta": 0.3})


@dataclass(frozen=True)
class Owner:
    limit: int = 1


def test_a_function_gets_the_options_of_a_step_and_an_instance_new_attributes():
    schedules = Schedules({"loss.clip": lambda step: step, "reward.limit": lambda step: step + 2})
    loss = schedules.apply(partial(dict, clip=9, other=1), "loss", 4)
    assert loss() == {"clip": 4, "other": 1}
    owner = Owner()
    assert schedules.apply(owner, "reward", 4) is owner
    assert owner.limit == 6


TEXT = """
[large]
url = "https://host/v1"
model = "large-1"
api_key_variable = "LARGE_KEY"
[local]
url = "http://localhost:8000/v1"
model = "small"
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "endpoints.toml").write_text


@pytest.mark.parametrize(
    ("primary", "overrides", "path"),
    [
        ("evaluate", ["client=messages", "client.url=large"], "client"),
        ("train", ["env=wiki-search-judged", "env.judge.url=large"], "env.judge"),
        ("train", ["loss=distill", "reference=endpoint", "reference.url=large"], "reference"),
        ("optimize_prompt", ["model.path=x", "reflection.base_url=large"], "reflection"),
    ],
)
def test_a_name_stands_for_the_url_the_model_and_the_key(primary, overrides, path, write):
    write(TEXT)
    node = composed(*overrides, primary=primary)
    for key in path.split("."):
        node = node[key]
    assert node.get("url", node.get("base_url")) == "https://host/v1"
    assert node["model"] == "large-1"
    assert node.get("api_key_variable", "LARGE_KEY") == "LARGE_KEY"


def test_a_model_and_an_address_of_the_command_line_are_kept(write):
    write(TEXT)
    for url, kept in (("local", "http://localhost:8000/v1"), ("http://a/v1", "http://a/v1")):
        given = ["client=messages", f"client.url={url}", "client.model=b"]
        client = composed(*given, primary="evaluate")["client"]
        assert (client["url"], client["model"]) == (kept, "b")
        assert client["api_key_variable"] == "OPENAI_API_KEY"


def test_a_wrong_name_or_file_is_refused(write):
    for text, said in (
        (TEXT, "endpoints.toml has no endpoint larg: use large or local"),
        ("[large]\nurl = 'x'\nmodel = 'y'\nkey = 'z'\n", r"\[large\] needs url and model"),
        ("[large", "endpoints.toml cannot be read"),
    ):
        write(text)
        with pytest.raises(ConfigError, match=said):
            composed("client=messages", "client.url=larg", primary="evaluate")
