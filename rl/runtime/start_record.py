"""Read overrides.yaml, the record of how a run was started, and build the command to resume it."""

import os
import re
import shlex
from pathlib import Path
from typing import Any

from rl.runtime.folder import RunFolder
from rl.runtime.metrics import num_steps_done
from rl.runtime.text import START_KEYS, key_of, printable

_RESERVED = {"true", "false", "null", "nan", "inf"}  # Hydra reads these as text only in quotes


def program(name: str) -> str:
    """Return `python <name>.py` if that file is in the working folder, else `offbyone <name>`."""
    is_here = Path(f"{name}.py").exists()
    return f"python {name}.py" if is_here else f"offbyone {name.replace('_', '-')}"


def read_record(folder: RunFolder) -> dict[str, Any]:
    """Return the record without values of a wrong type, which an edit by hand may leave."""
    items = folder.read_yaml(folder.overrides).items()
    return {k: x for k, x in items if isinstance(x, list if k in ("overrides", "command") else str)}


def read_overrides(folder: RunFolder) -> list[str]:
    return [printable(str(item)) for item in read_record(folder).get("overrides", [])]


def resume_command(folder: RunFolder) -> str:
    record = read_record(folder)
    kept = [item for item in read_overrides(folder) if key_of(item) not in START_KEYS]
    name = quote_for_hydra(record.get("run_name", folder.name))
    command = map(str, record.get("command", ["python", "train.py"]))
    line = shlex.join([*command, *kept, f"run_name={name}", "resume=true"])
    started_in = record.get("started_in", os.getcwd())
    return line if started_in == os.getcwd() else f"cd {shlex.quote(started_in)} && {line}"


def quote_for_hydra(text: str) -> str:
    """Return the text, in quotes if Hydra's command line would not parse it as text."""
    is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*( [\w./-]+)*", text, re.ASCII) is not None
    if is_plain and text.lower() not in _RESERVED:
        return text
    # Double only the backslashes before a quote, because Hydra unescapes no other backslashes.
    escaped = re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def resume_advice(folder: RunFolder) -> str:
    """Return a message with the number of saved steps and the command that resumes the run."""
    num_steps = num_steps_done(folder)
    if not num_steps:
        return "no step was done: nothing is lost, and run_name can be used again"
    saved = folder.num_saved_steps()
    lost = f"{saved} of {num_steps} steps are in the last checkpoint"
    lost += ", and the others are lost" * (saved < num_steps)
    if not saved:
        lost = f"{num_steps} steps are in no checkpoint (trainer.checkpoint_every): they are lost"
    return f"{lost}\n{'go on' if saved else 'again'}  {resume_command(folder)}"
