"""The options of conf/evaluate.yaml, and the rules that refuse bad combinations."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from msgspec import Meta

from rl.config.annotations import Node
from rl.config.check import check
from rl.config.facts import fact, is_external, is_imitator
from rl.config.limits import value_of
from rl.config.nodes import InferenceNode, ModelNode, SamplerNode
from rl.config.positions import ADAPTER, base_model_of
from rl.config.process_rules import output_head_problems
from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.config.resume_rules import run_folder_problems
from rl.config.rules import (
    Rule,
    data_file_problems,
    length_problems,
    reward_problems,
    secret_problems,
)
from rl.config.schema import Settings

Config = Mapping[str, Any]
P = TypeVar("P", bound="PolicySettings")


@dataclass(frozen=True, kw_only=True)
class PolicySettings(Settings):
    """The options of a program that samples a policy but does not train it."""

    TYPED: ClassVar[Config] = {
        "model": ModelNode,
        "sampler": SamplerNode,
        "inference": InferenceNode,
    }

    seed: NonNegativeInt  # seed of vLLM's sampling, and of GEPA in a prompt search
    max_seq_len: Annotated[int, Meta(ge=2)]
    model: ModelNode | None  # None if client=messages: an external server then has the model
    adapter_path: str | None  # folder of a LoRA adapter; None: no adapter
    env: Node
    sampler: SamplerNode
    client: Node
    inference: InferenceNode | None
    output_dir: str
    run_name: str


@dataclass(frozen=True, kw_only=True)
class Evaluation(PolicySettings):
    num_examples: PositiveInt
    rollouts_per_example: PositiveInt
    split: Literal["train", "eval"]
    pass_threshold: float


def check_evaluation(config: Config) -> Evaluation:
    return checked_settings(Evaluation, without_training_keys(config))


def checked_settings(schema: type[P], config: Config) -> P:
    check(config, schema, POLICY_RULES)
    return schema.of(config)


def without_training_keys(config: Config) -> Config:
    """Return the configuration without the keys that only training reads.

    With client=messages, an external server has the model, so `model` and `inference` become null.
    A LoRA adapter in `model.path` moves to `adapter_path`, and `model.path` becomes its base model.
    """
    config = {key: config[key] for key in config if key not in ("adapter", "evaluation")}
    model, needs_vllm = config.get("model"), True
    with suppress(LookupError):  # `check` reports a wrong client._target_ later
        needs_vllm = fact(str(value_of(config, "client._target_")), "needs_vllm", True)
    if not needs_vllm:
        config |= {"model": None, "inference": None, "adapter_path": None}
    elif isinstance(model, Mapping) and (base := base_model_of(model.get("path"))):
        config |= {"model": {**model, "path": base}, "adapter_path": model["path"]}
    return config


def _evaluation_problems(config: Config) -> Iterator[str]:
    sampler, model = config["sampler"]["_target_"], config["model"]
    if is_imitator(sampler):
        yield f"this program samples from the policy, but {sampler} does not: set sampler=async"
    drawn = model and fact(model["_target_"], "drawn_by_trainer", False)
    if model and (drawn or model.get("warm_start") is not None):
        yield (
            "this program trains nothing, so it needs a trained model: set model=hf "
            "model.path=<a model's folder, such as outputs/<run>/checkpoints/step_000150/hf>"
        )
    inference, path = config["inference"], config["adapter_path"]
    if is_external(inference):
        yield (
            "inference=external is only for training: to use a server that already runs, set "
            "client=messages client.url=http://host:port/v1 client.model=<name on the server>"
        )
    elif inference and (number := inference.get("replicas") or 1) > 1:
        yield f"inference.replicas={number}, but only train.py starts several: set it to null"
    if path is not None and not (Path(path).expanduser() / ADAPTER).is_file():
        yield f"adapter_path={path} contains no {ADAPTER}: name the folder of a LoRA adapter"


POLICY_RULES: tuple[Rule, ...] = (
    secret_problems,
    length_problems,
    reward_problems,
    output_head_problems,
    data_file_problems,
    _evaluation_problems,
    run_folder_problems,
)
