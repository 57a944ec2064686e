"""The supervised run that makes the policy a run starts from."""

from pathlib import Path

import pytest

from rl.config.schema import Run
from rl.supervisor.warm_start import warm_start_key, warm_start_run
from tests.support.composing import composed


def supervised(*overrides: str) -> Run:
    recipe = composed("loss=sft", "sampler=demonstrations")
    return warm_start_run(Run(**composed(*overrides)), recipe, Path("somewhere/warm"))


def test_it_imitates_an_expert_who_errs_as_often_as_the_model_says() -> None:
    made = supervised(
        "model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "seed=5"
    )
    assert made.sampler["_target_"] == "rl.sampling.demonstrations.DemonstrationSampler"
    assert made.sampler["corruption_rate"] == 0.25
    assert (made.max_steps, made.group_size, made.seed) == (33, 1, 0)


def test_supervised_training_by_itself_learns_from_an_expert_without_fault() -> None:
    assert composed("loss=sft", "sampler=demonstrations")["sampler"]["corruption_rate"] == 0


@pytest.mark.parametrize(
    "change",
    ["model.warm_start.corruption_rate=0.25", "model.warm_start.steps=33", "env.max_length=4"],
)
def test_another_lesson_is_another_policy(change: str) -> None:
    assert warm_start_key(supervised(change)) != warm_start_key(supervised())


@pytest.mark.parametrize("same", ["seed=5", "optim.learning_rate=0.1", "loss=grpo", "max_steps=9"])
def test_every_run_after_the_same_lesson_starts_from_the_same_policy(same: str) -> None:
    assert warm_start_key(supervised(same)) == warm_start_key(supervised())
