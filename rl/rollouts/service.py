"""What the rollouts process says to the trainer, to the screen and to its files. No torch.

Serves the trainer ranks: `next_batch` (a rank's share of a step), `publish` (new
weights are live), `evaluation` (of the last ones that were due), `state` (what a checkpoint keeps).
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, replace

import msgspec

from rl.config.build import build
from rl.config.facts import takes_turns
from rl.config.schema import Run
from rl.evaluation.periodic import Evaluator
from rl.inference.client import RequestTally
from rl.records import Credit, Group, RankBatch, Rollout
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.dispatcher import Dispatcher
from rl.rollouts.listening import listening
from rl.rollouts.plan import plan_batch
from rl.rollouts.replicas import Replicas
from rl.rollouts.token_record import TokenRecord
from rl.run.failure import report_failure
from rl.run.folder import RunFolder
from rl.run.json_lines import json_line
from rl.run.status import Status
from rl.sampling.waits import Waits
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack


class RolloutService:
    """Answers the trainer's calls; one instance, one loop."""

    def __init__(
        self,
        run: Run,
        run_folder: RunFolder,
        dispatcher: Dispatcher,
        status: Status,
        tally: RequestTally,
        evaluator: Evaluator | None = None,
        waits: Waits | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        """`tally`: of the requests to vLLM; those since the last batch are logged with the next.

        `waits`: what the rollouts in flight wait for. `replicas`: who answers them.
        """
        self._waits, self._replicas = waits, replicas
        self._run, self._run_folder, self._dispatcher, self._status = (
            run,
            run_folder,
            dispatcher,
            status,
        )
        self._evaluator, self._tally, self._num_retried = evaluator, tally, tally.num_retried
        self._aggregation = build(run.aggregation)
        self._record: TokenRecord = build(run.record)()
        self._weighs_turns = takes_turns(run.aggregation["_target_"])
        self._plans: dict[int, asyncio.Task[list[RankBatch]]] = {}
        self._rejected: list[Group] = []
        self._error: Exception | None = None
        self._broken = asyncio.Event()
        self._num_ranks = 0  # that listen
        dispatcher.on_rejected = self._rejected.append

    def listening(self, host: str | None = None) -> AbstractAsyncContextManager[None]:
        """Serve ranks for as long as the block lasts; `host`: on a port of that address."""
        return listening(self._run_folder, self.serve, host)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank until it hangs up."""
        self._num_ranks += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the rank has ended
            while True:
                header = await reader.readexactly(HEADER.size)
                data = await reader.readexactly(HEADER.unpack(header)[0])
                answer = pack(await self._answer(unpack(data, Call)))
                writer.write(HEADER.pack(len(answer)) + answer)
                await writer.drain()
        self._num_ranks -= 1
        writer.close()

    async def _answer(self, call: Call) -> Answer:
        """Return the answer; whatever goes wrong with it ends this process, with its own report."""
        try:
            return Answer(value=msgspec.Raw(pack(await self._value(call))))
        except NoMoreBatches as end:
            return Answer(over=str(end), solved=end.solved)
        except Exception as error:
            self._error = self._error or error
            self._broken.set()
            await asyncio.Event().wait()  # the rank keeps waiting until we have ended
            raise

    async def _value(self, call: Call) -> object:
        if call.what == "next_batch":
            # The first rank to ask starts the plan, the others share it. None is a step behind the
            # others, for they meet in every update: the last plan can go.
            if call.step not in self._plans:
                self._plans = {call.step: asyncio.create_task(self._plan(call.step))}
            return (await self._plans[call.step])[call.rank]
        if call.what == "publish":
            if self._replicas:
                self._replicas.publish(call.replicas)
            await self._dispatcher.publish(call.version)
            if self._evaluator:
                self._evaluator.start(call.version)
            return {}
        if call.what == "evaluation":
            if not self._evaluator:
                return {}
            return await self._evaluator.finish(call.version, last=call.last)
        if call.what == "state":
            return asdict(self._dispatcher.checkpoint())
        raise AssertionError(f"unknown call {call.what}")

    async def _plan(self, step: int) -> list[RankBatch]:
        groups = await self._dispatcher.batch(step)
        before, self._num_retried = self._num_retried, self._tally.num_retried
        metrics = {
            **batch_metrics(groups, step),
            "rollout/retried_requests": float(self._num_retried - before),
            **{
                f"buffer/rejected_{reason}": float(count)
                for reason, count in self._dispatcher.buffer.rejected.items()
            },
            **{f"order/{k}": v for k, v in self._dispatcher.order.metrics().items()},
            **(await self._replicas.metrics() if self._replicas else {}),
        }
        rejected = self._write(step, groups)
        recorded = self._record.choose(groups, rejected, step)
        # A thread, beside which the batch is planned: the rollouts in flight wait for neither.
        recording = asyncio.create_task(
            asyncio.to_thread(self._record.write, self._run_folder, step, recorded)
        )
        trainer = self._run.trainer
        shares = plan_batch(
            groups,
            self._aggregation,
            per_turn=self._weighs_turns,
            step=step,
            ranks=trainer["ranks"],
            tokens_per_micro_batch=trainer["tokens_per_micro_batch"],
            metrics=metrics,
        )
        await recording  # a step that is trained has been recorded
        record_ids = self._record.ids(groups, recorded)
        return [replace(share, record_ids=record_ids) for share in shares]

    def _write(self, step: int, groups: list[Group]) -> list[Group]:
        """Write the rollouts of a step, and of the groups rejected since the last; return these."""
        rejected, self._rejected[:] = list(self._rejected), []
        lines = [
            json_line({"id": id, **trained_line(group, rollout, credit, used)})
            for chosen, used in ((groups, True), (rejected, False))
            for group in chosen
            for id, rollout, credit in zip(
                group.rollout_ids, group.rollouts, group.credits, strict=True
            )
        ]
        self._run_folder.rollouts_of(step).write_text("".join(lines))
        return rejected

    async def sample(self) -> None:
        """Play groups and evaluate, for ever. What ends that ends the run, once the ranks saved."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._dispatcher.run())
                if self._evaluator:
                    tasks.create_task(self._evaluator.run())
        except* Exception as failure:
            # Before anything else can fail because of it: the oldest report is the one shown.
            report_failure(self._run_folder, "rollouts", failure)
            await self._dispatcher.stop()
            # Once this process ends, the supervisor ends the ranks in the middle of their saving.
            deadline = time.monotonic() + self._run.trainer["wait_timeout"]
            while self._num_ranks and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            raise

    async def report(self) -> None:
        """Say on the screen, a few times a second, what is being waited for.

        Raises what answering a rank raised: nobody else would, asyncio only logs it.
        """
        while True:
            standstill = self._waits.standstill() if self._waits else ""
            self._status.set("; ".join(filter(None, [self._dispatcher.progress(), standstill])))
            if self._run_folder.stop_request.exists():
                await self._dispatcher.stop()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._broken.wait(), 0.25)
            if self._error:
                raise self._error


def trained_line(group: Group, rollout: Rollout, credit: Credit, used: bool) -> dict[str, object]:
    """Return a rollout of a training batch, with what it was worth; `used`: not rejected."""
    versions = [row.token_versions[row.completion_mask] for row in rollout.sequences]
    return {
        "group": group.index,
        "example": group.example.id,
        "env": group.example.env,
        "messages": rollout.messages,
        "reward": rollout.reward,
        "rewards": rollout.rewards,
        **({"turn_rewards": rollout.turn_rewards} if rollout.turn_rewards else {}),
        "shaped_reward": credit.reward,
        "advantage": credit.advantages if len(credit.advantages) != 1 else credit.advantages[0],
        "stop_reason": rollout.stop_reason,
        "num_rows": len(rollout.sequences),
        "turns": rollout.turns,
        "tool_calls": rollout.tool_calls,
        "tokens": sum(len(v) for v in versions),
        # Text that no policy sampled has none.
        "versions": sorted({int(v) for row in versions for v in row if v >= 0}),
        "used": used and credit.trains,
        "error": rollout.error,
    }
