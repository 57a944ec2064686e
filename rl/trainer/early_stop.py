"""Decide after each step whether stop_when ends the run."""

import logging
from collections.abc import Mapping
from typing import Any

from rl.config.schema import Run
from rl.config.signatures import did_you_mean
from rl.learner.ranks import Ranks
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from rl.runtime.stop_when import StopWhen

log = logging.getLogger(__name__)


def warn_of_missing_metric(run: Run, run_folder: RunFolder) -> None:
    """Warn if stop_when names an unknown metric. Do not fail, because a later step may log it."""
    if run.stop_when is None:
        return
    metric = StopWhen.of(run.stop_when).metric
    known = {name for row in read_metrics(run_folder) for name in row}
    if metric not in known:
        hint = did_you_mean(metric, known) or ": choose a name in metrics.jsonl"
        log.warning("stop_when: there is no metric %s yet%s", metric, hint)


def reason_to_end(run: Run, step: int, line: Mapping[str, Any], ranks: Ranks) -> str:
    """Return why stop_when ends the run after this step, or "" if it does not. Collective."""
    if run.stop_when is None or step + 1 == run.max_steps:
        return ""
    is_reached = ranks.any(ranks.first and StopWhen.of(run.stop_when).holds(line))
    return f"stop_when={run.stop_when} is fulfilled" if is_reached else ""
