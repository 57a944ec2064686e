"""Define the top-level keys of a run's configuration, and load and save the configuration."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from msgspec import Meta

from rl.config.annotations import Node
from rl.config.limits import value_of
from rl.config.nodes import (
    AdapterNode,
    ClusterNode,
    InferenceNode,
    ModelNode,
    SamplerNode,
    TrainerSettings,
)
from rl.config.ranges import NonNegativeInt, PositiveInt
from rl.config.schedules import join_schedules, split_schedules, with_values
from rl.config.transport import Transport, transport
from rl.runtime.files import write_atomically
from rl.runtime.given_files import load_yaml

FORMAT = 2  # format number written to config.yaml as `format`
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNITS))


class ConfigError(ValueError):
    """The error raised for an invalid configuration; each problem is a sentence with a remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


@contextmanager
def as_config_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError([f"{error.filename}, line {error.lineno}: {error.msg}"]) from error
    # A file that is nested too deeply raises RecursionError.
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError([str(error)]) from error


class Settings:
    """The base class of the settings of train.yaml, evaluate.yaml and optimize_prompt.yaml."""

    TYPED: ClassVar[Mapping[str, Any]]  # top-level key -> class that holds its node
    output_dir: str
    run_name: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        typed = {key: config[key] and kind.of(config[key]) for key, kind in cls.TYPED.items()}
        return cls(**{**config, **typed})  # pyright: ignore[reportCallIssue] subclasses have fields

    def plain(self) -> dict[str, Any]:
        values = vars(self)
        return {**values, **{key: values[key] and values[key].plain() for key in self.TYPED}}

    @property
    def folder(self) -> Path:
        return Path(self.output_dir) / self.run_name

    def save(self, path: Path) -> None:
        content = {"format": FORMAT, **join_schedules(self.plain())}
        write_atomically(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """The resolved settings of a training run; conf/train.yaml explains each key."""

    TYPED: ClassVar[Mapping[str, Any]] = {
        "model": ModelNode,
        "adapter": AdapterNode,
        "sampler": SamplerNode,
        "inference": InferenceNode,
        "cluster": ClusterNode,
        "trainer": TrainerSettings,
    }

    seed: NonNegativeInt
    max_steps: PositiveInt
    max_time: float | str | None
    stop_when: str | None
    batch_size: PositiveInt  # rollouts per training step
    group_size: PositiveInt  # rollouts per example
    max_seq_len: Annotated[int, Meta(ge=2)]
    updates_per_batch: PositiveInt
    entropy_bonus: float
    model: ModelNode
    adapter: AdapterNode
    env: Node
    order: Node
    sampler: SamplerNode
    strategy: Node
    client: Node
    buffer: Node
    reward: Node
    truncation: Node
    advantage: Node
    batch_credit: Node
    critic: Node
    aggregation: Node
    reference: Node
    kl: Node
    correction: Node
    loss: Node
    optim: Node
    deepspeed: dict[str, Any]
    inference: InferenceNode
    sync: Node
    cluster: ClusterNode
    logger: Node
    evaluation: Node
    record: Node
    trainer: TrainerSettings
    output_dir: str
    run_name: str
    resume: bool
    accept_changed_code: bool
    init_from: str | None = None
    init_optimizer: bool = False
    learned: dict[str, Any] = field(default_factory=dict)  # facts about components (learned.py)
    schedules: dict[str, Any] = field(default_factory=dict)  # dotted key -> node (schedules.py)

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        return type(self).of(with_values(self.plain(), changes))

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.group_size

    @property
    def starts_vllm(self) -> bool:
        return self.sampler.uses_vllm and not self.inference.is_external

    @property
    def transport(self) -> Transport:
        return transport(vars(self))

    @property
    def pushes_adapter(self) -> bool:
        return self.transport.has("adapter_only")

    def compiles(self, *, on_gpu: bool) -> bool:
        """Return whether to compile the layers: by default on a GPU, but not with ZeRO stage 3."""
        gathers = value_of(self.deepspeed, "zero_optimization.stage") == 3
        return on_gpu and not gathers if self.trainer.compile is None else self.trainer.compile

    @classmethod
    def load(cls, path: Path) -> Self:
        settings = load_yaml(path.read_bytes())
        settings.pop("format", None)
        return cls.of(split_schedules(settings))


def seconds_of(duration: float | str) -> float:
    """Return the seconds of a duration (1d12h, 3h30m, 45s or 45). Raise ValueError if invalid."""
    text = str(duration).replace(" ", "")
    is_number = re.fullmatch(r"\d+(\.\d+)?", text)
    numbers = _DURATION.fullmatch(f"{text}s" if is_number else text)
    pairs = zip(numbers.groups() if numbers else (), _UNITS.values(), strict=False)
    if not (seconds := sum(float(number) * unit for number, unit in pairs if number)):
        raise ValueError(f"{duration} is not a duration: write 3h30m, 90m, or a number of seconds")
    return seconds
