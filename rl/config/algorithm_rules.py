"""Which choices of an algorithm's components make sense together. A problem is one sentence.

The loss, the aggregation, the policy that ratios are taken to, the divergence, and what happens to
rewards before they are advantages. The rules use what the components say about themselves
(facts.py) and what the dry call found out (learned.py), so that they hold for a user's own, too.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.critic_rules import critic
from rl.config.facts import fact, is_imitator
from rl.config.learned import Learned
from rl.config.limits import value_of
from rl.config.reference_rules import REFERENCE_RULES

Config = Mapping[str, Any]

# With these values vLLM samples from the policy's own distribution.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def group_of_one(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse a group without a second rollout to compare with."""
    is_sampled = not is_imitator(config["sampler"]["_target_"])
    if config["group_size"] == 1 and is_sampled and learned.advantage_compares:
        yield (
            f"group_size=1 with {config['advantage']['_target_']} makes every advantage 0, because "
            "it compares the rollouts of a group: use group_size=8 or so, or advantage=none"
        )


def loss_and_aggregation(config: Config, learned: Learned) -> Iterator[str]:
    """Require equal weights of sequences from a loss that gives each one weight."""
    if learned.loss_weighs_sequences and not learned.aggregation_weighs_sequences:
        yield (
            f"{config['loss']['_target_']} gives a whole sequence one weight, and "
            f"{config['aggregation']['_target_']} would let long sequences count more: use "
            "aggregation=sequence_mean"
        )


def loss_and_sampler(config: Config, learned: Learned) -> Iterator[str]:
    """Compare what a loss needs with what the sampler's text has."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]["_target_"]
    imitates = is_imitator(sampler)
    if learned.is_supervised and not imitates:
        yield (
            f"{loss} imitates its tokens and sees no reward, so it learns nothing from the "
            "policy's own rollouts: add sampler=demonstrations, or choose another loss"
        )
    if imitates and not learned.takes_any_text:
        needs = {
            "rewards": learned.reads_advantages,
            "the sampler's logprobs": learned.uses_ratio,
            "tokens that the policy sampled": not (learned.reads_advantages or learned.uses_ratio),
        }
        yield (
            f"{loss} needs {' and '.join(need for need, is_so in needs.items() if is_so)}, and "
            f"{sampler} gives text that no policy sampled: add loss=sft, or choose sampler=async"
        )


def changed_sampling(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse sampling from another distribution than the one that the loss assumes."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]
    changed = [
        f"sampler.{key}={sampler[key]}"
        for key, neutral in NEUTRAL_SAMPLING.items()
        if sampler.get(key, neutral) != neutral
    ]
    if not changed or learned.takes_any_text or sampler.get("allow_biased_ratio", False):
        return
    what = (
        f"every ratio in {loss} is biased"
        if learned.uses_ratio
        else f"{loss}, which takes rollouts for the policy's own, is biased"
    )
    yield (
        f"{' and '.join(changed)} changes what is sampled, so {what}: leave it out, or accept that "
        "with sampler.allow_biased_ratio=true"
    )


def divergence(config: Config, learned: Learned) -> Iterator[str]:
    """Check the place of the estimator of the divergence."""
    kl = config["kl"]
    estimator, place = kl["estimator"].get("_target_"), kl["place"]
    if kl["beta"] == 0:
        if kl["target_kl"] is not None:
            yield f"kl.target_kl={kl['target_kl']} steers kl.beta=0, which stays 0: try kl=k3"
        return
    if place == "loss" and learned.divergence_is_linear:
        yield (
            f"kl.place=loss with {estimator} has a gradient of zero on average: use "
            "kl.place=reward, or kl=k3"
        )
    if place == "reward" and not learned.divergence_is_linear:
        yield f"kl.place=reward with {estimator} is no unbiased penalty: use kl=k1"
    loss, sampled = config["loss"]["_target_"], not is_imitator(config["sampler"]["_target_"])
    if place == "reward" and sampled and not learned.reads_advantages:
        yield f"kl.place=reward pulls by the advantages, and {loss} reads none: use kl=k3"
    if place == "reward" and value_of(config, "reward.normalise_each"):
        yield (
            "kl.place=reward is one penalty on the whole reward and reward.normalise_each=true "
            "knows only single ones: set one of them back"
        )


def old_logprobs(config: Config, learned: Learned) -> Iterator[str]:
    """Compare the number of updates of a batch with the correction that they need."""
    updates, loss = config["updates_per_batch"], config["loss"]["_target_"]
    correction = config["correction"]["_target_"]
    if updates > 1 and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the policy it trains has sampled the batch, which is so in the "
            f"first of updates_per_batch={updates} only: use updates_per_batch=1 or loss=cispo"
        )
    if not learned.correction_is_neutral and updates == 1:
        yield (
            "with updates_per_batch=1 ratios are taken to the sampler, which corrects already; "
            f"{correction} would count the difference twice: use correction=none or "
            "updates_per_batch=2"
        )
    elif not learned.correction_is_neutral and learned.loss_corrects:
        yield (
            f"{loss} corrects for the sampler by itself, and {correction} would do so twice: use "
            "correction=none"
        )


def rewards_before_advantages(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse rewards that may be negative if the advantage needs rewards >= 0."""
    truncation, advantage = config["truncation"]["_target_"], config["advantage"]["_target_"]
    lowers = learned.truncation_lowers_rewards
    lowered = {
        truncation: lowers,
        # Then the change that truncation makes is a reward of its own (rl/rollouts/credit.py).
        f"{truncation} with reward.normalise_each": not lowers
        and learned.truncation_changes_rewards
        and value_of(config, "reward.normalise_each"),
        "reward.length_penalty": (value_of(config, "reward.length_penalty") or 0) > 0,
        "kl.place=reward": config["kl"]["beta"] > 0 and config["kl"]["place"] == "reward",
    }
    for what, is_on in lowered.items():
        if is_on and learned.advantage_refuses_negative:
            yield f"{advantage} needs rewards >= 0 and {what} lowers them: use advantage=group_mean"


def demonstrations(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse what has no effect if every reward is 1 and nothing is sampled."""
    sampler = config["sampler"]["_target_"]
    if not is_imitator(sampler):
        return
    dead = {
        "truncation": not learned.truncation_is_neutral,
        "reward.length_penalty": bool(value_of(config, "reward.length_penalty")),
        "reward.normalise_each": value_of(config, "reward.normalise_each"),
        "correction": not learned.correction_is_neutral,
        "buffer": fact(config["buffer"]["_target_"], "judges_rewards", False),
        "kl.place=reward": config["kl"]["place"] == "reward" and config["kl"]["beta"] > 0,
    }
    for what in (name for name, is_set in dead.items() if is_set):
        yield (
            f"{what} says what to do with sampled rollouts, and {sampler} gives none: leave it "
            "out, or choose sampler=async"
        )
    order = config["order"]["_target_"]
    if not fact(order, "is_default", False):
        yield (
            f"{order} says which examples the policy plays, and {sampler} gives it text to imitate "
            "instead: leave order out, or choose sampler=async"
        )


ALGORITHM_RULES: tuple[Callable[[Config, Learned], Iterator[str]], ...] = (
    group_of_one,
    loss_and_aggregation,
    loss_and_sampler,
    changed_sampling,
    *REFERENCE_RULES,
    divergence,
    old_logprobs,
    rewards_before_advantages,
    demonstrations,
    critic,
)
