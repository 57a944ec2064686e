"""Rules about combinations of configuration values. A problem is one sentence: values, then remedy.

check.py has already checked keys, names, types and ranges. A rule yields nothing if the chosen
nodes lack its key.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from rl.config.facts import fact, is_imitator, spans_hosts
from rl.config.initial import initial_problems
from rl.config.limits import free_form_problems, value_of
from rl.config.resume_rules import leaves, run_folder_problems
from rl.config.schema import seconds_of
from rl.config.transport import transport_problems
from rl.runtime.stop_when import StopWhen

Config = Mapping[str, Any]

OFFLOADS = {"offload_optimizer": "zero3_offload_optimizer", "offload_param": "zero3_offload"}
_SECRET = re.compile(  # scheme://user:password@host or scheme://host?key=value
    r"\s*[a-z][a-z0-9+.-]*://([^/?#\s]*@|.*[?&][^=&]*(key|token|secret|passw)[^=&]*=)",
    re.IGNORECASE,
)
# The usual form of the name of an environment variable that holds a key.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def rule_problems(config: Config) -> list[str]:
    """Return one sentence for each invalid combination of values."""
    return [problem for rule in RULES for problem in rule(config)]


def secret_problems(config: Config) -> Iterator[str]:
    """Yield one sentence for each value that contains a secret, without repeating the secret."""
    for path, value in leaves(config):
        if not isinstance(value, str):
            continue
        if _SECRET.match(value):
            yield (
                f"{path} contains a password or key, which would be written to config.yaml: remove "
                "it, and name an environment variable that contains it in an api_key_variable"
            )
        named = path.endswith("_variable")
        if named and value not in os.environ and not _VARIABLE.fullmatch(value):
            yield (
                f"{path} does not name an environment variable that is set: export MY_KEY=<key>, "
                f"and set {path}=MY_KEY, because a key itself would be written to config.yaml"
            )


def batches(config: Config) -> Iterator[str]:
    """Require that a batch consists of whole groups, and has a rollout for each rank."""
    batch, group, ranks = config["batch_size"], config["group_size"], config["trainer"]["ranks"]
    if ranks and batch < ranks:
        yield f"batch_size={batch} is below trainer.ranks={ranks}: use trainer.ranks={batch}"
    if batch % group:
        lower, upper = batch // group * group, (batch // group + 1) * group
        yield (
            f"batch_size={batch} is not a multiple of group_size={group}: use "
            f"batch_size={f'{lower} or {upper}' if lower else upper}, or another group_size"
        )


def client_and_evaluation(config: Config) -> Iterator[str]:
    """Refuse a client that receives text without tokens, and evaluations in a run without vLLM."""
    client, sampler = config["client"]["_target_"], config["sampler"]["_target_"]
    if not fact(client, "needs_vllm", True):
        yield (
            f"{client} receives text, but training needs the sampled tokens with their logprobs: "
            "use client=renderer or client=tokens (client=messages is for python evaluate.py)"
        )
    if fact(config["evaluation"]["_target_"], "evaluates", True) and is_imitator(sampler):
        yield (
            f"evaluation needs vLLM to sample answers, but a run with {sampler} starts no vLLM: "
            "use evaluation=none, and evaluate a checkpoint with python evaluate.py"
        )


def strategy(config: Config) -> Iterator[str]:
    """Refuse a strategy in a run without vLLM, and stop texts if turns begin with given tokens."""
    target, sampler = config["strategy"]["_target_"], config["sampler"]["_target_"]
    if fact(target, "samples", True) and is_imitator(sampler):
        yield (
            f"{target} plays attempts of the policy, but {sampler} starts no vLLM: "
            "use strategy=independent, or sampler=async"
        )
    for path, limits in _sampling(config):
        if limits.get("stop") and fact(target, "begins_turns", False):
            yield (
                f"{target} begins turns with given tokens, where vLLM does not find "
                f"{path}.stop={list(limits['stop'])}: set {path}.stop=[], or use another strategy"
            )


def _sampling(config: Config) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the sampler's limits and the limits in env.sampling, each with its config path."""
    limits = value_of(config, "env.sampling") or {}
    return [("sampler", config["sampler"]), *((f"env.sampling.{k}", v) for k, v in limits.items())]


