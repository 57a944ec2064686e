"""Which choices of an algorithm's parts make sense together. A problem is one sentence.

The loss, what it is averaged over, what its ratios are taken to, what pulls at the policy, what
becomes of rewards before they are advantages. The rules go by what the parts say of themselves and
read (facts.py), so they hold for a user's own parts, too.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.facts import (
    ADVANTAGES,
    RATIO,
    fact,
    is_imitator,
    is_marked,
    is_supervised,
    reads,
    takes_any_text,
    uses_ratio,
)
from rl.config.limits import outside_own
from rl.config.reference_rules import REFERENCE_RULES

Config = Mapping[str, Any]

# What vLLM samples from with these is the policy's own distribution.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def loss_and_aggregation(config: Config) -> Iterator[str]:
    """A loss over whole sequences needs its own normalisation."""
    loss, aggregation = config["loss"]["_target_"], config["aggregation"]["_target_"]
    if is_marked(loss, "PER_SEQUENCE") and not is_marked(aggregation, "PER_SEQUENCE"):
        yield (
            f"{loss} gives a whole sequence one weight, and {aggregation} would let "
            "long sequences count more: use aggregation=sequence_mean"
        )


def bounds(config: Config) -> Iterator[str]:
    """Bounds have an order, some are ratios that must exceed 1, and some have a range."""
    for group in ("loss", "correction", "advantage", "aggregation", "buffer", "order"):
        node = config[group]
        yield from outside_own(group, node)
        pair = [key for key in fact(node["_target_"], "ORDERED", ()) if node.get(key) is not None]
        if len(pair) == 2 and node[pair[0]] >= node[pair[1]]:
            low, high = (f"{group}.{key}={node[key]}" for key in pair)
            yield f"{low} is not below {high}: move one of them"
        for key in fact(node["_target_"], "ABOVE_ONE", ()):
            if node.get(key) is not None and node[key] <= 1:
                yield (
                    f"{group}.{key}={node[key]} is a ratio and must exceed 1: 3 is usual, null "
                    "turns it off"
                )


def loss_and_sampler(config: Config) -> Iterator[str]:
    """What the sampler's tokens allow a loss to do with them."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]["_target_"]
    imitates, supervised = is_imitator(sampler), is_supervised(loss)
    if supervised and not imitates:
        yield (
            f"{loss} imitates whatever it is given and sees no reward, so it learns nothing from "
            "the policy's own rollouts: add sampler=demonstrations, or choose another loss"
        )
    if imitates and not takes_any_text(loss):
        needs = {
            "rewards": reads(loss, ADVANTAGES),
            "the sampler's logprobs": reads(loss, RATIO),
            "tokens that the policy sampled": not reads(loss, ADVANTAGES | RATIO),
        }
        yield (
            f"{loss} needs {' and '.join(need for need, is_so in needs.items() if is_so)}, and "
            f"{sampler} gives text that no policy sampled: add loss=sft, or choose sampler=async"
        )


