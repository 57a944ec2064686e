"""An environment that YAML composes from a data set, tools, rewards and shared objects.

    dataset: {_target_: envs.datasets.JsonLines, ...}
    shared: {index: {_target_: my_package.load_index, path: ...}}
    tools: [{_target_: my_package.search}]
    rewards: {correct: {fn: {_target_: envs.rewards.exact_match}, weight: 1.0}}

Every `_target_` is an import path. Your own modules must be in the current folder or on PYTHONPATH.
envs/binding.py passes shared objects to tools and rewards. docs/environments.md has an example.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from envs.binding import Binder, Objects
from envs.datasets import Dataset
from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant
from envs.options import PositiveFloat, PositiveInt
from envs.protocol import Environment
from envs.tools import Function, unwrap


@dataclass(frozen=True, kw_only=True)
class Toolset:
    """A set of tools with their objects. conf/env/composed.yaml explains the fields."""

    tools: Sequence[Function]
    shared: Mapping[str, Any] = field(default_factory=dict)
    per_episode: Mapping[str, Any] = field(default_factory=dict)
    bindings: Mapping[str, str] = field(default_factory=dict)


class Composed(Environment):
    """An environment composed in YAML. conf/env/composed.yaml explains the options."""

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
        max_turns: PositiveInt,
        tool_timeout: PositiveFloat,
        describe_tools: bool,
        max_concurrent: PositiveInt | None,
    ) -> None:
        functions, self.reward_weights = _functions_and_weights(rewards, reward_weights)
        env = Toolset(tools=tools, shared=shared, per_episode=per_episode, bindings=bindings)
        sets = {"env": env, **{f"toolsets.{key}": toolset for key, toolset in toolsets.items()}}
        tools = [tool for toolset in sets.values() for tool in toolset.tools]
        _check_unique_names(sets)
        self._objects = Objects(_merge_field(sets, "shared"), _merge_field(sets, "per_episode"))
        binder = Binder(_merge_field(sets, "bindings"), self._objects)
        self.tools = [binder.tool(tool) for tool in tools]
        named = [(unwrap(tool).__name__, tool) for tool in tools]
        binder.check([*named, *functions.items()])
        super().configure(tool_timeout=tool_timeout, max_concurrent=max_concurrent)
        self.name, self.max_turns = name, max_turns
        self.describe_tools, self._dataset = describe_tools, dataset
        self._rewards = {key: binder.reward(key, reward) for key, reward in functions.items()}
        if (max_turns > 1) != bool(self.toolbox.specs):
            raise ValueError(
                f"max_turns={max_turns} does not suit {len(tools) or 'no'} tools: an episode "
                "continues only after a tool call, so set 1 without tools, or at least 2 with tools"
            )

    def check_machine(self) -> None:
        if isinstance(self._dataset, Dataset):  # a user's own data set may have no `check`
            self._dataset.check()

    def examples(self, split: Split) -> Sequence[Example]:
        """Create the shared objects, so that no episode waits for them. Return the examples."""
        _ = self._objects.shared
        return self._dataset.examples(split, env=self.name)

    async def score(self, episode: Episode) -> dict[str, Any]:
        return {name: await reward(episode) for name, reward in self._rewards.items()}

    def close(self, episode: Episode) -> None:
        self._objects.close(episode)

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield random training prompts, each with its answer.

        Raise ValueError if the environment has tools or the examples have no answers.
        """
        examples = self.examples("train")
        if self.tools or self.holds_conversation or "answer" not in examples[0].info:
            yield from super().demonstrations(rng)
        while True:
            example = examples[rng.randrange(len(examples))]
            answer = example.info["answer"]
            first = answer[0] if isinstance(answer, list | tuple) else answer
            yield [*example.messages, assistant(str(first))]


def _functions_and_weights(
    rewards: Mapping[str, Any], weights: Mapping[str, float]
) -> tuple[dict[str, Function], dict[str, float]]:
    """Return (name -> reward function, name -> weight)."""
    if not rewards:
        raise ValueError("rewards is empty: add one, such as envs.rewards.exact_match")
    functions, own_weights = {}, {}
    for name, entry in rewards.items():
        if isinstance(entry, Mapping):
            if set(entry) != {"fn", "weight"} or not callable(entry["fn"]):
                raise ValueError(
                    f"rewards.{name} has {', '.join(entry) or 'nothing'}: give it a _target_, or "
                    "both `fn` (with a _target_) and `weight`"
                )
            if isinstance(entry["weight"], bool) or not isinstance(entry["weight"], int | float):
                raise ValueError(f"rewards.{name}.weight={entry['weight']}: set it to a number")
            functions[name], own_weights[name] = entry["fn"], float(entry["weight"])
        else:
            functions[name] = entry
    if unknown := set(weights) - set(functions):
        raise ValueError(
            f"reward_weights contains {sorted(unknown)}, which are not in rewards: choose from "
            f"{', '.join(functions)}"
        )
    if both := sorted(own_weights.keys() & weights.keys()):
        raise ValueError(
            f"reward_weights.{both[0]} and rewards.{both[0]}.weight are both set: remove one"
        )
    return functions, {**weights, **own_weights}


def _check_unique_names(sets: Mapping[str, Toolset]) -> None:
    origins: dict[str, str] = {}
    for origin, toolset in sets.items():
        # A binding is never named as an object, because its name contains a dot.
        for name in (*toolset.shared, *toolset.per_episode, *toolset.bindings):
            if name in origins:
                raise ValueError(
                    f"{origins[name]} and {origin} both have the object or binding {name!r}: "
                    "rename or remove one (bindings pass an object to a parameter of another name)"
                )
            origins[name] = origin


def _merge_field(sets: Mapping[str, Toolset], field: str) -> dict[str, Any]:
    return {k: v for toolset in sets.values() for k, v in getattr(toolset, field).items()}
