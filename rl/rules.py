"""What the keys of a configuration mean together. A problem is one sentence: values, then remedy.

Keys, names and types are right by the time these run (rl/config.py). A rule about a key that the
chosen nodes do not have says nothing.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.ranges import range_problems, value_of
from rl.run_folder import run_folder_problems
from rl.signatures import source
from rl.strategy import LORA, obstacle

Config = Mapping[str, Any]

DEMONSTRATIONS = "rl.demonstrations.DemonstrationSampler"
GROUP_ADVANTAGES = tuple(
    f"losses.advantages.{name}" for name in ("group_mean", "group_zscore", "rloo", "max_rl")
)
SEQUENCE_LOSSES = ("losses.gspo.gspo", "losses.sapo.sapo")
ABSOLUTE_BOUNDS = {
    "losses.cispo.cispo": ("clip_low", "clip_high"),
    "losses.masked_is.masked_is": ("ratio_low", "ratio_high"),
}
SEQUENCE_MEAN = "losses.aggregation.sequence_mean"
SUPERVISED = "losses.cross_entropy.cross_entropy"
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def rule_problems(config: Config) -> list[str]:
    """One sentence for each combination that makes no sense."""
    return [problem for rule in RULES for problem in rule(config)]


def batches(config: Config) -> Iterator[str]:
    """How many rollouts there are, of how many examples, for how many ranks."""
    batch, group, ranks = config["batch_size"], config["group_size"], config["trainer"]["ranks"]
    if min(batch, group, ranks) < 1:
        return
    if batch % group:
        lower, upper = batch // group * group, (batch // group + 1) * group
        yield (
            f"batch_size={batch} is no multiple of group_size={group}: use "
            f"batch_size={f'{lower} or {upper}' if lower else upper}, or another group_size"
        )
    if batch < ranks:
        yield f"batch_size={batch} leaves some of trainer.ranks={ranks} idle: use at most {batch}"
    advantage = config["advantage"]["_target_"]
    is_compared = advantage in GROUP_ADVANTAGES and config["sampler"]["_target_"] != DEMONSTRATIONS
    if group == 1 and is_compared:
        yield (
            f"group_size=1 with {advantage} makes every advantage 0, for it compares the rollouts "
            "of a group: use group_size=8 or so, or advantage=none"
        )


def lengths(config: Config) -> Iterator[str]:
    """Tokens of a turn, of a row, and what the model is made for."""
    longest, turn = config["max_seq_len"], value_of(config, "sampler.max_tokens")
    if turn is not None and turn >= longest:
        yield (
            f"sampler.max_tokens={turn} leaves no room for the prompt in max_seq_len={longest}: "
            "lower the one or raise the other"
        )
    made_for = value_of(config, "model.max_seq_len")
    if made_for is not None and longest > made_for:
        yield f"max_seq_len={longest} exceeds model.max_seq_len={made_for}: raise that one instead"


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
    imitates = sampler["_target_"] == DEMONSTRATIONS
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


def uses_ratio(target: str) -> bool:
    """Whether a loss reads the probability that its tokens were sampled with."""
    module = source(target.rpartition(".")[0])
    assert module, "the target was found before"
    reads = {"anchor", "rollout_logprobs", "old_logprobs"}
    return any(isinstance(n, ast.Attribute) and n.attr in reads for n in ast.walk(module.tree))


def steps_and_waits(config: Config) -> Iterator[str]:
    """Durations that contradict each other."""
    episode, wait = value_of(config, "sampler.rollout_timeout"), config["trainer"]["wait_timeout"]
    if episode is not None and episode >= wait:
        yield (
            f"one slow rollout (sampler.rollout_timeout={episode} s) would stop the run "
            f"(trainer.wait_timeout={wait} s): raise the latter above the former"
        )


def rewards(config: Config) -> Iterator[str]:
    """Something must be rewarded."""
    weights = value_of(config, "env.reward_weights")
    if isinstance(weights, Mapping) and not any(weights.values()):
        yield f"env.reward_weights={dict(weights)} makes every reward 0: give one a weight"


def adapter(config: Config) -> Iterator[str]:
    """What can be trained beside frozen weights, and travel alone."""
    chosen = config["adapter"]
    if config["sync"]["strategy"] == "adapter" and (why := obstacle(chosen, config["model"])):
        yield f"sync=adapter, but {why}"
    if chosen["_target_"] == LORA and not chosen["target_modules"]:
        yield (
            "adapter.target_modules=[] leaves LoRA no layer: use all-linear, or name some, such as "
            "[q_proj, v_proj]"
        )


def model_folder(config: Config) -> Iterator[str]:
    """A local model must be there; what may be a name on the hub is left to the download."""
    path = value_of(config, "model.path")
    if not isinstance(path, str):
        return
    folder = Path(path).expanduser()
    if not folder.exists() and (path[:1] in "/.~" or not HUB_NAME.fullmatch(path)):
        yield f"model.path={path}: no such folder, and no name on the hub (organisation/model)"
    elif folder.exists() and not (folder / "config.json").is_file():
        yield f"model.path={path}: {folder} holds no config.json, so it is no model in HF form"


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    range_problems,
    batches,
    lengths,
    loss_and_aggregation,
    loss_and_sampler,
    steps_and_waits,
    rewards,
    adapter,
    model_folder,
    run_folder_problems,
)