def changed_sampling(config: Config) -> Iterator[str]:
    """A loss takes what is sampled for the policy's, divided by its probability or as it is."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]
    changed = [
        f"sampler.{key}={sampler[key]}"
        for key, neutral in NEUTRAL_SAMPLING.items()
        if sampler.get(key, neutral) != neutral
    ]
    if not changed or takes_any_text(loss) or sampler.get("allow_biased_ratio", False):
        return
    what = (
        f"every ratio in {loss} is biased"
        if uses_ratio(loss)
        else f"{loss}, which takes rollouts for the policy's own, is biased"
    )
    yield (
        f"{' and '.join(changed)} changes what is sampled, so {what}: leave it out, or accept that "
        "with sampler.allow_biased_ratio=true"
    )


def divergence(config: Config) -> Iterator[str]:
    """Where an estimator of the divergence belongs."""
    kl = config["kl"]
    estimator, place = kl["estimator"].get("_target_"), kl["place"]
    if kl["beta"] == 0:
        if kl["target_kl"] is not None:
            yield f"kl.target_kl={kl['target_kl']} steers kl.beta=0, which stays 0: try kl=k3"
        return
    if place == "loss" and is_marked(estimator, "FOR_REWARD"):
        yield (
            f"kl.place=loss with {estimator} has a gradient of zero on average: use "
            "kl.place=reward, or kl=k3"
        )
    if place == "reward" and not is_marked(estimator, "FOR_REWARD"):
        yield f"kl.place=reward with {estimator} is no unbiased penalty: use kl=k1"
    loss, sampled = config["loss"]["_target_"], not is_imitator(config["sampler"]["_target_"])
    if place == "reward" and sampled and not reads(loss, ADVANTAGES):
        yield f"kl.place=reward pulls by the advantages, and {loss} reads none: use kl=k3"
    if place == "reward" and config["reward"]["normalise_each"]:
        yield (
            "kl.place=reward is one penalty on the whole reward and reward.normalise_each=true "
            "knows only single ones: set one of them back"
        )


def old_logprobs(config: Config) -> Iterator[str]:
    """Several updates of a batch, and the correction that they need."""
    updates, loss = config["updates_per_batch"], config["loss"]["_target_"]
    correction = config["correction"]["_target_"]
    if updates > 1 and not takes_any_text(loss) and not uses_ratio(loss):
        yield (
            f"{loss} takes a batch as sampled by the very policy it trains, which is so in the "
            f"first of updates_per_batch={updates} only: use updates_per_batch=1 or loss=cispo"
        )
    if not is_marked(correction, "NEUTRAL") and updates == 1:
        yield (
            "with updates_per_batch=1 ratios are taken to the sampler, which corrects already; "
            f"{correction} would count the difference twice: use correction=none or "
            "updates_per_batch=2"
        )
    elif not is_marked(correction, "NEUTRAL") and is_marked(loss, "CORRECTS"):
        yield (
            f"{loss} corrects for the sampler by itself, and {correction} would do so twice: use "
            "correction=none"
        )


def rewards_before_advantages(config: Config) -> Iterator[str]:
    """Rewards that an advantage cannot take."""
    truncation, shaping = config["truncation"]["_target_"], config["reward"]
    advantage = config["advantage"]["_target_"]
    lowers = is_marked(truncation, "LOWERS_REWARDS")
    lowered = {
        truncation: lowers,
        # Then what truncation changed is a reward of its own (rl/rollouts/credit.py).
        f"{truncation} with reward.normalise_each": not lowers
        and is_marked(truncation, "CHANGES_REWARDS")
        and shaping["normalise_each"],
        "reward.length_penalty": shaping["length_penalty"] > 0,
        "kl.place=reward": config["kl"]["beta"] > 0 and config["kl"]["place"] == "reward",
    }
    for what, is_on in lowered.items():
        if is_on and is_marked(advantage, "NON_NEGATIVE"):
            yield f"{advantage} needs rewards >= 0 and {what} lowers them: use advantage=group_mean"


def demonstrations(config: Config) -> Iterator[str]:
    """What has no meaning where every reward is 1 and nothing was sampled."""
    sampler = config["sampler"]["_target_"]
    if not is_imitator(sampler):
        return
    dead = {
        "truncation": not is_marked(config["truncation"]["_target_"], "NEUTRAL"),
        "reward.length_penalty": config["reward"]["length_penalty"] != 0,
        "reward.normalise_each": config["reward"]["normalise_each"],
        "correction": not is_marked(config["correction"]["_target_"], "NEUTRAL"),
        "buffer": fact(config["buffer"]["_target_"], "judges_rewards", False),
        "kl.place=reward": config["kl"]["place"] == "reward" and config["kl"]["beta"] > 0,
    }
    for what in (name for name, is_set in dead.items() if is_set):
        yield (
            f"{what} says what to do with sampled rollouts, and {sampler} gives none: leave it "
            "out, or choose sampler=async"
        )
    order = config["order"]["_target_"]
    if not is_marked(order, "NEUTRAL"):
        yield (
            f"{order} says which examples the policy plays, and {sampler} gives it text to imitate "
            "instead: leave order out, or choose sampler=async"
        )


def text_alone(config: Config) -> Iterator[str]:
    """What a client or a sampler that has no tokens of the policy's cannot do."""
    client, sampler = config["client"]["_target_"], config["sampler"]["_target_"]
    if not fact(client, "needs_vllm", True):
        yield (
            f"{client} gets words, and training needs the very tokens with their logprobs: "
            "use client=renderer or client=tokens (python evaluate.py takes client=messages)"
        )
    if fact(config["evaluation"]["_target_"], "evaluates", True) and is_imitator(sampler):
        yield (
            f"evaluation plays the policy, and with {sampler} no vLLM is started that could: "
            "use evaluation=none, and python evaluate.py on a checkpoint"
        )


ALGORITHM_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    loss_and_aggregation,
    bounds,
    loss_and_sampler,
    changed_sampling,
    *REFERENCE_RULES,
    divergence,
    old_logprobs,
    rewards_before_advantages,
    demonstrations,
    text_alone,
)
