"""Check whether a run may start or resume in its folder, which can hold only one run.

A resume may change only the options of MAY_CHANGE, which hardly affect what the run learns.
"""

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rl.config.facts import Config
from rl.config.schedules import join_schedules
from rl.config.schema import FORMAT
from rl.config.shipped import SHIPPED
from rl.runtime.code_copies import changed_code
from rl.runtime.folder import RunFolder
from rl.runtime.text import START_KEYS, leaves

# A resume may change these options. A new max_steps changes the decay of the learning rate.
MAY_CHANGE = (
    *START_KEYS,
    *("output_dir", "learned", "init_optimizer"),  # a path, facts, and an option of the first start
    "max_steps",
    "max_time",
    "stop_when",
    "trainer",
    "inference",
    "cluster",
    "sync",
    "logger",
    "evaluation",
    "record",
    *("sampler.rollout_timeout", "sampler.max_concurrent", "sampler.max_retries"),
    *("env.sampling.*.rollout_timeout", "client.max_retries", "env.max_concurrent"),
    *("env.tool_timeout", "env.envs.*.max_concurrent", "env.envs.*.tool_timeout"),
    *("max_calls", "num_rounds"),  # limits of a prompt search
    *(
        f"{server}.{key}"
        for server in ("reference", "reference.teachers.*", "reflection")
        for key in ("url", "base_url", "api_key_variable", "timeout", "max_retries")
    ),
)
FIXED = ("trainer.max_grad_norm",)  # must not change, although `trainer` is in MAY_CHANGE


def run_folder_problems(config: Config) -> Iterator[str]:
    name, parent = config["run_name"], Path(config["output_dir"])
    run_folder = RunFolder(parent / name)
    saved, resume = run_folder.config, config.get("resume")
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        yield (
            f'run_name="{name}" names no folder below output_dir={parent}: use a relative path '
            'without ".."'
        )
    elif not name.isprintable():
        yield f"run_name={name!r} contains unprintable characters: choose another run_name"
    elif (saved.is_file() or run_folder.overrides.is_file()) and not run_folder.has_results():
        return  # the new run may replace an earlier one that has no results
    elif saved.is_file() and not resume:
        how = "use resume=true to continue it, or " if "resume" in config else ""
        yield f"{saved.parent} already holds a run: {how}choose another run_name"
    elif resume and not saved.is_file():
        yield (
            f"resume=true, but {saved.parent} holds no run: give run_name=<a folder in {parent}>, "
            "or leave resume out"
        )
    elif resume:
        yield from resume_problems(config, saved)


def resume_problems(config: Config, saved: Path) -> Iterator[str]:
    before = RunFolder(saved.parent).read_yaml(saved)
    if not before:
        yield f"{saved} is damaged, so the run cannot be resumed: restore it, or start a new run"
        return
    if (other := before.pop("format", None)) != FORMAT:
        yield (
            f"{saved} is of format {other}, which this version cannot resume: use the version that "
            "wrote it, or start a new run"
        )
        return
    folder = RunFolder(saved.parent)
    accepts = config.get("accept_changed_code") or not folder.num_saved_steps()
    if files := [] if accepts else changed_code(folder):
        yield (
            f"{', '.join(files)} changed since {saved.parent} was trained: restore the files "
            f"(copies of code are in {folder.code}), start a new run, or continue "
            "with the changed files by accept_changed_code=true"
        )
    now, then = dict(leaves(join_schedules(config))), dict(leaves(before))
    ranks, stage = "trainer.ranks", then.get("deepspeed.zero_optimization.stage")
    # Accept null (one rank per device), because this rule does not know the number of devices.
    if stage and now.get(ranks) not in (None, then.get(ranks)):
        yield (
            f"{ranks} was {then.get(ranks)} and is {now.get(ranks)}, but with ZeRO stage {stage} "
            "each rank can load only its own share of the optimizer state from a checkpoint: "
            f"use {ranks}={then.get(ranks)}"
        )
    # Treat a missing key as null, because an older run may lack a newer option.
    changed = [
        key
        for key in {**then, **now}
        if (key in FIXED or not any(fnmatchcase(f"{key}.", f"{free}.*") for free in MAY_CHANGE))
        and _resolve_path(now.get(key)) != _resolve_path(then.get(key))
    ]
    if changed:
        shown = ", ".join(f"{key} was {then.get(key)} and is {now.get(key)}" for key in changed[:3])
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        yield (
            f"the configuration differs from {saved}: {shown}{more}; "
            "repeat the overrides of that run, or start a new one"
        )


def _resolve_path(value: Any) -> Any:
    """Return the absolute path if `value` names an existing file or folder, else `value`."""
    if isinstance(value, str) and "/" in value and "\n" not in value:
        for path in (Path(value), SHIPPED / value):
            with suppress(OSError):  # raised if the operating system rejects the text as a path
                if path.exists():
                    return path.resolve()
    return value
