"""Check that the chosen components of an algorithm can be combined.

Each function of ALGORITHM_RULES yields one message per problem. The functions read constants of
components (facts.py) and facts from dry calls (learned.py), so they also check custom components.
"""

from collections.abc import Callable, Iterator

from rl.config.facts import Config, fact, is_imitator
from rl.config.learned import Learned
from rl.config.limits import (
    LIMITING_SAMPLING,
    MAX_TOP_K,
    NEUTRAL_SAMPLING,
    num_returned_tokens,
    value_of,
)
from rl.config.reference_rules import REFERENCE_RULES


def equal_reward_problems(config: Config, learned: Learned) -> Iterator[str]:
    sampler = config["sampler"]["_target_"]
    if not learned.advantage_compares:
        return
    if is_imitator(sampler):
        if (value_of(config, "buffer.min_spread") or 0) > 0:
            yield (
                f"{sampler} makes all rewards of a group equal, so the buffer would reject every "
                "group: use buffer=fifo or buffer.min_spread=0"
            )
    elif config["group_size"] == 1:
        yield (
            f"{config['advantage']['_target_']} compares the rollouts of a group, so group_size=1 "
            "makes every advantage 0: use group_size=8, or advantage=none"
        )


def loss_problems(config: Config, learned: Learned) -> Iterator[str]:
    loss, sampler = config["loss"]["_target_"], config["sampler"]["_target_"]
    if learned.loss_weighs_sequences and not learned.aggregation_weighs_sequences:
        yield (
            f"{loss} needs equal weights of all sequences, but {config['aggregation']['_target_']} "
            "weighs them unequally: use aggregation=sequence_mean"
        )
    imitates = is_imitator(sampler)
    if learned.is_supervised and not imitates:
        yield (
            f"{loss} imitates all text and reads no reward, so the policy would only imitate its "
            "own rollouts: use sampler=demonstrations, or another loss"
        )
    if imitates and not learned.takes_any_text:
        yield (
            f"{loss} needs rollouts that the policy sampled, but {sampler} samples none: use "
            "loss=sft, or sampler=async"
        )


def changed_sampling_problems(config: Config, learned: Learned) -> Iterator[str]:
    loss, sampler = config["loss"]["_target_"], config["sampler"]
    changed = {
        key: f"sampler.{key}={sampler[key]}"
        for key, neutral in NEUTRAL_SAMPLING.items()
        if sampler.get(key, neutral) != neutral
    }
    if not changed or learned.takes_any_text or sampler.get("allow_biased_ratio", False):
        return
    if num_returned_tokens(sampler):
        return
    biased = [text for key, text in changed.items() if key not in LIMITING_SAMPLING]
    remedy = "remove the option" if biased else f"add sampler.top_k={MAX_TOP_K} or less"
    yield (
        f"with {' and '.join(biased or changed.values())} vLLM does not sample the policy's "
        f"distribution, so {loss} is biased: {remedy}, or accept the bias with "
        "sampler.allow_biased_ratio=true"
    )


def correction_problems(config: Config, learned: Learned) -> Iterator[str]:
    updates, loss = config["updates_per_batch"], config["loss"]["_target_"]
    correction = config["correction"]["_target_"]
    if updates > 1 and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the current policy sampled the batch, but updates_per_batch="
            f"{updates} changes the policy within a batch: use updates_per_batch=1, or loss=cispo"
        )
    if learned.correction_is_neutral:
        return
    if is_imitator(config["sampler"]["_target_"]):
        yield (
            f"{correction} needs the logprobs of the policy that sampled the text, but "
            f"{config['sampler']['_target_']} returns text that no policy sampled: use "
            "correction=none"
        )
    elif learned.loss_corrects or updates == 1:
        corrects = loss if learned.loss_corrects else "with updates_per_batch=1 the loss"
        yield (
            f"{corrects} itself corrects for the difference between trainer and vLLM, and "
            f"{correction} would correct a second time: use correction=none"
            f"{'' if learned.loss_corrects else ', or updates_per_batch=2'}"
        )


