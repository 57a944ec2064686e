"""The trainer: one process per rank, one loop for synchronous and asynchronous training alike.

    python -m rl.trainer <run folder>          RANK, LOCAL_RANK and WORLD_SIZE in the environment

Step k trains policy version k into version k + 1. The loop waits for a batch, updates, pushes,
tells the rollouts process that k + 1 is live. How far sampling may run ahead is decided there,
not here.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from rl.config.build import build
from rl.config.facts import is_by_hand, spans_hosts
from rl.config.schema import Run
from rl.config.transport import transport
from rl.learner.learner import Learner, TrainerSettings
from rl.learner.ranks import Ranks
from rl.records import RankBatch
from rl.run.by_hand import end_with_run
from rl.run.dropped_steps import drop_steps_from
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.run.interface import bind_collectives
from rl.run.metrics import MetricsFile
from rl.run.status import STOPPED, Status
from rl.trainer.checkpoint import save_checkpoint
from rl.trainer.delivery import Delivery
from rl.trainer.replicas import PushedReplicas
from rl.trainer.rollouts_link import RolloutsLink
from rl.trainer.token_record import StepRecord
from rl.weights.pusher import WeightPusher, WeightSync
from rl.wire import NoMoreBatches

_ENDING_S = 10.0  # of a rank that is done, which the supervisor may see before it has ended


class Stopwatch:
    """Seconds per phase of one step."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self.times: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, doing: str) -> Iterator[None]:
        """Count the block as time/<name> and show `doing` on the screen."""
        self._status.set(doing)
        began = time.monotonic()
        yield
        self.times[f"time/{name}"] = time.monotonic() - began


