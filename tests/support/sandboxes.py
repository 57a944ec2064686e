"""Sandboxes for tests, and the processes that they leave."""

import time
from pathlib import Path

from envs.sandbox.sandbox import OURS, Limits, Sandbox
from envs.tools import ToolError

KNOBS = {
    "call_timeout": 1.0,
    "cpu_seconds": 60,
    "memory_mb": 256,
    "max_output_chars": 1000,
    "site_packages": False,
    "allow_without_landlock": False,
}


def make(**changes):
    return Sandbox(Limits(**{**KNOBS, "call_timeout": 60.0, **changes}))


def interpreters():
    """Living processes that run a sandbox of this checkout, wherever they have got to."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if status != "Z" and b"envs.sandbox.interpreter" in command and OURS.encode() in command:
            found.add(int(folder.name))
    return found


def settled(expected, seconds=60.0):
    """Whether no others than `expected` live after a while; of those, another process's may end."""
    deadline = time.monotonic() + seconds
    while not interpreters() <= expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return interpreters() <= expected


async def said(box, code):
    """The answer, or the sentence that the policy gets instead."""
    try:
        return await box.run(code)
    except ToolError as error:
        return str(error)
