"""The rollouts process: environment, client, sampler, buffer, plan in one asyncio loop. No torch.

    python -m rl.rollouts <run folder>

Serves the trainer ranks over a Unix socket: `next_batch` (a rank's share of a step), `publish` (new
weights are live), `evaluation` (of the last ones that were due), `state` (what a checkpoint keeps).
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path

import msgspec
from renderers import Renderer

from envs.protocol import Environment, Example
from rl.clients import Setting
from rl.config import Run, build
from rl.credit import Crediting
from rl.demonstrations import Imitator
from rl.dispatcher import Dispatcher, DispatcherState, PlayGroup
from rl.example_order import ExampleOrder
from rl.failure import reporting
from rl.layout import Layout
from rl.periodic import Evaluator, evaluator_of
from rl.plan import plan_batch
from rl.player import Player
from rl.records import Group, RankBatch, Rollout
from rl.rollout_lines import trained_line
from rl.rollout_metrics import batch_metrics
from rl.sampler import PolicySampler
from rl.status import Status
from rl.strategy import SERVED_AS, strategy
from rl.tokenizer import load_renderer
from rl.wire import HEADER, Call, pack, unpack


class RolloutService:
    """Answers the trainer's calls; one instance, one loop."""

    def __init__(
        self,
        run: Run,
        layout: Layout,
        dispatcher: Dispatcher,
        status: Status,
        evaluator: Evaluator | None = None,
    ) -> None:
        self._run, self._layout, self._dispatcher, self._status = run, layout, dispatcher, status
        self._evaluator = evaluator
        self._aggregation = build(run.aggregation)
        self._plans: dict[int, asyncio.Task[list[RankBatch]]] = {}
        self._rejected: list[Group] = []
        dispatcher.on_rejected = self._rejected.append

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank until it hangs up."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the rank has ended
            while True:
                header = await reader.readexactly(HEADER.size)
                data = await reader.readexactly(HEADER.unpack(header)[0])
                answer = pack(await self._answer(unpack(data, Call)))
                writer.write(HEADER.pack(len(answer)) + answer)
                await writer.drain()
        writer.close()

    async def _answer(self, call: Call) -> object:
        if call.what == "next_batch":
            if call.step not in self._plans:
                self._plans = {call.step: asyncio.create_task(self._plan(call.step))}
            return (await self._plans[call.step])[call.rank]
        if call.what == "publish":
            await self._dispatcher.publish(call.step)
            if self._evaluator:
                self._evaluator.start(call.step)
            return {}
        if call.what == "evaluation":
            return await self._evaluator.finish() if self._evaluator else {}
        if call.what == "state":
            return asdict(self._dispatcher.checkpoint())
        raise AssertionError(f"unknown call {call.what}")

    async def _plan(self, step: int) -> list[RankBatch]:
        groups = await self._dispatcher.batch(step)
        metrics = batch_metrics(groups, step) | {
            f"buffer/rejected_{reason}": float(count)
            for reason, count in self._dispatcher.buffer.rejected.items()
        }
        self._write(step, groups)
        trainer = self._run.trainer
        return plan_batch(
            groups,
            self._aggregation,
            step=step,
            ranks=trainer["ranks"],
            tokens_per_micro_batch=trainer["tokens_per_micro_batch"],
            metrics=metrics,
        )

    def _write(self, step: int, groups: list[Group]) -> None:
        rejected, self._rejected[:] = list(self._rejected), []
        lines = [
            json.dumps(trained_line(group, rollout, credit, used))
            for chosen, used in ((groups, True), (rejected, False))
            for group in chosen
            for rollout, credit in zip(group.rollouts, group.credits, strict=True)
        ]
        self._layout.rollouts_of(step).write_text("\n".join(lines) + "\n")

    async def report(self) -> None:
        """Say on the screen, a few times a second, what is being waited for."""
        while True:
            self._status.set(self._dispatcher.progress())
            await asyncio.sleep(0.25)


def _imitate(run: Run, sampler: Imitator, env: Environment, renderer: Renderer) -> PlayGroup:
    async def play_group(
        index: int,
        example: Example,  # says which environment of a mixture; its expert chooses what to show
        group_size: int,
    ) -> tuple[Rollout, ...]:
        rng = random.Random(f"{run.seed}:{index}")
        return sampler.group(env.of(example), renderer, rng, group_size, run.max_seq_len)

    return play_group


def _setting(
    run: Run,
    layout: Layout,
    env: Environment,
    sampler: PolicySampler,
    version: Callable[[], int],
) -> Setting:
    """What a client needs to know of this run."""
    return Setting(
        sampler=sampler,
        max_seq_len=run.max_seq_len,
        max_turns=env.max_turns,
        version=version,
        socket=layout.vllm_socket,
        served_as=SERVED_AS[strategy(run.sync, run.adapter, run.model)],
        model=layout.model(),
        renderer=build(run.model)().renderer,
    )


async def main(folder: Path) -> None:
    """Play groups and answer the trainer until we are ended."""
    run, layout = Run.load(folder / "config.yaml"), Layout(folder)
    status = Status(folder, "rollouts")
    status.set("loading the environment")
    env: Environment = build(run.env)()
    examples = ExampleOrder(env.pools("train"), run.seed)
    sampler = build(run.sampler)()
    start = layout.resumed()
    async with AsyncExitStack() as stack:
        evaluator: Evaluator | None = None
        if sampler.uses_engine:
            setting = _setting(run, layout, env, sampler, lambda: dispatcher.version)
            chat = await stack.enter_async_context(build(run.client)().connect(setting))
            player = Player(sampler, env, chat)
            play_group = player.play_group
            evaluator = evaluator_of(run, layout, env, player)
        else:
            renderer = load_renderer(layout.model(), build(run.model)().renderer)
            play_group = _imitate(run, sampler, env, renderer)
        dispatcher = Dispatcher(
            play_group=play_group,
            examples=examples,
            credit=Crediting(
                build(run.truncation),
                build(run.reward)(),
                build(run.advantage),
                lambda example: env.of(example).reward_weights,
            ),
            buffer=build(run.buffer)(),
            group_size=run.group_size,
            groups_per_step=run.groups_per_step,
            max_staleness=sampler.max_staleness,
            max_concurrent=sampler.max_concurrent,
            step=start.step if start else 0,
            state=msgspec.convert(start.rollouts, DispatcherState) if start else DispatcherState(),
        )
        service = RolloutService(run, layout, dispatcher, status, evaluator)
        server = await asyncio.start_unix_server(service.serve, layout.rollouts_socket)
        await stack.enter_async_context(server)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dispatcher.run())
            tasks.create_task(service.report())
            if evaluator:
                tasks.create_task(evaluator.run())


if __name__ == "__main__":
    run_folder = Path(sys.argv[1])
    with reporting(run_folder, "rollouts"):
        asyncio.run(main(run_folder))
