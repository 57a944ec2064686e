"""Which values of a configuration go together. A problem is one sentence: values, then remedy.

Keys, names, types and ranges are right before these rules run (check.py). A rule about a key that
the chosen nodes do not have yields nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from rl.config.durations import seconds_of
from rl.config.facts import fact, is_imitator, references, spans_hosts
from rl.config.limits import free_form_problems, value_of
from rl.config.positions import too_long
from rl.config.resume_rules import run_folder_problems
from rl.config.secrets import secret_problems
from rl.config.sharding_rules import compilation, offload, optimizer_and_sharding
from rl.config.signatures import did_you_mean, spec_of
from rl.config.transport import transport_problems
from rl.config.vllm_flags import flag_problems, plain

Config = Mapping[str, Any]

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def rule_problems(config: Config) -> list[str]:
    """Return one sentence for each combination that makes no sense."""
    return [problem for rule in RULES for problem in rule(config)]


def batches(config: Config) -> Iterator[str]:
    """Compare the numbers of rollouts, examples and ranks."""
    batch, group, ranks = config["batch_size"], config["group_size"], config["trainer"]["ranks"]
    ranks = 1 if ranks is None else ranks  # it follows the devices, and never above batch_size
    if batch % group:
        lower, upper = batch // group * group, (batch // group + 1) * group
        yield (
            f"batch_size={batch} is not a multiple of group_size={group}: use "
            f"batch_size={f'{lower} or {upper}' if lower else upper}, or another group_size"
        )
    if batch < ranks:
        yield f"batch_size={batch} leaves some of trainer.ranks={ranks} idle: use at most {batch}"
    is_sampled = not is_imitator(config["sampler"]["_target_"])
    if group == 1 and is_sampled and (value_of(config, "buffer.min_spread") or 0) > 0:
        yield (
            "group_size=1 has no spread, so the buffer would reject every group: use group_size=8 "
            "or so, buffer.min_spread=0, or buffer=fifo"
        )


def text_alone(config: Config) -> Iterator[str]:
    """Refuse a client that gets no tokens, and an evaluation without a vLLM."""
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


def _no_room(sampler: str, tokens: int, longest: int) -> str:
    return (
        f"{sampler}.max_tokens={tokens} leaves no room for the prompt in max_seq_len={longest}: "
        "lower the one or raise the other"
    )


def lengths(config: Config) -> Iterator[str]:
    """Compare the tokens of a turn, of a row, and of the longest row of the model."""
    longest, turn = config["max_seq_len"], value_of(config, "sampler.max_tokens")
    if turn is not None and turn >= longest:
        yield _no_room("sampler", turn, longest)
    prompt = value_of(config, "sampler.max_prompt_len")
    if prompt is not None and prompt >= longest:
        yield (
            f"sampler.max_prompt_len={prompt} leaves no room for an answer in max_seq_len="
            f"{longest}: lower the one, raise the other, or use null"
        )
    client = config["client"]["_target_"]
    if prompt is not None and not fact(client, "measures_prompts", True):
        yield (
            f"sampler.max_prompt_len={prompt} cannot be kept with {client}, because only the "
            "server knows how long its prompts are: use client=renderer, or null"
        )
    environments = dict.fromkeys(node["_target_"] for _, node in _nodes(config["env"], "env"))
    for env in environments:  # a mixture has several
        if prompt is not None and fact(env, "holds_conversation", False):
            yield (
                f"sampler.max_prompt_len={prompt} cannot be kept with {env}, which writes its "
                "prompts itself: use null"
            )
    made_for = value_of(config, "model.max_seq_len")
    if made_for is not None and longest > made_for:
        yield f"max_seq_len={longest} exceeds model.max_seq_len={made_for}: raise that one instead"


def steps_and_waits(config: Config) -> Iterator[str]:
    """Refuse a rollout that may take longer than the other processes wait."""
    episode, wait = value_of(config, "sampler.rollout_timeout"), config["trainer"]["wait_timeout"]
    if episode is not None and episode >= wait:
        yield (
            f"one slow rollout (sampler.rollout_timeout={episode} s) would stop the run "
            f"(trainer.wait_timeout={wait} s): raise the latter above the former"
        )


def time_limit(config: Config) -> Iterator[str]:
    """Check the time of the whole run."""
    max_time = config.get("max_time")
    if max_time is None:
        return
    try:
        too_short = not seconds_of(max_time) > 0  # NaN is refused, too
    except ValueError:
        too_short = True
    if too_short:
        yield f"max_time={max_time} is not a time: write 3h30m, 90m, a number of seconds, or null"


def limits_of_parts(config: Config) -> Iterator[str]:
    """Refuse more time or longer turns for one environment than the run allows."""
    episode, longest = value_of(config, "sampler.rollout_timeout"), config["max_seq_len"]
    for name, limits in (value_of(config, "env.sampling") or {}).items():
        own, tokens = limits.get("rollout_timeout"), limits.get("max_tokens")
        if isinstance(tokens, int) and tokens >= longest:
            yield _no_room(f"env.sampling.{name}", tokens, longest)
        if episode is not None and isinstance(own, int | float) and own > episode:
            yield (
                f"env.sampling.{name}.rollout_timeout={own} exceeds sampler.rollout_timeout="
                f"{episode}, the longest that vLLM may be silent: raise that one, and give the "
                "others less"
            )


def rewards(config: Config) -> Iterator[str]:
    """Require a reward with a weight."""
    members = value_of(config, "env.envs") or {}  # of a mixture
    for path in ("env", *(f"env.envs.{name}" for name in members)):
        weights = value_of(config, f"{path}.reward_weights")
        entries = value_of(config, f"{path}.rewards")  # which may have weights of their own
        entries = entries.values() if isinstance(entries, Mapping) else ()
        own = [entry["weight"] for entry in entries if isinstance(entry.get("weight"), float | int)]
        if isinstance(weights, Mapping) and not any([*weights.values(), *own]):
            yield f"{path}.reward_weights={dict(weights)} makes every reward 0: give one a weight"


def order_weights(config: Config) -> Iterator[str]:
    """Require a pool of examples with a weight."""
    weights = {f"order.{k}": v for k, v in config["order"].items() if k.endswith("_weight")}
    if weights and not any(weights.values()):
        zeros = ", ".join(f"{key}={value}" for key, value in weights.items())
        yield f"{zeros} leave no pool of examples to draw from: give one a weight"


def adapter(config: Config) -> Iterator[str]:
    """Require a layer that an adapter trains."""
    chosen = config["adapter"]
    if fact(chosen["_target_"], "freezes_base", False) and not chosen["target_modules"]:
        yield (
            "adapter.target_modules=[] leaves LoRA no layer: use all-linear, or name some, such as "
            "[q_proj, v_proj]"
        )


def packages(config: Config) -> Iterator[str]:
    """Require the packages that a component imports after the start."""
    nodes = [*_nodes(config["logger"], "logger"), *_nodes(config.get("cluster"), "cluster")]
    for path, node in nodes:
        package = fact(node["_target_"], "needs_package", None)
        if package and spec_of(package) is None:
            yield (
                f"{path}: {node['_target_']} needs the package {package}, which is not installed: "
                f"pip install {package}, or choose another {path}"
            )


def several_hosts(config: Config) -> Iterator[str]:
    """Refuse names of devices if the hosts are not known yet."""
    cluster = config.get("cluster")
    for key in ("inference.devices", "trainer.devices"):
        if cluster and spans_hosts(cluster) and (names := value_of(config, key)) is not None:
            yield (
                f"{key}={names} names GPUs of this machine, and {cluster['_target_']} starts "
                "processes on others: leave it null, and hide GPUs from each host by "
                "CUDA_VISIBLE_DEVICES"
            )


def output_head(config: Config) -> Iterator[str]:
    """Refuse overrides of the model's config beside a head dtype, which is one itself."""
    inference, head_dtype = config["inference"], value_of(config, "model.head_dtype")
    flags = {plain(str(key)) for key in (inference or {}).get("args", {})}
    if head_dtype and "hf_overrides" in flags:
        yield (
            f"model.head_dtype={head_dtype} and inference.args.hf_overrides exclude each other: "
            "vLLM learns the first by the second. Leave model.head_dtype null, or put the other "
            "overrides into the model's config.json"
        )


