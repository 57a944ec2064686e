"""Decide after each step whether stop_when ends the run."""

from collections.abc import Mapping
from typing import Any

from rl.config.schema import Run
from rl.config.signatures import did_you_mean
from rl.learner.ranks import Ranks
from rl.runtime.failure import RunFailed
from rl.runtime.stop_when import StopWhen


def reason_to_end(run: Run, step: int, line: Mapping[str, Any], ranks: Ranks) -> str:
    """Return why stop_when ends the run after this step, "" if it does not. Collective.

    Raise RunFailed if the first line of metrics lacks the metric, because it may be misspelt.
    """
    if run.stop_when is None or step + 1 == run.max_steps:
        return ""
    condition = StopWhen.of(run.stop_when)
    if step == 0 and ranks.first and condition.metric not in line:
        hint = did_you_mean(condition.metric, line) or ": metrics.jsonl has all names"
        raise RunFailed(f"stop_when: there is no metric {condition.metric}{hint}")
    is_reached = ranks.any(ranks.first and condition.holds(line))
    return f"stop_when={run.stop_when} is fulfilled" if is_reached else ""
