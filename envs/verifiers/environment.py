"""Environments of the `verifiers` library, both of its generations, in our loop.

    env.id=owner/name  ->  the installed package  ->  ClassicWorld | TasksetWorld
                                                       rows, play, reward weights

The library holds the conversation as it would against any chat endpoint, and each of its
requests is one turn of our policy (`Environment.play`). So its prompts, tools, stop conditions and
rewards are its own, and every token is sampled by the run's vLLM. Its sampling settings are not
looked at: those are the sampler's.

`verifiers` 0.1 has the classic API (a module with `load_environment`), 0.4 the tasksets of
`verifiers.v1`. They cannot be installed together.
"""

from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from envs.episode import Episode, Example, Split
from envs.protocol import Environment, Speak
from envs.verifiers.world import Row, World, check_text

_LOOKED_AT = 64  # prompts of a split, for images: they are of one kind
UNLISTED = "unlisted"  # what their reward holds beyond the rewards whose weights are known


class Verifiers(Environment):
    """One environment of the library. Knobs are explained in conf/env/verifiers.yaml."""

    holds_conversation = True

    def __init__(
        self,
        *,
        id: str,
        args: dict[str, Any] | None,
        num_train: int | None,
        num_eval: int,
        max_concurrent: int | None,
    ) -> None:
        if num_eval < 0 or (num_train is not None and num_train < 1):
            raise ValueError(
                f"num_train={num_train}, num_eval={num_eval}: train on one example or more "
                "(null: on all there are) and hold out none or more"
            )
        self.name = module_of(id).replace("_", "-")
        self.max_concurrent = max_concurrent
        self.reward_weights = {}  # known once it is loaded
        self._id, self._args = id, args or {}
        self._num_train, self._num_eval = num_train, num_eval

    def configure(  # pyright: ignore[reportIncompatibleMethodOverride] the library has the others
        self, *, system_prompt: str | None = None
    ) -> None:
        """Take a system prompt, in the place of the library's own."""
        super().configure(system_prompt=system_prompt)

    def examples(self, split: Split) -> list[Example]:
        """All examples of a split; loads their package and its data at the first call."""
        rows = self._rows[split]
        return [
            Example(id=i, env=self.name, messages=list(row.messages), info={"split": split})
            for i, row in enumerate(rows)
        ]

    async def play(self, episode: Episode, speak: Speak) -> None:
        """Let the library hold the conversation, and score it."""
        row = self._rows[episode.example.info["split"]][episode.example.id]
        outcome = await self._world.play(row, speak)
        episode.memory["outcome"] = outcome
        episode.stop_reason = outcome.stop_reason

    async def score(self, episode: Episode) -> dict[str, float]:
        """Their rewards and metrics by name; weighted, they sum to their reward."""
        outcome = episode.memory.get("outcome")
        if outcome is None:  # the context was full and their code did not mind
            return {}
        rewards = {**dict.fromkeys(self.reward_weights, 0.0), **outcome.rewards}
        rest = outcome.reward - sum(w * rewards[name] for name, w in self.reward_weights.items())
        return {**rewards, UNLISTED: 0.0 if abs(rest) < 1e-9 else rest}

    @cached_property
    def _world(self) -> World:
        return load_world(self._id, self._args)

    @cached_property
    def _rows(self) -> dict[Split, list[Row]]:
        held_out = self._world.rows("eval", self._num_eval)
        own = 0 if held_out is not None else self._num_eval
        train = self._world.rows(
            "train", None if self._num_train is None else self._num_train + own
        )
        train = train or []
        if len(train) <= own:
            raise ValueError(
                f"env.id={self._id} has {len(train)} examples, which leaves none to train on "
                f"beside env.num_eval={own} held out: lower env.num_eval"
            )
        if held_out is None:
            train, held_out = train[: len(train) - own], train[len(train) - own :]
        check_text(self._id, (*train[:_LOOKED_AT], *held_out[:_LOOKED_AT]))
        self.reward_weights = {**self._world.reward_weights, UNLISTED: 1.0}
        if self.max_concurrent is None:
            self.max_concurrent = self._world.max_concurrent
        return {"train": train, "eval": held_out}


def module_of(env_id: str) -> str:
    """The module of `owner/name@version`."""
    return env_id.rpartition("/")[2].partition("@")[0].replace("-", "_")


def load_world(env_id: str, args: dict[str, Any]) -> World:
    """Load an installed environment by whichever library is installed.

    Raises:
        ValueError: the library or the package is missing, or they are of different generations.

    """
    if find_spec("verifiers") is None:
        raise ValueError(
            f"env.id={env_id} needs the verifiers library, which is not installed: "
            'pip install "offbyone[verifiers]"'
        )
    module = module_of(env_id)
    classic = find_spec("verifiers.envs") is not None
    known = find_spec(module) or (not classic and find_spec(f"verifiers.v1.tasksets.{module}"))
    if not known:
        raise ValueError(
            f"env.id={env_id}, but there is no module {module}: install the environment's package"
        )
    # Read and not imported: the other generation's environment would fail with its own error.
    source = Path(known.origin).read_text() if known.origin else ""
    if ("load_environment" if classic else "__all__") not in source:
        written_for = "tasksets of verifiers>=0.4" if classic else "classic API, verifiers==0.1.14"
        raise ValueError(
            f"env.id={env_id} is written for the {written_for}, but verifiers "
            f"{version('verifiers')} is installed: install the other one"
        )
    if classic:
        from envs.verifiers.classic import ClassicWorld

        return ClassicWorld(module, args)
    from envs.verifiers.v1 import TasksetWorld

    return TasksetWorld(module, args)
