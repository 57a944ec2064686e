"""An environment made of configuration alone: a data set, tools, rewards, and how it is played.

    dataset: {_target_: envs.datasets.JsonLines, ...}
    shared: {index: {_target_: my_package.load_index, path: ...}}
    tools: [{_target_: my_package.search}]
    rewards: {correct: {fn: {_target_: envs.rewards.exact_match}, weight: 1.0}}

Every part is an import path: ours, or a module of yours in the folder you start from or on
PYTHONPATH. Objects that tools and rewards have in common are made once a run (`shared`) or once an
episode (`per_episode`), and go to the parameters of their names, or where `bindings` says
(envs/objects.py, envs/binding.py). Tools may come in named sets (envs/toolset.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from envs.binding import bindings_of, bound_reward, bound_tool, check_bindings
from envs.datasets import Dataset
from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant
from envs.objects import Objects
from envs.protocol import Environment
from envs.tools import EPISODE, Function, unwrapped
from envs.toolset import Toolset, joined


class Composed(Environment):
    """Parts, put together. conf/env/composed.yaml explains the knobs."""

    def __init__(
        self,
        *,
        name: str,
        dataset: Dataset,
        shared: Mapping[str, Any],
        per_episode: Mapping[str, Any],
        bindings: Mapping[str, str],
        tools: Sequence[Function],
        toolsets: Mapping[str, Toolset],
        rewards: Mapping[str, Any],
        reward_weights: Mapping[str, float],
        max_turns: int,
        tool_timeout: float,
        describe_tools: bool,
        max_concurrent: int | None,
    ) -> None:
        functions, self.reward_weights = _rewards(rewards, reward_weights)
        env = Toolset(tools=tools, shared=shared, per_episode=per_episode, bindings=bindings)
        sets = {"env": env, **{f"toolsets.{key}": part for key, part in toolsets.items()}}
        self._objects = Objects(
            joined(((k, part.shared) for k, part in sets.items()), "an object"),
            joined(((k, part.per_episode) for k, part in sets.items()), "an object"),
        )
        whole = joined(((k, part.bindings) for k, part in sets.items()), "a binding of")
        tools = [tool for part in sets.values() for tool in part.tools]
        _check_objects(tools, functions, whole, self._objects)
        self.name, self.max_turns = name, max_turns
        self.tool_timeout, self.describe_tools = tool_timeout, describe_tools
        self.max_concurrent, self._dataset = max_concurrent, dataset
        self.tools = [bound_tool(tool, whole, self._objects) for tool in tools]
        self._rewards = {
            key: bound_reward(key, reward, whole, self._objects)
            for key, reward in functions.items()
        }
        if (max_turns > 1) != bool(self.toolbox.specs):
            raise ValueError(
                f"max_turns={max_turns} with {len(tools) or 'no'} tools: an episode goes on only "
                "where a tool answers, so use 1 without tools and at least 2 with them"
            )

    def examples(self, split: Split) -> Sequence[Example]:
        """The rows of the data set. What is shared is made first: playing must not wait for it."""
        self._objects.make()
        return self._dataset.examples(split, env=self.name)

    async def score(self, episode: Episode) -> dict[str, Any]:
        """Return every reward, one after the other."""
        return {name: await reward(episode) for name, reward in self._rewards.items()}

    def close(self, episode: Episode) -> None:
        """Close the episode's own objects."""
        self._objects.close(episode)

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


def _rewards(
    given: Mapping[str, Any], weights: Mapping[str, float]
) -> tuple[dict[str, Function], dict[str, float]]:
    """Return function and weight of each reward, wherever the weight stands."""
    if not given:
        raise ValueError("rewards is empty: name at least one function")
    functions, own = {}, {}
    for name, entry in given.items():
        if isinstance(entry, Mapping):
            if set(entry) != {"fn", "weight"} or not callable(entry["fn"]):
                raise ValueError(
                    f"rewards.{name} has {', '.join(entry) or 'nothing'}: give it a _target_, or "
                    "fn (with a _target_) and weight"
                )
            if isinstance(entry["weight"], bool) or not isinstance(entry["weight"], int | float):
                raise ValueError(f"rewards.{name}.weight={entry['weight']}: a number")
            functions[name], own[name] = entry["fn"], float(entry["weight"])
        else:
            functions[name] = entry
    if unknown := set(weights) - set(functions):
        raise ValueError(
            f"reward_weights names {sorted(unknown)}, which rewards does not have: use "
            f"{' or '.join(functions)}"
        )
    if twice := sorted(own.keys() & weights.keys()):
        raise ValueError(
            f"reward_weights.{twice[0]} and rewards.{twice[0]}.weight: give it one weight"
        )
    return functions, {**weights, **own}


def _check_objects(
    tools: Sequence[Function],
    rewards: Mapping[str, Function],
    bindings: Mapping[str, str],
    objects: Objects,
) -> None:
    """Raise ValueError where a binding is wrong, or nobody takes an object."""
    named = [(getattr(unwrapped(tool), "__name__", ""), tool) for tool in tools]
    named += rewards.items()
    check_bindings(bindings, named, objects)
    taken = {
        value
        for name, part in named
        for value in bindings_of(name, part, bindings, objects).values()
    }
    if useless := set(objects.names) - taken | set(objects.names) & {EPISODE}:
        raise ValueError(
            f"shared names {sorted(useless)}, which no tool and no reward takes: give one a "
            "parameter of that name, before any *, or a binding"
        )
