"""The environment env=verifiers, which plays an environment of the `verifiers` library.

    env.id=owner/name  ->  the installed package  ->  ClassicAdapter | TasksetAdapter
                                                       rows, play, reward weights

The library controls the conversation, and each of its requests is one turn of the policy. Prompts,
tools, stop conditions and rewards come from the library. The run's vLLM samples every token, with
the options of the run's sampler instead of the library's.

For `verifiers` 0.1 (classic API) an environment is a module with `load_environment`. For 0.4
(`verifiers.v1`) it is a taskset. The two versions cannot be installed together.
"""

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs.episode import Episode, Example, Split
from envs.options import NonNegativeInt, PositiveInt
from envs.protocol import Environment, Speak
from envs.verifiers.adapter import Adapter, Row, check_text

_CHECKED_PROMPTS = 64  # number of prompts per split that `check_text` checks
# Name of a reward: the library's total reward minus the weighted sum of all other rewards.
UNLISTED = "unlisted"


@dataclass(kw_only=True, eq=False)
class Verifiers(Environment):
    """An environment of the `verifiers` library. conf/env/verifiers.yaml explains the options."""

    holds_conversation = True

    id: str
    args: dict[str, Any] | None
    num_train: PositiveInt | None
    num_eval: NonNegativeInt
    max_concurrent: PositiveInt | None = field()

    def __post_init__(self) -> None:
        self.name = module_of(self.id).replace("_", "-")
        self.reward_weights = {}  # set by `_rows_by_split`, which loads the environment

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] other options have no effect
        self, *, system_prompt: str | None = None
    ) -> None:
        super().configure(system_prompt=system_prompt)

    def examples(self, split: Split) -> list[Example]:
        """Return all examples of a split. The first call loads the package and its data."""
        rows = self._rows_by_split[split]
        return [
            Example(id=i, env=self.name, messages=list(row.messages), info={"split": split})
            for i, row in enumerate(rows)
        ]

    async def play(self, episode: Episode, speak: Speak) -> None:
        row = self._rows_by_split[episode.example.info["split"]][episode.example.id]
        episode.memory["outcomes"] = await self._adapter.play(row, speak)

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return rewards and metrics by name. Their weighted sum is the library's reward."""
        outcome = episode.memory.get("outcomes", {}).get(episode.role)
        if outcome is None:  # the context was full, so `play` did not finish
            return dict.fromkeys(self.reward_weights, 0.0)
        episode.stop_reason = outcome.stop_reason or episode.stop_reason
        rewards = {**dict.fromkeys(self.reward_weights, 0.0), **outcome.rewards}
        other = outcome.reward - sum(w * rewards[name] for name, w in self.reward_weights.items())
        return {**rewards, UNLISTED: 0.0 if abs(other) < 1e-9 else other}

    @cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self.id, self.args or {})

    @cached_property
    def _rows_by_split(self) -> dict[Split, list[Row]]:
        held_out = self._adapter.rows("eval", self.num_eval)
        reserved = 0 if held_out is not None else self.num_eval
        limit = None if self.num_train is None else self.num_train + reserved
        train = self._adapter.rows("train", limit) or []
        if (num_kept := len(train) - reserved) <= 0:
            raise ValueError(
                f"env.id={self.id} has {len(train)} training examples, and holding out {reserved} "
                "(env.num_eval) leaves none: lower env.num_eval, or choose an environment with "
                "more examples"
            )
        if held_out is None:
            train, held_out = train[:num_kept], train[num_kept:]
        check_text(self.id, (*train[:_CHECKED_PROMPTS], *held_out[:_CHECKED_PROMPTS]))
        self.reward_weights = {**self._adapter.reward_weights, UNLISTED: 1.0}
        if self.max_concurrent is None:
            self.max_concurrent = self._adapter.max_concurrent
        return {"train": train, "eval": held_out}


def module_of(env_id: str) -> str:
    """Return the module name of an environment id `owner/name@version`."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def load_adapter(env_id: str, args: dict[str, Any]) -> Adapter:
    """Load an environment. Raise ValueError if no suitable library or package is installed."""
    if find_spec("verifiers") is None:
        raise ValueError(
            f"env.id={env_id} needs the library verifiers, which is not installed: run "
            "`make verifiers`, then set PYTHONPATH=.venv/verifiers-v1 before the command"
        )
    module = module_of(env_id)
    classic = find_spec("verifiers.envs") is not None
    spec = find_spec(module) or (not classic and find_spec(f"verifiers.v1.tasksets.{module}"))
    if not spec:
        raise ValueError(
            f"env.id={env_id}: the module {module} is not installed: install its package"
        )
    # Read the source as text, because importing an environment of the other API would fail.
    source = Path(spec.origin).read_text() if spec.origin else ""
    if ("load_environment" if classic else "__all__") not in source:
        written_for = "tasksets of verifiers>=0.4" if classic else "classic API, verifiers==0.1.14"
        raise ValueError(
            f"env.id={env_id} is written for the {written_for}, but verifiers "
            f"{version('verifiers')} is installed: run `make verifiers`, then set "
            f"PYTHONPATH=.venv/verifiers-{'v1' if classic else 'classic'} before the command"
        )
    if classic:
        from envs.verifiers.classic import ClassicAdapter

        return ClassicAdapter(module, args)
    from envs.verifiers.v1 import TasksetAdapter

    return TasksetAdapter(module, args)
