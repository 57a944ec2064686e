"""The rollouts process: python -m rl.rollouts <run folder>."""

import asyncio
import os
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
from renderers import Renderer

from envs.episode import Example
from envs.protocol import Environment, Pool
from envs.stateful import Stateful
from rl.config.build import build
from rl.config.facts import sees_hint
from rl.config.schedules import Schedules
from rl.config.schema import Run
from rl.evaluation.periodic import Evaluator, evaluator_of
from rl.inference.client import RequestTally
from rl.inference.live_version import LiveVersion
from rl.inference.server import SERVED_AS
from rl.model.tokenizer import load_renderer
from rl.records import Rollout
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.credit import GroupCredit
from rl.rollouts.dispatcher import Dispatcher, DispatcherState, PlayGroupAt
from rl.rollouts.example_order import ExampleOrder
from rl.rollouts.listening import open_server
from rl.rollouts.mixed_buffer import MixedBuffer
from rl.rollouts.service import RolloutService
from rl.rollouts.serving_replicas import ServingReplicas
from rl.runtime.devices import raise_file_limit
from rl.runtime.failure import reporting_failures
from rl.runtime.folder import ResumePoint, RunFolder, naming_damage
from rl.runtime.network import LISTEN_VARIABLE
from rl.runtime.status import Status
from rl.runtime.stop_request import pass_on_signals
from rl.runtime.warning_lines import noting_warnings
from rl.sampling.chat import ChatSettings
from rl.sampling.demonstrations import ImitationSampler
from rl.sampling.player import Player
from rl.sampling.prompt_lengths import FittingExamples
from rl.sampling.strategy import Strategy
from rl.sampling.watchdog import Watchdog


def _demonstrator(
    run: Run, sampler: ImitationSampler, env: Environment, renderer: Renderer
) -> Callable[..., tuple[Rollout, ...]]:
    def demonstrate(
        seed: str, example: Example, group_size: int = run.group_size
    ) -> tuple[Rollout, ...]:
        rng = random.Random(f"{run.seed}:{seed}")
        own_env = env.environment_of(example)
        return sampler.group(own_env, renderer, rng, group_size, run.max_seq_len)

    return demonstrate


def _demonstration_player(demonstrate: Callable[..., tuple[Rollout, ...]]) -> PlayGroupAt:
    async def play_group(index: int, example: Example, size: int, *_: int) -> tuple[Rollout, ...]:
        return demonstrate(str(index), example, size)

    return play_group


def _renderer(run: Run, run_folder: RunFolder) -> Renderer:
    model = build(run.model)()
    return load_renderer(run_folder.initial_model(), model.renderer, model.renderer_options)


def _buffer(run: Run, run_folder: RunFolder, env: Environment) -> FifoBuffer:
    buffer: FifoBuffer = build(run.buffer)()
    if isinstance(buffer, MixedBuffer) and buffer.shares[1]:
        renderer = _renderer(run, run_folder)
        buffer.demonstrate = _demonstrator(run, buffer.demonstrations, env, renderer)
    return buffer


def _hinted_envs(
    run: Run, env: Environment, pools: Sequence[Pool], strategy: Strategy
) -> frozenset[str]:
    """Return the envs whose reference model sees hints. Raise ValueError if a hint is missing."""
    hinted: set[str] = set()
    for pool in pools:
        if not pool.examples:  # ExampleOrder.begin reports empty pools later
            continue
        if sees_hint(run.plain(), name := pool.examples[0].env):
            hinted.add(name)
        if name in hinted or strategy.needs_hints:
            for example in pool.examples:
                env.environment_of(example).teacher_messages(example, list(example.messages))
    return frozenset(hinted)


def dispatcher_state(start: ResumePoint | None) -> DispatcherState:
    """Return the saved state, or a new one without `start`. Raise ValueError if it is damaged."""
    if start is None:
        return DispatcherState()
    with naming_damage(RunFolder.state_of(start.folder)):
        return msgspec.convert(start.rollouts, DispatcherState)


