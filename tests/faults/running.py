"""Run one case of the campaign, and check what it leaves."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path

from envs.user_code import format_location
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics, steps_done
from rl.runtime.status import read_statuses
from tests.faults.table import Case
from tests.support import launching, whole_runs
from tests.support.equal_runs import Run
from tests.support.launching import ROOT, Process, Result, alive, groups_below, wait_for

MAX_STEPS = 8
RUN = [
    f"max_steps={MAX_STEPS}", "batch_size=8", "group_size=4", "trainer.checkpoint_every=2",
    "trainer.wait_timeout=30", "sampler.rollout_timeout=20", "record=all", "env.num_train=300",
    "entropy_bonus=0.01", "evaluation=default", "evaluation.every=2", "evaluation.num_examples=4",
    "evaluation.rollouts_per_example=1",
]  # fmt: skip
DISK_MIB = 200


class ScriptedRun:
    """A run of train.py with the scripted engine, and the fault that it meets."""

    settings: Sequence[str] = RUN
    longest_s, most_mismatch = 600, float("inf")

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, RunFolder(folder / "run")
        case.write_engine_faults(folder / "faults.json")
        self.process: Process | None = None
        self.is_repaired = self.happened = False  # happened: the fault met a running process

    def start(self, *overrides: str) -> Process:
        """Start the run."""
        output = self.folder.path.parent
        given = [*self.settings, f"inference.replicas={self.case.replicas}", *overrides]
        given += [*self.engine(), *self.case.fault.overrides]
        environment = {"OFFBYONE_CACHE": str(output.parent / "cache")}
        environment |= {"REPAIRED": "1"} if self.is_repaired else {}
        self.process = Run(ROOT, "run", given, output, environment).start()
        return self.process

    def engine(self) -> list[str]:
        """Return the overrides that choose the engine."""
        return [f"+inference.args.faults={self.folder.path.parent / 'faults.json'}"]

    def is_at(self, moment: str, step: int) -> bool:
        """Return whether the run is at a moment, after at least `step` steps."""
        doing = {name: status.doing for name, status in read_statuses(self.folder).items()}
        if moment == "start":
            return self.pid("inference") > 0
        if steps_done(read_metrics(self.folder)) < (MAX_STEPS - 1 if moment == "end" else step):
            return False
        trainer = doing.get("trainer.rank0", "")
        return {
            "generation": "in flight" in doing.get("rollouts", ""),
            "push": trainer.startswith("pushing version"),
            "checkpoint": any(self.folder.checkpoints.glob(".step_*.incomplete")),
            "evaluation": trainer.startswith("waiting for the evaluation"),
            "end": True,
        }[moment]

    def pid(self, victim: str) -> int:
        """Return the process id of a process of the run, 0 if it does not run yet."""
        assert self.process
        if victim == "supervisor":
            return self.process.pid
        if victim == "inference":
            name = "inference" if self.case.replicas == 1 else "inference0"
            endpoint = Endpoint.read(self.folder, name)
            return endpoint.pid if endpoint else 0
        if victim == "reaper":
            return next(iter(launching.called(self.process.pid, "reaper.py")), 0)
        status = read_statuses(self.folder).get(victim)
        return status.pid if status else 0

    def inflict(self) -> None:
        """Wait for the moment of the case, and let its fault happen."""
        assert self.process
        case, process, name = self.case, self.process, self.case.fault.victim

        def due() -> bool:
            here = self.is_at(case.moment, case.step) and (not name or self.pid(name) > 0)
            return here or process.poll() is not None

        if not wait_for(due, self.longest_s, every=0.01):  # because some moments are short
            return  # the row then says that the fault did not happen
        victim = self.pid(name) if name else 0
        if name and (process.poll() is not None or victim <= 1):
            return  # the run has ended
        send(victim, case.fault.signals)
        self.happened = bool(name) or process.poll() is None
        self._damage()

    def _damage(self) -> None:
        if self.case.fault.damage == "remove the socket":
            for path in islice(self.folder.private.path.resolve().glob("vllm*.sock"), 1):
                path.unlink(missing_ok=True)
        elif self.case.fault.damage == "fill the disk":
            with suppress(OSError), (self.folder.path / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
        elif self.case.fault.damage == "make checkpoints read-only":
            self.folder.checkpoints.mkdir(exist_ok=True)
            _mount("-o", "bind,ro", self.folder.checkpoints, self.folder.checkpoints)
            _mount("-o", "remount,bind,ro", self.folder.checkpoints)

    def repair(self) -> None:
        """Remove the cause of the fault, as a user would before a resume."""
        self.is_repaired = True
        (self.folder.path / "filler").unlink(missing_ok=True)
        self.folder.path.parent.joinpath("faults.json").write_text("[]")
        if self.case.fault.damage == "make checkpoints read-only":
            subprocess.run(["umount", self.folder.checkpoints], check=False)


class RealRun(ScriptedRun):
    """A run with the real vLLM."""

    settings = (*RUN, "trainer.wait_timeout=500", "inference.startup_timeout=400")
    longest_s, most_mismatch = 1500, whole_runs.MOST_MISMATCH

    def engine(self) -> list[str]:
        real = "inference._target_=rl.inference.server.VLLMServer"
        return [real, "sync.max_mismatch=0.1", "sampler.rollout_timeout=100"]


def run(case: Case, folder: Path, kind: type[ScriptedRun] = ScriptedRun) -> dict[str, object]:
    """Run a case to its end, resume it if it ended early, and return its row of results."""
    began, before, problems = time.monotonic(), _left_in_shared_memory(), list[str]()
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        if case.fault.damage == "fill the disk":
            _mount("-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder)
            stack.callback(subprocess.run, ["umount", folder], check=True)
        one = kind(case, folder)
        outcome = _attempt(one, problems, inflicts=True)
        came = one.happened or not case.fault.victim  # a run may end before a short moment is seen
        if outcome not in case.allowed and (came or outcome != "end"):
            problems.append(f"outcome: {outcome}")
        if outcome != "end":
            one.repair()
            # A run without any finished step starts again, because it has nothing to resume.
            resumed = _attempt(one, problems, *["resume=true"] * one.folder.has_results())
            problems += [f"resumed: {resumed}"] * (resumed != "end")
        problems += _lost(one)
        problems += ["the folder of sockets is left"] * one.folder.private.path.exists()
        if problems:
            shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"), symlinks=True)
    # A process that has just created a semaphore, such as one of another program, maps it soon.
    wait_for(lambda: not _left_in_shared_memory() - before, 10)
    problems += [f"left in shared memory: {n}" for n in sorted(_left_in_shared_memory() - before)]
    row = {"case": case.key, "outcome": outcome, "happened": one.happened, "ok": not problems}
    return row | {"problems": problems, "seconds": round(time.monotonic() - began, 1)}


def send(victim: int, signals: Iterable[float]) -> None:
    """Send signals to a process, and wait for so many seconds where there is a number instead."""
    for each in signals:
        if not isinstance(each, signal.Signals):
            time.sleep(each)
        elif victim > 1:  # kill(0) would signal the group of this program
            with suppress(ProcessLookupError):
                os.kill(victim, each)


def _attempt(one: ScriptedRun, problems: list[str], *more: str, inflicts: bool = False) -> str:
    """Start a run and return its outcome. Add what it leaves, and an unclear end, to `problems`."""
    process, groups = one.start(*more), set[int]()
    with ThreadPoolExecutor(2) as pool:
        end = pool.submit(launching.ended, process, one.folder.path, one.longest_s)
        fault = pool.submit(one.inflict) if inflicts else None
        while not end.done():
            groups |= groups_below(process.pid)
            time.sleep(0.2)
        if fault:
            fault.result()
        try:
            result = end.result()
        except subprocess.TimeoutExpired:
            problems.append(f"the run did not end within {one.longest_s} s")
            result = Result(-signal.SIGKILL, "", one.folder.path)
    if not wait_for(lambda: not alive(groups), 6):
        problems.append(f"left: {alive(groups)}")
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    with (one.folder.path.parent / "screen.txt").open("a") as file:
        file.write(f"--- status {result.status}\n{result.screen}\n")
    if result.status == 0:
        return "end" if one.folder.num_saved_steps() == MAX_STEPS else "stopped"
    if result.status != 1:
        return "stopped"
    message = result.screen.partition("The end of")[0]
    if result.screen.count("the run failed") != 1 or "Traceback" in message:
        problems.append(f"not one message: {result.screen[-1500:]}")
    return "message"


def _lost(one: ScriptedRun) -> list[str]:
    """Return what was lost or trained twice, or has a wrong version."""
    if not steps_done(read_metrics(one.folder)):
        return ["no step was done"]
    try:
        if not one.case.fault.rejects:
            whole_runs.nothing_is_lost_or_trained_twice(one.folder)
        whole_runs.every_token_has_a_version_that_may_be_trained(one.folder, one.most_mismatch)
    except (AssertionError, KeyError, OSError) as error:
        return [f"{type(error).__name__}: {error} ({format_location(error)})"]
    return []


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _left_in_shared_memory() -> set[str]:
    """Return the files in shared memory that no process uses."""
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = maps.read_text().splitlines()
            used |= {line.split()[-1] for line in lines if "/dev/shm" in line}
    return {str(path) for path in Path("/dev/shm").iterdir()} - used
