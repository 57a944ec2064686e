"""The files, the table and the settings of evaluations, as stored files."""

import json
from io import StringIO
from math import nan

import numpy as np
from rich.console import Console

from envs.episode import StopReason
from envs.messages import assistant
from lab.evaluation.standalone import write_files
from lab.evaluation.table import result_lines
from rl.evaluation.summary import summarise
from rl.records import TrainingRow
from rl.runtime.folder import RunFolder
from tests.lab.evaluation.test_standalone import played, rollout
from tests.support.golden import golden


def row(length):
    ints, mask = np.arange(length, dtype=np.int32), np.arange(length) > 2
    return TrainingRow(ints, mask, np.zeros(length, np.float32), ints * 0, ints * 0)


def shown(summary, threshold):
    console = Console(file=StringIO(), width=110)
    console.print(result_lines(summary, threshold, "outputs/x"))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_summary_the_table_and_the_files(tmp_path):
    """All numbers of a mixture with tools, truncation, errors and NaN, and its files."""
    tools = {"rewards": {"exact": 1.0, "f1": 0.5}, "turns": 3, "tool_calls": 4, "tool_errors": 1}
    cut = {"stop_reason": StopReason.MAX_TOKENS, "rewards": {"exact": 0.0, "f1": nan}}
    broken = {"error": "the tool broke " * 20, "stop_reason": StopReason.ENV_ERROR}
    one = [
        rollout(0.75, assistant("a"), rows=(row(9), row(2000)), **tools),
        rollout(0.25, assistant("b"), rows=(row(30),), **cut),
        *(rollout(None, assistant(""), **broken) for _ in range(2)),
    ]
    two = [rollout(1.0, assistant("c"), rows=(row(5),)), rollout(0.5, rows=(row(7),), turns=2)]
    errors = [rollout(None, error=f"error {number}", retries=2) for number in range(6)]
    some = [played(*one, env="wiki", answer="x" * 600), played(*two, env="wiki", answer=["y", 2])]
    some += [played(*two, *two, env="maths", level=3), played(*two[:1], *errors, env="maths")]
    summary = summarise(some, 0.5)
    write_files(RunFolder(tmp_path), some, summary, "my/model · python evaluate.py")
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    tables = [shown(summarise(some[2:3], threshold), threshold) for threshold in (1.0, 2.0)]
    found = [shown(summary, 0.5), *tables, json.loads((tmp_path / "summary.json").read_text())]
    golden("evaluation/results", [*found, lines[:2], lines[4:7:2], summary.metrics()])
