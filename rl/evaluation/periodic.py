"""Evaluate policy versions during training, on the held-out split.

    trainer    push v -> publish v -> wait for batch -> update -> [evaluation] -> push v + 1
    rollouts             `-> evaluate version v, while the next batch is sampled ->'

The next push waits for the evaluation, so one version samples all tokens of an evaluation. Training
rollouts and the update continue meanwhile. metrics.jsonl has the results of version v in the line
of step v.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from envs.episode import Example
from envs.protocol import Environment
from rl.config.build import build
from rl.config.ranges import PositiveFloat, PositiveInt
from rl.config.schema import Run
from rl.evaluation.play import choose_examples, play, write_rollouts
from rl.evaluation.summary import summarise
from rl.inference.live_version import LiveVersion
from rl.runtime.folder import RunFolder
from rl.sampling.player import Player
from rl.sampling.strategy import Independent


@dataclass(frozen=True, kw_only=True)
class NoEvaluation:
    evaluates: ClassVar[bool] = False

    def is_due(self, version: int, last_version: int) -> bool:  # noqa: ARG002
        return False


@dataclass(frozen=True, kw_only=True)
class PeriodicEvaluation:
    """The options of conf/evaluation/default.yaml."""

    every: PositiveInt
    num_examples: PositiveInt
    rollouts_per_example: PositiveInt
    temperature: PositiveFloat
    pass_threshold: float

    def is_due(self, version: int, last_version: int) -> bool:
        return version % self.every == 0 or version == last_version


@dataclass
class Evaluator:
    settings: PeriodicEvaluation
    player: Player  # the player of the training rollouts
    examples: Sequence[Example]
    run_folder: RunFolder
    last: int  # the policy version after the last step of the run
    _due: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    _metrics: dict[int, asyncio.Future[dict[str, float]]] = field(default_factory=dict)
    ended: bool = False  # whether `run` has ended

    def start(self, version: int) -> None:
        if not self.settings.is_due(version, self.last):
            return
        self._metrics[version] = asyncio.get_running_loop().create_future()
        if self.ended:
            self._metrics[version].set_result({})
        self._due.put_nowait(version)

    async def wait_for_metrics(self, version: int) -> dict[str, float]:
        # Shield the future, because a rank that disconnects must not cancel it for the other ranks.
        metrics = self._metrics.get(version)
        return {} if metrics is None else await asyncio.shield(metrics)

    async def run(self) -> None:
        try:
            while True:
                version = await self._due.get()
                self._metrics[version].set_result(await self._evaluate(version))
        finally:  # after an error, waiting ranks get empty metrics and can save a checkpoint
            self.ended = True
            for metrics in self._metrics.values():
                if not metrics.done():
                    metrics.set_result({})

    async def _evaluate(self, version: int) -> dict[str, float]:
        settings = self.settings
        played = await play(
            self._evaluation_player(version).play_group,
            self.examples,
            settings.rollouts_per_example,
            max_concurrent=self.player.sampler.max_concurrent,
        )
        rows = [row for one in played for rollout in one.rollouts for row in rollout.rows]
        found = {int(v) for row in rows for v in row.token_versions[row.completion_mask]}
        assert found <= {version}, f"the evaluation of version {version} has tokens of {found}"
        write_rollouts(self.run_folder.evaluation_of(version), played)
        return summarise(played, settings.pass_threshold).metrics()

    def _evaluation_player(self, version: int) -> Player:
        player = self.player.at_version(version)
        settings = player.schedules.apply(self.settings, "evaluation", version)
        sampler = player.sampler.for_evaluation(temperature=settings.temperature)
        # Fix the version, so that requests use only prefix caches of this version.
        chat = replace(player.chat, sampler=sampler, version=LiveVersion(version))
        without_hints = {"hinted_envs": frozenset(), "strategy": Independent()}
        return replace(player, sampler=sampler, chat=chat, **without_hints)


def evaluator_of(
    run: Run, run_folder: RunFolder, env: Environment, player: Player
) -> Evaluator | None:
    settings = build(run.evaluation)()
    if isinstance(settings, NoEvaluation):
        return None
    examples = choose_examples(env, "eval", settings.num_examples)
    return Evaluator(settings, player, examples, run_folder, last=run.max_steps)
