"""Rules about which components of an algorithm can be combined. A problem is one sentence.

The rules cover the loss, the aggregation, the policy in the ratio's denominator, the divergence,
the reference, the critic, and the changes of rewards before advantages. They read class constants
(facts.py) and results of the dry call (learned.py), so that they also apply to a user's own
components.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.facts import fact, is_imitator, references
from rl.config.learned import REFERENCE, Learned
from rl.config.limits import NEUTRAL_SAMPLING, value_of
from rl.config.signatures import did_you_mean

Config = Mapping[str, Any]


def groups_of_equal_rewards(config: Config, learned: Learned) -> Iterator[str]:
    """If the advantage compares rewards in a group, refuse options that make all of them equal."""
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


def loss_and_text(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse a loss that cannot learn from the sampler's text or with the aggregation's weights."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]["_target_"]
    if learned.loss_weighs_sequences and not learned.aggregation_weighs_sequences:
        yield (
            f"{loss} needs equal weights of all sequences, but {config['aggregation']['_target_']} "
            "weighs them unequally: use aggregation=sequence_mean"
        )
    imitates = is_imitator(sampler)
    if learned.is_supervised and not imitates:
        yield (
            f"{loss} imitates all text and reads no reward, so on its own rollouts the policy "
            "would only imitate itself: use sampler=demonstrations, or another loss"
        )
    if imitates and not learned.takes_any_text:
        yield (
            f"{loss} needs rollouts that the policy sampled, but {sampler} samples none: use "
            "loss=sft, or sampler=async"
        )


def changed_sampling(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse options with which vLLM samples from another distribution than the policy's."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]
    changed = [
        f"sampler.{key}={sampler[key]}"
        for key, neutral in NEUTRAL_SAMPLING.items()
        if sampler.get(key, neutral) != neutral
    ]
    if not changed or learned.takes_any_text or sampler.get("allow_biased_ratio", False):
        return
    yield (
        f"with {' and '.join(changed)} vLLM does not sample the policy's distribution, so {loss} "
        "is biased: remove the option, or accept the bias with sampler.allow_biased_ratio=true"
    )


def divergence(config: Config, learned: Learned) -> Iterator[str]:
    """Check that the divergence estimator can be used in kl.place, which is loss or reward."""
    kl = config["kl"]
    estimator, place = kl["estimator"].get("_target_"), kl["place"]
    if kl["beta"] == 0:
        if kl["target_kl"] is not None:
            yield f"kl.target_kl={kl['target_kl']} cannot adapt kl.beta=0: set kl.beta=0.05"
        return
    if place == "loss" and learned.divergence_is_linear:
        yield (
            f"kl.place=loss with {estimator} has no effect, because the mean of its gradient is "
            "zero: use kl.place=reward, or kl=k3"
        )
    if place == "reward" and not learned.divergence_is_linear:
        yield f"kl.place=reward with {estimator} has a biased gradient: use kl=k1"
    if place == "reward" and not learned.reads_advantages:
        loss = config["loss"]["_target_"]
        yield f"kl.place=reward changes advantages, but {loss} reads none: use kl=k3"
    if place == "reward" and value_of(config, "reward.normalise_each"):
        yield (
            "kl.place=reward lowers the sum of the rewards, but reward.normalise_each=true treats "
            "each reward separately: use kl=k3, or reward.normalise_each=false"
        )


def updates_and_correction(config: Config, learned: Learned) -> Iterator[str]:
    """Check that updates_per_batch, the loss and the correction of ratios can be combined."""
    updates, loss = config["updates_per_batch"], config["loss"]["_target_"]
    correction = config["correction"]["_target_"]
    if updates > 1 and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the current policy sampled the batch, but updates_per_batch="
            f"{updates} changes the policy in between: use updates_per_batch=1, or loss=cispo"
        )
    if learned.correction_is_neutral:
        return
    if is_imitator(config["sampler"]["_target_"]):
        yield (
            f"{correction} needs the logprobs of the policy that sampled the text, but "
            f"{config['sampler']['_target_']} returns text that no policy sampled: use "
            "correction=none"
        )
    elif updates == 1:
        yield (
            "with updates_per_batch=1 the loss itself corrects for the difference between trainer "
            f"and vLLM, and {correction} would correct a second time: use correction=none, or "
            "updates_per_batch=2"
        )
    elif learned.loss_corrects:
        yield (
            f"{loss} itself corrects for the difference between trainer and vLLM, and {correction} "
            "would correct a second time: use correction=none"
        )


def rewards_before_advantages(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse options that make rewards negative if the advantage needs rewards >= 0."""
    truncation, advantage = config["truncation"]["_target_"], config["advantage"]["_target_"]
    # With normalise_each, penalties lower advantages instead of rewards (rl/rollouts/credit.py).
    on_rewards = not value_of(config, "reward.normalise_each")
    lowered = {
        truncation: on_rewards and learned.truncation_lowers_rewards,
        "reward.length_penalty": on_rewards and bool(value_of(config, "reward.length_penalty")),
        "kl.place=reward": config["kl"]["beta"] > 0 and config["kl"]["place"] == "reward",
    }
    for what, is_on in lowered.items():
        if is_on and learned.advantage_refuses_negative:
            yield f"{advantage} needs rewards >= 0 but {what} lowers them: use advantage=group_mean"


