"""The configuration of an evaluation (conf/evaluate.yaml), and what its keys mean together.

`PlayedPolicy` and `POLICY_RULES` hold of any policy that is played and not trained; a prompt
optimisation has them, too (rl/config/prompt_optimization.py).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rl.config.annotations import Node
from rl.config.check import check
from rl.config.facts import fact, is_external, is_imitator
from rl.config.limits import range_problems
from rl.config.positions import ADAPTER, base_of
from rl.config.rules import (
    data_files,
    lengths,
    limits_of_parts,
    model_folders,
    output_head,
    rewards,
)
from rl.config.schema import SAVED, write_settings
from rl.config.secrets import secret_problems
from rl.config.signatures import read
from rl.config.vllm_flags import flag_problems

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlayedPolicy:
    """A policy, who serves it, and what it plays."""

    seed: int  # of vLLM's sampling
    max_seq_len: int
    model: Node | None  # None: somebody else serves it
    adapter_path: str | None
    env: Node
    sampler: Node
    client: Node
    inference: Node | None
    output_dir: str
    run_name: str

    @property
    def folder(self) -> Path:
        """Where everything of this evaluation lies."""
        return Path(self.output_dir) / self.run_name

    def save(self, path: Path) -> None:
        """Write the resolved configuration as YAML."""
        write_settings(path, asdict(self))


@dataclass(frozen=True, kw_only=True)
class Evaluation(PlayedPolicy):
    """The top level of conf/evaluate.yaml, resolved. Values are explained there."""

    num_examples: int
    rollouts_per_example: int
    split: Literal["train", "eval"]
    pass_threshold: float


def checked(config: Config, choices: Mapping[str, str] | None = None) -> Evaluation:
    """Return the evaluation that a configuration asks for. ConfigError if it cannot work."""
    config = of_played_policy(config)
    check(config, f"{__name__}.Evaluation", _problems, choices=choices)
    return Evaluation(**config)


def of_played_policy(config: Config) -> Config:
    """Return the configuration without what only training reads.

    The model that another server holds is none of our business, and the folder of a LoRA adapter
    stands for its base and the adapter.
    """
    config = {key: config[key] for key in config if key not in ("adapter", "evaluation")}
    client, model = config.get("client"), config.get("model")
    if isinstance(client, Mapping) and not _needs_vllm(client):
        config |= {"model": None, "inference": None, "adapter_path": None}
    elif isinstance(model, Mapping) and (base := base_of(model.get("path"))):
        config |= {"model": {**model, "path": base}, "adapter_path": model["path"]}
    return config


def _needs_vllm(client: Config) -> bool:
    """Whether a client asks a vLLM of ours; one that cannot be read is for the check to refuse."""
    try:
        read(str(client.get("_target_")))
    except LookupError:
        return True
    return fact(client["_target_"], "needs_vllm", True)


def _problems(config: Config) -> list[str]:
    rules = (*POLICY_RULES, evaluation_folder_problems)
    return [problem for rule in rules for problem in rule(config)]


def _policy(config: Config) -> Iterator[str]:
    """There must be something to evaluate, and a way of asking it."""
    sampler = config["sampler"]["_target_"]
    if is_imitator(sampler):
        yield f"an evaluation plays the policy, and {sampler} needs none: use sampler=async"
    model = config["model"]
    drawn = model and fact(model["_target_"], "drawn_by_trainer", False)
    if model and (drawn or model.get("warm_start") is not None):
        yield (
            "an evaluation trains nothing, so it needs a model that is ready: use model=hf "
            "model.path=<a model's folder, such as outputs/<run>/checkpoints/step_000150/hf>"
        )


def _one_server(config: Config) -> Iterator[str]:
    """What plays a policy and does not train starts one vLLM by itself, or asks in words."""
    inference = config["inference"]
    if is_external(inference):
        yield (
            "inference=external is for training, which pushes weights: ask a server that runs "
            "already by client=messages client.url=http://host:port/v1 client.model=<its name>"
        )
    elif inference and (number := inference.get("replicas") or 1) > 1:
        yield f"inference.replicas={number}, but here one vLLM is started: leave it null"


def _adapters(config: Config) -> Iterator[str]:
    """An adapter lies in a folder of its own."""
    path = config["adapter_path"]
    if path is not None and not (Path(path).expanduser() / ADAPTER).is_file():
        yield f"adapter_path={path} holds no {ADAPTER}, so it is no LoRA adapter in peft's form"


def evaluation_folder_problems(config: Config) -> Iterator[str]:
    """One folder holds one evaluation."""
    name, parent = config["run_name"], Path(config["output_dir"])
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f'run_name="{name}" is no name for a folder below output_dir={parent}'
    elif (parent / name / SAVED).exists():
        yield f"{parent / name} already holds a run or an evaluation: choose another run_name"


POLICY_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    range_problems,
    secret_problems,
    lengths,
    limits_of_parts,
    rewards,
    output_head,
    model_folders,
    data_files,
    flag_problems,
    _policy,
    _one_server,
    _adapters,
)
