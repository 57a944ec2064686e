"""Find the checkpoint of another run from which a new run starts: init_from=<run>[:<step>]."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rl.config.facts import fact
from rl.config.limits import value_of
from rl.config.positions import ADAPTER, merge_advice
from rl.runtime.folder import RunFolder, step_of


def initial_checkpoint(config: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint of `init_from`, None if it is null; raise ValueError if unusable."""
    if (name := config.get("init_from")) is None:
        return None
    path, colon, step = name.rpartition(":")
    path, step = (path, step) if colon and step.isdecimal() else (name, "")
    folders = Path(path).expanduser().absolute(), Path(config["output_dir"], path).absolute()
    saved = {step_of(c): c for f in folders for c in RunFolder(f).complete_checkpoints()}
    chosen = saved.get(int(step) if step else max(saved, default=0))
    if chosen is None:
        found = f"there is no checkpoint in {' or '.join(dict.fromkeys(map(str, folders)))}"
        if saved:
            found = f"{path} has checkpoints only of the steps {sorted(saved)}"
        raise ValueError(f"init_from={name}, but {found}: name a run and a step (<run>:<step>)")
    if ((export := RunFolder.export_of(chosen)) / ADAPTER).is_file():
        how = merge_advice(export, "model=hf model.path")
        raise ValueError(f"init_from={name}, but {how} instead of init_from")
    return chosen


def initial_problems(config: Mapping[str, Any]) -> Iterator[str]:
    try:
        found = config["resume"] or initial_checkpoint(config)  # True if the run resumes
    except ValueError as error:
        yield str(error)
        return
    if not config.get("init_optimizer"):
        return
    if not found:
        yield "init_optimizer=true loads the optimizer of another run: set init_from=<a run>"
    elif fact(config["adapter"]["_target_"], "freezes_base", False):
        yield (
            "init_optimizer=true loads the optimizer of all weights, but this run trains an "
            "adapter: set init_optimizer=false, or use adapter=none"
        )
    elif isinstance(found, Path):
        yield from _optimizer_problems(config, RunFolder(found.parents[1]))


def _optimizer_problems(config: Mapping[str, Any], run_folder: RunFolder) -> Iterator[str]:
    before = run_folder.read_yaml(run_folder.config)
    stage = value_of(config, "deepspeed.zero_optimization.stage")
    keys = ["deepspeed.zero_optimization.stage", "model.dtype", "trainer.max_grad_norm"]
    # Compare `optim` except `not_set`, because the checkpoint would override the other options.
    not_set = {"learning_rate", "schedule", "warmup_steps", "min_ratio"}
    optim = [f"optim.{option}" for option in sorted(config["optim"].keys() - not_set)]
    keys += [key for key in optim if value_of(before, key) is not None]
    for key in [*keys, "trainer.ranks"] if stage else keys:
        now, then = value_of(config, key), value_of(before, key)
        if now != then and not (key == "trainer.ranks" and now is None):
            yield (
                f"init_optimizer=true loads the optimizer of {run_folder} with {key}={then}, but "
                f"{key}={now}: use {key}={then}, or init_optimizer=false"
            )
