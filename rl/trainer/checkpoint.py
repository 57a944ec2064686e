"""Write each checkpoint under a temporary name, and rename it when it is complete.

checkpoints/step_000100/
  state.json      step; states of dispatcher, buffer, order, advantage, strategy and environment
  deepspeed/      trained weights and optimizer state, in the file format of DeepSpeed
  critic/         the same for the critic, if the run has one
  learner.json    beta, the current weight of the KL penalty
  reference*      the weights of a reference model, if they change during training
  hf/             the model for other programs (transformers, vLLM), or with LoRA the adapter (peft)
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError

from rl.learner.learner import Learner
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder

# A RuntimeError of torch contains one of these words if a file cannot be written.
_SIGNS_OF_FAILED_WRITE = ("inline_container", "PytorchStreamWriter")


def save_checkpoint(
    learner: Learner,
    run_folder: RunFolder,
    *,
    step: int,  # number of finished steps, which equals the policy version
    rollouts: dict[str, Any],  # state of the rollouts process's dispatcher
    model: Path,  # folder of the initial model, whose tokenizer files are copied
    keep: int,  # number of checkpoints to keep
) -> Path:
    """Write a checkpoint and return its folder. Delete all but the newest `keep`. Collective."""
    final = run_folder.checkpoint(step)
    temporary = final.with_name(f".{final.name}.incomplete")
    first = learner.policy.ranks.first
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()  # no rank writes before rank 0 has emptied the folder
    with _reporting_failure(temporary, step, run_folder):
        learner.save(temporary)
        learner.policy.export(run_folder.export_of(temporary), model)
    dist.barrier()  # rank 0 must not rename before all ranks have written their files
    if first:
        with _reporting_failure(temporary, step, run_folder):  # fsync fails if the disk is full
            state = {"step": step, "rollouts": rollouts}
            run_folder.state_of(temporary).write_text(json.dumps(state))
            if final.exists():
                _delete_checkpoint(final)
            flush_and_rename(temporary, final)
        for old in run_folder.complete_checkpoints()[:-keep]:
            _delete_checkpoint(old)
    dist.barrier()  # no rank continues before the checkpoint has its final name
    return final


@contextmanager
def _reporting_failure(temporary: Path, step: int, run_folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except RunFailed:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        _delete_incomplete(temporary)  # writing the error report needs disk space, too
        has_sign = any(sign in str(error) for sign in _SIGNS_OF_FAILED_WRITE)
        if isinstance(error, RuntimeError) and not has_sign:
            raise  # the model or a collective failed, and the user needs the traceback
        free = shutil.disk_usage(run_folder.path).free / 2**20
        raise RunFailed(
            f"the checkpoint of step {step} could not be written ({error}); its files are deleted, "
            f"earlier checkpoints are unchanged, and {free:,.0f} MiB are free at "
            f"{run_folder.path}. Free more space or remove the cause, then use resume=true"
        ) from error


def flush_and_rename(temporary: Path, final: Path) -> None:
    """Flush a folder to disk, then rename it to `final`, so that `final` is always complete."""
    for path in [*temporary.rglob("*"), temporary]:
        _flush_to_disk(path)
    temporary.rename(final)
    _flush_to_disk(final.parent)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_incomplete(folder: Path) -> None:
    """Delete a folder. Truncate its files first, because a deleted open file still uses space."""
    with suppress(FileNotFoundError):  # another rank may clear the folder at the same time
        for path in folder.rglob("*"):
            if path.is_file():
                os.truncate(path, 0)
    shutil.rmtree(folder, ignore_errors=True)


def _delete_checkpoint(checkpoint: Path) -> None:
    """Rename a checkpoint, then delete it, so that no partly deleted folder looks complete."""
    renamed = checkpoint.with_name(f".{checkpoint.name}.deleted")
    shutil.rmtree(renamed, ignore_errors=True)
    checkpoint.rename(renamed)
    shutil.rmtree(renamed)
