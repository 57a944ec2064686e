"""A search with all that it needs: the vLLMs of policy and teacher, and the chats with them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import yaml
from rich.console import Console

from envs.protocol import Environment
from rl.config.build import build
from rl.config.prompt_optimization import PromptOptimization
from rl.evaluation.served import chat_setting, prepare_model, serving_policy
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import SERVED_AS, VLLMServer, only_replica, serving
from rl.prompts import prompt_player, teacher
from rl.prompts.journal import Journal, Record
from rl.prompts.outputs import Candidates, write_outputs
from rl.prompts.progress import Progress
from rl.prompts.prompt_player import PromptPlayer, Task, is_unscored
from rl.prompts.reflection import Reflection
from rl.prompts.teacher import Teacher
from rl.run.folder import RunFolder
from rl.sampling.chat import Chat, ChatSetting
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient


@dataclass
class ServedSearch:
    """One search, with all that it needs."""

    settings: PromptOptimization
    run_folder: RunFolder
    env: Environment
    reflection: Reflection
    teacher_folder: RunFolder
    console: Console
    failures: Counter[str] = field(default_factory=Counter)  # unscored rollouts by cause

    def search(
        self, start: str, train: list[Task], validation: list[Task]
    ) -> tuple[Candidates, str]:
        """Return the candidates, and why the search ended."""
        from rl.prompts.search import GepaLog, Search  # GEPA: a quarter of a second

        settings, folder = self.settings, self.run_folder.path
        summary = {"config": yaml.safe_load(self.run_folder.config.read_text())}
        with ExitStack() as stack:
            self._serve(stack)
            runner = stack.enter_context(asyncio.Runner())
            chats = self._chats()
            policy, teaching = runner.run(chats.__aenter__())
            stack.callback(lambda: runner.run(chats.__aexit__(None, None, None)))
            progress = stack.enter_context(Progress(self.console, settings.max_calls))
            search = Search(
                settings,
                self._player(policy, runner, progress),
                Teacher(
                    teaching,
                    runner,
                    Journal(folder / "reflections.jsonl", teacher.QUESTION),
                    self.reflection.timeout,
                ),
                progress,
                lambda candidates: write_outputs(folder, candidates, validation, summary),
                GepaLog(self.run_folder.log_of("gepa")),
            )
            candidates = search.run(start, train, validation)
        write_outputs(folder, candidates, validation, summary | {"ended_by": search.ended_by})
        return candidates, search.ended_by

    def _player(self, chat: Chat, runner: asyncio.Runner, progress: Progress) -> PromptPlayer:
        path = self.run_folder.path / "rollouts.jsonl"
        journal = Journal(path, prompt_player.QUESTION, failed=is_unscored)
        if journal.num_kept:
            self._say(f"{journal.num_kept} rollouts are there already and are not played again")
        sampler = build(self.settings.sampler)()
        seed = self.settings.seed if sampler.seeded else None

        def told(record: Record) -> None:
            progress.call()
            if is_unscored(record):
                self.failures[record["error"]] += 1

        player = Player(sampler, self.env, chat, seed=seed)
        return PromptPlayer(player, runner, journal, self.console.print, told)

    def _serve(self, stack: ExitStack) -> None:
        """Start what is ours to serve."""
        settings, reflection = self.settings, self.reflection
        if settings.model is not None:
            prepare_model(settings, self.run_folder)
            self._say("starting vLLM (logs/inference.log)")
            stack.enter_context(serving_policy(settings, self.run_folder))
        if reflection.path is not None:
            self._say("starting the teacher's vLLM (teacher/logs/inference.log)")
            server: VLLMServer = build(settings.inference or {})()
            lengths = {"dtype": reflection.dtype, "max_seq_len": reflection.max_seq_len}
            rest = {"seed": settings.seed, "adapter": None}
            vllm = stack.enter_context(serving(server, self.teacher_folder, **lengths, **rest))
            vllm.set_version(0)

    @asynccontextmanager
    async def _chats(self) -> AsyncIterator[tuple[Chat, Chat]]:
        """The chats with the policy and with the teacher."""
        reflection = self.reflection
        setting = chat_setting(self.settings, self.run_folder, self.env)
        async with build(self.settings.client)().connect(setting) as policy:
            if reflection.endpoint is not None:
                async with reflection.at_endpoint(reflection.endpoint) as teaching:
                    yield policy, teaching
            elif reflection.path is not None:
                theirs = _teachers_setting(setting, reflection, self.teacher_folder)
                async with RendererClient(on_rewrite="fork").connect(theirs) as teaching:
                    yield policy, teaching
            else:
                yield policy, policy.asking(reflection.sampler)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)


def _teachers_setting(
    setting: ChatSetting, reflection: Reflection, folder: RunFolder
) -> ChatSetting:
    """What a client needs to know of a teacher that we serve."""
    return replace(
        setting,
        sampler=reflection.sampler,
        max_seq_len=reflection.max_seq_len,
        has_turns=False,
        version=LiveVersion(0),
        router=Router.to(only_replica(folder)),
        served_as=SERVED_AS["shm"],
        model=folder.model(),
        renderer=reflection.renderer,
    )
