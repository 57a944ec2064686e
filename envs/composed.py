"""An environment made of configuration alone: a data set, tools, rewards, and how it is played.

    dataset: {_target_: envs.datasets.JsonLines, ...}
    shared: {index: {_target_: my_package.load_index, path: ...}}
    tools: [{_target_: my_package.search}]
    rewards: {correct: {_target_: envs.rewards.exact_match}}

Every part is an import path: ours, or a module of yours in the folder you start from or on
PYTHONPATH. `shared` holds what tools and rewards have in common, made once: a parameter of that
name gets it (envs/binding.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from random import Random
from typing import Any

from envs.binding import bound_reward, bound_tool, supplied
from envs.datasets import Dataset
from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant
from envs.protocol import Environment
from envs.tools import EPISODE, Function


class Composed(Environment):
    """Parts, put together. conf/env/composed.yaml explains the knobs."""

    def __init__(
        self,
        *,
        name: str,
        dataset: Dataset,
        shared: Mapping[str, Any],
        tools: Sequence[Function],
        rewards: Mapping[str, Function],
        reward_weights: Mapping[str, float],
        max_turns: int,
        tool_timeout: float,
        describe_tools: bool,
        max_concurrent: int | None,
    ) -> None:
        if not rewards:
            raise ValueError("rewards is empty: name at least one function")
        if unknown := set(reward_weights) - set(rewards):
            raise ValueError(
                f"reward_weights names {sorted(unknown)}, which rewards does not have: use "
                f"{' or '.join(rewards)}"
            )
        taken = {parameter for part in (*tools, *rewards.values()) for parameter in supplied(part)}
        if useless := set(shared) - taken | set(shared) & {EPISODE}:
            raise ValueError(
                f"shared names {sorted(useless)}, which no tool and no reward takes: give one a "
                "parameter of that name, before any *"
            )
        self.name, self.max_turns, self.reward_weights = name, max_turns, dict(reward_weights)
        self.tool_timeout, self.describe_tools = tool_timeout, describe_tools
        self.max_concurrent = max_concurrent
        self._dataset, self._shared = dataset, dict(shared)

        def objects() -> Mapping[str, Any]:
            return self._objects  # made when they are first wanted

        self.tools = [bound_tool(tool, shared, objects) for tool in tools]
        self._rewards = {
            key: bound_reward(key, reward, shared, objects) for key, reward in rewards.items()
        }
        if (max_turns > 1) != bool(self.toolbox.specs):
            raise ValueError(
                f"max_turns={max_turns} with {len(tools) or 'no'} tools: an episode goes on only "
                "where a tool answers, so use 1 without tools and at least 2 with them"
            )

    def examples(self, split: Split) -> Sequence[Example]:
        """The rows of the data set. What is shared is made first: playing must not wait for it."""
        _ = self._objects
        return self._dataset.examples(split, env=self.name)

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return every reward, one after the other."""
        return {name: float(await reward(episode)) for name, reward in self._rewards.items()}

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield the answers of the training rows as turns, where there is one and no tool."""
        examples = self.examples("train")
        if self.tools or "answer" not in examples[0].info:
            return super().demonstrations(rng)
        return self._answered(examples, rng)

    def _answered(self, examples: Sequence[Example], rng: Random) -> Iterator[list[Message]]:
        while True:
            example = examples[rng.randrange(len(examples))]
            answer = example.info["answer"]
            first = answer[0] if isinstance(answer, list | tuple) else answer
            yield [*example.messages, assistant(str(first))]

    @cached_property
    def _objects(self) -> dict[str, Any]:
        return {
            name: value() if isinstance(value, partial) else value  # a function: called once
            for name, value in self._shared.items()
        }
