"""What a run is asked for: the top level of its configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from rl.config.annotations import Node

SAVED = "config.yaml"  # of a run's folder, which rl.run.folder describes; it knows nothing of us


class ConfigError(ValueError):
    """The configuration cannot work; each problem is one sentence that says what to do."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(f"- {problem}" for problem in problems))
        self.problems = problems


@contextmanager
def refused() -> Iterator[None]:
    """What cannot be read, found or written in the block is a mistake in the configuration."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError([str(error)]) from error


@contextmanager
def parsed() -> Iterator[None]:
    """What is no Python in a file that the block reads is named with its line."""
    try:
        yield
    except SyntaxError as error:
        raise ConfigError([f"{error.filename}, line {error.lineno}: {error.msg}"]) from error


@dataclass(frozen=True, kw_only=True)
class Run:
    """The top level of conf/train.yaml, resolved. Values are explained there."""

    seed: int
    max_steps: int
    max_time: float | str | None
    batch_size: int  # rollouts per optimizer step
    group_size: int  # rollouts per example
    max_seq_len: int
    updates_per_batch: int
    entropy_bonus: float
    model: Node
    adapter: Node
    env: Node
    order: Node
    sampler: Node
    client: Node
    buffer: Node
    reward: Node
    truncation: Node
    advantage: Node
    critic: Node
    aggregation: Node
    reference: Node
    kl: Node
    correction: Node
    loss: Node
    optim: Node
    deepspeed: dict[str, Any]
    inference: Node
    sync: Node
    cluster: Node
    logger: Node
    evaluation: Node
    record: Node
    trainer: Node
    output_dir: str
    run_name: str
    resume: bool

    @property
    def folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.output_dir) / self.run_name

    @property
    def groups_per_step(self) -> int:
        """Examples per batch."""
        return self.batch_size // self.group_size

    @classmethod
    def load(cls, path: Path) -> "Run":
        """The run that `save` wrote there."""
        return cls(**yaml.safe_load(path.read_text()))

    def save(self, path: Path) -> None:
        """Write the resolved configuration as YAML."""
        write_settings(path, asdict(self))


def write_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a configuration, whole or not at all: a sweep reads those of runs that were killed."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    aside.replace(path)
