"""Serve the trainer ranks, show progress and write the rollouts.

A rank may send these calls:

    next_batch    returns the rank's share of the batch of a step
    record_all    returns the newest batch's rollout ids; for rank 0, writes the batch's tokens
    publish       tells this process that vLLM has new weights, so that more groups may start
    evaluation    returns the metrics of the evaluation of a policy version
    state         returns the state of this process for a checkpoint
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict, replace

import msgspec
import numpy as np

from rl.config.build import build, component
from rl.config.facts import fact
from rl.config.learned import Learned
from rl.config.schema import Run
from rl.evaluation.periodic import Evaluator
from rl.evaluation.play import rollout_line
from rl.inference.client import RequestTally
from rl.records import Credit, Group, Rollout
from rl.rollouts.batch_credit import apply_batch_credit
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.dispatcher import Dispatcher
from rl.rollouts.plan import plan_batch
from rl.rollouts.sampled_tokens import TokenRecord
from rl.rollouts.serving_replicas import ServingReplicas
from rl.runtime.failure import RunFailed, message_of, report_failure
from rl.runtime.files import json_line
from rl.runtime.folder import RunFolder
from rl.runtime.status import STOPPED, Status
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack


class RolloutService:
    def __init__(
        self,
        run: Run,
        run_folder: RunFolder,
        dispatcher: Dispatcher,
        status: Status,
        tally: RequestTally,
        evaluator: Evaluator | None = None,
        replicas: ServingReplicas | None = None,
    ) -> None:
        """`tally` counts retried requests. `replicas` is None if the run samples without vLLM."""
        self._run, self._run_folder, self._dispatcher = run, run_folder, dispatcher
        self._status, self._evaluator, self._replicas = status, evaluator, replicas
        self._tally, self._num_retried = tally, tally.num_retried
        self._batch_credit = component(run.batch_credit)
        self._aggregation = build(run.aggregation)
        self._record: TokenRecord = build(run.record)()
        self._weighs_turns = Learned.of(run).aggregation_takes_turns
        self._plans: dict[int, asyncio.Task[list[msgspec.Raw]]] = {}
        self._groups: list[Group] = []  # the groups of the newest plan
        self._rejected: list[Group] = []
        self._failure: asyncio.Future[BaseException] = asyncio.Future()  # `watch` raises this error
        self._unreported: Answer | None = None  # answer to the ranks if no report can be written
        self._num_connections = 0  # number of open connections of ranks
        dispatcher.on_rejected = self._rejected.append

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_connections += 1
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # the rank disconnected
                while True:
                    header = await reader.readexactly(HEADER.size)
                    data = await reader.readexactly(HEADER.unpack(header)[0])
                    answer = pack(await self._answer(unpack(data, Call)))
                    writer.write(HEADER.pack(len(answer)) + answer)
                    await writer.drain()
        finally:
            self._num_connections -= 1
            writer.close()

    async def _answer(self, call: Call) -> Answer:
        """Answer a rank's call. After an error, this or a later answer makes the rank save and end.

        Raise the error if the rank cannot save without the result.
        """
        try:
            return Answer(value=msgspec.Raw(pack(await self._call_result(call))))
        except NoMoreBatches as end:
            return self._unreported or Answer(over=str(end), stopped=end.stopped)
        except Exception as error:
            await self._end_batches(error)
            if call.what == "next_batch":
                return self._unreported or Answer(over=STOPPED, stopped=True)
            if call.what in ("publish", "evaluation"):  # a later next_batch stops the rank
                return Answer(value=msgspec.Raw(pack({})))
            raise  # `serve` closes the connection, because the rank needs the missing value

    async def _call_result(self, call: Call) -> object:
        if call.what == "next_batch":
            # The first rank that asks for a step starts the plan for all ranks. The previous
            # plan is no longer needed, because all ranks have received its batch.
            if call.step not in self._plans:
                self._plans = {call.step: asyncio.create_task(self._plan_step(call))}
            return (await self._plans[call.step])[call.rank]
        if call.what == "publish":
            self._check_first_version(call.version)
            if self._replicas:
                self._replicas.publish(call.replicas)
            # The version is unchanged if rank 0 pushed the current weights to a restarted vLLM.
            if call.version != self._dispatcher.version.number:
                await self._dispatcher.publish(call.version)
                if self._evaluator:
                    self._evaluator.start(call.version)
            return {}
        if call.what == "evaluation":
            return await self._evaluation_metrics(call.version)
        if call.what == "record_all":
            return await self._record_all(call)
        if call.what == "state":
            return asdict(self._dispatcher.checkpoint())
        raise AssertionError(f"a rank sent an unknown call: {call.what}")

    async def _evaluation_metrics(self, version: int) -> dict[str, float]:
        if not self._evaluator:
            return {}
        metrics = await self._evaluator.wait_for_metrics(version)
        # `metrics` is {} after an error, before `version` is published, or if no evaluation is due.
        failed = self._evaluator.ended or self._failure.done()
        # After the last step no rank calls next_batch, so only this answer can report the error.
        if failed and not metrics and version == self._run.max_steps:
            raise NoMoreBatches(message_of(await asyncio.shield(self._failure)))
        return metrics

    def _check_first_version(self, version: int) -> None:
        if self._dispatcher.version.number < 0 and version != self._dispatcher.step:
            raise RunFailed(
                f"rank 0 resumed after step {version} and the rollouts process after step "
                f"{self._dispatcher.step}, because the file system showed them different "
                "checkpoints: start again with resume=true"
            )

    async def _plan_step(self, call: Call) -> list[msgspec.Raw]:
        groups = await self._dispatcher.take_batch(call.step)
        try:
            return await self._finish_plan(call, apply_batch_credit(groups, self._batch_credit))
        except Exception:
            self._dispatcher.return_batch()
            raise

    async def _finish_plan(self, call: Call, groups: list[Group]) -> list[msgspec.Raw]:
        """Write the rollouts of a step and return each rank's packed share of the batch."""
        step, self._groups = call.step, groups
        before, self._num_retried = self._num_retried, self._tally.num_retried
        metrics = {
            **batch_metrics(groups, step),
            "rollout/retried_requests": float(self._num_retried - before),
            **{f"buffer/{k}": v for k, v in self._dispatcher.buffer.metrics().items()},
            **{f"order/{k}": v for k, v in self._dispatcher.order.metrics().items()},
            **(await self._replicas.metrics() if self._replicas else {}),
        }
        rejected = self._write_rollouts(step, groups)
        recorded = self._record.choose(groups, rejected, step)
        # Use threads, because writing and planning take long and would block running rollouts.
        recording = asyncio.create_task(
            asyncio.to_thread(self._record.write, self._run_folder, step, recorded)
        )
        trainer = self._run.trainer
        shares = await asyncio.to_thread(
            plan_batch,
            groups,
            self._aggregation,
            per_turn=self._weighs_turns,
            step=step,
            ranks=trainer.ranks or 1,
            tokens_per_micro_batch=trainer.tokens_per_micro_batch,
            metrics=metrics,
            shares_prefixes=call.shares_prefixes,
            whole_groups=fact(self._run.loss["_target_"], "whole_groups", False),
        )
        await recording  # wait, so that no step is trained before its token file is written
        record_ids = self._record.ids(groups, recorded)
        # If `pack` raises an error here, `_plan_step` gives the batch back to the dispatcher.
        return [msgspec.Raw(pack(replace(share, record_ids=record_ids))) for share in shares]

    async def _record_all(self, call: Call) -> tuple[str, ...]:
        """Return the newest batch's rollout ids. For rank 0, first write the batch's tokens."""
        everything, groups = TokenRecord(num_groups=None), self._groups
        if call.rank == 0 and self._record != everything:
            await asyncio.to_thread(everything.write, self._run_folder, call.step, groups)
        return everything.ids(groups, groups)

    def _write_rollouts(self, step: int, groups: list[Group]) -> list[Group]:
        """Write the rollouts of a step and of newly rejected groups; return the rejected groups."""
        rejected, self._rejected[:] = list(self._rejected), []
        lines = [
            json_line({"id": id, **train_line(group, rollout, credit, used)})
            for chosen, used in ((groups, True), (rejected, False))
            for group in chosen
            for id, rollout, credit in zip(
                group.rollout_ids, group.rollouts, group.credits, strict=True
            )
        ]
        self._run_folder.rollouts_of(step).write_text("".join(lines))
        return rejected

    async def sample(self) -> None:
        """Play groups and evaluate. After an error, return; `watch` then raises the error."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._dispatcher.run())
                if self._replicas:
                    tasks.create_task(self._replicas.watch())
                if self._evaluator:
                    tasks.create_task(self._evaluator.run())
        except* Exception as failure:  # noqa: BLE001 `watch` raises it
            await self._end_batches(failure)

    async def _end_batches(self, error: BaseException) -> None:
        """Report an error and plan no more batches, so that the ranks save a checkpoint."""
        if not self._failure.done():
            self._failure.set_result(error)
        # Report this error before `stop` causes others, because the supervisor shows the oldest.
        try:
            report_failure(self._run_folder, "rollouts", error)
        except OSError:  # perhaps the disk is full: the ranks get the message and try to report it
            self._unreported = self._unreported or Answer(over=message_of(error))
        await self._dispatcher.stop()

    async def watch(self) -> None:
        """Show the progress of the next batch and check for a stop request, four times a second.

        After an error, wait until the ranks have saved and closed their connections, because the
        supervisor ends them when this process ends. Raise the error after at most wait_timeout s.
        """
        while not self._failure.done():
            self._status.set(self._dispatcher.progress())
            if self._run_folder.stop_request.exists():
                await self._dispatcher.stop()
                if self._replicas:
                    self._replicas.router.end()
            await asyncio.wait([self._failure], timeout=0.25)
        deadline = time.monotonic() + self._run.trainer.wait_timeout
        while self._num_connections and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        raise self._failure.result()


def train_line(group: Group, rollout: Rollout, credit: Credit, used: bool) -> dict[str, object]:
    """Return a line of rollouts/*.jsonl. `used`: whether the buffer accepted the group."""
    advantages = credit.advantages
    if credit.by_token:
        advantages = (sum(advantages) / max(len(advantages), 1),)  # the mean over the tokens
    versions = np.concatenate(
        [np.empty(0, np.int32), *(row.token_versions[row.completion_mask] for row in rollout.rows)]
    )
    return {
        "group": group.index,
        **rollout_line(group.example, rollout),
        **({"source": rollout.source.name.lower()} if group.suffix or group.index < 0 else {}),
        "shaped_reward": credit.reward,
        "advantage": advantages if len(advantages) != 1 else advantages[0],
        "num_rows": len(rollout.rows),
        "tokens": len(versions),
        "versions": np.unique(versions[versions >= 0]).tolist(),  # [] for demonstrations
        "used": used and credit.trains,
    }
