"""Check with stored runs whether the default configuration still learns as well as before.

    python -m benchmarks.baseline outputs/sweeps/baseline-... [store]

The runs of a sweep and the stored runs are compared as two arms, at the last policy version that
all runs evaluated. The usual report page is written. The exit status is 1 if the runs of the sweep
are worse. With `store`, the scores of these runs are stored instead.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from envs.user_code import ROOT
from lab.report.arms import Arm
from lab.report.command import show
from lab.report.comparison import Comparison, NothingToCompare, compare
from lab.report.evaluations import Evaluation, Question
from lab.report.run import Curve, Run
from lab.report.sources import read_sources
from lab.report.statistics import WORSE

STORED_AT = ROOT / "baselines" / "default.json"
TODAY, STORED = "today", "stored"
CURVE = ("steps", "seconds", "tokens", "rewards")  # keys of a stored curve
ALL_EVALUATIONS = 10**6
OK, IS_WORSE, NOT_COMPARED = 0, 1, 2


def main(arguments: Sequence[str], file: Path = STORED_AT) -> int:
    """Compare or store the runs of a sweep, and return the exit status."""
    folder = Path(arguments[0])
    try:
        runs = read_sources([folder], ALL_EVALUATIONS).runs
        finished = [run for run in runs if run.finished and run.evaluations]
        if not finished:
            raise NothingToCompare(f"{folder} needs a finished run with evaluation=default")
        if "store" in arguments:
            store(finished, file)
            return OK
        comparison = compare_with_stored(runs, file)
    except (NothingToCompare, OSError) as error:
        print(f"no comparison: {error}")
        return NOT_COMPARED
    show(comparison, folder / "baseline.html")
    return IS_WORSE if comparison.others[0].decision == WORSE else OK


def compare_with_stored(today: Sequence[Run], file: Path) -> Comparison:
    """Compare runs with the stored runs at the last policy version that all runs evaluated."""
    stored = read_stored(file)
    evaluated = [run for run in (*today, *stored) if run.finished and run.evaluations]
    shared = set.intersection(*(set(run.evaluations) for run in evaluated))
    if not (last := max(shared, default=0)):
        raise NothingToCompare(
            "after version 0, no policy version was evaluated in both today's and the stored runs: "
            "use the stored runs' evaluation.every, or store again (`make baseline STORE=store`)"
        )
    arms = []
    for name, runs in ((STORED, stored), (TODAY, today)):
        seen = [{v: one for v, one in run.evaluations.items() if v <= last} for run in runs]
        cut = (replace(run, evaluations=e) for run, e in zip(runs, seen, strict=True))
        arms.append(Arm(name, name, tuple(cut)))
    question = f"Does today's code learn as well as that of commit {stored[0].commit[:10]}?"
    comparison = compare(arms, baseline=STORED, question=question)
    if not comparison.others:
        raise NothingToCompare(
            "the stored baseline has other questions: replace it by `make baseline STORE=store`"
        )
    return comparison


def store(runs: Sequence[Run], file: Path) -> None:
    """Write the scores of these runs to `file`, by question and policy version."""
    questions = sorted(set().union(*(e.scores for run in runs for e in run.evaluations.values())))
    stored = []
    for run in runs:
        columns = {k: x.round(4).tolist() for k, x in zip(CURVE, run.held_out.columns, strict=True)}
        totals = {"total_seconds": run.seconds, "total_tokens": run.tokens}
        scores = {
            v: [e.rewards.get(q, [None]) for q in questions] for v, e in run.evaluations.items()
        }
        stored.append({"seed": run.seed, **columns, **totals, "scores": scores})
    content = {"commit": runs[0].commit, "day": time.strftime("%Y-%m-%d"), "runs": stored}
    content["questions"] = [(q.env, q.example, q.digest) for q in questions]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(msgspec.json.encode(content) + b"\n")


def read_stored(file: Path) -> list[Run]:
    """Return the stored runs with the fields that a comparison needs."""
    if not file.is_file():
        raise NothingToCompare(f"{file} does not exist: `make baseline STORE=store` writes it")
    content = json.loads(file.read_text())
    questions = [Question(*fields[:3]) for fields in content["questions"]]
    runs = []
    for stored in content["runs"]:
        evaluations = {
            int(version): Evaluation(dict(zip(questions, rewards, strict=True)))
            for version, rewards in stored["scores"].items()
        }
        run = Run(
            name=f"stored-s{stored['seed']}",
            seed=stored["seed"],
            num_steps=max(evaluations),
            max_steps=max(evaluations),
            seconds=stored["total_seconds"],
            tokens=stored["total_tokens"],
            held_out=Curve(*(np.array(stored[name], float) for name in CURVE)),
            evaluations=evaluations,
            commit=content["commit"],
        )
        runs.append(run)
    return runs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
