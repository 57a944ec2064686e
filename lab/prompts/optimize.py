"""Runs a prompt search: checks the options, starts servers, searches, prints the result.

outputs/<run_name>/  system_prompt.txt  results.jsonl  pareto_frontier.jsonl  metadata.json
                     config.yaml  rollouts.jsonl  reflections.jsonl  logs/{gepa,inference}.log
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import yaml
from rich.console import Console

from envs.protocol import Environment
from lab.evaluation.served import (
    as_run_failures,
    chat_setting,
    locked_run_folder,
    prepared_settings,
    record_start,
    serving_policy,
)
from lab.prompts.closing_lines import closing_lines
from lab.prompts.describe import check_columns
from lab.prompts.outputs import PROMPT, Candidates, write_outputs
from lab.prompts.prompt_player import PromptPlayer, Task, starting_prompt
from lab.prompts.settings import PromptOptimization, checked
from lab.prompts.teacher import Reflection, ReflectionModel
from rl.config.build import build
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import as_config_error
from rl.evaluation.play import choose_examples
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import SERVED_AS, ServedPolicy, VLLMServer, only_replica, serving
from rl.model.pretrained import check_length, local_folder
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import resume_command
from rl.sampling.chat import Chat
from rl.sampling.messages_chat import MessagesChat
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient
from rl.terminal.progress import Progress


def optimize_prompt(
    config: dict[str, Any],
    *,
    overrides: list[str],
    choices: dict[str, str],
    command: Sequence[str],
) -> float:
    """Run a prompt search and return the validation score of the best prompt.

    `choices`: config group -> chosen file; `command`: the command line without its `overrides`.

    Raises:
        ConfigError: the configuration is not valid. No process was started.
        RunFailed: the search ended early because of an error.
    """
    settings = prepared_settings(config, checked)
    console = Console()
    env: Environment = build(settings.env)()
    with locked_run_folder(settings, run_folder_problems) as run_folder:
        with as_config_error():
            if env.scores_groups:
                raise ValueError(
                    f"the environment {env.name} compares rollouts of a group (score_group), and "
                    "a prompt search samples one rollout per example: choose another environment"
                )
            num_played = _num_played(run_folder)
            train, validation = _examples(settings, env, num_played)
            start = starting_prompt(env, [task.example for task in (*train, *validation)])
            best = run_folder.path / PROMPT  # exists if this start resumes a search
            start = best.read_text(encoding="utf-8")[:-1] if best.is_file() else start
            reflection: Reflection = build(settings.reflection)()
            reflection_folder = _reflection_folder(reflection, run_folder)
        record_start(
            run_folder, settings, overrides=overrides, choices=choices, command=list(command)
        )
        served = ServedSearch(settings, run_folder, env, reflection, reflection_folder, console)
        again = f"to continue from the best prompt so far:  {resume_command(run_folder)}"
        try:
            with as_run_failures():
                result = served.search(start, train, validation, num_played)
        except RunFailed as error:
            raise RunFailed(f"{error}\n{again}") from error
        except KeyboardInterrupt:
            console.print(again, markup=False, highlight=False, soft_wrap=True)
            raise
    candidates = result[0]
    lines = closing_lines(*result, run_folder, overrides, choices)
    console.print(lines, soft_wrap=True)  # no line breaks inside commands, which users copy
    return candidates.means[candidates.best]


def _num_played(run_folder: RunFolder) -> int:
    """Return the number of rollouts that earlier starts of this search have played."""
    path = run_folder.evaluated
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):  # a killed search left its last line incomplete
        path.write_bytes(content + b"\n")
    return len(content.splitlines())


def _examples(
    settings: PromptOptimization, env: Environment, num_played: int
) -> tuple[list[Task], list[Task]]:
    """Return the train examples for the mini-batches, and the validation examples.

    Raises:
        ValueError: a split is empty, or max_calls is too low for one round.
    """
    train = [Task("train", one) for one in choose_examples(env, "train", settings.num_train)]
    validation = [Task("eval", one) for one in choose_examples(env, "eval", settings.num_val)]
    check_columns(settings.state_columns, [task.example for task in (*train, *validation)])
    one_round = 2 * settings.minibatch_size + len(validation)
    least = num_played + len(validation) + one_round
    if settings.max_calls < least:
        earlier = f"{num_played} rollouts were played before, " if num_played else ""
        raise ValueError(
            f"max_calls={settings.max_calls} is too low for one round: {earlier}scoring the first "
            f"prompt takes {len(validation)} rollouts (num_val), and a round up to {one_round} "
            f"(2 * minibatch_size + num_val): set max_calls={least} or more, or lower num_val"
        )
    return train, validation


def _reflection_folder(reflection: Reflection, run_folder: RunFolder) -> RunFolder:
    """Return the run folder of the reflection model's vLLM. Download the model if necessary."""
    folder = RunFolder(run_folder.path / "teacher")
    if reflection.path is not None:
        local = local_folder(reflection.path, reflection.revision, "reflection")
        check_length(local, reflection.max_seq_len, "reflection")
        folder.path.mkdir(exist_ok=True)
        folder.set_model(local)
    return folder


