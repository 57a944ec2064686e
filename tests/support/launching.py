"""Start real runs of train.py with vLLM and DeepSpeed, and watch their processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["batch_size=32", "group_size=8", "trainer.wait_timeout=400"]
WARM = ["model.warm_start.steps=8"]
COLD = ["model.warm_start=null"]
# The engine answers from a script, for tests whose subject is not vLLM.
SCRIPTED = ["inference._target_=tests.support.scripted_vllm.ScriptedVLLM", "sync.max_mismatch=1e9"]


def nightly(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that starts whole runs, which only `make test-all` does."""
    return pytest.mark.slow(pytest.mark.server(pytest.mark.timeout(600)(test)))


def train(
    *arguments: str,
    output_dir: Path,
    program: str = "train.py",
    started_in: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program from the folder `started_in` (default: `output_dir`), for early failures."""
    command = [sys.executable, str(ROOT / program), *arguments, f"output_dir={output_dir}"]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=started_in or output_dir,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )


@dataclass
class Result:
    """The status, screen and folder of a finished run of train.py."""

    status: int
    screen: str
    folder: Path

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]


class Process(subprocess.Popen):
    """A process that ends at the end of its `with` block, also of a test that fails."""

    def __exit__(self, *error: Any) -> None:
        stop(self)
        super().__exit__(*error)


def begin(command: list[str] | str, folder: Path, environment: Mapping[str, str]) -> Process:
    """Start a command, or a line of a shell, in a folder and in a session of its own."""
    return Process(
        command,
        shell=isinstance(command, str),
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell lets background commands ignore Ctrl-C, and what they start would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def ended(process: subprocess.Popen, folder: Path, seconds: float = 600) -> Result:
    """Wait until a process ends; `folder` is that of its run."""
    try:
        screen, _ = process.communicate(timeout=seconds)
    finally:
        stop(process)
    return Result(process.returncode, screen, folder)


@dataclass
class Launcher:
    """Start train.py as a user would, with the output folder and cache of the test session."""

    output: Path
    environment: dict[str, str]

    def start(self, name: str, *overrides: str, warm: Sequence[str] = WARM) -> Process:
        # Use a relative path, as the default is, to notice code that expects an absolute one.
        output = os.path.relpath(self.output, ROOT)
        command = [sys.executable, "train.py", f"run_name={name}", f"output_dir={output}"]
        return begin([*command, *SMALL, *warm, *overrides], ROOT, self.environment)

    def run(self, name: str, *overrides: str, warm: Sequence[str] = WARM) -> Result:
        return ended(self.start(name, *overrides, warm=warm), self.output / name)

    def succeed(self, name: str, *overrides: str, warm: Sequence[str] = WARM) -> Result:
        """Return the result of a run that must end with status 0."""
        result = self.run(name, *overrides, warm=warm)
        assert result.status == 0, result.screen
        return result


def below(leader: int) -> set[int]:
    """Return the process ids of a process's descendants."""
    with suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(leader).children(recursive=True)}
    return set()


def groups_below(leader: int) -> set[int]:
    """Return the process groups of a process's descendants."""
    groups = set()
    for pid in below(leader):
        with suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    return groups


def called(leader: int, text: str) -> list[int]:
    """Return the descendants of a process whose command contains a text."""
    found = []
    for pid in sorted(below(leader)):
        with suppress(psutil.Error):
            found += [pid] if text in " ".join(psutil.Process(pid).cmdline()) else []
    return found


def alive(groups: set[int]) -> list[str]:
    """Return the names of the processes in these groups, without zombies."""
    names = []
    for process in psutil.process_iter(["name", "status"]):
        with suppress(ProcessLookupError):
            is_dead = process.info["status"] == psutil.STATUS_ZOMBIE
            if not is_dead and os.getpgid(process.pid) in groups:
                names.append(process.info["name"])
    return names


def wait_for(condition: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Return True when the condition holds, False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def stop(process: subprocess.Popen) -> None:
    """End a process that a failed test may have left."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
