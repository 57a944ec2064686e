"""Whether a run may start in its folder.

One folder holds one run, and resuming continues that very run: forgetting an override of the first
half would make the second half another experiment, so it is refused.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from rl.config.schema import SAVED

Config = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
_LONGEST_NAME = 255  # bytes; what Linux takes

# What may differ when a run goes on: how long and how, never what is learned.
MAY_CHANGE = (
    *("resume", "run_name", "output_dir"),  # it is the folder's
    "max_steps",
    "max_time",
    "trainer",
    "inference",
    "cluster",
    "sync",
    "logger",
    "evaluation",
    "record",
    *("sampler.rollout_timeout", "sampler.max_concurrent", "sampler.max_retries"),
    *("client.max_retries", "env.max_concurrent", "env.tool_timeout"),
    *("reference.url", "reference.timeout", "reference.max_retries"),
    *("max_calls", "num_rounds"),  # of a search for a prompt, as the next
    *(f"reflection.{key}" for key in ("base_url", "api_key_variable", "timeout", "max_retries")),
)
LEARNED = ("trainer.max_grad_norm",)  # though it stands among these
# What is so of one is so of each of several.
_PARTS = {
    r"^reference\.teachers\.[^.]+": "reference",
    r"^env\.envs\.[^.]+": "env",
    r"^env\.sampling\.[^.]+": "sampler",
}
# What a run did that is older than the group.
IMPLIED = {"order._target_": "rl.rollouts.example_order.ShuffledOrder"}


def run_folder_problems(config: Config) -> Iterator[str]:
    """A folder holds one run, and going on means going on with the same experiment."""
    name, parent = config["run_name"], Path(config["output_dir"])
    saved = parent / name / SAVED
    if not Path(name).parts or Path(name).is_absolute() or ".." in Path(name).parts:
        yield f'run_name="{name}" is no name for a folder below output_dir={parent}'
    elif longest := [part for part in Path(name).parts if len(os.fsencode(part)) > _LONGEST_NAME]:
        yield (
            f"run_name={name[:20]}... has {len(os.fsencode(longest[0]))} bytes, and a folder's "
            f"name takes {_LONGEST_NAME}: choose a shorter run_name"
        )
    elif saved.is_file() and not has_steps(saved.parent):
        return  # whoever tried it before did not get so far that anything could be lost
    elif saved.is_file() and not config["resume"]:
        yield (
            f"{saved.parent} already holds a run: go on with it by resume=true, or choose another "
            "run_name"
        )
    elif config["resume"] and not saved.is_file():
        saves = sorted(parent.glob(f"*/{SAVED}"), key=lambda p: p.stat().st_mtime, reverse=True)
        known = (
            path.parent.name
            for path in saves
            # An evaluation is whole or nothing.
            if has_steps(path.parent) and not (path.parent / "rollouts.html").is_file()
        )
        names = ", ".join(islice(known, 3)) or "none yet"
        yield (
            f"resume=true, but {saved.parent} holds no run: give run_name=<one of {parent}: "
            f"{names}>, or leave resume out"
        )
    elif config["resume"]:
        yield from changes(config, saved)


def has_steps(folder: Path) -> bool:
    """True where a step was done, an evaluation, or a rollout of a search: else there is no run."""
    metrics = folder / "metrics.jsonl"
    was_logged = metrics.is_file() and metrics.stat().st_size > 0
    was_evaluated = (folder / "summary.json").is_file()  # python evaluate.py has no steps
    was_searched = any(folder.glob("rollouts.jsonl"))  # nor has python optimize_prompt.py
    return was_logged or was_evaluated or was_searched or any(folder.glob("checkpoints/step_*"))


def changes(config: Config, saved: Path) -> Iterator[str]:
    """What would make the rest of a run another experiment than its beginning, which is `saved`."""
    try:
        before = yaml.safe_load(saved.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        before = None
    if not isinstance(before, dict) or not before:
        yield f"{saved} is damaged, so nobody knows how to go on: restore it, or start a new run"
        return
    now, then = dict(_leaves(config)), dict(_leaves(before))
    then = {key: value for key, value in IMPLIED.items() if key in now} | then
    ranks, stage = "trainer.ranks", then.get("deepspeed.zero_optimization.stage")
    # Null follows the devices; the supervisor asks again when it knows how many there are.
    if stage and now.get(ranks) not in (None, then.get(ranks)):
        yield (
            f"{ranks} was {then.get(ranks)} and is {now.get(ranks)}, but with ZeRO stage {stage} "
            "each rank's part of the optimizer lies in the checkpoint as it was: use "
            f"{ranks}={then.get(ranks)}"
        )
    # A key that one of them lacks counts as null there: an older run may lack a newer knob.
    changed = [
        key
        for key in {**then, **now}
        if not _may_change(key) and _place(now.get(key)) != _place(then.get(key))
    ]
    # Another callable has other knobs: it is enough to say that it is another.
    others = {key.removesuffix("_target_") for key in changed if key.endswith("._target_")}
    changed = [
        key for key in changed if key.endswith("._target_") or not key.startswith(tuple(others))
    ]
    if changed:
        shown = ", ".join(f"{key} was {then.get(key)} and is {now.get(key)}" for key in changed[:3])
        more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
        yield (
            f"resume=true would go on with another configuration than {saved}: {shown}{more}; "
            "repeat the overrides of that run, or start a new one"
        )


def _may_change(key: str) -> bool:
    for part, alone in _PARTS.items():
        key = re.sub(part, alone, key)
    return key not in LEARNED and any(f"{key}.".startswith(f"{free}.") for free in MAY_CHANGE)


def _place(value: Any) -> Any:
    """What tells a value from another; of a file, where it is.

    A path of ours is relative where a run is started in our folder, and absolute elsewhere.
    """
    if isinstance(value, str) and "/" in value and "\n" not in value:
        for path in (Path(value), ROOT / value):
            with suppress(OSError):  # longer than a path can be
                if path.exists():
                    return path.resolve()
    return value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