def lengths(config: Config) -> Iterator[str]:
    """Check that turns and prompts fit into max_seq_len, and that max_seq_len suits the model."""
    longest = config["max_seq_len"]
    for path, limits in _sampling(config):
        turn = limits.get("max_tokens")
        if isinstance(turn, int) and turn >= longest:
            yield (
                f"{path}.max_tokens={turn} leaves no room for the prompt in max_seq_len={longest}: "
                f"lower {path}.max_tokens, or raise max_seq_len"
            )
    prompt = value_of(config, "sampler.max_prompt_len")
    client = config["client"]["_target_"]
    hidden = [] if fact(client, "measures_prompts", True) else [client]
    targets = (node["_target_"] for _, node in nodes(config["env"], "env"))
    hidden += [env for env in targets if fact(env, "holds_conversation", False)]
    for target in dict.fromkeys(hidden if prompt is not None else ()):
        yield (
            f"sampler.max_prompt_len={prompt} cannot be enforced, because the length of a prompt "
            f"of {target} is known only to the server: set sampler.max_prompt_len=null"
        )
    made_for = value_of(config, "model.max_seq_len")
    if made_for is not None and longest > made_for:
        yield f"max_seq_len={longest} exceeds model.max_seq_len={made_for}: raise model.max_seq_len"


def zero_stage(config: Config) -> Iterator[str]:
    """Check that the optimizer, offloading and compilation work in the ZeRO stage.

    From stage 1 on, an optimizer gets flattened pieces of matrices. Below stage 3, DeepSpeed sums
    offloaded gradients in bfloat16, and skips all steps after a NaN. Stage 3 gathers weights
    inside compiled layers.
    """
    stage = value_of(config, "deepspeed.zero_optimization.stage")
    for key, own in (("optim", "optim"), ("critic.optim", "optim@critic.optim")):
        optimizer = value_of(config, f"{key}._target_")
        if optimizer and fact(optimizer, "whole_matrices", False) and stage:
            yield (
                f"{optimizer} orthogonalises whole matrices, and ZeRO stage {stage} gives an "
                f"optimizer flattened pieces of them: use deepspeed=zero0, or {own}=adamw"
            )
    for key, choice in OFFLOADS.items():
        path = f"deepspeed.zero_optimization.{key}.device"
        device = value_of(config, path)
        if device not in (None, "none") and stage != 3:
            yield (
                f"{path}={device} under ZeRO stage {stage} loses gradients or is ignored: use "
                f"deepspeed={choice}"
            )
    if stage == 3 and value_of(config, "trainer.compile"):
        yield (
            "trainer.compile=true compiles whole layers, and ZeRO stage 3 gathers weights inside "
            "them: use deepspeed=zero2, or trainer.compile=false"
        )


def rollout_timeout(config: Config) -> Iterator[str]:
    """Refuse a time limit of rollouts that exceeds the time that other processes wait for them."""
    episode, wait = value_of(config, "sampler.rollout_timeout"), config["trainer"]["wait_timeout"]
    if episode is not None and episode >= wait:
        yield (
            f"sampler.rollout_timeout={episode} s is not below trainer.wait_timeout={wait} s, so "
            f"one slow rollout would end the run: set trainer.wait_timeout above {episode}"
        )
    for path, limits in _sampling(config):
        own = limits.get("rollout_timeout")
        if episode is not None and isinstance(own, int | float) and own > episode:
            yield (
                f"{path}.rollout_timeout={own} exceeds sampler.rollout_timeout={episode}, the "
                "limit for every environment: raise sampler.rollout_timeout"
            )


def devices(config: Config) -> Iterator[str]:
    """Refuse names of this machine's GPUs in a run that starts processes on other hosts."""
    for key in ("inference.devices", "trainer.devices"):
        names = value_of(config, key)
        if names is not None and "cluster" in config and spans_hosts(config["cluster"]):
            yield (
                f"{key}={names} names GPUs of this machine, but {config['cluster']['_target_']} "
                f"uses other machines, too: set {key}=null, and on each CUDA_VISIBLE_DEVICES"
            )


def time_limit(config: Config) -> Iterator[str]:
    """Check that max_time is a valid duration."""
    try:
        if (max_time := config.get("max_time")) is not None:
            seconds_of(max_time)
    except ValueError as error:
        yield f"max_time={error}, or null"


