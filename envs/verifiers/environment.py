"""Environments of the `verifiers` library as an `Environment` of this project.

    env.id=owner/name  ->  the installed package  ->  ClassicAdapter | TasksetAdapter
                                                       rows, play, reward weights

The library conducts the conversation as with any chat endpoint. Each request of the library is one
turn of the policy (`Environment.play`). So prompts, tools, stop conditions and rewards come from
the library, and the run's vLLM samples every token. The run's sampler replaces the library's
sampling settings.

`verifiers` 0.1 has the classic API (a module with `load_environment`). `verifiers` 0.4 has tasksets
(`verifiers.v1`). The two versions cannot be installed together.
"""

from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs.episode import Episode, Example, Split
from envs.options import check_at_least
from envs.protocol import Environment, Speak
from envs.verifiers.adapter import Adapter, Row, check_text

_CHECKED_PROMPTS = 64  # number of prompts per split that are checked for images
UNLISTED = "unlisted"  # the library's reward minus the weighted rewards whose weights are known


@dataclass(kw_only=True, eq=False)
class Verifiers(Environment):
    """An environment of the `verifiers` library. conf/env/verifiers.yaml explains the options."""

    holds_conversation = True

    id: str
    args: dict[str, Any] | None
    num_train: int | None
    num_eval: int
    max_concurrent: int | None = field()

    def __post_init__(self) -> None:
        check_at_least(1, num_train=self.num_train)
        check_at_least(0, num_eval=self.num_eval)
        self.name = module_of(self.id).replace("_", "-")
        self.reward_weights = {}  # `_rows` sets these weights when it loads the environment.

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] the library has the rest
        self, *, system_prompt: str | None = None
    ) -> None:
        """Set a system prompt that replaces the library's system prompt."""
        super().configure(system_prompt=system_prompt)

    def examples(self, split: Split) -> list[Example]:
        """Return all examples of a split. The first call loads the package and its data."""
        rows = self._rows[split]
        return [
            Example(id=i, env=self.name, messages=list(row.messages), info={"split": split})
            for i, row in enumerate(rows)
        ]

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Let the library conduct and score the conversation."""
        row = self._rows[episode.example.info["split"]][episode.example.id]
        outcome = await self._adapter.play(row, speak)
        episode.memory["outcome"] = outcome
        episode.stop_reason = outcome.stop_reason

    async def score(self, episode: Episode) -> dict[str, float]:
        """Return the library's rewards and metrics. Their weighted sum is the library's reward."""
        outcome = episode.memory.get("outcome")
        if outcome is None:  # The context was full, and the library's code ignored the error.
            return {}
        rewards = {**dict.fromkeys(self.reward_weights, 0.0), **outcome.rewards}
        rest = outcome.reward - sum(w * rewards[name] for name, w in self.reward_weights.items())
        return {**rewards, UNLISTED: 0.0 if abs(rest) < 1e-9 else rest}

    @cached_property
    def _adapter(self) -> Adapter:
        return load_adapter(self.id, self.args or {})

    @cached_property
    def _rows(self) -> dict[Split, list[Row]]:
        held_out = self._adapter.rows("eval", self.num_eval)
        own = 0 if held_out is not None else self.num_eval
        limit = None if self.num_train is None else self.num_train + own
        train = self._adapter.rows("train", limit) or []
        if len(train) <= own:
            raise ValueError(
                f"env.id={self.id} has {len(train)} examples, and env.num_eval={own} "
                "leaves none of them to train on: lower env.num_eval"
            )
        if held_out is None:
            train, held_out = train[: len(train) - own], train[len(train) - own :]
        check_text(self.id, (*train[:_CHECKED_PROMPTS], *held_out[:_CHECKED_PROMPTS]))
        self.reward_weights = {**self._adapter.reward_weights, UNLISTED: 1.0}
        if self.max_concurrent is None:
            self.max_concurrent = self._adapter.max_concurrent
        return {"train": train, "eval": held_out}


def module_of(env_id: str) -> str:
    """Return the module name of an environment id `owner/name@version`."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def load_adapter(env_id: str, args: dict[str, Any]) -> Adapter:
    """Load an environment with the installed version of the library.

    Raise ValueError if the library or the package is missing, or the package needs the other API.
    """
    if find_spec("verifiers") is None:
        raise ValueError(
            f"env.id={env_id} needs the verifiers library, which is not installed: "
            "make verifiers, and PYTHONPATH=.venv/verifiers-v1 before the command"
        )
    module = module_of(env_id)
    classic = find_spec("verifiers.envs") is not None
    known = find_spec(module) or (not classic and find_spec(f"verifiers.v1.tasksets.{module}"))
    if not known:
        raise ValueError(
            f"env.id={env_id}, but there is no module {module}: install the environment's package"
        )
    # Read the source, because importing an environment of the other API would fail.
    source = Path(known.origin).read_text() if known.origin else ""
    if ("load_environment" if classic else "__all__") not in source:
        written_for = "tasksets of verifiers>=0.4" if classic else "classic API, verifiers==0.1.14"
        raise ValueError(
            f"env.id={env_id} is written for the {written_for}, but verifiers "
            f"{version('verifiers')} is installed: install the other one"
        )
    if classic:
        from envs.verifiers.classic import ClassicAdapter

        return ClassicAdapter(module, args)
    from envs.verifiers.v1 import TasksetAdapter

    return TasksetAdapter(module, args)
