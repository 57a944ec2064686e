"""Make sandboxes for tests, and find their processes."""

import psutil

from envs.sandbox.sandbox import PROJECT, Limits, Sandbox
from envs.tools import ToolError
from tests.support.launching import wait_for

OPTIONS = {
    "call_timeout": 1.0,
    "cpu_seconds": 60,
    "memory_mb": 256,
    "max_output_chars": 1000,
    "site_packages": False,
    "allow_without_landlock": False,
}


def make(**changes):
    return Sandbox(Limits(**{**OPTIONS, "call_timeout": 60.0, **changes}))


def interpreters():
    """Return the living processes that run a sandbox of this checkout."""
    found = set()
    for process in psutil.process_iter(["status", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if is_alive and "envs.sandbox.interpreter" in command and PROJECT in command:
            found.add(process.pid)
    return found


def settled(expected, seconds=60.0):
    """Return whether only processes in `expected` are alive after a while."""
    return wait_for(lambda: interpreters() <= expected, seconds, every=0.01)


def close(grader):
    """End the processes of a grader."""
    for sandbox in grader._idle:
        sandbox.close()


async def said(box, code):
    """Return the answer, or the error message that the policy gets."""
    try:
        return await box.run(code)
    except ToolError as error:
        return str(error)
