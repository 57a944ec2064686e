"""What a batch of rollouts looks like in numbers. Names are the ones in metrics.jsonl."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from rl.records import Group, Rollout

_SPREAD = 1e-6


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Return the metrics of the batch that `step` trains; lengths are completion tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    credits = [credit for group in groups for credit in group.credits]
    scored = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [sum(row.num_completion for row in rollout.sequences) for rollout in rollouts]
    stops = Counter(rollout.stop_reason for rollout in rollouts)
    named: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            named[name].append(value)
    metrics = {
        "train/reward": _mean(scored),
        "train/shaped_reward": _mean([c.reward for c in credits if c.reward is not None]),
        "rollout/mean_length": _mean(lengths),
        "rollout/max_length": max(lengths, default=0),
        "rollout/turns": _mean([rollout.turns for rollout in rollouts]),
        "rollout/generation_time": _mean([rollout.generation_time for rollout in rollouts]),
        "rollout/truncated": _mean([rollout.stop_reason.truncated for rollout in rollouts]),
        "rollout/untrained": _mean([not credit.trains for credit in credits]),
        "rollout/errors": _mean([rollout.reward is None for rollout in rollouts]),
        "rollout/forks": _mean([max(len(rollout.sequences) - 1, 0) for rollout in rollouts]),
        "rollout/retries": _mean([rollout.retries for rollout in rollouts]),
        "rollout/zero_spread": _mean([_spread(group) <= _SPREAD for group in groups]),
        "train/tokens": sum(lengths),
        **{f"reward/{name}": _mean(values) for name, values in named.items()},
        **{f"stop/{reason}": count / len(rollouts) for reason, count in stops.items()},
    }
    if any(rollout.tool_calls for rollout in rollouts):
        metrics |= {
            "rollout/tool_calls": _mean([rollout.tool_calls for rollout in rollouts]),
            "rollout/tool_errors": _mean([rollout.tool_errors for rollout in rollouts]),
        }
    if any(rollout.blocked_time for rollout in rollouts):
        metrics["rollout/blocked"] = _mean([rollout.blocked_time > 0 for rollout in rollouts])
    by_env: dict[str, list[Rollout]] = defaultdict(list)
    for group in groups:
        by_env[group.example.env] += group.rollouts
    if len(by_env) > 1:
        for name, played in by_env.items():
            rewards = [rollout.reward for rollout in played if rollout.reward is not None]
            metrics[f"env/{name}/reward"] = _mean(rewards)
            metrics[f"env/{name}/share"] = len(played) / len(rollouts)
            metrics[f"env/{name}/errors"] = 1 - len(rewards) / len(played)
    behind = _staleness(groups, step)
    if behind.size:
        metrics |= {
            "staleness/mean": float(behind.mean()),
            "staleness/max": int(behind.max()),
            **{
                f"staleness/share_{s}": float((behind == s).mean())
                for s in range(int(behind.max()) + 1)
            },
        }
    return {name: float(value) for name, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _spread(group: Group) -> float:
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _staleness(groups: Sequence[Group], step: int) -> np.ndarray:
    """Versions that each sampled token lies behind the policy that trains it. [tokens]"""
    versions = [
        row.token_versions[row.token_versions >= 0]
        for group in groups
        for rollout in group.rollouts
        for row in rollout.sequences
    ]
    return step - np.concatenate(versions) if versions else np.empty(0, np.int32)