def negative_reward_problems(config: Config, learned: Learned) -> Iterator[str]:
    truncation, advantage = config["truncation"]["_target_"], config["advantage"]["_target_"]
    # With normalise_each, truncation and length penalty lower advantages, not rewards (credit.py).
    on_rewards = not value_of(config, "reward.normalise_each")
    lowers_rewards = {
        truncation: on_rewards and learned.truncation_lowers_rewards,
        "reward.length_penalty": on_rewards and bool(value_of(config, "reward.length_penalty")),
        "kl.place=reward": config["kl"]["beta"] > 0 and config["kl"]["place"] == "reward",
    }
    for what, is_on in lowers_rewards.items():
        if is_on and learned.advantage_refuses_negative:
            yield (
                f"{advantage} needs rewards >= 0, but {what} can make them negative: use "
                "advantage=group_mean"
            )


def critic_problems(config: Config, learned: Learned) -> Iterator[str]:
    kind, loss = config["critic"]["_target_"], config["loss"]["_target_"]
    if not fact(kind, "estimates", True):
        return
    if not learned.reads_advantages:
        yield f"{kind} estimates advantages, but {loss} reads none: use critic=none or loss=ppo"
    if not learned.advantage_is_reward:
        yield (
            f"{kind} computes the advantages, so those of {config['advantage']['_target_']} would "
            "be ignored: use advantage=none, or critic=none"
        )
    if value_of(config, "reward.normalise_each"):
        yield (
            f"reward.normalise_each=true computes an advantage from each reward, but {kind} from "
            "their sum: set reward.normalise_each=false, or use critic=none"
        )
    head_start, steps = value_of(config, "critic.head_start"), config["max_steps"]
    if head_start is not None and head_start >= steps:
        yield (
            f"critic.head_start={head_start} leaves no steps of max_steps={steps} for the policy: "
            f"set max_steps above {head_start}, or lower critic.head_start"
        )


def batch_credit_problems(config: Config, learned: Learned) -> Iterator[str]:
    kind, loss = config["batch_credit"]["_target_"], config["loss"]["_target_"]
    if learned.batch_credit_is_neutral:
        return
    if not learned.reads_advantages:
        yield f"{kind} changes advantages, but {loss} reads none: use batch_credit=none"
    critic = config["critic"]["_target_"]
    if fact(critic, "estimates", True):
        yield f"{critic} replaces the advantages of {kind}: use batch_credit=none, or critic=none"


def batch_source_problems(config: Config, learned: Learned) -> Iterator[str]:
    loss, correction = config["loss"]["_target_"], config["correction"]["_target_"]
    replayed = value_of(config, "buffer.replay_share")
    oldest, newest = value_of(config, "buffer.max_staleness"), config["sampler"]["max_staleness"]
    if replayed and oldest is not None and oldest <= newest:
        yield (
            f"buffer.max_staleness={oldest} removes groups before they can be replayed, because a "
            f"group may be sampler.max_staleness={newest} versions old in its first batch: use "
            f"buffer.max_staleness={newest + 8}"
        )
    if replayed and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the current policy sampled the batch, but buffer.replay_share="
            f"{replayed} adds rollouts of earlier policies: use loss=cispo, or buffer=fifo"
        )
    demonstrated = value_of(config, "buffer.demonstration_share")
    if demonstrated and not learned.takes_any_text and not learned.reads({"source"}):
        yield (
            f"{loss} needs rollouts that the policy sampled, but buffer.demonstration_share="
            f"{demonstrated} adds text that no policy sampled: use loss=sft_and_rl, or buffer=fifo"
        )
    if demonstrated and not learned.correction_is_neutral:
        yield (
            f"{correction} needs the logprobs of the policy that sampled the text, which the "
            f"demonstrations of buffer.demonstration_share={demonstrated} lack: use correction=none"
        )


ALGORITHM_RULES: tuple[Callable[[Config, Learned], Iterator[str]], ...] = (
    equal_reward_problems,
    loss_problems,
    changed_sampling_problems,
    *REFERENCE_RULES,
    correction_problems,
    negative_reward_problems,
    critic_problems,
    batch_credit_problems,
    batch_source_problems,
)
