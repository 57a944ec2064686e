"""Which choices of an algorithm's parts make sense together. A problem is one sentence.

The loss, what it is averaged over, what its ratios are taken to, what pulls at the policy, what
becomes of rewards before they are advantages.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl.config.limits import value_of
from rl.config.loss_reads import needs_reference, reads, uses_ratio
from rl.config.transport import LORA

Config = Mapping[str, Any]

# Samplers whose text no policy sampled: supervised fine-tuning.
IMITATORS = (
    "rl.sampling.demonstrations.DemonstrationSampler",
    "rl.sampling.transcripts.TranscriptSampler",
)
SEQUENCE_LOSSES = ("losses.gspo.gspo", "losses.sapo.sapo")
ABSOLUTE_BOUNDS = {
    "losses.cispo.cispo": ("clip_low", "clip_high"),
    "losses.masked_is.masked_is": ("ratio_low", "ratio_high"),
}
SEQUENCE_MEAN = "losses.aggregation.sequence_mean"
SUPERVISED = "losses.cross_entropy.cross_entropy"
NO_REFERENCE, INITIAL = "rl.learner.reference.NoReference", "rl.learner.reference.InitialPolicy"
MESSAGES, NO_EVALUATION = (
    "rl.sampling.messages_chat.MessagesClient",
    "rl.evaluation.periodic.NoEvaluation",
)
NO_CORRECTION = "losses.correction.none"


def loss_and_aggregation(config: Config) -> Iterator[str]:
    """A loss over whole sequences needs its own normalisation; bounds have an order."""
    loss, aggregation = config["loss"], config["aggregation"]["_target_"]
    if loss["_target_"] in SEQUENCE_LOSSES and aggregation != SEQUENCE_MEAN:
        yield (
            f"{loss['_target_']} gives a whole sequence one weight, and {aggregation} would let "
            "long sequences count more: use aggregation=sequence_mean"
        )
    if bounds := ABSOLUTE_BOUNDS.get(loss["_target_"]):
        low, high = (loss[key] for key in bounds)
        if low >= high:
            yield f"loss.{bounds[0]}={low} is not below loss.{bounds[1]}={high}: swap them"
    dual = value_of(config, "loss.dual_clip")
    if loss["_target_"] == "losses.ppo_clip.ppo_clip" and dual is not None and dual <= 1:
        yield f"loss.dual_clip={dual} is a ratio and must exceed 1: 3 is usual, null turns it off"


def loss_and_sampler(config: Config) -> Iterator[str]:
    """What the sampler's tokens allow a loss to do with them."""
    loss, sampler = config["loss"]["_target_"], config["sampler"]
    imitates = sampler["_target_"] in IMITATORS
    if loss == SUPERVISED and not imitates:
        yield (
            f"{loss} imitates whatever it is given and sees no reward, so it learns nothing from "
            "the policy's own rollouts: add sampler=demonstrations, or choose another loss"
        )
    if imitates and loss != SUPERVISED:
        yield (
            f"{loss} needs rewards and the sampler's logprobs, and demonstrations have neither: "
            "add loss=sft, or choose sampler=async"
        )
    neutral = {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    changed = [f"sampler.{k}={sampler[k]}" for k, v in neutral.items() if sampler.get(k, v) != v]
    if changed and uses_ratio(loss) and not sampler.get("allow_biased_ratio", False):
        yield (
            f"{' and '.join(changed)} changes what is sampled, so every ratio in {loss} is biased: "
            "leave it out, or accept that with sampler.allow_biased_ratio=true"
        )


def reference(config: Config) -> Iterator[str]:
    """What reads a reference, and which one it gets."""
    node, loss = config["reference"], config["loss"]["_target_"]
    kind, teaches = node["_target_"], reads(loss, {"ref_logprobs"})
    if not needs_reference(config):
        if kind not in (NO_REFERENCE, INITIAL) or node.get("refresh_every"):
            yield (
                f"nothing reads the reference {kind}: add kl.beta=0.01, or loss=distill for a "
                "teacher, or leave reference out"
            )
    elif kind == NO_REFERENCE:
        reader = loss if teaches else f"kl.beta={config['kl']['beta']}"
        remedy = "model reference.path=<the teacher>" if teaches else "initial"
        yield f"{reader} needs a reference and reference=none has none: use reference={remedy}"
    if teaches and kind == INITIAL:
        yield (
            f"{loss} learns from a teacher, and reference=initial is the policy itself: use "
            "reference=model reference.path=<the teacher>"
        )
    if node.get("refresh_every") and config["adapter"]["_target_"] == LORA:
        yield (
            f"reference.refresh_every={node['refresh_every']} moves the reference, which with "
            "adapter=lora is the frozen base: set it to 0, or use adapter=none"
        )
    temperature = value_of(config, "sampler.temperature")
    if kind == "rl.learner.reference.Endpoint" and temperature not in (None, 1):
        yield (
            f"reference=endpoint returns logprobs at temperature 1 and sampler.temperature="
            f"{temperature}: sample at 1, or load the teacher with reference=model"
        )


def divergence(config: Config) -> Iterator[str]:
    """Where an estimator of the divergence belongs."""
    kl = config["kl"]
    estimator, place = kl["estimator"].get("_target_"), kl["place"]
    if kl["beta"] == 0:
        if kl["target_kl"] is not None:
            yield f"kl.target_kl={kl['target_kl']} steers kl.beta=0, which stays 0: try kl=k3"
        return
    if place == "loss" and estimator == "losses.kl.k1":
        yield (
            "kl.place=loss with losses.kl.k1 has a gradient of zero on average: use "
            "kl.place=reward, or kl=k3"
        )
    if place == "reward" and estimator != "losses.kl.k1":
        yield f"kl.place=reward with {estimator} is no unbiased penalty: use kl=k1"
    if place == "reward" and config["reward"]["normalise_each"]:
        yield (
            "kl.place=reward is one penalty on the whole reward and reward.normalise_each=true "
            "knows only single ones: set one of them back"
        )


def old_logprobs(config: Config) -> Iterator[str]:
    """Several updates of a batch, and the correction that they need."""
    updates, loss = config["updates_per_batch"], config["loss"]["_target_"]
    correction = config["correction"]
    kind = correction["_target_"]
    if updates > 1 and loss != SUPERVISED and not uses_ratio(loss):
        yield (
            f"{loss} takes a batch as sampled by the very policy it trains, which is so in the "
            f"first of updates_per_batch={updates} only: use updates_per_batch=1 or loss=cispo"
        )
    if kind != NO_CORRECTION and updates == 1:
        yield (
            "with updates_per_batch=1 ratios are taken to the sampler, which corrects already; "
            f"{kind} would count the difference twice: use correction=none or updates_per_batch=2"
        )
    low, high = correction.get("low"), correction.get("high")
    if low is not None and high is not None and low >= high:
        yield f"correction.low={low} is not below correction.high={high}: swap them"


def rewards_before_advantages(config: Config) -> Iterator[str]:
    """Rewards that an advantage cannot take, and groups that no buffer would let pass."""
    truncation, shaping = config["truncation"]["_target_"], config["reward"]
    lowered = {
        "truncation=penalty": truncation == "rl.rollouts.truncation.penalty",
        # Then what truncation changed is a reward of its own (rl/rollouts/credit.py).
        "truncation=zero_reward with reward.normalise_each": truncation
        == "rl.rollouts.truncation.zero_reward"
        and shaping["normalise_each"],
        "reward.length_penalty": shaping["length_penalty"] > 0,
        "kl.place=reward": config["kl"]["beta"] > 0 and config["kl"]["place"] == "reward",
    }
    for what, is_on in lowered.items():
        if is_on and config["advantage"]["_target_"] == "losses.advantages.max_rl":
            yield f"advantage=max_rl needs rewards >= 0 and {what} lowers them: use group_mean"
    low, high = value_of(config, "buffer.min_reward"), value_of(config, "buffer.max_reward")
    if low is not None and high is not None and low >= high:
        yield f"buffer.min_reward={low} is not below buffer.max_reward={high}: swap them"


def demonstrations(config: Config) -> Iterator[str]:
    """What has no meaning where every reward is 1 and nothing was sampled."""
    if config["sampler"]["_target_"] not in IMITATORS:
        return
    dead = {
        "truncation": config["truncation"]["_target_"] != "rl.rollouts.truncation.keep",
        "reward.length_penalty": config["reward"]["length_penalty"] != 0,
        "reward.normalise_each": config["reward"]["normalise_each"],
        "correction": config["correction"]["_target_"] != NO_CORRECTION,
        "buffer": config["buffer"]["_target_"] != "rl.rollouts.buffer.FifoBuffer",
        "kl.place=reward": config["kl"]["place"] == "reward" and config["kl"]["beta"] > 0,
    }
    for what in (name for name, is_set in dead.items() if is_set):
        yield (
            f"{what} says what to do with sampled rollouts, and demonstrations are none: leave it "
            "out, or choose sampler=async"
        )


def text_alone(config: Config) -> Iterator[str]:
    """What a client or a sampler that has no tokens of the policy's cannot do."""
    if config["client"]["_target_"] == MESSAGES:
        yield (
            "client=messages gets words, and training needs the very tokens with their logprobs: "
            "use client=renderer or client=tokens (python evaluate.py takes client=messages)"
        )
    is_evaluated = config["evaluation"]["_target_"] != NO_EVALUATION
    if is_evaluated and config["sampler"]["_target_"] in IMITATORS:
        yield (
            "evaluation plays the policy, and with demonstrations no vLLM is started that could: "
            "use evaluation=none, and python evaluate.py on a checkpoint"
        )


ALGORITHM_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    loss_and_aggregation,
    loss_and_sampler,
    reference,
    divergence,
    old_logprobs,
    rewards_before_advantages,
    demonstrations,
    text_alone,
)
