"""Compare the present code with stored runs: does the default configuration still learn as well?

    python -m lab.report.baseline outputs/sweeps/baseline-... [store] [file=baselines/default.json]

The runs of a sweep and the stored runs are compared like two arms, at the last version at which
both were evaluated, and the same page is written. The exit status is 1 if the present code is
worse. `store` stores the runs instead: their scores by question, some 20 KB.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.report.arms import Arm
from lab.report.command import show
from lab.report.comparison import Comparison, NothingToCompare, compare
from lab.report.curve import Curve
from lab.report.evaluations import Evaluation, Question
from lab.report.run import Run
from lab.report.sources import read_sources
from lab.report.statistics import WORSE
from rl.runtime.commit import REPO

STORED_AT = REPO / "baselines" / "default.json"
TODAY, STORED = "today", "stored"
ALL_EVALUATIONS = 10**6
OK, IS_WORSE, NOT_COMPARED = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Compare or store the runs; return the exit status."""
    console = Console(soft_wrap=True)
    files = [Path(a.removeprefix("file=")) for a in arguments if a.startswith("file=")]
    folders = [Path(a) for a in arguments if a != "store" and not a.startswith("file=")]
    file = files[0] if files else STORED_AT
    if not folders:
        console.print(__doc__ or "", markup=False)
        return NOT_COMPARED
    try:
        if "store" in arguments:
            store(_evaluated_runs(folders), file)
            console.print(f"stored in {file}", markup=False)
            return OK
        comparison = against(_evaluated_runs(folders), *read_stored(file))
    except (NothingToCompare, OSError, ValueError) as error:
        console.print(f"no comparison: {error}", markup=False)
        return NOT_COMPARED
    show(comparison, folders[0] / "baseline.html", console)
    return IS_WORSE if comparison.others[0].decision == WORSE else OK


def _evaluated_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the finished runs of a sweep with all of their evaluations."""
    runs = read_sources(folders, ALL_EVALUATIONS).runs
    finished = [run for run in runs if run.finished and run.evaluations]
    if not finished:
        causes = [run.cause or "it has no evaluation" for run in runs]
        raise NothingToCompare(
            f"no run with an evaluation has finished: {causes[0]}" if causes else "there is no run"
        )
    return finished


def against(today: Sequence[Run], stored: Sequence[Run], origin: str) -> Comparison:
    """Compare runs with the stored ones at the last version that all of them evaluated."""
    runs = [*today, *stored]
    shared = set.intersection(*(set(run.evaluations) for run in runs))
    if not shared - {0}:
        raise NothingToCompare(
            "today's runs and the stored ones were evaluated at no common version but the first: "
            "keep evaluation.every and max_steps, or store the curves again"
        )
    arms = [
        Arm(name, name, tuple(_until(run, max(shared)) for run in members))
        for name, members in ((STORED, stored), (TODAY, today))
    ]
    question = f"Does today's code learn as well as that of {origin}?"
    comparison = compare(arms, baseline=STORED, question=question)
    if not comparison.others or not comparison.questions:
        raise NothingToCompare(
            "the runs have other questions than the stored baseline: store the curves again"
        )
    return comparison


def _until(run: Run, version: int) -> Run:
    """Return the run as if it had ended with this version."""
    kept = {v: evaluation for v, evaluation in run.evaluations.items() if v <= version}
    return replace(run, evaluations=kept, held_out=run.held_out.at(run.held_out.steps <= version))


def store(runs: Sequence[Run], file: Path) -> None:
    """Write the scores of these runs by question and version."""
    questions = sorted(set().union(*(e.scores for run in runs for e in run.evaluations.values())))
    content = {
        "commit": runs[0].commit,
        "day": time.strftime("%Y-%m-%d"),
        "questions": [[q.env, q.example, q.digest, q.text] for q in questions],
        "runs": [_stored(run, questions) for run in runs],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _stored(run: Run, questions: Sequence[Question]) -> dict[str, Any]:
    curve = run.held_out
    return {
        "seed": run.seed,
        "steps": curve.steps.astype(int).tolist(),
        "seconds": curve.seconds.round(1).tolist(),
        "tokens": curve.tokens.astype(int).tolist(),
        "rewards": curve.scores.round(4).tolist(),
        "total_seconds": round(run.seconds, 1),
        "total_tokens": int(run.tokens),
        "scores": {
            str(version): [_rounded(evaluation.scores.get(question)) for question in questions]
            for version, evaluation in run.evaluations.items()
        },
    }


def _rounded(score: float | None) -> float | None:
    return None if score is None or isnan(score) else round(score, 4)


def read_stored(file: Path) -> tuple[list[Run], str]:
    """Return stored runs, with what a comparison needs of them, and their day and commit."""
    if not file.is_file():
        raise NothingToCompare(f"{file} does not exist: `make baseline STORE=store` writes it")
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not {"questions", "runs", "commit", "day"} <= set(content):
        raise NothingToCompare(f"{file} holds no stored curves")
    questions = [Question(*fields) for fields in content["questions"]]
    commit = content["commit"]
    runs = [_as_run(run, questions, commit) for run in content["runs"]]
    return runs, f"{content['day']} ({commit[:10] or 'commit not recorded'})"


def _as_run(run: dict[str, Any], questions: Sequence[Question], commit: str) -> Run:
    evaluations = {}
    for version, scores in run["scores"].items():
        by_question = {
            question: nan if score is None else score
            for question, score in zip(questions, scores, strict=True)
        }
        evaluations[int(version)] = Evaluation(int(version), by_question)
    columns = (np.array(run[name], float) for name in ("steps", "seconds", "tokens", "rewards"))
    last = max(evaluations)
    return Run(
        name=f"stored-s{run['seed']}",
        seed=run["seed"],
        num_steps=last,
        max_steps=last,
        seconds=run["total_seconds"],
        tokens=run["total_tokens"],
        held_out=Curve(*columns),
        evaluations=evaluations,
        commit=commit,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
