"""Warm starts: supervised steps on an environment's demonstrations, done once and cached.

A warm start is a run of its own, with the configuration conf/warm_start.yaml. The name of its
cache folder is a hash of the options, code, data and library versions that affect the weights.
"""

import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl.config.ranges import PositiveFloat, PositiveInt, Probability
from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.runtime.lock import try_lock
from rl.runtime.text import leaves, say

# The cache key depends on all files of these packages, because they may affect the weights.
_PACKAGES = ("rl/learner", "rl/model", "rl/sampling", "rl/rollouts", "losses")
_ROOT = Path(__file__).parents[2]
# These options of an environment may name a folder or a file pattern. Other options may look like
# a pattern by chance, such as the operators "*" and "/" of env=arithmetic.
_DATA_KEYS = ("path", "eval_path", "corpus", "questions")
_TICK_S = 0.5
_LIBRARIES = ("torch", "transformers", "deepspeed", "renderers")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The options of model.warm_start. corruption_rate is the share of wrong demonstrations."""

    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    corruption_rate: Probability


def warm_start_key(warm_run: Run, own_files: Iterable[str]) -> str:
    """Return a hash of the options, code, data and versions that affect the weights."""
    content = warm_run.plain()
    irrelevant = ("output_dir", "run_name", "inference", "client", "sync", "logger", "record")
    for group in (*irrelevant, "cluster", "trainer", "max_time"):
        del content[group]
    content["max_grad_norm"] = warm_run.trainer.max_grad_norm  # other keys change only rounding
    # Leave out keys that a warm start ignores.
    content["model"] = _without_keys(warm_run.model.plain(), "learning_rate", "max_tokens")
    content["env"] = _without_keys(warm_run.env, "reward_weights")
    sources = {path for name in _PACKAGES for path in (_ROOT / name).rglob("*.py")}
    # Leave out files in other packages of rl/, because they do not affect the weights.
    sources |= {Path(file) for file in own_files if not Path(file).is_relative_to(_ROOT / "rl")}
    content["sources"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources)]
    content["files"] = [_file_hash(key, value) for key, value in leaves(content["env"])]
    content["versions"] = [version(name) for name in _LIBRARIES]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _without_keys(node: Any, *keys: str) -> Any:
    if isinstance(node, dict):
        return {key: _without_keys(value, *keys) for key, value in node.items() if key not in keys}
    return [_without_keys(item, *keys) for item in node] if isinstance(node, list) else node


def _file_hash(key: str, value: Any) -> Any:
    """Return the hash of the file at the path `value`; "" if `value` names no file.

    For a folder or a file pattern of a key in _DATA_KEYS, return [name, size, time] of each file.
    """
    if not isinstance(value, str) or "\n" in value or not value:
        return ""
    try:
        path = Path(value).expanduser()
        if not path.is_file():
            if key.rpartition(".")[2] not in _DATA_KEYS:
                return ""
            pattern = f"{glob.escape(str(path))}/**" if path.is_dir() else str(path)
            found = sorted(filter(os.path.isfile, glob.iglob(pattern, recursive=True)))
            stats = [(name, os.stat(name)) for name in found]
            return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats] or ""
    except (OSError, RuntimeError):  # the path is too long, or the user after ~ does not exist
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def warm_start_run(run: Run, recipe: dict[str, Any], folder: Path) -> Run:
    """Return the run that warm-starts `run`. `recipe`: the content of conf/warm_start.yaml."""
    settings = run.model.warm_start or {}
    # Turn these options off, because a short run does not need them.
    changed = {"checkpoint_every": 0, "compile": False, "debug": False, "profile": 0}
    trainer = {**run.trainer.plain(), **changed}
    if run.cluster.spans_hosts:  # the warm start of such a run uses one rank on this machine
        trainer |= {"ranks": 1, "num_threads": None}
    return Run.of(
        {
            **recipe,
            "max_time": run.max_time,
            "max_seq_len": run.max_seq_len,
            "model": {**run.model, "warm_start": None},
            "env": run.env,
            "trainer": trainer,
            "sampler": {**recipe["sampler"], "corruption_rate": settings["corruption_rate"]},
            "max_steps": settings["steps"],
            "batch_size": settings["batch_size"],
            "optim": {
                **recipe["optim"],
                "learning_rate": settings["learning_rate"],
                "warmup_steps": min(5, settings["steps"]),
            },
            "output_dir": str(folder.parent),
            "run_name": folder.name,
        }
    )


@contextmanager
def alone_with(cached: Path, tick: Callable[[], None]) -> Iterator[None]:
    """Lock the cache folder `cached` of a model while the block runs. Call `tick` while waiting."""
    path = cached.with_name(f"{cached.name}.lock")
    try:
        opened = path.open("a")  # NFS locks only a file that is open for writing
    except PermissionError:  # another user has created the file
        opened = path.open()
    with opened as file:
        if not try_lock(file):
            say("warm start: waiting for another run, which computes the same warm start")
            while not try_lock(file):
                tick()
                time.sleep(_TICK_S)
        yield


def move_to_cache(run_folder: RunFolder, target: Path) -> None:
    """Move the model of a finished warm start to `target` atomically, and delete its run folder."""
    (exported,) = run_folder.exports()
    # Copy beside the target first, because a rename cannot move files to another file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as aside:
        copy = shutil.copytree(exported, Path(aside) / "model")
        try:
            copy.rename(target)
        except OSError:  # another run may have created `target` meanwhile
            if not target.is_dir():
                raise
    shutil.rmtree(run_folder.path)