def unused_or_missing_reference(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse a reference that nothing reads, and a loss or KL penalty without its reference."""
    node, loss = config["reference"], config["loss"]["_target_"]
    kind, teaches = node["_target_"], learned.reads(REFERENCE)
    exists, is_policy = fact(kind, "has_logprobs", True), fact(kind, "is_policy", False)
    if not teaches and not config["kl"]["beta"] > 0:
        if (exists and not is_policy) or node.get("refresh_every") or node.get("sees_hint"):
            yield (
                f"neither {loss} nor a KL penalty uses {kind}: set kl.beta=0.01, use loss=distill "
                "to learn from this teacher, or use reference=none"
            )
    elif not exists:
        reader = loss if teaches else f"kl.beta={config['kl']['beta']}"
        remedy = "model reference.path=<the teacher>" if teaches else "initial"
        yield f"{reader} needs a reference model: use reference={remedy}"


def each_reference(config: Config, learned: Learned) -> Iterator[str]:
    """Check that each reference supports the run's options and loss.

    Each teacher of reference=per_env is checked as if it were the only reference.
    """
    loss, temperature = config["loss"]["_target_"], value_of(config, "sampler.temperature")
    temperature = (config.get("schedules") or {}).get("sampler.temperature", temperature)
    for path, node in references(config).items():
        kind = node["_target_"]
        if path != "reference" and not fact(kind, "has_logprobs", True):
            yield f"{path} is {kind}, which returns no logprobs: use {path}=model"
        is_hinted = node.get("sees_hint", False)
        may_be_policy = is_hinted or fact(loss, "stays_near_reference", False)
        if learned.reads(REFERENCE) and fact(kind, "is_policy", False) and not may_be_policy:
            yield (
                f"{loss} learns from a teacher, and {path}=initial is the policy itself: use "
                f"{path}=model {path}.path=<the teacher>, or {path}.sees_hint=true"
            )
        if node.get("refresh_every") and fact(config["adapter"]["_target_"], "freezes_base", False):
            yield (
                f"{path}.refresh_every={node['refresh_every']} cannot refresh the base model, "
                f"which an adapter freezes: set {path}.refresh_every=0, or use adapter=none"
            )
        if fact(kind, "only_temperature_1", False) and temperature not in (None, 1):
            yield (
                f"{path}=endpoint returns logprobs at temperature 1, but sampler.temperature="
                f"{temperature}: set sampler.temperature=1, or use {path}=model"
            )
        if is_hinted and is_imitator(config["sampler"]["_target_"]):
            yield (
                f"{path}.sees_hint=true adds hints to prompts of sampled rollouts, but "
                f"{config['sampler']['_target_']} samples none: set {path}.sees_hint=false, or use "
                "sampler=async"
            )


def one_per_environment(config: Config, learned: Learned) -> Iterator[str]:
    """Require one teacher for each environment of the mixture, all with the same top_k."""
    if "teachers" not in config["reference"]:
        return
    teachers, members = config["reference"]["teachers"], value_of(config, "env.envs")
    if not isinstance(members, Mapping):
        yield (
            f"{config['reference']['_target_']} has a teacher for each environment of a mixture, "
            "but env is a single environment: use reference=model, or env=mixture"
        )
        return
    if missing := [name for name in members if name not in teachers]:
        yield (
            f"reference.teachers has no teacher for {' and for '.join(missing)} of env.envs: add "
            f"+reference@reference.teachers.{missing[0]}=model "
            f"reference.teachers.{missing[0]}.path=<its teacher>"
        )
    for name in (name for name in teachers if name not in members):
        hint = did_you_mean(name, members) or f": use {' or '.join(members)}"
        yield f"reference.teachers.{name} is not an environment of env.envs{hint}"
    numbers = {f"{path}.top_k={node.get('top_k')}" for path, node in references(config).items()}
    distinct = {number.rpartition("=")[2] for number in numbers}
    if len(distinct) > 1 and learned.compares_distributions:
        yield f"{' and '.join(sorted(numbers))} must be equal, because one loss uses them: set one"


def critic(config: Config, learned: Learned) -> Iterator[str]:
    """Require a loss that reads the critic's advantages; refuse options that compute others."""
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


def batch_credit(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse a batch credit whose advantages nothing reads."""
    kind, loss = config["batch_credit"]["_target_"], config["loss"]["_target_"]
    if learned.batch_credit_is_neutral:
        return
    if not learned.reads_advantages:
        yield f"{kind} changes advantages, but {loss} reads none: use batch_credit=none"
    critic = config["critic"]["_target_"]
    if fact(critic, "estimates", True):
        yield f"{critic} replaces the advantages of {kind}: use batch_credit=none, or critic=none"


def batch_sources(config: Config, learned: Learned) -> Iterator[str]:
    """Refuse replayed groups that are too old, and text for which a component needs logprobs."""
    loss, correction = config["loss"]["_target_"], config["correction"]["_target_"]
    replayed = value_of(config, "buffer.replay_share")
    oldest, newest = value_of(config, "buffer.max_staleness"), config["sampler"]["max_staleness"]
    if replayed and oldest is not None and oldest <= newest:
        yield (
            f"buffer.max_staleness={oldest} removes groups before they can be replayed, because "
            f"sampler.max_staleness={newest} versions may pass until their first batch: use "
            f"buffer.max_staleness={newest + 8}"
        )
    if replayed and not learned.takes_any_text and not learned.uses_ratio:
        yield (
            f"{loss} assumes that the current policy sampled the batch, but buffer.replay_share="
            f"{replayed} adds rollouts of earlier policies: use loss=cispo, or buffer=fifo"
        )
    shown = value_of(config, "buffer.demonstration_share")
    if shown and not learned.takes_any_text and not learned.reads({"source"}):
        yield (
            f"{loss} needs rollouts that the policy sampled, but buffer.demonstration_share="
            f"{shown} adds text that no policy sampled: use loss=sft_and_rl, or buffer=fifo"
        )
    if shown and not learned.correction_is_neutral:
        yield (
            f"{correction} needs the logprobs of the policy that sampled the text, which the "
            f"demonstrations of buffer.demonstration_share={shown} lack: use correction=none"
        )


ALGORITHM_RULES: tuple[Callable[[Config, Learned], Iterator[str]], ...] = (
    groups_of_equal_rewards,
    loss_and_text,
    changed_sampling,
    unused_or_missing_reference,
    each_reference,
    one_per_environment,
    divergence,
    updates_and_correction,
    rewards_before_advantages,
    critic,
    batch_credit,
    batch_sources,
)
