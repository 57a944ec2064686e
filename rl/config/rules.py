"""Check combinations of configuration values, after check.py has checked each value by itself.

Each function of RULES yields one message per problem: the values, then the remedy. A function
yields nothing if the chosen nodes lack the keys that it reads.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from rl.config.facts import Config, fact, is_imitator
from rl.config.initial import initial_problems
from rl.config.limits import reserved_key_problems, sampling_limits, value_of
from rl.config.process_rules import PROCESS_RULES
from rl.config.resume_rules import run_folder_problems
from rl.config.transport import transport_problems
from rl.runtime.stop_when import StopWhen
from rl.runtime.text import leaves

_SECRET = re.compile(  # matches https://user:password@host and https://host?api_key=<key>
    r"\s*[a-z][a-z0-9+.-]*://([^/?#\s]*@|.*[?&][^=&]*(key|token|secret|passw)[^=&]*=)",
    re.IGNORECASE,
)
Rule = Callable[[Config], Iterator[str]]
# Matches the usual name of an environment variable that holds a key, such as MY_API_KEY.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def secret_problems(config: Config) -> Iterator[str]:
    for path, value in leaves(config):
        if not isinstance(value, str):
            continue
        if _SECRET.match(value):
            yield (
                f"{path} contains a password or key, which would be written to config.yaml: put it "
                "into an environment variable, and name that variable in an api_key_variable"
            )
        named = path.endswith("_variable")
        if named and value not in os.environ and not _VARIABLE.fullmatch(value):
            yield (
                f"{path} does not name an environment variable that is set: export MY_KEY=<key>, "
                f"and set {path}=MY_KEY, because a key itself would be written to config.yaml"
            )


def batch_problems(config: Config) -> Iterator[str]:
    batch, group, ranks = config["batch_size"], config["group_size"], config["trainer"]["ranks"]
    if ranks and batch < ranks:
        yield f"batch_size={batch} is below trainer.ranks={ranks}: use trainer.ranks={batch}"
    if batch % group:
        lower, upper = batch // group * group, (batch // group + 1) * group
        yield (
            f"batch_size={batch} is not a multiple of group_size={group}: use "
            f"batch_size={f'{lower} or {upper}' if lower else upper}, or another group_size"
        )


def client_and_evaluation_problems(config: Config) -> Iterator[str]:
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


def strategy_problems(config: Config) -> Iterator[str]:
    target, sampler = config["strategy"]["_target_"], config["sampler"]["_target_"]
    if fact(target, "samples", True) and is_imitator(sampler):
        yield (
            f"{target} samples from the policy, but {sampler} starts no vLLM: "
            "use strategy=independent, or sampler=async"
        )
    for path, limits in sampling_limits(config):
        if limits.get("stop") and fact(target, "begins_turns", False):
            yield (
                f"{target} may prefill the start of a turn, where vLLM does not look for "
                f"{path}.stop={list(limits['stop'])}: set {path}.stop=[], or use another strategy"
            )


def length_problems(config: Config) -> Iterator[str]:
    longest = config["max_seq_len"]
    for path, limits in sampling_limits(config):
        turn = limits.get("max_tokens")
        if isinstance(turn, int) and turn >= longest:
            yield (
                f"{path}.max_tokens={turn} leaves no room for the prompt in max_seq_len={longest}: "
                f"lower {path}.max_tokens, or raise max_seq_len"
            )
    prompt = value_of(config, "sampler.max_prompt_len")
    client = config["client"]["_target_"]
    unmeasured = [] if fact(client, "measures_prompts", True) else [client]
    targets = (node["_target_"] for _, node in nodes_in(config["env"], "env"))
    unmeasured += [env for env in targets if fact(env, "holds_conversation", False)]
    for target in dict.fromkeys(unmeasured if prompt is not None else ()):
        yield (
            f"sampler.max_prompt_len={prompt} cannot be enforced, because the length of a prompt "
            f"of {target} is unknown before its rollout: set sampler.max_prompt_len=null"
        )
    limit = value_of(config, "model.max_seq_len")
    if limit is not None and longest > limit:
        yield f"max_seq_len={longest} exceeds model.max_seq_len={limit}: raise model.max_seq_len"


def stop_when_problems(config: Config) -> Iterator[str]:
    if config["stop_when"] is None:
        return
    try:
        metric = StopWhen.of(config["stop_when"]).metric
    except ValueError as error:
        yield f"stop_when={error}"
        return
    if metric.startswith("eval/") and not fact(config["evaluation"]["_target_"], "evaluates", True):
        yield f"stop_when reads {metric}, but the run has no evaluation: use evaluation=default"


def reward_problems(config: Config) -> Iterator[str]:
    members = value_of(config, "env.envs") or {}  # the environments of a mixture by name
    for path in ("env", *(f"env.envs.{name}" for name in members)):
        weights = value_of(config, f"{path}.reward_weights")
        entries = value_of(config, f"{path}.rewards")  # an entry may contain its reward's weight
        entries = entries.values() if isinstance(entries, Mapping) else ()
        others = [value_of(entry, "weight") for entry in entries]
        # A negative entropy_bonus needs no rewards. A scheduled one may be negative at other steps.
        scheduled = "entropy_bonus" in (config.get("schedules") or {})
        needed = config.get("entropy_bonus", 0.0) >= 0 and not scheduled
        if needed and isinstance(weights, Mapping) and not any([*weights.values(), *others]):
            yield f"{path}.reward_weights={dict(weights)} makes every reward 0: raise one weight"


def data_file_problems(config: Config) -> Iterator[str]:
    """Report missing data files before the start, because an environment opens its files later."""
    for path, node in nodes_in(config["env"], "env"):
        for key in fact(node["_target_"], "local_files", ()):
            if not isinstance(value := node.get(key), str):
                continue
            if Path(value).expanduser().is_dir():
                yield f"{path}.{key}={value} is a folder: name a file in this folder"
            elif not glob(os.path.expanduser(value)):
                yield f"{path}.{key}={value} does not exist (relative paths start in {Path.cwd()})"


def micro_batch_problems(config: Config) -> Iterator[str]:
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


def nodes_in(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield path, value
        for key, item in value.items():
            yield from nodes_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from nodes_in(item, f"{path}.{i}")


RULES: tuple[Rule, ...] = (
    reserved_key_problems,
    secret_problems,
    batch_problems,
    micro_batch_problems,
    length_problems,
    client_and_evaluation_problems,
    strategy_problems,
    *PROCESS_RULES,
    stop_when_problems,
    reward_problems,
    transport_problems,
    data_file_problems,
    initial_problems,
    run_folder_problems,
)
