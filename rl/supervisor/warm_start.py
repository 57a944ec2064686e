"""Supervised steps on an environment's demonstrations before a run, done once and cached.

The warm start is an ordinary run (loss=sft sampler=demonstrations), so supervised fine-tuning needs
no second program. The cache folder's name is a hash of everything that the result depends on.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl.config.annotations import Node
from rl.config.ranges import PositiveFloat, PositiveInt, Probability
from rl.config.schema import Run
from rl.runtime.folder import RunFolder
from rl.supervisor.sources import module_files, package_files

# The code that learns and makes batches: a change to any of its files may change the result.
_PACKAGES = ("rl.learner", "rl.model", "rl.sampling", "rl.rollouts", "losses")
# The groups that say what is learned and how. The warm start takes those of supervised fine-tuning.
_LEARNING = (
    *("loss", "reward", "truncation", "advantage", "critic", "aggregation"),
    *("reference", "kl", "correction", "order", "sampler", "buffer"),
)
# The overrides that these groups are composed with. An evaluation would need a policy's sampler.
IMITATION = ["loss=sft", "sampler=demonstrations", "evaluation=none"]
_LIBRARIES = ("torch", "transformers", "deepspeed", "renderers")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """How long and how strongly to imitate, and how often the expert errs (conf/model)."""

    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    corruption_rate: Probability


def warm_start_key(first: Run, read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Return 16 hex digits that change with anything the supervised run's result depends on.

    `read` returns the content of a source file.
    """
    content = first.plain()
    irrelevant = ("output_dir", "run_name", "inference", "client", "sync", "logger", "record")
    for group in (*irrelevant, "cluster", "trainer", "max_time"):
        del content[group]
    content["max_grad_norm"] = first.trainer.max_grad_norm  # other trainer keys change no result
    # The warm start has its own learning rate and no turn limit, and it ignores rewards.
    content["model"] = _without(first.model.plain(), "learning_rate", "max_tokens")
    content["env"] = _without(first.env, "reward_weights")
    nodes = [*_nodes(first.env)]
    modules = [node["_target_"].rpartition(".")[0] for node in nodes]
    files = [*package_files(_PACKAGES), *module_files(modules, apart_from=("rl", "losses"))]
    content["sources"] = [hashlib.sha256(read(path)).hexdigest() for path in files]
    content["files"] = [_file_hash(value) for node in nodes for value in node.values()]
    content["versions"] = [version(name) for name in _LIBRARIES]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _without(node: Any, *keys: str) -> Any:
    """Return a node without these keys, also in the nodes inside it."""
    if isinstance(node, dict):
        return {key: _without(value, *keys) for key, value in node.items() if key not in keys}
    return [_without(item, *keys) for item in node] if isinstance(node, list) else node


def _nodes(value: Any) -> Iterator[Node]:
    """Yield every node in a value, itself included: of a mixture, a data set, a tool."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _nodes(item)


def _file_hash(value: Any) -> str:
    """Return the hash of the file that a value names; an empty text where it names no file."""
    if not isinstance(value, str) or "\n" in value or not value:
        return ""
    try:
        path = Path(value).expanduser()
        if not path.is_file():
            return ""
    except (OSError, RuntimeError):  # the text is too long for a path, or its ~ names no user
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def warm_start_run(run: Run, supervised: dict[str, Any], folder: Path) -> Run:
    """Return the supervised run that makes the model `run` starts from.

    Args:
        run: the main run; its model and environment are used.
        supervised: a configuration composed with loss=sft sampler=demonstrations, whose groups
            replace those that say what is learned.
        folder: of the supervised run.

    """
    recipe = WarmStart(**{k: v for k, v in (run.model.warm_start or {}).items() if k != "_target_"})
    trainer: Node = {"checkpoint_every": 0, "compile": False}  # the run is too short for either
    if run.cluster.spans_hosts:  # the ranks of the main run are on other machines
        trainer |= {"ranks": 1, "num_threads": None}
    changes: dict[str, Any] = {group: supervised[group] for group in _LEARNING}
    changes |= {f"trainer.{key}": value for key, value in trainer.items()}
    return run.changed(
        {
            **changes,
            "sampler.corruption_rate": recipe.corruption_rate,
            # The same seed for all runs, so that compared runs start from the same policy.
            "seed": 0,
            "max_steps": recipe.steps,
            "batch_size": recipe.batch_size,
            "group_size": 1,
            "updates_per_batch": 1,
            "entropy_bonus": 0.0,
            "model.warm_start": None,
            "adapter": {"_target_": "rl.model.lora.NoAdapter"},  # the main run adapts whole weights
            "optim": {
                **supervised["optim"],
                "learning_rate": recipe.learning_rate,
                "schedule": "constant",
                "warmup_steps": min(5, recipe.steps),
            },
            "cluster": {"_target_": "rl.cluster.local.LocalCluster"},  # it takes about a minute
            "logger": {"_target_": "rl.trainer.loggers.ConsoleLogger"},
            "evaluation": {"_target_": "rl.evaluation.periodic.NoEvaluation"},
            "record": {"_target_": "rl.rollouts.sampled_tokens.TokenRecord", "num_groups": 0},
            "deepspeed": {"zero_optimization": {"stage": 0}},
            "output_dir": str(folder.parent),
            "run_name": folder.name,
            "resume": False,
        }
    )


def keep_result(run_folder: RunFolder, target: Path) -> None:
    """Move the exported model of a finished supervised run to `target`, whole or not at all."""
    (exported,) = run_folder.exports()
    # Copy to the file system of the target first, because a rename cannot cross file systems.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as aside:
        copy = shutil.copytree(exported, Path(aside) / "model")
        try:
            copy.rename(target)
        except OSError:  # another run was faster; its result is the same
            if not target.is_dir():
                raise
    shutil.rmtree(run_folder.path)
