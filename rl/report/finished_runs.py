"""Finished runs, read back from their folders: settings, overrides, metrics, and how to go on."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omegaconf import OmegaConf

from rl.run.folder import RunFolder
from rl.run.metrics import Row, read_metrics

RUN_KEYS = {"seed", "run_name", "resume", "output_dir"}  # differ between runs of one experiment


@dataclass(frozen=True)
class RunResult:
    """One run, as far as it got."""

    overrides: tuple[str, ...]  # those that matter: without the seed and where the run lies
    folder: RunFolder | None  # None: it failed before it had one
    error: str | None = None  # what the sweep knows of its failure

    @cached_property
    def rows(self) -> list[Row]:
        """The run's metrics."""
        return read_metrics(self.folder) if self.folder else []

    @property
    def num_steps(self) -> int:
        """Optimizer steps done."""
        return steps_done(self.rows)

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The run's settings by dotted key, without the seed and what holds its name."""
        if self.folder is None or not self.folder.config.exists():
            return None
        flat = flatten(OmegaConf.to_container(OmegaConf.load(self.folder.config), resolve=False))
        return {
            key: value
            for key, value in flat.items()
            if key.rpartition(".")[2] not in RUN_KEYS and self.folder.name not in str(value)
        }

    @property
    def failed(self) -> bool:
        """True when it ended before its last step."""
        wanted = int((self.config or {}).get("max_steps", 1))
        return self.error is not None or not self.rows or self.num_steps < wanted

    def same_as(self, other: "RunResult") -> bool:
        """True when the two differ in nothing but the seed, as far as it is known."""
        if self.config is None or other.config is None:
            return self.overrides == other.overrides
        return self.config == other.config


def steps_done(rows: Sequence[Row]) -> int:
    """Optimizer steps behind these lines; one of an evaluation alone stands after the last step."""
    if not rows:
        return 0
    alone = all(name in ("step", "time") or name.startswith("eval/") for name in rows[-1])
    return rows[-1]["step"] + (0 if alone and len(rows[-1]) > 2 else 1)


def result_of(folder: RunFolder, error: str | None = None) -> RunResult:
    """The run that lies in a folder."""
    return RunResult(meaningful(read_overrides(folder)), folder, error)


def resume_command(folder: RunFolder) -> str:
    """The command line that takes the run up where its last checkpoint left it."""
    kept = [item for item in read_overrides(folder) if key_of(item) not in {"run_name", "resume"}]
    return shlex.join(["python", "train.py", *kept, f"run_name={folder.name}", "resume=true"])


def read_overrides(folder: RunFolder) -> list[str]:
    """The run's command-line overrides as `key=value`; none when there is no such file."""
    if not folder.overrides.exists():
        return []
    content = OmegaConf.to_container(OmegaConf.load(folder.overrides))
    items = content.get("overrides", []) if isinstance(content, dict) else content
    return [str(item) for item in items or []]


def meaningful(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides that say what was run, not where or with which seed, in alphabetical order."""
    return tuple(sorted(item for item in overrides if key_of(item) not in RUN_KEYS))


def key_of(override: str) -> str:
    """The key an override sets."""
    return override.partition("=")[0].lstrip("+~")


def flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key."""
    if not isinstance(node, Mapping):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
