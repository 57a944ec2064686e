"""The training loop, one process per rank, for synchronous and asynchronous training.

    python -m rl.trainer <run folder>   reads RANK, LOCAL_RANK and WORLD_SIZE from the environment

Step k trains policy version k into version k + 1. The loop waits for a batch, updates the policy,
pushes the weights, and reports to the rollouts process that vLLM samples with k + 1. The rollouts
process decides how far sampling may run ahead.
"""

import os
import time
from typing import Any

import torch

from rl.config.build import build
from rl.config.schema import Run
from rl.learner.learner import Learner
from rl.learner.ranks import Ranks, num_resumed_steps
from rl.records import RankBatch
from rl.runtime.endpoint import WAIT_VARIABLE
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder, drop_steps_from
from rl.runtime.metrics import MetricsFile
from rl.runtime.network import bind_collectives
from rl.runtime.status import STOPPED, Status, Stopwatch
from rl.trainer.alarms import Alarms
from rl.trainer.checkpoint import save_checkpoint
from rl.trainer.delivery import Delivery, Receivers
from rl.trainer.early_stop import reason_to_end, warn_of_missing_metric
from rl.trainer.nonfinite import NonFiniteSteps
from rl.trainer.profiler import start_profiler
from rl.trainer.rollouts_link import RolloutsLink
from rl.trainer.trained_tokens import StepRecord
from rl.weights.pusher import WeightPusher
from rl.weights.transport import Sender
from rl.wire import NoMoreBatches


