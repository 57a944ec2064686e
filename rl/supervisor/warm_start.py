"""Supervised steps on an environment's demonstrations before a run, done once and cached.

The warm start is a run like any other (loss=sft sampler=demonstrations), so supervised fine-
tuning is a use of the loop and not a second program. Its result is a model folder named by a hash
of everything it depends on.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl.config.annotations import Node
from rl.config.facts import spans_hosts
from rl.config.schema import Run
from rl.run.folder import RunFolder
from rl.supervisor.sources import module_files, package_files

# What learns, from what, in which batches: a change to any file may be one to the result.
_PACKAGES = ("rl.learner", "rl.model", "rl.sampling", "rl.rollouts", "losses")
# The groups that say what is learned and how: those of supervised fine-tuning.
_LEARNING = (
    *("loss", "reward", "truncation", "advantage", "critic", "aggregation"),
    *("reference", "kl", "correction", "order", "sampler", "buffer"),
)
# What is composed for them; an evaluation that the run has would ask for a policy's sampler.
IMITATION = ["loss=sft", "sampler=demonstrations", "evaluation=none"]
_TRAINER = {"checkpoint_every": 0, "compile": False}  # too short for either
_HERE = {"ranks": 1, "num_threads": None}  # where the run's own ranks lie on other machines
_LIBRARIES = ("torch", "transformers", "deepspeed", "renderers")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """How long and how hard to imitate, and an expert how faultless (conf/model)."""

    steps: int
    batch_size: int
    learning_rate: float
    corruption_rate: float


def warm_start_key(first: Run, read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Return 16 hex digits that change with anything the supervised run's result depends on.

    `read` returns what is in a source file.
    """
    content = asdict(first)
    elsewhere = ("output_dir", "run_name", "inference", "client", "sync", "logger", "record")
    for group in (*elsewhere, "cluster", "trainer", "max_time"):
        del content[group]
    content["max_grad_norm"] = first.trainer["max_grad_norm"]  # the others change no result
    # The first two serve the run that follows; the environment's rewards are not looked at.
    content["model"] = _without(first.model, "learning_rate", "max_tokens")
    content["env"] = _without(first.env, "reward_weights")
    parts = [*_nodes(first.env)]
    modules = [node["_target_"].rpartition(".")[0] for node in parts]
    files = [*package_files(_PACKAGES), *module_files(modules, apart_from=("rl", "losses"))]
    content["sources"] = [hashlib.sha256(read(path)).hexdigest() for path in files]
    content["files"] = [_content(value) for node in parts for value in node.values()]
    content["versions"] = [version(name) for name in _LIBRARIES]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _without(node: Any, *keys: str) -> Any:
    """Return a node without these keys, in the nodes inside it neither."""
    if isinstance(node, dict):
        return {key: _without(value, *keys) for key, value in node.items() if key not in keys}
    return [_without(item, *keys) for item in node] if isinstance(node, list) else node


def _nodes(value: Any) -> Iterator[Node]:
    """Yield every node in a value, itself included: a mixture's, a data set's, a tool's."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield value
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _nodes(item)


def _content(value: Any) -> str:
    """Return the hash of the file that a knob names; nothing where it names none."""
    if not isinstance(value, str) or "\n" in value or not value:
        return ""
    try:
        path = Path(value).expanduser()
        if not path.is_file():
            return ""
    except (OSError, RuntimeError):  # a text: longer than a name can be, or a ~ that is nobody's
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def warm_start_run(run: Run, supervised: dict[str, Any], folder: Path) -> Run:
    """Return the supervised run that makes the model `run` starts from.

    Args:
        run: the run to be; its model and environment are used.
        supervised: a configuration composed with loss=sft sampler=demonstrations, whose groups
            replace those that differ.
        folder: where the supervised run lies.

    """
    recipe = WarmStart(**{k: v for k, v in run.model["warm_start"].items() if k != "_target_"})
    changed: dict[str, Node] = {group: supervised[group] for group in _LEARNING}
    changed["sampler"] = {**supervised["sampler"], "corruption_rate": recipe.corruption_rate}
    return replace(
        run,
        **changed,
        # The same for every seed: runs that are compared start from the same policy.
        seed=0,
        max_steps=recipe.steps,
        batch_size=recipe.batch_size,
        group_size=1,
        updates_per_batch=1,
        entropy_bonus=0.0,
        model={**run.model, "warm_start": None},
        adapter={"_target_": "rl.model.lora.NoAdapter"},  # what a run adapts is a whole model
        optim={
            **supervised["optim"],
            "learning_rate": recipe.learning_rate,
            "schedule": "constant",
            "warmup_steps": min(5, recipe.steps),
        },
        cluster={"_target_": "rl.cluster.local.LocalCluster"},  # a minute's work
        logger={"_target_": "rl.trainer.loggers.ConsoleLogger"},
        evaluation={"_target_": "rl.evaluation.periodic.NoEvaluation"},
        record={"_target_": "rl.rollouts.token_record.TokenRecord", "num_groups": 0},
        trainer={**run.trainer, **_TRAINER, **(_HERE if spans_hosts(run.cluster) else {})},
        deepspeed={"zero_optimization": {"stage": 0}},
        output_dir=str(folder.parent),
        run_name=folder.name,
        resume=False,
    )


def keep_result(run_folder: RunFolder, target: Path) -> None:
    """Keep the model that a finished supervised run exported as `target`, whole or not at all."""
    (exported,) = run_folder.exports()
    # Beside the target, since a rename works within one file system only.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as aside:
        copy = shutil.copytree(exported, Path(aside) / "model")
        try:
            copy.rename(target)
        except OSError:  # another run was faster; its result is the same
            if not target.is_dir():
                raise
    shutil.rmtree(run_folder.path)
