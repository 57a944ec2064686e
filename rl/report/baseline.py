"""Today's code against stored curves: does the default configuration still learn as well?

    python -m rl.report.baseline outputs/sweeps/baseline-... [store] [file=baselines/default.json]

Compares the runs of a sweep with the stored ones like two arms, at the last version that both were
evaluated at, and writes the same page. Exit status 1 where today's code is worse. `store` keeps the
runs instead: their scores by question, some 20 KB.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rl.report.arms import Arm
from rl.report.comparison import Comparison, NothingToCompare, compare
from rl.report.conclude import show
from rl.report.curve import Curve
from rl.report.evaluations import Evaluation, Question
from rl.report.evidence import FINISHED, KEPT, Evidence, evidence_of
from rl.report.run_sources import read_sources
from rl.report.statistics import WORSE
from rl.run.commit import REPO

STORED_AT = REPO / "baselines" / "default.json"
TODAY, STORED = "today", "stored"
ALL_EVALUATIONS = 10**6
OK, IS_WORSE, NOT_COMPARED = 0, 1, 2


@dataclass(frozen=True)
class StoredCurves:
    """What a file of stored curves holds."""

    runs: list[Evidence]
    origin: str  # commit and day


def main(arguments: Sequence[str]) -> int:
    """Compare or store, as the arguments say; the exit status."""
    console = Console(soft_wrap=True)
    files = [Path(a.removeprefix("file=")) for a in arguments if a.startswith("file=")]
    folders = [Path(a) for a in arguments if a != "store" and not a.startswith("file=")]
    file = files[0] if files else STORED_AT
    if not folders:
        console.print(__doc__ or "", markup=False)
        return NOT_COMPARED
    try:
        if "store" in arguments:
            store(_today(folders), file)
            console.print(f"stored in {file}", markup=False)
            return OK
        comparison = against(_today(folders), read_stored(file))
    except (NothingToCompare, OSError, ValueError) as error:
        console.print(f"no comparison: {error}", markup=False)
        return NOT_COMPARED
    show(comparison, folders[0] / "baseline.html", console)
    return IS_WORSE if comparison.others[0].verdict == WORSE else OK


def _today(folders: Sequence[Path]) -> list[Evidence]:
    """The runs of a sweep with all of their evaluations."""
    runs = [evidence_of(run, ALL_EVALUATIONS) for run in read_sources(folders).runs]
    finished = [run for run in runs if run.finished and run.evaluations]
    if not finished:
        causes = [run.cause or "it has no evaluation" for run in runs]
        raise NothingToCompare(
            f"no run with an evaluation has finished: {causes[0]}" if causes else "there is no run"
        )
    return finished


def against(today: Sequence[Evidence], stored: StoredCurves) -> Comparison:
    """Today's runs compared with the stored ones at the last version that all of them have."""
    runs = [*today, *stored.runs]
    shared = set.intersection(*(set(run.evaluations) for run in runs))
    if not shared - {0}:
        raise NothingToCompare(
            "today's runs and the stored ones were evaluated at no common version but the first: "
            "keep evaluation.every and max_steps, or store the curves anew"
        )
    arms = [
        Arm(name, name, tuple(_until(run, max(shared)) for run in members))
        for name, members in ((STORED, stored.runs), (TODAY, today))
    ]
    question = f"Does today's code learn as well as that of {stored.origin}?"
    comparison = compare(arms, baseline=STORED, question=question)
    if not comparison.others or not comparison.questions:
        raise NothingToCompare("today's runs were asked other questions: store the curves anew")
    return comparison


def _until(run: Evidence, version: int) -> Evidence:
    """The run as if it had ended with this version."""
    kept = {v: evaluation for v, evaluation in run.evaluations.items() if v <= version}
    until = run.held_out.steps <= version
    return replace(run, evaluations=kept, held_out=run.held_out.at(until))


def store(runs: Sequence[Evidence], file: Path) -> None:
    """Write the scores of these runs, by question and version."""
    questions = sorted(set().union(*(e.scores for run in runs for e in run.evaluations.values())))
    content = {
        "commit": runs[0].commit,
        "day": time.strftime("%Y-%m-%d"),
        "questions": [[q.env, q.example, q.digest, q.text] for q in questions],
        "runs": [_stored(run, questions) for run in runs],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _stored(run: Evidence, questions: Sequence[Question]) -> dict[str, Any]:
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
    return None if score is None or np.isnan(score) else round(score, 4)


def read_stored(file: Path) -> StoredCurves:
    """The stored runs, as far as a comparison needs them."""
    if not file.is_file():
        raise NothingToCompare(f"{file} does not exist: `make baseline STORE=store` writes it")
    content = json.loads(file.read_text())
    if not isinstance(content, dict) or not {"questions", "runs", "commit", "day"} <= set(content):
        raise NothingToCompare(f"{file} holds no stored curves")
    questions = [Question(*fields) for fields in content["questions"]]
    commit = content["commit"]
    runs = [_as_evidence(run, questions, commit) for run in content["runs"]]
    return StoredCurves(runs, f"{content['day']} ({commit[:10] or 'commit not recorded'})")


def _as_evidence(run: dict[str, Any], questions: Sequence[Question], commit: str) -> Evidence:
    evaluations = {}
    for version, scores in run["scores"].items():
        known = {
            question: float("nan") if score is None else score
            for question, score in zip(questions, scores, strict=True)
        }
        evaluations[int(version)] = Evaluation(int(version), known, 0, 0, "")
    columns = (np.array(run[name], float) for name in ("steps", "seconds", "tokens", "rewards"))
    nothing = np.array([], float)
    last = max(evaluations)
    return Evidence(
        name=f"stored-s{run['seed']}",
        folder=None,
        overrides=(),
        config=None,
        seed=run["seed"],
        status=FINISHED,
        cause="",
        last_log_line="",
        num_steps=last,
        max_steps=last,
        columns=dict.fromkeys(KEPT, nothing),
        activities={},
        seconds=run["total_seconds"],
        tokens=run["total_tokens"],
        held_out=Curve(*columns),
        training=Curve(nothing, nothing, nothing, nothing),
        evaluations=evaluations,
        commit=commit,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
