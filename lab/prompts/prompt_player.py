"""Samples rollouts with a given system prompt, and appends each rollout to rollouts.jsonl."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.episode import Example, Split
from envs.messages import Message
from envs.protocol import Environment
from rl.evaluation.play import evaluated_line, play
from rl.evaluation.summary import Played
from rl.records import Rollout
from rl.runtime.files import append_line
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog
from rl.terminal.progress import Progress


@dataclass(frozen=True)
class Task:
    """One example, and the split (train or eval) that it belongs to."""

    split: Split
    example: Example


@dataclass(frozen=True)
class Attempt:
    """One rollout of an example with a given system prompt."""

    example: Example
    turns: list[Message]  # the conversation from the policy's first message on
    record: dict[str, Any]  # the rollout's line in rollouts.jsonl

    @property
    def reward(self) -> float | None:
        """The reward; None if the rollout has none, because of an error."""
        return self.record["reward"]


def prompt_fingerprint(prompt: str) -> str:
    """Return a short hash of a prompt, by which result files refer to it."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


@dataclass
class PromptPlayer:
    """The player that samples one rollout per example with a given system prompt.

    Attributes:
        runner: the event loop in which all rollouts of the search run.
        path: rollouts.jsonl. Each rollout is appended when it ends.
        progress: counts all rollouts of the search, including those of earlier starts.
        failures: error text -> number of rollouts without a reward.
    """

    player: Player
    runner: asyncio.Runner
    path: Path
    progress: Progress
    failures: Counter[str] = field(default_factory=Counter)

    def play(self, tasks: Sequence[Task], prompt: str) -> list[Attempt]:
        """Sample one rollout per task with the system prompt `prompt`. Return them in order."""
        envs = [self.player.env.environment_of(task.example) for task in tasks]
        for env in envs:
            env.system_prompt = prompt
        attempts: dict[int, Attempt] = {}
        first = self.progress.done

        async def play_group(index: int, example: Example, group_size: int) -> tuple[Rollout, ...]:
            # `first + index` is the rollout's number in the search, from which its seed is derived.
            rollouts = await self.player.play_group(first + index, example, group_size)
            line = evaluated_line(Played(example, rollouts), rollouts[0])
            key = {"prompt": prompt_fingerprint(prompt), "split": tasks[index].split}
            record = append_line(self.path, {**key, **line})
            num_opening = len(envs[index].opened(example.messages))
            attempts[index] = Attempt(example, record["messages"][num_opening:], record)
            self.progress.advance(1)
            if record["reward"] is None:
                self.failures[record["error"]] += 1
            return rollouts

        async def play_all() -> None:
            most = self.player.sampler.max_concurrent
            with Watchdog(self.progress.console.print) as self.player.watchdog:
                await play(play_group, [task.example for task in tasks], 1, max_concurrent=most)

        self.runner.run(play_all())
        return [attempts[index] for index in range(len(tasks))]


def starting_prompt(env: Environment, examples: Sequence[Example]) -> str:
    """Return the system prompt that all examples have, from which the search starts.

    Raises:
        ValueError: the examples have no system prompt, or different system prompts.
    """
    openings = [env.environment_of(example).opened(example.messages) for example in examples]
    firsts = [messages[0] if messages else {} for messages in openings]
    prompts = {str(m.get("content") or "") if m.get("role") == "system" else "" for m in firsts}
    if prompts == {""} or len(prompts) > 1:
        has = "different system prompts" if len(prompts) > 1 else "no system prompt"
        raise ValueError(
            f"the environment {env.name!r} has {has}, but the search starts from one: set "
            "env.system_prompt='...' or env.system_prompt=<a .txt or .md file>"
        )
    return prompts.pop()
