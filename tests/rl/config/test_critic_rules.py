"""What goes with a critic, and what is refused beside one in one sentence."""

from typing import Any

import pytest

from tests.support.composing import Changes, changed, check_all, chosen, composed, only_problem


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return composed("loss=ppo", f"output_dir={tmp_path_factory.mktemp('runs')}")


MUON = {**chosen("optim", "adamw"), **chosen("optim", "muon"), "learning_rate": 1e-3}

REFUSED: dict[str, tuple[Changes, str]] = {
    "demonstrations": (
        {"loss": chosen("loss", "sft"), "sampler": chosen("sampler", "demonstrations")},
        "rl.learner.critic.ValueModel estimates advantages, and "
        "losses.cross_entropy.cross_entropy reads none: use critic=none, or loss=ppo",
    ),
    "a teacher": (
        {
            "loss": chosen("loss", "distill"),
            "reference": {**chosen("reference", "model"), "path": "a/b", "dtype": "bfloat16"},
        },
        "losses.distill.distill reads none: use critic=none, or loss=ppo",
    ),
    "a group's baseline": (
        {"advantage": chosen("advantage", "group_mean")},
        "rl.learner.critic.ValueModel makes the advantages, so those of "
        "losses.advantages.group_mean would be thrown away: use advantage=none, or critic=none",
    ),
    "rewards one by one": (
        {"reward.normalise_each": True},
        "and rl.learner.critic.ValueModel one of their sum: set it to false, or use critic=none",
    ),
    "a policy that never moves": (
        {"critic.head_start": 20, "max_steps": 20},
        "critic.head_start=20 leaves the policy none of max_steps=20: lower the one, or raise",
    ),
    "pieces of its matrices": (
        {"critic.optim": MUON, "deepspeed": {"zero_optimization": {"stage": 2}}},
        "flattened pieces of them: use deepspeed=zero0, or optim@critic.optim=adamw",
    ),
    "gamma": ({"critic.estimator.gamma": 1.1}, "critic.estimator.gamma=1.1, but it must be <= 1"),
    "lambda": ({"critic.estimator.gae_lambda": -0.1}, "critic.estimator.gae_lambda=-0.1, but it"),
    "a clip of nothing": ({"critic.loss.clip": 0.0}, "critic.loss.clip=0.0, but it must be > 0"),
    "a head start into the past": ({"critic.head_start": -1}, "critic.head_start=-1, but it must"),
    "no rate": ({"critic.optim.learning_rate": 0.0}, "critic.optim.learning_rate=0.0, but it must"),
    "words": ({"critic.over": "words"}, "critic.over"),
}

ALLOWED: dict[str, Changes] = {
    "turns": {"critic.over": "turns", "critic.loss.clip": 0.2, "updates_per_batch": 4},
    "a group of one": {"group_size": 1},
    "a penalty in the reward": {
        "kl.beta": 0.05,
        "kl.place": "reward",
        "kl.estimator": {"_target_": "losses.kl.k1"},
    },
    "a penalty in the loss": {"kl.beta": 0.05},
    "another loss": {"loss": chosen("loss", "cispo")},
    "low-rank matrices": {"adapter": chosen("adapter", "lora")},
    "an optimizer of its own": {"critic.optim": MUON},
    "the reward itself without a critic": {"critic": chosen("critic", "none")},
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_with_a_critic_is_refused_in_one_sentence(
    changes: Changes, sentence: str, ppo: dict[str, Any]
) -> None:
    problem = only_problem(changed(ppo, changes))
    assert sentence in problem
    assert "\n" not in problem


@pytest.mark.parametrize("name", ALLOWED)
def test_what_goes_with_a_critic_is_allowed(name: str, ppo: dict[str, Any]) -> None:
    check_all(changed(ppo, ALLOWED[name]))


def test_ppo_brings_its_critic_and_the_command_line_wins(tmp_path: Any) -> None:
    critic = composed("loss=ppo", f"output_dir={tmp_path}", "critic.optim.learning_rate=0.5")
    assert critic["critic"]["optim"]["learning_rate"] == 0.5
    assert critic["optim"]["learning_rate"] != 0.5
    muon = composed("loss=ppo", f"output_dir={tmp_path}", "optim@critic.optim=muon")
    assert muon["critic"]["optim"]["_target_"] == "rl.learner.optim.Muon"
    assert muon["optim"]["_target_"] == "rl.learner.optim.AdamW"
    none = composed("loss=ppo", "critic=none", f"output_dir={tmp_path}")
    assert none["critic"] == chosen("critic", "none")


def test_nothing_is_refused_for_the_sake_of_a_critic_that_is_not_there(
    config: dict[str, Any],
) -> None:
    check_all(changed(config, {"reward.normalise_each": True}))
