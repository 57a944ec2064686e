"""Several environments in one run, each with a weight.

    envs:                                weights: {words: 1, maths: 3}
      words: {_target_: ...}             three groups of four are sums
      maths: {_target_: ...}

An example belongs to one environment, and so does its group: rewards are only ever compared with
those of the same task. Everything but which environment comes next (turns, tools, reward weights,
concurrency) is the environment's own.
"""

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from envs.episode import Example, Split
from envs.messages import Message
from envs.protocol import Environment, Pool
from envs.turn_limits import checked_limits


class Mixture(Environment):
    """Environments by name, drawn by weight. The name is theirs in metrics and rollout files."""

    name = "mixture"

    def __init__(self, *, envs: Mapping[str, Environment], weights: Mapping[str, float]) -> None:
        if not envs:
            raise ValueError("envs is empty: a mixture needs at least one environment")
        if envs.keys() != weights.keys():
            raise ValueError(
                f"weights names {', '.join(weights) or 'nothing'}, but envs has {', '.join(envs)}: "
                "give each environment a weight, and nothing else"
            )
        if bad := {name: weight for name, weight in weights.items() if weight <= 0}:
            raise ValueError(f"weights={bad}: make them positive, or leave these out of envs too")
        if nested := [name for name, env in envs.items() if isinstance(env, Mixture)]:
            raise ValueError(
                f"{' and '.join(nested)} is a mixture itself: list its environments in this one"
            )
        for name, env in envs.items():
            env.name = name
        self._envs, self._weights = dict(envs), dict(weights)
        self.max_turns = max(env.max_turns for env in envs.values())

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] the others are its parts
        self,
        *,
        system_prompt: str | None = None,
        sampling: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Take what its environments have in common, and what one of them has for itself.

        Args:
            system_prompt: of all of them; None: each has its own.
            sampling: by name, what the sampler does otherwise there (envs/turn_limits.py).

        """
        if unknown := set(sampling or {}) - set(self._envs):
            raise ValueError(
                f"sampling names {sorted(unknown)}, but envs has {', '.join(self._envs)}"
            )
        for name, env in self._envs.items():
            if system_prompt is not None:
                env.configure(system_prompt=system_prompt)
            if sampling and name in sampling:
                env.sampling = checked_limits(sampling[name], f"env.sampling.{name}")

    @property
    def has_turns(self) -> bool:
        """Whether one of them has."""
        return any(env.has_turns for env in self._envs.values())

    def check_machine(self) -> None:
        """Let every environment find out."""
        for env in self._envs.values():
            env.check_machine()

    def environment_of(self, example: Example) -> Environment:
        """The environment that the example came from."""
        return self._envs[example.env]

    def pools(self, split: Split) -> list[Pool]:
        """One pool for each environment, in their order.

        Raises:
            ValueError: an environment has no examples, or calls them something else than itself.

        """
        pools = []
        for name, env in self._envs.items():
            examples = env.examples(split)
            if not examples:
                raise ValueError(f"the environment {name!r} of the mixture has no {split} examples")
            if examples[0].env != name:
                raise ValueError(
                    f"examples of the environment {name!r} say env={examples[0].env!r}: "
                    f"{type(env).__name__} must make them with env=self.name"
                )
            pools.append(Pool(self._weights[name], examples))
        return pools

    def examples(self, split: Split) -> list[Example]:
        """All examples of all environments, one environment after the other."""
        return [example for pool in self.pools(split) for example in pool.examples]

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield conversations of the environments' own experts, each as often as its weight says.

        They do not say which tools there are: `environment_of(example).tool_specs` does.
        """
        experts = {name: env.demonstrations(rng) for name, env in self._envs.items()}
        while True:
            (name,) = rng.choices(list(self._weights), list(self._weights.values()))
            yield next(experts[name])
