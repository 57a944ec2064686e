"""The metrics of a batch of rollouts, by their names in metrics.jsonl."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from losses.groups import Source
from rl.evaluation.summary import (
    average,
    mean_rewards,
    rollout_means,
    stop_reason_shares,
    zero_spread,
)
from rl.records import Group, Rollout
from rl.rollouts.compared import compared_columns, spread


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Return the metrics of the batch that step number `step` trains on.

    Most metrics describe only the new rollouts, if there are any. Staleness also includes replayed
    groups, and the `source/` metrics describe all groups by source.
    """
    all_groups, groups = groups, [g for g in groups if not g.rollouts[0].source] or groups
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    credits = [credit for group in groups for credit in group.credits]
    compared = [columns for group in groups if (columns := compared_columns(group)) is not None]
    most_varied = [max(columns, key=spread) for columns in compared]
    means = rollout_means(rollouts)
    if not means["tool_calls"]:  # without tool calls, both tool metrics are 0
        del means["tool_calls"], means["tool_errors"]
    metrics = {
        "train/reward": average(_rewards(rollouts)),
        "train/shaped_reward": average([c.reward for c in credits if c.reward is not None]),
        **{f"rollout/{name}": value for name, value in means.items()},
        "rollout/errors": average([bool(rollout.error) for rollout in rollouts]),
        "rollout/generation_time": average([rollout.generation_time for rollout in rollouts]),
        "rollout/untrained": average([not credit.trains for credit in credits]),
        "rollout/forks": average([max(len(rollout.rows) - 1, 0) for rollout in rollouts]),
        "rollout/retries": average([rollout.retries for rollout in rollouts]),
        "rollout/zero_spread": zero_spread(most_varied),
        "train/tokens": sum(rollout.num_completion for rollout in rollouts),
        **{f"reward/{name}": value for name, value in mean_rewards(rollouts).items()},
        **{f"stop/{reason}": share for reason, share in stop_reason_shares(rollouts).items()},
    }
    if any(rollout.blocked_time for rollout in rollouts):
        metrics["rollout/blocked"] = average([rollout.blocked_time > 0 for rollout in rollouts])
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for group in groups:
        by_env[group.example.env] += group.rollouts
    if len(by_env) > 1:
        for name, played in by_env.items():
            metrics[f"env/{name}/reward"] = average(_rewards(played))
            metrics[f"env/{name}/share"] = len(played) / len(rollouts)
            metrics[f"env/{name}/errors"] = average([bool(r.error) for r in played])
    for role in {rollout.role for rollout in rollouts} - {""}:
        metrics[f"role/{role}/reward"] = average(_rewards(r for r in rollouts if r.role == role))
    if len(groups) < len(all_groups):
        metrics |= _source_metrics(all_groups, step)
    staleness = _token_staleness(all_groups, step)
    if staleness.size:
        metrics |= {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            **{
                f"staleness/share_{s}": float((staleness == s).mean())
                for s in range(int(staleness.max()) + 1)
            },
        }
    return {name: float(value) for name, value in metrics.items()}


def _rewards(rollouts: Iterable[Rollout]) -> list[float]:
    """Return the rewards of the rollouts, without the constant reward of demonstrations."""
    sampled = (rollout for rollout in rollouts if rollout.source != Source.DEMONSTRATION)
    return [rollout.reward for rollout in sampled if rollout.reward is not None]


def _source_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    sources = [group.rollouts[0].source for group in groups]
    metrics = {f"source/{s.name.lower()}/share": sources.count(s) / len(groups) for s in Source}
    if replayed := [group for group in groups if group.suffix]:
        metrics["source/replay/reward"] = average(_rewards(r for g in replayed for r in g.rollouts))
        metrics["source/replay/staleness"] = _token_staleness(replayed, step).mean()
    return metrics


def _token_staleness(groups: Sequence[Group], step: int) -> np.ndarray:
    """Return the staleness [N] of the N sampled tokens of `groups` at `step`."""
    versions = [
        row.token_versions[row.token_versions >= 0]
        for group in groups
        for rollout in group.rollouts
        for row in rollout.rows
    ]
    return step - np.concatenate(versions) if versions else np.empty(0, np.int32)