class TrainingRun:
    """Everything that one rank holds during a run."""

    def __init__(self, run_folder: RunFolder) -> None:
        self.run, self.run_folder = Run.load(run_folder.config), run_folder
        if is_by_hand(self.run.cluster):
            end_with_run(run_folder, after_s=_ENDING_S)
        self.settings: TrainerSettings = build(self.run.trainer)()
        self.sampler = build(self.run.sampler)()
        rank = int(os.environ["RANK"])
        self.status = Status(run_folder, f"trainer.rank{rank}")
        others = " and joining the other ranks" if int(os.environ["WORLD_SIZE"]) > 1 else ""
        self.status.set(f"starting DeepSpeed{others} (at first it compiles something for minutes)")
        # Else OMP_NUM_THREADS says so (rl/placement), or who started this rank by hand.
        if self.settings.num_threads:
            torch.set_num_threads(self.settings.num_threads)
        # Whoever waits for another rank waits longer than that one does: its sentence comes first.
        meeting = run_folder.private.rendezvous
        if spans_hosts(self.run.cluster):
            bind_collectives(self.run.cluster["interface"])
            meeting = None
        self.ranks = Ranks.join(meeting, 2 * self.settings.wait_timeout)
        self.status.set("loading the model")
        self.learner = Learner(self.run, self.run_folder, self.ranks)
        self.resumed = self.run_folder.resumed()
        if self.resumed:
            self.status.set(f"loading {self.resumed.folder.name}")
            self.learner.load(self.resumed.folder)
        self.start = self.resumed.step if self.resumed else 0
        self.metrics = MetricsFile(run_folder) if self.ranks.first else None
        self.logger = build(self.run.logger)()
        self.nonfinite = 0
        self.delivery = self._delivery()

    def train(self) -> None:
        """Run all steps."""
        run, rollouts = self.run, self._begin()
        began, watch = time.monotonic(), Stopwatch(self.status)
        for step in range(self.start, run.max_steps):
            with watch.phase("wait", f"waiting for batch {step}"):
                try:
                    batch = rollouts.next_batch(step, self.settings.wait_timeout)
                except NoMoreBatches as end:
                    self._end_early(step, end, rollouts)
                    return
            with watch.phase("update", f"training step {step}"):
                record = StepRecord(batch) if batch.record_ids else None
                stats = self.learner.update(batch, record.observe if record else None)
            self._stop_if_nonfinite(stats)
            stats |= self._evaluation(rollouts, watch, step)  # of the policy that vLLM still has
            live = not self.delivery or self.delivery.bring(
                step + 1, batch.micro_batches[0], stats, watch.phase
            )
            if live:  # only now, so that the probe does not queue behind a batch of new prompts
                self._publish(rollouts, step + 1)
            if record:
                with watch.phase("record", f"recording the tokens of step {step}"):
                    record.write(self.run_folder, self.ranks.rank)
            self._log(step, batch, stats, watch.times, time.monotonic() - began)
            if not live:
                self._end_early(step + 1, NoMoreBatches(STOPPED, solved=True), rollouts)
                return
            # After its line: a resumed run goes on behind the checkpoint and writes no line again.
            # The time it takes is the next step's.
            began, watch = time.monotonic(), Stopwatch(self.status)
            with watch.phase("checkpoint", f"writing {self._named(step + 1)}"):
                self._checkpoint(step + 1, rollouts)
        self._evaluate_last(run.max_steps, rollouts)
        if self.ranks.first:
            self.logger.finish()
        self.status.set("done")

    def _begin(self) -> RolloutsLink:
        """Let sampling start, with the weights that this run starts from."""
        rollouts = RolloutsLink(self.run_folder, self.ranks.rank)
        rollouts.connect(self.settings.wait_timeout)
        if self.ranks.first:
            self.logger.start(self.run_folder.path, self.run.run_name, asdict(self.run))
            if self.metrics:
                # Lines behind the checkpoint: their steps are about to be trained again.
                self.metrics.truncate_after(self.start - 1)
            drop_steps_from(self.run_folder, self.start)
        if self.delivery:
            self.status.set("waiting for vLLM to start (logs/inference*.log)")
            self.delivery.begin(self.start, self.run.inference["startup_timeout"])
        self._publish(rollouts, self.start)
        return rollouts

    def _delivery(self) -> Delivery | None:
        """None when nothing is sampled (demonstrations): there is no vLLM to push to."""
        if not self.sampler.uses_vllm:
            return None
        run, timeout = self.run, self.settings.wait_timeout
        sync: WeightSync = build(run.sync)()
        pusher = WeightPusher(
            sync,
            transport(vars(run)),
            [],  # nobody is known yet
            folder=self.run_folder.pushed_weights(sync.folder),
            timeout=timeout,
            goes_on=self.start > 0,
        )
        replicas = PushedReplicas(self.run_folder, run.inference, timeout=timeout)
        return Delivery(pusher, replicas, self.learner.policy, self.ranks, self.run_folder)

    def _publish(self, rollouts: RolloutsLink, version: int) -> None:
        """Let those that have the weights be asked for tokens of this version, and no others."""
        if self.ranks.first:
            rollouts.publish(version, self.delivery.living() if self.delivery else {})

    def _evaluation(
        self, rollouts: RolloutsLink, watch: Stopwatch, version: int, *, last: bool = False
    ) -> dict[str, float]:
        """Wait until the version that is live has been evaluated, if it is due.

        All ranks do, for what comes next wants all of them within trainer.wait_timeout.
        """
        settings = build(self.run.evaluation)()
        if not settings.due(version, version if last else self.run.max_steps):
            return {}
        with watch.phase("evaluate", f"waiting for the evaluation of version {version}"):
            return rollouts.evaluation(version, last=last)

    def _evaluate_last(self, version: int, rollouts: RolloutsLink) -> None:
        """The last version trains no step, so its evaluation has a line to itself."""
        stats = self._evaluation(rollouts, Stopwatch(self.status), version, last=True)
        if stats and self.metrics:
            self._write(version, stats)

    def _stop_if_nonfinite(self, stats: dict[str, float]) -> None:
        self.nonfinite = self.nonfinite + 1 if stats["train/skipped"] else 0
        if self.nonfinite >= self.settings.max_nonfinite_steps:
            raise RunFailed(
                f"{self.nonfinite} steps in a row had a loss or gradient that is not finite "
                "(trainer.max_nonfinite_steps). Lower optim.learning_rate, or look at the rollouts "
                "and, if the loss is your own, at what it divides and takes the logarithm of"
            )

    def _checkpoint(self, step: int, rollouts: RolloutsLink) -> None:
        every = self.settings.checkpoint_every
        if step == self.run.max_steps or (every and step % every == 0):
            self._save(step, rollouts)

    def _save(self, step: int, rollouts: RolloutsLink) -> None:
        save_checkpoint(
            self.learner,
            self.run_folder,
            step=step,
            rollouts=rollouts.state() if self.ranks.first else {},
            model=self.run_folder.model(),
            keep=self.settings.keep_checkpoints,
        )

    def _named(self, num_steps: int) -> str:
        """The checkpoint after so many steps, by its folder: steps themselves count from 0."""
        return f"checkpoints/{self.run_folder.checkpoint(num_steps).name}"

    def _end_early(self, step: int, end: NoMoreBatches, rollouts: RolloutsLink) -> None:
        """Keep what was learned; a task that is solved is a good end, one that teaches nothing not.

        Raises:
            RunFailed: it is not solved.

        """
        if step > self.start and not self.run_folder.checkpoint(step).exists():
            self.status.set(f"writing {self._named(step)}")
            self._save(step, rollouts)
        if not end.solved:
            raise RunFailed(str(end))
        if str(end) != STOPPED:  # whoever wants the end has no time for it
            self._evaluate_last(step, rollouts)
        if self.ranks.first:
            self.logger.finish()
        self.status.set(f"done: {end}")  # the supervisor repeats it at the end

    def _log(
        self,
        step: int,
        batch: RankBatch,
        stats: dict[str, float],
        times: dict[str, float],
        seconds: float,
    ) -> None:
        if not self.metrics:
            return
        tokens = batch.metrics.get("train/tokens", 0.0)
        line: dict[str, Any] = {
            **batch.metrics,
            **stats,
            **times,
            "time/step": seconds,
            "rollout/tokens_per_s": tokens / seconds,
            "train/policy_version": step + 1,
        }
        self._write(step, line)

    def _write(self, step: int, line: dict[str, Any]) -> None:
        assert self.metrics
        self.metrics.append(step, line)
        self.logger.log(step, line)
