"""The configuration of an evaluation (conf/evaluate.yaml) and the rules between its keys.

`PlayedPolicy` and `checked_as` are shared with the prompt search (lab/prompts/settings.py), which
also samples a policy without training it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from rl.config.annotations import Node
from rl.config.check import check
from rl.config.facts import fact, is_external, is_imitator
from rl.config.nodes import InferenceNode, ModelNode, SamplerNode
from rl.config.positions import ADAPTER, base_model_of
from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.config.rules import (
    data_files,
    lengths,
    model_folders,
    output_head,
    rewards,
    secret_problems,
)
from rl.config.schema import Settings
from rl.runtime.folder import RunFolder

Config = Mapping[str, Any]
Rule = Callable[[Config], Iterator[str]]
P = TypeVar("P", bound="PlayedPolicy")


@dataclass(frozen=True, kw_only=True)
class PlayedPolicy(Settings):
    """The settings of a policy that is sampled but not trained, with its server and environment."""

    TYPED: ClassVar[Config] = {
        "model": ModelNode,
        "sampler": SamplerNode,
        "inference": InferenceNode,
    }

    seed: NonNegativeInt  # seed of vLLM's sampling
    max_seq_len: Annotated[int, Meta(ge=2)]
    model: ModelNode | None  # None if an external server provides the model
    adapter_path: str | None
    env: Node
    sampler: SamplerNode
    client: Node
    inference: InferenceNode | None
    output_dir: str
    run_name: str


@dataclass(frozen=True, kw_only=True)
class Evaluation(PlayedPolicy):
    """The settings of an evaluation. conf/evaluate.yaml explains them."""

    num_examples: PositiveInt
    rollouts_per_example: PositiveInt
    split: Literal["train", "eval"]
    pass_threshold: float


def checked(config: Config) -> Evaluation:
    """Return the settings of an evaluation, or raise ConfigError if they break a rule."""
    return checked_as(Evaluation, without_training_keys(config), evaluation_folder_problems)


def checked_as(kind: type[P], config: Config, folder_problems: Rule) -> P:
    """Return the configuration as settings of class `kind`, or raise ConfigError."""
    rules = (*POLICY_RULES, folder_problems)

    def problems(config: Config) -> list[str]:
        return [problem for rule in rules for problem in rule(config)]

    check(config, f"{kind.__module__}.{kind.__name__}", problems)
    return kind.of(config)


def without_training_keys(config: Config) -> Config:
    """Return the configuration without the keys that only training reads.

    With client=messages, an external server provides the model, so `model` and `inference` become
    null. If `model.path` is a LoRA adapter, it becomes `adapter_path`, and its base `model.path`.
    """
    config = {key: config[key] for key in config if key not in ("adapter", "evaluation")}
    client, model = config.get("client"), config.get("model")
    if isinstance(client, Mapping) and not _needs_vllm(client):
        config |= {"model": None, "inference": None, "adapter_path": None}
    elif isinstance(model, Mapping) and (base := base_model_of(model.get("path"))):
        config |= {"model": {**model, "path": base}, "adapter_path": model["path"]}
    return config


def _needs_vllm(client: Config) -> bool:
    """Return True if the client sends its requests to a vLLM that this program starts."""
    try:
        return fact(str(client.get("_target_")), "needs_vllm", True)
    except LookupError:  # a wrong _target_, which `check` reports later
        return True


def _policy(config: Config) -> Iterator[str]:
    """Yield a problem for each setting that does not suit the evaluation of a trained policy."""
    sampler, model = config["sampler"]["_target_"], config["model"]
    if is_imitator(sampler):
        yield f"an evaluation samples from the policy, but {sampler} does not: use sampler=async"
    drawn = model and fact(model["_target_"], "drawn_by_trainer", False)
    if model and (drawn or model.get("warm_start") is not None):
        yield (
            "an evaluation trains nothing, so it needs a model that is ready: use model=hf "
            "model.path=<a model's folder, such as outputs/<run>/checkpoints/step_000150/hf>"
        )
    inference, path = config["inference"], config["adapter_path"]
    if is_external(inference):
        yield (
            "inference=external is for training, which pushes weights: ask a server that runs "
            "already by client=messages client.url=http://host:port/v1 client.model=<its name>"
        )
    elif inference and (number := inference.get("replicas") or 1) > 1:
        yield f"inference.replicas={number}, but an evaluation starts one vLLM: use null"
    if path is not None and not (Path(path).expanduser() / ADAPTER).is_file():
        yield f"adapter_path={path} holds no {ADAPTER}: give the folder of a LoRA adapter of peft"


def evaluation_folder_problems(config: Config) -> Iterator[str]:
    """Yield a problem if the run's name is not valid or its folder already holds a run."""
    name, parent = config["run_name"], Path(config["output_dir"])
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f'run_name="{name}" is not a name for a folder below output_dir={parent}'
    elif RunFolder(parent / name).is_run:
        yield f"{parent / name} already holds a run or an evaluation: choose another run_name"


POLICY_RULES: tuple[Rule, ...] = (
    secret_problems,
    lengths,
    rewards,
    output_head,
    model_folders,
    data_files,
    _policy,
)
