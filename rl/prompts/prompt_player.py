"""Plays examples under a system prompt, and remembers what came of it."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envs.episode import Example, Split
from envs.messages import Message
from envs.protocol import Environment
from rl.evaluation.play import evaluated_line, play
from rl.evaluation.summary import Played
from rl.prompts.journal import Journal, Record
from rl.records import Rollout
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog

QUESTION = ("prompt", "split", "env", "example")  # what a rollout answers


@dataclass(frozen=True)
class Task:
    """One example, and the split that it is of."""

    split: Split
    example: Example


@dataclass(frozen=True)
class Attempt:
    """One example, and what the policy made of it under a prompt."""

    example: Example
    num_opening: int  # messages before the policy's first
    record: Record  # as in rollouts.jsonl

    @property
    def reward(self) -> float | None:
        """None: it could not be scored."""
        return self.record["reward"]


def digest(prompt: str) -> str:
    """Return what tells a prompt from any other, in a few characters."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]


def is_unscored(record: Record) -> bool:
    """Whether a rollout says nothing about its prompt: the environment or the server failed."""
    return record["reward"] is None


@dataclass
class PromptPlayer:
    """One rollout an example, out of the journal where it was played before.

    Attributes:
        runner: of the loop that everything of this search runs in.
        told: called with each rollout, played or remembered.

    """

    player: Player
    runner: asyncio.Runner
    journal: Journal
    say: Callable[[str], None]
    told: Callable[[Record], None]
    _count: int = field(default=0, init=False)  # rollouts asked for so far

    def play(self, tasks: Sequence[Task], prompt: str) -> list[Attempt]:
        """Return an attempt at each example, in order."""
        for task in tasks:
            self._env_of(task.example).system_prompt = prompt
        questions = [_question(task, prompt) for task in tasks]
        records = [self.journal.take(question) for question in questions]
        for record in filter(None, records):
            self.told(record)
        missing = [i for i, record in enumerate(records) if record is None]
        asked = [(self._count + i, tasks[i], questions[i]) for i in missing]
        for i, record in zip(missing, self._played(asked), strict=True):
            records[i] = record
        self._count += len(tasks)
        return [
            Attempt(task.example, len(self._opened(task.example)), record)
            for task, record in zip(tasks, records, strict=True)
            if record is not None
        ]

    def _played(self, asked: list[tuple[int, Task, Record]]) -> list[Record]:
        """Play what nobody played yet; the number of each is what its seed comes from."""
        records: dict[int, Record] = {}

        async def play_group(position: int, example: Example, size: int) -> tuple[Rollout, ...]:
            number, _, question = asked[position]
            rollouts = await self.player.play_group(number, example, size)
            line = evaluated_line(Played(example, rollouts), rollouts[0])
            records[position] = self.journal.add({**question, **line})
            self.told(records[position])
            return rollouts

        async def all_of_them() -> None:
            most = self.player.sampler.max_concurrent
            with Watchdog(self.say) as self.player.watchdog:
                await play(play_group, [t.example for _, t, _ in asked], 1, max_concurrent=most)

        if asked:
            self.runner.run(all_of_them())
        return [records[i] for i in range(len(asked))]

    def _opened(self, example: Example) -> list[Message]:
        return self._env_of(example).opened(example.messages)

    def _env_of(self, example: Example) -> Environment:
        return self.player.env.environment_of(example)


def _question(task: Task, prompt: str) -> Record:
    example = task.example
    values = (digest(prompt), task.split, example.env, example.id)
    return dict(zip(QUESTION, values, strict=True))


def starting_prompt(env: Environment, examples: Sequence[Example]) -> str:
    """Return the system prompt that all examples begin with.

    Raises:
        ValueError: they have none, or different ones.

    """
    openings = [env.environment_of(example).opened(example.messages) for example in examples]
    firsts = [messages[0] if messages else {} for messages in openings]
    prompts = {str(m.get("content") or "") if m.get("role") == "system" else "" for m in firsts}
    if prompts == {""}:
        raise ValueError(
            f"the environment {env.name!r} has no system prompt, so there is none to improve: say "
            "what to begin with, env.system_prompt='...' or env.system_prompt=<a .txt or .md file>"
        )
    if len(prompts) > 1:
        raise ValueError(
            f"the examples of {env.name!r} have {len(prompts)} different system prompts, and one "
            "for all of them is looked for: say what to begin with, env.system_prompt='...'"
        )
    return prompts.pop()
