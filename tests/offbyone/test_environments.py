"""This project's environments by name, for programs without Hydra."""

import pytest

from envs.messages import user
from envs.reverse_text import ReverseText
from offbyone.environments import CONF, load, load_for_verifiers


def test_a_name_is_its_yaml_file_with_options_changed():
    env = load("reverse-text", max_length=3, num_train=9, num_eval=7)
    assert isinstance(env, ReverseText)
    words = [example.info["answer"] for example in env.examples("eval")]
    assert len(words) == 7
    assert {len(word) for word in words} == {3}
    assert env.reward_weights == {"exact": 1.0, "similarity": 0.0}


def test_a_system_prompt_is_set_in_every_environment_of_a_mixture():
    env = load("mixture", system_prompt="Be brief.")
    for pool in env.pools("train"):
        opening = env.environment_of(pool.examples[0]).add_system_prompt([user("hi")])
        assert opening == [{"role": "system", "content": "Be brief."}, user("hi")]


@pytest.mark.parametrize("file", sorted((CONF / "env").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_environment_loads_or_names_the_missing_option(file):
    if "???" in file.read_text():
        with pytest.raises(ValueError, match="has no default: pass"):
            load(file.stem)
    else:
        assert load(file.stem).name


def test_a_class_can_be_loaded_by_its_import_path():
    options = {"min_length": 1, "max_length": 2, "num_eval": 1, "reward_weights": {"exact": 1.0}}
    assert len(load("envs.reverse_text.ReverseText", num_train=3, **options).examples("train")) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "reverse-texts",
            {},
            "environment 'reverse-texts' does not exist: did you mean reverse-text",
        ),
        ("zzz", {}, "environment 'zzz' does not exist: choose one of agent, alphabet-sort, "),
        ("arithmetic", {"max_operant": 3}, r"no options \['max_operant'\]: use max_operand, "),
        ("verifiers", {}, r"verifiers\.id has no default: pass"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_refused_with_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message):
        load(name, **options)


def test_an_environment_that_compares_a_group_is_not_exported(monkeypatch):
    async def score_group(self, episodes):
        return [{} for _ in episodes]

    monkeypatch.setattr(ReverseText, "score_group", score_group)
    for name in ("reverse-text", "mixture"):  # the mixture contains reverse-text
        with pytest.raises(ValueError, match=f"{name} compares the episodes of a group"):
            load_for_verifiers(name)