async def main(run_folder: RunFolder) -> None:
    """Play groups and answer the ranks' calls until the supervisor or an error ends the process."""
    run, status = Run.load(run_folder.config), Status(run_folder, "rollouts")
    status.set("loading the environment")
    env: Environment = build(run.env)()
    pools = env.pools("train")
    sampler, schedules = build(run.sampler)(), Schedules.of(run.plain())
    model = build(run.model)()
    start, version, tally = run_folder.resume_point(), LiveVersion(), RequestTally()
    version.listeners.append(env.begin_version)
    replicas = ServingReplicas(run_folder, run.inference)
    async with AsyncExitStack() as stack:
        evaluator: Evaluator | None = None
        stateful: dict[str, Stateful] = {"env": env}
        attempts_per_rollout: float = 1
        if sampler.uses_vllm:
            num_seqs = (run.inference.args or {}).get("max_num_seqs")
            settings = ChatSettings(
                sampler=sampler,
                max_seq_len=run.max_seq_len,
                is_multi_turn=env.is_multi_turn,
                num_seqs=num_seqs and num_seqs * len(run.inference.names),
                version=version,
                router=replicas.router,
                served_as=SERVED_AS[run.pushes_adapter],
                model=run_folder.initial_model(),
                renderer=model.renderer,
                renderer_options=model.renderer_options,
                tally=tally,
            )
            chat = await stack.enter_async_context(build(run.client)().connect(settings))
            # Check hints before the pools become FittingExamples, because those would render the
            # prompt of each example that the check reads.
            strategy: Strategy = build(run.strategy)()
            stateful["strategy"] = strategy
            hinted = _hinted_envs(run, env, pools, strategy)
            limits = env, chat, run.max_seq_len, sampler.max_prompt_len
            pools = [replace(p, examples=FittingExamples(p.examples, *limits)) for p in pools]
            player = Player(
                *(sampler, env, chat, stack.enter_context(Watchdog(status.set))),
                *(run.seed if sampler.seeded else None, strategy, schedules),
                hinted_envs=hinted,
            )
            play_group: PlayGroupAt = player.play_group_at
            # Respect max_concurrent even if a strategy starts more attempts than group_size.
            attempts_per_rollout = max(strategy.num_first(run.group_size) / run.group_size, 1)
            evaluator = evaluator_of(run, run_folder, env, player)
        else:
            renderer = _renderer(run, run_folder)
            play_group = _demonstration_player(_demonstrator(run, sampler, env, renderer))
        order: ExampleOrder = build(run.order)()
        order.begin(pools, run.seed)
        credit = GroupCredit.of(run, lambda example: env.environment_of(example).reward_weights)
        dispatcher = Dispatcher(
            play_group=play_group,
            order=order,
            credit=lambda example, rollouts, version: schedules.at(
                version, credit, truncation="truncation", shaping="reward", advantage="advantage"
            )(example, rollouts),
            stateful=stateful | {"advantage": credit},
            buffer=_buffer(run, run_folder, env),
            group_size=run.group_size,
            groups_per_step=run.groups_per_step,
            max_staleness=sampler.max_staleness,
            max_concurrent=int(sampler.max_concurrent / attempts_per_rollout),
            step=start.step if start else 0,
            version=version,
            state=dispatcher_state(start),
        )
        service = RolloutService(
            *(run, run_folder, dispatcher, status, tally, evaluator),
            replicas if sampler.uses_vllm else None,
        )
        # Listen last, because a rank may send any request as soon as it is connected.
        host = os.environ.get(LISTEN_VARIABLE)
        await stack.enter_async_context(open_server(run_folder, service.serve, host))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.sample())
            tasks.create_task(service.watch())


if __name__ == "__main__":
    sys.path.append(os.getcwd())  # the current folder may contain the user's modules
    run_folder = RunFolder(Path(sys.argv[1]))
    pass_on_signals(run_folder)
    with reporting_failures(run_folder, "rollouts"), noting_warnings(run_folder, "rollouts"):
        raise_file_limit()  # each request to vLLM needs a connection, which is an open file
        asyncio.run(main(run_folder))
