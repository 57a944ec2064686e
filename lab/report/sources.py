"""Find and read the runs of a report in sweep folders and run folders."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.report.run import Run, read_run
from lab.runs import runs_at
from rl.runtime.sweep_folder import SweepFolder
from rl.runtime.text import printable


@dataclass(frozen=True)
class Sources:
    runs: list[Run]
    question: str  # the question of the first sweep that has a question
    command: str  # the first sweep's latest command, which also resumes the sweep
    baseline: str  # the overrides of the first arm of the first sweep with until=decided, or ""
    smallest_effect: str  # until.smallest_effect of the first sweep that has it, or ""
    notes: list[str]  # unreadable files, folders without runs, a sweep's progress (until=decided)


def read_sources(paths: Sequence[Path], num_judged: int = 1) -> Sources:
    runs: dict[Any, Run] = {}  # key: resolved run folder, or a number if the job has none
    notes: list[str] = []
    texts = dict.fromkeys(("question", "command", "baseline", "smallest_effect", "progress"), "")
    for path in paths:
        sweep, found = SweepFolder(path), runs_at(path)
        if sweep.jobs.is_dir():
            if num_broken := len(list(sweep.jobs.glob("*.json"))) - len(found):
                notes.append(f"Unreadable files in {sweep.jobs}: {num_broken}.")
            info = sweep.read_info()
            texts = {k: text or printable(str(info.get(k) or "")) for k, text in texts.items()}
        elif not found:
            notes.append(f"{path} holds neither a sweep (jobs/) nor a run.")
        for run in found:
            key = run.folder.path.resolve() if run.folder else len(runs)
            trains = not (run.folder and run.folder.evaluated.exists())
            if key not in runs and trains:
                one = read_run(run.folder, run.overrides, run.error, num_judged)
                runs[key] = replace(one, grown=run.grown)
    notes += filter(None, [texts.pop("progress")])
    return Sources(list(runs.values()), notes=notes, **texts)
