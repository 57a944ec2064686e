"""Typed records of the configuration nodes that rl/ reads.

A `CoreNode` is also the node's mapping from config.yaml, so that `build(run.model)` works. A field
with a default is a key that the chosen target may lack. Some properties read a class attribute from
the target's source, so that no process has to build the node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import msgspec

from rl.config.annotations import Node
from rl.config.facts import fact, is_external, is_imitator, spans_hosts
from rl.config.ranges import NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class CoreNode(Mapping[str, Any]):
    """A configuration node: a mapping, with typed fields for the keys that rl/ reads."""

    node: Node = field(repr=False)

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Self:
        return msgspec.convert({**node, "node": dict(node)}, cls)

    def option_or_constant(self, name: str, default: Any = None) -> Any:
        return self.node[name] if name in self.node else fact(self["_target_"], name, default)

    def plain(self) -> Node:
        return self.node

    def __getitem__(self, key: str) -> Any:
        return self.node[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.node)

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, kw_only=True)
class ModelNode(CoreNode):
    dtype: str
    head_dtype: str | None = None
    path: str | None = None  # None if the run creates a new model
    warm_start: Node | None = None

    @property
    def drawn_by_trainer(self) -> bool:
        """Whether the trainer initialises the weights instead of loading them."""
        return self.option_or_constant("drawn_by_trainer", False)


@dataclass(frozen=True, kw_only=True)
class AdapterNode(CoreNode):
    rank: int = 0
    target_modules: str | list[str] = "all-linear"
    modules_to_save: list[str] = field(default_factory=list)

    @property
    def freezes_base(self) -> bool:
        return self.option_or_constant("freezes_base", False)


@dataclass(frozen=True, kw_only=True)
class SamplerNode(CoreNode):
    max_staleness: int = 0  # default for a user's sampler class without this option

    @property
    def uses_vllm(self) -> bool:
        return not is_imitator(self["_target_"])

    @property
    def temperature(self) -> float:
        if (value := self.option_or_constant("temperature")) is None:
            raise ValueError(
                f"{self['_target_']} has no temperature, by which the trainer divides logits: "
                "add an option or a class attribute `temperature`"
            )
        return float(value)


@dataclass(frozen=True, kw_only=True)
class InferenceNode(CoreNode):
    startup_timeout: float
    listen: str = "unix"
    replicas: int | None = None
    devices: list[int | str] | None = None
    tensor_parallel_size: int = 1
    cpu_kv_cache_gib: int | None = None
    args: Node | None = None  # None if the run does not start vLLM
    urls: list[str] | None = None
    api_key_variable: str | None = None

    @property
    def is_external(self) -> bool:
        return is_external(self)

    @property
    def names(self) -> list[str]:
        return replica_names(len(self.urls) if self.urls is not None else self.replicas or 1)


def replica_names(num_replicas: int) -> list[str]:
    return ["inference"] if num_replicas == 1 else [f"inference{i}" for i in range(num_replicas)]


@dataclass(frozen=True, kw_only=True)
class ClusterNode(CoreNode):
    gpus: bool = True
    interface: str | None = None
    cores_per_replica: int | None = None
    cores_per_rank: int | None = None

    @property
    def spans_hosts(self) -> bool:
        return spans_hosts(self)


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The settings of the training processes (conf/train.yaml explains each key)."""

    ranks: PositiveInt | None
    devices: list[int | str] | None
    tokens_per_micro_batch: PositiveInt
    logprob_chunk: PositiveInt
    max_grad_norm: PositiveFloat
    gradient_checkpointing: bool
    compile: bool | None
    share_prefixes: bool
    num_threads: PositiveInt | None
    checkpoint_every: NonNegativeInt
    keep_checkpoints: PositiveInt
    max_nonfinite_steps: PositiveInt
    wait_timeout: PositiveFloat
    debug: bool
    profile: NonNegativeInt

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> Self:
        return msgspec.convert(dict(node), cls)

    def plain(self) -> Node:
        return {"_target_": f"{__name__}.{type(self).__name__}", **asdict(self)}
