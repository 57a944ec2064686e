"""A whole search for a system prompt: check, start the servers, search, print. No torch.

outputs/<run_name>/  system_prompt.txt  results.jsonl  pareto_frontier.jsonl  metadata.json
                     config.yaml  rollouts.jsonl  reflections.jsonl  logs/{gepa,inference}.log
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from rich.console import Console

from envs.protocol import Environment
from lab.evaluation.served import (
    as_run_failures,
    chat_setting,
    locked_run_folder,
    prepare_model,
    prepared_settings,
    record_start,
    serving_policy,
)
from lab.prompts import prompt_player, teacher
from lab.prompts.closing_lines import closing_lines
from lab.prompts.journal import Journal, Record
from lab.prompts.lesson import check_columns
from lab.prompts.outputs import Candidates, write_outputs
from lab.prompts.progress import Progress
from lab.prompts.prompt_player import PromptPlayer, Task, is_unscored, starting_prompt
from lab.prompts.settings import PromptOptimization, checked
from lab.prompts.teacher import Reflection, Teacher
from rl.config.build import build
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import refused
from rl.evaluation.play import choose
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import SERVED_AS, ServedPolicy, VLLMServer, only_replica, serving
from rl.model.pretrained import check_length, local_folder
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import resume_command
from rl.sampling.chat import Chat
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient


def optimize_prompt(
    config: dict[str, Any],
    *,
    overrides: list[str],
    choices: dict[str, str],
    command: Sequence[str],
) -> float:
    """Do a whole search and return the validation score of the best prompt.

    Args:
        config: resolved configuration.
        overrides: the overrides of the command line, as written.
        choices: the chosen file of each group.
        command: the command line before its overrides, as written.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        RunFailed: the search ended early; the message is for the user.

    """
    settings = prepared_settings(config, checked)
    console = Console()
    env: Environment = build(settings.env)()
    with locked_run_folder(settings, run_folder_problems) as run_folder:
        with refused():
            train, validation = _examples(settings, env)
            start = starting_prompt(env, [task.example for task in (*train, *validation)])
            reflection: Reflection = build(settings.reflection)()
            teacher_folder = _teacher_folder(reflection, run_folder)
        record_start(
            run_folder, settings, overrides=overrides, choices=choices, command=list(command)
        )
        with _with_resume_command(run_folder, console), as_run_failures():
            whole = ServedSearch(settings, run_folder, env, reflection, teacher_folder, console)
            candidates, ended_by = whole.search(start, train, validation)
    lines = closing_lines(candidates, ended_by, whole.failures, run_folder, overrides, choices)
    console.print(lines, soft_wrap=True)  # whole lines, because users copy the commands
    return candidates.means[candidates.best]


@contextmanager
def _with_resume_command(run_folder: RunFolder, console: Console) -> Iterator[None]:
    line = f"all rollouts and reflections so far are saved; resume  {resume_command(run_folder)}"
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"{error}\n{line}") from error
    except KeyboardInterrupt:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        raise


def _examples(settings: PromptOptimization, env: Environment) -> tuple[list[Task], list[Task]]:
    """Return the examples of the mini-batches and those that rank the candidates.

    Raises:
        ValueError: a split is empty, or max_calls is too low for one round.

    """
    train = [Task("train", example) for example in choose(env, "train", settings.num_train)]
    validation = [Task("eval", example) for example in choose(env, "eval", settings.num_val)]
    check_columns(settings.state_columns, [task.example for task in (*train, *validation)])
    one_round = 2 * settings.minibatch_size + len(validation)
    if settings.max_calls < len(validation) + one_round:
        raise ValueError(
            f"max_calls={settings.max_calls} is too low for one round: the start takes "
            f"{len(validation)} rollouts (num_val) and a round up to {one_round} (2 * "
            f"minibatch_size + num_val): use at least {len(validation) + one_round}, or lower "
            "num_val"
        )
    return train, validation


def _teacher_folder(reflection: Reflection, run_folder: RunFolder) -> RunFolder:
    """Return the folder of the teacher's vLLM; with reflection.path its model is recorded there.

    Raises:
        ValueError: the model does not exist, or its positions are too few.

    """
    folder = RunFolder(run_folder.path / "teacher")
    if reflection.path is not None:
        local = local_folder(reflection.path, reflection.revision, "reflection")
        check_length(local, reflection.max_seq_len, "reflection")
        folder.path.mkdir(exist_ok=True)
        folder.set_model(local)
    return folder


@dataclass
class ServedSearch:
    """A search with its servers and chats."""

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
        from lab.prompts.search import Search  # late: importing GEPA takes 0.25 s

        settings, folder = self.settings, self.run_folder.path
        summary = {"config": yaml.safe_load(self.run_folder.config.read_text())}
        with ExitStack() as stack:
            self._serve(stack)
            runner = stack.enter_context(asyncio.Runner())
            chats = self._chats()
            policy, teaching = runner.run(chats.__aenter__())
            stack.callback(lambda: runner.run(chats.__aexit__(None, None, None)))
            progress = stack.enter_context(Progress(self.console, settings.max_calls))
            reflections = Journal(folder / "reflections.jsonl", teacher.QUESTION)
            search = Search(
                settings,
                self._player(policy, runner, progress),
                Teacher(teaching, runner, reflections, self.reflection.timeout),
                progress,
                lambda candidates: write_outputs(folder, candidates, validation, summary),
                self.run_folder.log_of("gepa"),
            )
            candidates = search.run(start, train, validation)
        write_outputs(folder, candidates, validation, summary | {"ended_by": search.ended_by})
        return candidates, search.ended_by

    def _player(self, chat: Chat, runner: asyncio.Runner, progress: Progress) -> PromptPlayer:
        journal = Journal(self.run_folder.evaluated, prompt_player.QUESTION, failed=is_unscored)
        if journal.num_kept:
            self._say(f"{journal.num_kept} rollouts were played before and are not played again")
        sampler = build(self.settings.sampler)()
        seed = self.settings.seed if sampler.seeded else None

        def count(record: Record) -> None:
            progress.call()
            if is_unscored(record):
                self.failures[record["error"]] += 1

        player = Player(sampler, self.env, chat, seed=seed)
        return PromptPlayer(player, runner, journal, self.console.print, count)

    def _serve(self, stack: ExitStack) -> None:
        """Start a vLLM for each model that this program serves."""
        settings, reflection = self.settings, self.reflection
        if settings.model is not None:
            prepare_model(settings, self.run_folder)
            self._say("starting vLLM (logs/inference.log)")
            stack.enter_context(serving_policy(settings, self.run_folder))
        if reflection.path is not None:
            self._say("starting the teacher's vLLM (teacher/logs/inference.log)")
            server: VLLMServer = build(settings.inference or {})()
            teacher = ServedPolicy(
                dtype=reflection.dtype, max_seq_len=reflection.max_seq_len, seed=settings.seed
            )
            vllm = stack.enter_context(serving(server, self.teacher_folder, teacher))
            vllm.set_version(0)

    @asynccontextmanager
    async def _chats(self) -> AsyncIterator[tuple[Chat, Chat]]:
        """Yield the chats with the policy and with the teacher."""
        reflection = self.reflection
        setting = chat_setting(self.settings, self.run_folder, self.env)
        async with build(self.settings.client)().connect(setting) as policy:
            if reflection.endpoint is not None:
                async with reflection.at_endpoint(reflection.endpoint) as teaching:
                    yield policy, teaching
            elif reflection.path is not None:
                served = replace(
                    setting,
                    sampler=reflection.sampler,
                    max_seq_len=reflection.max_seq_len,
                    has_turns=False,
                    version=LiveVersion(0),
                    router=Router.to(only_replica(self.teacher_folder)),
                    served_as=SERVED_AS[False],
                    model=self.teacher_folder.model(),
                    renderer=reflection.renderer,
                )
                async with RendererClient(on_rewrite="fork").connect(served) as teaching:
                    yield policy, teaching
            else:
                yield policy, policy.asking(reflection.sampler)

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False)