def debugging(config: Config) -> Iterator[str]:
    """Require one rank on this machine for trainer.debug, as only one can read the terminal."""
    if not config["trainer"]["debug"]:
        return
    if (ranks := config["trainer"]["ranks"]) not in (None, 1):
        yield (
            f"trainer.debug=true runs one rank in this terminal, but trainer.ranks={ranks}: set "
            "trainer.ranks=1"
        )
    if spans_hosts(config["cluster"]):
        yield "trainer.debug=true needs a trainer on this machine: use cluster=local"


def early_stop(config: Config) -> Iterator[str]:
    """Check that stop_when is a condition, and that the run records its metric."""
    if config["stop_when"] is None:
        return
    try:
        metric = StopWhen.of(config["stop_when"]).metric
    except ValueError as error:
        yield f"stop_when={error}"
        return
    if metric.startswith("eval/") and not fact(config["evaluation"]["_target_"], "evaluates", True):
        yield f"stop_when reads {metric}, but the run has no evaluation: use evaluation=default"


def rewards(config: Config) -> Iterator[str]:
    """Require that each environment has a reward whose weight is not 0."""
    members = value_of(config, "env.envs") or {}  # the environments of a mixture by name
    for path in ("env", *(f"env.envs.{name}" for name in members)):
        weights = value_of(config, f"{path}.reward_weights")
        entries = value_of(config, f"{path}.rewards")  # an entry may contain its reward's weight
        entries = entries.values() if isinstance(entries, Mapping) else ()
        own = [entry["weight"] for entry in entries if isinstance(entry.get("weight"), float | int)]
        if isinstance(weights, Mapping) and not any([*weights.values(), *own]):
            yield f"{path}.reward_weights={dict(weights)} makes every reward 0: raise one weight"


def output_head(config: Config) -> Iterator[str]:
    """Refuse hf_overrides together with a head dtype, which is passed to vLLM as hf_overrides."""
    inference, head_dtype = config["inference"], value_of(config, "model.head_dtype")
    flags = [str(key).replace("-", "_") for key in (inference or {}).get("args", {})]
    if head_dtype and any("hf_overrides" in flag for flag in flags):
        yield (
            f"model.head_dtype={head_dtype} and inference.args.hf_overrides exclude each other, "
            "because the run passes head_dtype to vLLM as hf_overrides: set model.head_dtype=null, "
            "or put the other overrides into the model's config.json"
        )


def data_files(config: Config) -> Iterator[str]:
    """Require the data files that an environment opens only after the start."""
    for path, node in nodes(config["env"], "env"):
        for key in fact(node["_target_"], "local_files", ()):
            if not isinstance(value := node.get(key), str):
                continue
            file = Path(value).expanduser()  # the path of a file, or a glob pattern
            if file.is_dir():
                yield f"{path}.{key}={value} is a folder: name a file in this folder"
            elif not glob(str(file)):
                yield f"{path}.{key}={value}: no such file (relative paths start in {Path.cwd()})"


def whole_groups(config: Config) -> Iterator[str]:
    """Refuse a loss that compares rollouts if a group may not fit into one micro-batch."""
    loss, limit = config["loss"]["_target_"], config["trainer"]["tokens_per_micro_batch"]
    strategy, longest = config["strategy"], config["max_seq_len"]
    if not fact(loss, "whole_groups", False):
        return
    rounds, size = 1, config["group_size"]
    if not fact(strategy["_target_"], "fixed_size", True):
        rounds = strategy.get("max_rounds", 1)
    if rounds * size * longest > limit:
        times = f"strategy.max_rounds={rounds} times " if rounds > 1 else ""
        yield (
            f"{loss} needs each group in one micro-batch, but {times}group_size={size} rollouts of "
            f"up to max_seq_len={longest} tokens exceed trainer.tokens_per_micro_batch={limit}: "
            f"set trainer.tokens_per_micro_batch={rounds * size * longest}, or lower group_size or "
            "max_seq_len"
        )


def nodes(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every node in a value with its dotted path."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield path, value
        for key, item in value.items():
            yield from nodes(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from nodes(item, f"{path}.{i}")


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    free_form_problems,
    secret_problems,
    batches,
    whole_groups,
    lengths,
    client_and_evaluation,
    strategy,
    zero_stage,
    rollout_timeout,
    devices,
    time_limit,
    debugging,
    early_stop,
    rewards,
    transport_problems,
    output_head,
    data_files,
    initial_problems,
    run_folder_problems,
)
