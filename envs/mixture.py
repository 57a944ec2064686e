"""An environment that mixes several environments in one run, each with a weight.

    envs:                                weights: {words: 1, maths: 3}
      words: {_target_: ...}             three of four groups are from maths, on average
      maths: {_target_: ...}

All rollouts of a group belong to one environment, so no group compares rewards of different
environments. Each environment keeps its own max_turns, tools, reward weights and max_concurrent.
"""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from envs.episode import Example, Split
from envs.messages import Message
from envs.options import PositiveFloat, parse_limits
from envs.protocol import Environment, Pool


class Mixture(Environment):
    """A mixture of environments. Each key of `envs` becomes the environment's name in metrics."""

    name = "mixture"

    def __init__(
        self, *, envs: Mapping[str, Environment], weights: Mapping[str, PositiveFloat]
    ) -> None:
        if not envs:
            raise ValueError("envs is empty: add at least one environment")
        if envs.keys() != weights.keys():
            raise ValueError(
                f"weights has {', '.join(weights) or 'nothing'}, but envs has {', '.join(envs)}: "
                "set one weight for each environment"
            )
        if nested := [name for name, env in envs.items() if isinstance(env, Mixture)]:
            raise ValueError(
                f"a mixture cannot contain another mixture (envs.{' and envs.'.join(nested)}): "
                "list the environments of the inner mixture in envs"
            )
        for name, env in envs.items():
            env.name = name
        self._envs, self._weights = dict(envs), dict(weights)
        self.max_turns = max(env.max_turns for env in envs.values())

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] other options belong to envs
        self,
        *,
        system_prompt: str | None = None,
        sampling: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Set one system prompt for all environments, and sampler options per environment."""
        if unknown := set(sampling or {}) - set(self._envs):
            raise ValueError(
                f"sampling contains {sorted(unknown)}: choose from {', '.join(self._envs)}"
            )
        for name, env in self._envs.items():
            if system_prompt is not None:
                env.configure(system_prompt=system_prompt)
            if sampling and name in sampling:
                env.sampling = parse_limits(sampling[name], f"env.sampling.{name}")

    @property
    def scores_groups(self) -> bool:
        return any(env.scores_groups for env in self._envs.values())

    @property
    def is_multi_turn(self) -> bool:
        return any(env.is_multi_turn for env in self._envs.values())

    def check_machine(self) -> None:
        for env in self._envs.values():
            env.check_machine()

    def state(self) -> dict[str, Any]:
        return {name: env.state() for name, env in self._envs.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, env in self._envs.items():
            env.load(state.get(name, {}))

    def begin_version(self, version: int) -> None:
        for env in self._envs.values():
            env.begin_version(version)

    def environment_of(self, example: Example) -> Environment:
        return self._envs[example.env]

    def pools(self, split: Split) -> list[Pool]:
        """Return one pool per environment, in the order of `envs`."""
        pools = []
        for name, env in self._envs.items():
            examples = env.examples(split)
            if not examples:
                raise ValueError(f"envs.{name} has no {split} examples: add some, or remove it")
            if examples[0].env != name:
                raise ValueError(
                    f"the examples of the environment {name!r} have env={examples[0].env!r}: let "
                    f"{type(env).__name__}.examples() create them with env=self.name"
                )
            pools.append(Pool(self._weights[name], examples))
        return pools

    def examples(self, split: Split) -> list[Example]:
        return [example for pool in self.pools(split) for example in pool.examples]

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        experts = {name: env.demonstrations(rng) for name, env in self._envs.items()}
        while True:
            (name,) = rng.choices(list(self._weights), list(self._weights.values()))
            yield next(experts[name])