def model_folders(config: Config) -> Iterator[str]:
    """Require that a local model exists; the download reports a wrong name on the hub.

    `models/mine` may be a name on the hub, unless there is a folder `models` here. A reference is
    opened only after the start, so its files are checked here, too.
    """
    for key in ("model.path", *(f"{reference}.path" for reference in references(config))):
        path = value_of(config, key)
        if not isinstance(path, str):
            continue
        folder = Path(path).expanduser()
        is_local = path[:1] in "/.~" or (len(folder.parts) > 1 and folder.parent.is_dir())
        if not folder.exists() and (is_local or not HUB_NAME.fullmatch(path)):
            near = folder.parent.iterdir() if folder.parent.is_dir() else ()
            hint = did_you_mean(folder.name, [entry.name for entry in near])
            no_name = "" if is_local and path[:1] not in "/.~" else ", and no name on the hub"
            what = hint or (" (organisation/model)" if no_name else "")
            yield f"{key}={path}: no such folder{no_name}{what}"
        elif folder.exists() and not (folder / "config.json").is_file():
            yield f"{key}={path}: {folder} holds no config.json, so it is not a model in HF form"
        elif key == "model.path":
            longest = value_of(config, "model.max_seq_len")
            if problem := too_long(path, longest or 0, "model"):
                yield problem
        elif folder.exists():
            for pattern in ("tokenizer.json", "*.safetensors"):
                if not any(folder.glob(pattern)):
                    yield f"{key}={path}: {folder} holds no {pattern}: save the whole model there"


def data_files(config: Config) -> Iterator[str]:
    """Require the files that an environment opens only after the start."""
    for path, node in _nodes(config["env"], "env"):
        for key in fact(node["_target_"], "local_files", ()):
            if isinstance(value := node.get(key), str):
                yield from _file_problems(f"{path}.{key}", value, "format" in node)


def _nodes(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every node in a value, with its dotted path."""
    if isinstance(value, Mapping):
        if "_target_" in value:
            yield path, value
        for key, item in value.items():
            yield from _nodes(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _nodes(item, f"{path}.{i}")


def _file_problems(key: str, value: str, has_format: bool) -> Iterator[str]:
    """Yield what is wrong with the name of a data file, or with a pattern of names."""
    file = Path(value).expanduser()
    node, form = key.rpartition(".")[0], file.suffix.removeprefix(".")
    if file.is_dir():
        yield f"{key}={value} is a folder: name the file in it that holds the rows"
    elif not glob(str(file)):
        yield f"{key}={value}: no such file (looked for in {Path.cwd()})"
    elif not has_format and form in ("csv", "parquet"):
        yield (
            f"{key}={value} holds no JSON lines: use {node}._target_=envs.datasets.Files "
            f"+{node}.format={form}"
        )


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    free_form_problems,
    secret_problems,
    batches,
    lengths,
    text_alone,
    optimizer_and_sharding,
    offload,
    compilation,
    steps_and_waits,
    time_limit,
    limits_of_parts,
    rewards,
    order_weights,
    adapter,
    transport_problems,
    packages,
    several_hosts,
    output_head,
    model_folders,
    data_files,
    flag_problems,
    run_folder_problems,
)