class TrainingRun:
    num_saved = 0  # number of steps in the newest checkpoint that this process has written

    def __init__(self, run_folder: RunFolder) -> None:
        self.run, self.run_folder = Run.load(run_folder.config), run_folder
        self.settings = self.run.trainer
        rank = int(os.environ["RANK"])
        self.status = Status(run_folder, f"trainer.rank{rank}")
        if os.environ.get(WAIT_VARIABLE):
            # Use no GPU memory yet, because vLLM measures the free memory during its start.
            self.status.set("waiting for vLLM to start, because it shares the GPU")
            Receivers(run_folder, self.run.inference, timeout=self.settings.wait_timeout).wait()
        others = " and joining the other ranks" if int(os.environ["WORLD_SIZE"]) > 1 else ""
        self.status.set(f"starting DeepSpeed{others} (the first time, compiling takes minutes)")
        # If num_threads is null, OMP_NUM_THREADS from the environment applies.
        if self.settings.num_threads:
            torch.set_num_threads(self.settings.num_threads)
        rendezvous = run_folder.private.rendezvous
        if self.run.cluster.spans_hosts:
            bind_collectives(self.run.cluster.interface)
            rendezvous = None
        # Requests time out before collectives, so that the rank whose request failed reports first.
        self.ranks = Ranks.join(rendezvous, 2 * self.settings.wait_timeout)
        self.status.set("loading the model")
        self.learner = Learner(self.run, self.run_folder, self.ranks)
        self.start = num_resumed_steps(run_folder, self.ranks)
        if self.start:
            self.status.set(f"loading {self._checkpoint_name(self.start)}")
            self.learner.load(run_folder.checkpoint(self.start))
        self.metrics = MetricsFile(run_folder) if self.ranks.first else None
        self.logger = build(self.run.logger)()
        self.alarms = Alarms.of(self.run, run_folder, self.start)
        self.nonfinite = NonFiniteSteps(run_folder, self.ranks, self.settings.max_nonfinite_steps)
        self.profiler = start_profiler(run_folder, rank, self.settings.profile)
        self.delivery = self._build_delivery()

    def train(self) -> None:
        """Train until max_steps, stop_when or a stop request ends the run, or no batch is left."""
        rollouts = self._start_sampling()
        began, watch = time.monotonic(), Stopwatch(self.status)
        for step in range(self.start, self.run.max_steps):
            with watch.phase("wait", f"waiting for batch {step}"):
                try:
                    batch = rollouts.next_batch(
                        step,
                        self.settings.wait_timeout,
                        shares_prefixes=self.learner.shares_prefixes,
                    )
                except NoMoreBatches as end:
                    self._end_early(step, end, rollouts)
                    return
            with watch.phase("update", f"training step {step}"):
                record = StepRecord(batch)
                stats = self.learner.update(batch, record.observe)
            failed = self.nonfinite.check(step, stats["train/skipped"], record, rollouts)
            # The evaluation of version `step` must end before vLLM gets new weights.
            stats |= self._evaluation(rollouts, watch, step)
            delivered = not self.delivery or self.delivery.deliver(
                step + 1, batch.micro_batches[0], stats, watch.phase
            )
            # Get the state before new groups start, because a resumed run samples them again.
            every, num_steps = self.settings.checkpoint_every, step + 1
            is_due = num_steps == self.run.max_steps or (every > 0 and num_steps % every == 0)
            state = rollouts.state() if is_due else None
            if delivered:  # publish after the probe, because new rollouts would delay the probe
                self._publish(rollouts, step + 1)
            if batch.record_ids:
                with watch.phase("record", f"recording the tokens of step {step}"):
                    record.write(self.run_folder, self.ranks.rank)
            del record  # frees its tensors on the GPU
            line = self._log(step, batch, stats | watch.times, time.monotonic() - began)
            if self.ranks.first:
                self.alarms.add(line)
                if step == self.start:
                    warn_of_missing_metric(self.run, self.run_folder)
            end = reason_to_end(self.run, step, line, self.ranks) if delivered else STOPPED
            if end := failed or end:
                self._end_early(step + 1, NoMoreBatches(end, stopped=not failed), rollouts)
                return
            # Save after writing the metrics line, because a run that resumes from this checkpoint
            # does not write that line again. The next step's metrics include the checkpoint's time.
            began, watch = time.monotonic(), Stopwatch(self.status)
            with watch.phase("checkpoint", f"writing {self._checkpoint_name(step + 1)}"):
                self._save(step + 1, state)
            if self.profiler:
                self.profiler.step()
        # No step trains the last version, so its evaluation needs a separate metrics line.
        if stats := self._evaluation(rollouts, Stopwatch(self.status), self.run.max_steps):
            self._write_line(self.run.max_steps, stats)
        self._finish("done")

    def _start_sampling(self) -> RolloutsLink:
        rollouts = RolloutsLink(self.run_folder, self.ranks.rank, self.delivery)
        rollouts.connect(self.settings.wait_timeout)
        if self.metrics:  # on rank 0
            # A resumed run repeats the steps after its checkpoint, so remove their old results.
            self.metrics.truncate_after(self.start - 1)
            drop_steps_from(self.run_folder, self.start)
            # Start the logger after the truncation, because it may read metrics.jsonl.
            self.logger.start(self.run_folder.path, self.run.run_name, self.run.plain())
        if self.delivery:
            self.status.set("waiting for vLLM to start (logs/inference*.log)")
            self.delivery.begin(self.start)
        self._publish(rollouts, self.start)
        return rollouts

    def _build_delivery(self) -> Delivery | None:
        if not self.run.sampler.uses_vllm:
            return None
        run, timeout = self.run, self.settings.wait_timeout
        sender: Sender = build(run.transport.node)()
        sender.open(timeout)
        pusher = WeightPusher(sender, resumed=self.start > 0)
        receivers = Receivers(self.run_folder, run.inference, timeout=timeout)
        return Delivery(pusher, receivers, self.learner.policy, self.ranks, self.run_folder)

    def _publish(self, rollouts: RolloutsLink, version: int) -> None:
        """Let the rollouts process sample with this version, on the vLLMs that have its weights."""
        if self.ranks.first:
            rollouts.publish(version, self.delivery.updated_replicas() if self.delivery else {})

    def _evaluation(
        self, rollouts: RolloutsLink, watch: Stopwatch, version: int
    ) -> dict[str, float]:
        if not build(self.run.evaluation)().is_due(version, self.run.max_steps):
            return {}
        with watch.phase("evaluate", f"waiting for the evaluation of version {version}"):
            return rollouts.evaluation(version)

    def _save(self, step: int, state: dict[str, Any] | None, extra: int = 0) -> None:
        if state is not None:  # None: no checkpoint is due
            folder, keep = self.run_folder, self.settings.keep_checkpoints + extra
            model = folder.initial_model()
            save_checkpoint(self.learner, folder, step=step, rollouts=state, model=model, keep=keep)
            self.num_saved = step

    def _checkpoint_name(self, num_steps: int) -> str:
        return f"checkpoints/{self.run_folder.checkpoint(num_steps).name}"

    def _end_early(self, step: int, end: NoMoreBatches, rollouts: RolloutsLink) -> None:
        """Save a checkpoint and end the run early. Raise RunFailed unless `end.stopped`."""
        # Compare step numbers, not files, because other hosts may not see a new checkpoint yet.
        if step > max(self.start, self.num_saved):
            self.status.set(f"writing {self._checkpoint_name(step)}")
            # After a failure, keep one more, because the user may need an older checkpoint.
            self._save(step, rollouts.state(), extra=not end.stopped)
        if not end.stopped:
            raise RunFailed(str(end))
        self._finish(f"done: {end}")  # the supervisor prints this status at the end

    def _finish(self, status: str) -> None:
        if self.profiler:
            self.profiler.stop()
        if self.ranks.first:
            self.logger.finish()
        self.status.set(status)

    def _log(
        self, step: int, batch: RankBatch, stats: dict[str, float], seconds: float
    ) -> dict[str, Any]:
        rate = batch.metrics.get("train/tokens", 0.0) / seconds
        times = {"time/step": seconds, "rollout/tokens_per_s": rate}
        line = {**batch.metrics, **stats, **times, "train/policy_version": step + 1}
        self._write_line(step, line)
        return {"step": step, **line}

    def _write_line(self, step: int, line: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.append(step, line)
            self.logger.log(step, line)