@dataclass(frozen=True)
class ServedSearch:
    """A prompt search with the servers that it starts and stops."""

    settings: PromptOptimization
    run_folder: RunFolder
    env: Environment
    reflection: Reflection
    reflection_folder: RunFolder
    console: Console

    def search(
        self, start: str, train: list[Task], validation: list[Task], num_played: int
    ) -> tuple[Candidates, str, Counter[str]]:
        """Return the candidates, why the search ended, and error texts of rollouts with counts."""
        from lab.prompts.search import Search  # late, because importing GEPA takes 0.25 s

        settings, folder = self.settings, self.run_folder.path
        summary = {"config": yaml.safe_load(self.run_folder.config.read_text())}
        with ExitStack() as stack:
            self._serve(stack)
            runner = stack.enter_context(asyncio.Runner())
            chats = self._chats()
            policy, reflecting = runner.run(chats.__aenter__())
            stack.callback(lambda: runner.run(chats.__aexit__(None, None, None)))
            bar = Progress(self.console, settings.max_calls, "calls", done=num_played)
            progress = stack.enter_context(bar)
            sampler = build(settings.sampler)()
            seed = settings.seed if sampler.seeded else None
            player = Player(sampler, self.env, policy, seed=seed)
            reflections = folder / "reflections.jsonl"
            search = Search(
                settings,
                PromptPlayer(player, runner, self.run_folder.evaluated, progress),
                ReflectionModel(reflecting, runner, reflections, self.reflection.timeout),
                lambda candidates: write_outputs(folder, candidates, validation, summary),
                self.run_folder.log_of("gepa"),
            )
            candidates = search.run(start, train, validation)
        write_outputs(folder, candidates, validation, summary | {"ended_by": search.ended_by})
        return candidates, search.ended_by, search.player.failures

    def _serve(self, stack: ExitStack) -> None:
        """Start a vLLM for the policy and one for reflection.path, if these are set."""
        settings, reflection = self.settings, self.reflection
        stack.enter_context(serving_policy(settings, self.run_folder, self.console))
        if reflection.path is not None:
            log = "teacher/logs/inference.log"
            self.console.print(f"starting vLLM for the reflection model ({log})", highlight=False)
            server: VLLMServer = build(settings.inference or {})()
            teacher = ServedPolicy(
                dtype=reflection.dtype, max_seq_len=reflection.max_seq_len, seed=settings.seed
            )
            vllm = stack.enter_context(serving(server, self.reflection_folder, teacher))
            vllm.set_version(0)

    @asynccontextmanager
    async def _chats(self) -> AsyncIterator[tuple[Chat, Chat]]:
        """Yield one chat with the policy and one chat with the reflection model."""
        reflection = self.reflection
        setting = chat_setting(self.settings, self.run_folder, self.env)
        async with build(self.settings.client)().connect(setting) as policy:
            if (endpoint := reflection.endpoint) is not None:
                async with endpoint.client(max_concurrent=1, timeout=reflection.timeout) as client:
                    await endpoint.check_access(client)
                    yield policy, MessagesChat(reflection.sampler, endpoint, client)
            elif reflection.path is not None:
                served = replace(
                    setting,
                    sampler=reflection.sampler,
                    max_seq_len=reflection.max_seq_len,
                    has_turns=False,
                    version=LiveVersion(0),
                    router=Router.to(only_replica(self.reflection_folder)),
                    served_as=SERVED_AS[False],
                    model=self.reflection_folder.model(),
                    renderer=reflection.renderer,
                    renderer_options=None,
                )
                async with RendererClient(on_rewrite="fork").connect(served) as reflecting:
                    yield policy, reflecting
            else:
                yield policy, policy.with_sampler(reflection.sampler)
