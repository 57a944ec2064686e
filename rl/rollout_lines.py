"""Rollouts as lines of JSON: what a person or a program reads after the run."""

from rl.records import Credit, Group, Rollout
from rl.verdict import Played


def trained_line(group: Group, rollout: Rollout, credit: Credit, used: bool) -> dict[str, object]:
    """Return a rollout of a training batch, with what it was worth; `used`: not rejected."""
    versions = [row.token_versions[row.completion_mask] for row in rollout.sequences]
    return {
        "group": group.index,
        "example": group.example.id,
        "env": group.example.env,
        "messages": rollout.messages,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "shaped_reward": credit.reward,
        "advantage": credit.advantage,
        "stop_reason": rollout.stop_reason,
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "tokens": sum(len(v) for v in versions),
        "versions": sorted({int(v) for row in versions for v in row}),
        "used": used and credit.trains,
        "error": rollout.error,
    }


def evaluated_line(played: Played, rollout: Rollout) -> dict[str, object]:
    """Return a rollout of an evaluation."""
    return {
        "example": played.example.id,
        "env": played.example.env,
        "messages": rollout.messages,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        "stop_reason": rollout.stop_reason,
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "tool_errors": rollout.tool_errors,
        "tokens": rollout.num_completion,
        "generation_time": rollout.generation_time,
        "error": rollout.error,
    }
