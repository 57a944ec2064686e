"""The top-level keys of a run's configuration."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import yaml
from msgspec import Meta

from rl.config.annotations import Node
from rl.config.nodes import (
    AdapterNode,
    ClusterNode,
    InferenceNode,
    ModelNode,
    SamplerNode,
    TrainerSettings,
)
from rl.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt
from rl.config.schedules import join_schedules, split_schedules, with_values
from rl.config.transport import Transport, transport
from rl.runtime.files import write_atomically
from rl.runtime.given_files import load_yaml

FORMAT = 2  # format number written to config.yaml as `format`; format 1 lacks this key
RESUMES_FORMAT_1 = "4df5c0c"  # the last git commit that can resume a run of format 1
# Renamed configuration keys: old name -> new name.
RENAMED = {
    "model.warm_start.slips": "model.warm_start.corruption_rate",
    "sampler.slips": "sampler.corruption_rate",
    "sync.strategy": "sync",
    "sync.transport": "sync",
}
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile("".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in _UNITS))


class ConfigError(ValueError):
    """The error raised for an invalid configuration; each problem is a sentence with a remedy."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


@contextmanager
def as_config_error() -> Iterator[None]:
    """Convert a ValueError, OSError, SyntaxError or RecursionError to a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError([f"{error.filename}, line {error.lineno}: {error.msg}"]) from error
    except (ValueError, OSError, RecursionError) as error:  # Recursion: nested too deeply
        raise ConfigError([str(error)]) from error


class Settings:
    """The base class of the settings of train.yaml, evaluate.yaml and optimize_prompt.yaml."""

    TYPED: ClassVar[Mapping[str, Any]]  # top-level key -> class of its typed node
    output_dir: str
    run_name: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the typed settings of a plain configuration that has been checked."""
        typed = {key: config[key] and kind.of(config[key]) for key, kind in cls.TYPED.items()}
        return cls(**{**config, **typed})  # pyright: ignore[reportCallIssue] the fields of a subclass

    def plain(self) -> dict[str, Any]:
        """Return the configuration as a plain mapping with the keys of the command line."""
        values = vars(self)
        return {**values, **{key: values[key] and values[key].plain() for key in self.TYPED}}

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return Path(self.output_dir) / self.run_name

    def save(self, path: Path) -> None:
        """Write the configuration as YAML, replacing the old file atomically."""
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
    batch_size: PositiveInt  # rollouts per optimizer step
    group_size: PositiveInt  # rollouts per example
    max_seq_len: Annotated[int, Meta(ge=2)]
    updates_per_batch: PositiveInt
    entropy_bonus: NonNegativeFloat
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
    # Facts from the dry call, which the supervisor adds (rl/config/learned.py).
    learned: dict[str, Any] = field(default_factory=dict)
    # Schedules by dotted key (rl/config/schedules.py).
    schedules: dict[str, Any] = field(default_factory=dict)

    def with_values(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy of the run with new values for dotted keys of at most two names."""
        return type(self).of(with_values(self.plain(), changes))

    @property
    def groups_per_step(self) -> int:
        """The number of groups per training step."""
        return self.batch_size // self.group_size

    @property
    def starts_vllm(self) -> bool:
        """Whether this run starts vLLM itself."""
        return self.sampler.uses_vllm and not self.inference.is_external

    @property
    def transport(self) -> Transport:
        """The sender that pushes new weights to vLLM."""
        return transport(vars(self))

    @property
    def pushes_adapter(self) -> bool:
        """Whether only the adapter is pushed to vLLM, where it has its own model name."""
        return self.transport.adapter_only

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the run that `save` wrote to this file."""
        settings = load_yaml(path.read_bytes())
        settings.pop("format", None)
        return cls.of(split_schedules(settings))


def seconds_of(duration: float | str) -> float:
    """Convert a duration such as 3h30m, 90m, 45s, 1d12h or a number to seconds.

    Raises:
        ValueError: the text is not a duration, or the duration is not positive.
    """
    text = str(duration).replace(" ", "")
    is_number = re.fullmatch(r"\d+(\.\d+)?", text)
    numbers = _DURATION.fullmatch(f"{text}s" if is_number else text)
    pairs = zip(numbers.groups() if numbers else (), _UNITS.values(), strict=False)
    if not (seconds := sum(float(number) * unit for number, unit in pairs if number)):
        raise ValueError(f"{duration} is not a duration: write 3h30m, 90m, or a number of seconds")
    return seconds
