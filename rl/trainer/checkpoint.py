"""Checkpoints that are complete or absent: written under another name, then renamed.

checkpoints/step_000100/
  state.json      step, dispatcher state (the next examples)
  deepspeed/      what is trained, optimizer; one file per rank
  critic/         the same of the critic, if there is one
  learner.json    adaptive beta; reference.safetensors beside it if the reference moves
  hf/             the model for other programs (transformers, vLLM); with LoRA the adapter (peft)
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl.learner.learner import Learner
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder


def save_checkpoint(
    learner: Learner,
    run_folder: RunFolder,
    *,
    step: int,  # optimizer steps taken, which is the policy version
    rollouts: dict[str, Any],  # state of the dispatcher
    model: Path,  # folder of the run's first model, for its tokenizer files
    keep: int,  # number of complete checkpoints that stay
) -> Path:
    """Write the state after `step` steps and delete all but the newest `keep`. Collective.

    Raises:
        RunFailed: it could not be written; earlier checkpoints are unchanged.

    """
    final = run_folder.checkpoint(step)
    aside = final.with_name(f".{final.name}.incomplete")
    first = learner.policy.ranks.first
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()  # no rank writes before the folder is empty
    with _reporting_full_disk(aside, step, run_folder):
        learner.save(aside)
        learner.policy.export(run_folder.export_of(aside), model)
    dist.barrier()  # complete only when every rank has written its files
    if first:
        with _reporting_full_disk(aside, step, run_folder):  # some file systems fail at the sync
            state = {"step": step, "rollouts": rollouts}
            run_folder.state_of(aside).write_text(json.dumps(state))
            if final.exists():
                _delete(final)
            publish(aside, final)
        for old in run_folder.complete_checkpoints()[:-keep]:
            _delete(old)
    dist.barrier()  # no rank continues or ends before the checkpoint has its name
    return final


@contextmanager
def _reporting_full_disk(aside: Path, step: int, run_folder: RunFolder) -> Iterator[None]:
    """Delete the incomplete checkpoint if the block cannot write it, and say how to continue."""
    try:
        yield
    except RunFailed:
        raise
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if a disk is full
        _clear(aside)  # the message needs space, too
        free = shutil.disk_usage(run_folder.path).free / 2**20
        raise RunFailed(
            f"the checkpoint of step {step} could not be written ({error}); without it "
            f"{free:,.0f} MiB are free at {run_folder.path}. Make room and go on with resume=true"
        ) from error


def publish(aside: Path, final: Path) -> None:
    """Rename a folder once all of it is on the disk, so that a crash leaves no half of it."""
    for path in [*aside.rglob("*"), aside]:
        _sync(path)
    aside.rename(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """Free the space at once, even of files that the failed writer still holds open."""
    with suppress(FileNotFoundError):  # another rank clears, too
        for path in folder.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _delete(checkpoint: Path) -> None:
    """Rename first, because a half deleted checkpoint must not look complete."""
    doomed = checkpoint.with_name(f".{checkpoint.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)
