"""A whole search for a system prompt: check, start what is to be served, search, say. No torch.

outputs/<run_name>/  system_prompt.txt  results.jsonl  pareto_frontier.jsonl  metadata.json
                     config.yaml  rollouts.jsonl  reflections.jsonl  logs/{gepa,inference}.log
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from envs.protocol import Environment
from rl.config.build import build, construct
from rl.config.prompt_optimization import PromptOptimization, checked
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import ConfigError
from rl.evaluation.play import choose
from rl.evaluation.served import chat_setting, failing, serving_policy
from rl.inference.live_version import LiveVersion
from rl.inference.server import SERVED_AS, VLLMServer, serving
from rl.model.pretrained import check_length, local_folder
from rl.prompts import prompt_player, teacher
from rl.prompts.closing_lines import closing_lines
from rl.prompts.journal import Journal, Record
from rl.prompts.lesson import check_columns
from rl.prompts.outputs import Candidates, write_outputs
from rl.prompts.progress import Progress
from rl.prompts.prompt_player import PromptPlayer, Task, is_unscored, starting_prompt
from rl.prompts.reflection import Reflection
from rl.prompts.teacher import Teacher
from rl.report.finished_runs import resume_command
from rl.run.child import stopped_by_signals
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.run.lock import ensure_free, locked
from rl.run.open_files import raise_open_files
from rl.sampling.chat import Chat, ChatSetting
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
        overrides: what the command line changed, as written.
        choices: which file of each group was chosen.
        command: the command line before its overrides, as written.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        RunFailed: the search ended early; the message is for the user.

    """
    run_folder = RunFolder(Path(str(config.get("output_dir")), str(config.get("run_name"))))
    ensure_free(run_folder)  # before anything slow: a name that is taken is known at once
    settings = checked(config, choices)
    construct(settings, ("model", "env", "sampler", "client", "inference", "reflection"))
    raise_open_files()  # a connection for every rollout in flight
    console = Console()
    env: Environment = build(settings.env)()
    with stopped_by_signals(), locked(run_folder):
        if problems := list(run_folder_problems(asdict(settings))):  # another came meanwhile
            raise ConfigError(problems)
        with refused():
            train, validation = _examples(settings, env)
            start = starting_prompt(env, [task.example for task in (*train, *validation)])
            reflection: Reflection = build(settings.reflection)()
            teacher_folder = _teacher_folder(reflection, run_folder)
        settings.save(run_folder.config)
        record = {"overrides": overrides, "choices": choices, "command": list(command)}
        run_folder.overrides.write_text(yaml.safe_dump(record, sort_keys=False))
        with _saying_how_to_go_on(run_folder, console), failing():
            whole = _Whole(settings, run_folder, env, reflection, teacher_folder, console)
            candidates, ended_by = whole.search(start, train, validation)
    lines = closing_lines(candidates, ended_by, whole.failures, run_folder, overrides, choices)
    console.print(lines, soft_wrap=True)  # commands are there to be copied
    return candidates.means[candidates.best]


@contextmanager
def refused() -> Iterator[None]:
    """What is wrong with examples or the first prompt is wrong with the configuration."""
    try:
        yield
    except ValueError as error:
        raise ConfigError([str(error)]) from error


@contextmanager
def _saying_how_to_go_on(run_folder: RunFolder, console: Console) -> Iterator[None]:
    line = f"nothing that was played or asked is lost; go on  {resume_command(run_folder)}"
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"{error}\n{line}") from error
    except KeyboardInterrupt:
        console.print(line, highlight=False, soft_wrap=True)
        raise


def _examples(settings: PromptOptimization, env: Environment) -> tuple[list[Task], list[Task]]:
    """Return what the teacher learns from and what candidates are ranked by.

    Raises:
        ValueError: a split is empty, or they leave no room for a single round.

    """
    train = [Task("train", example) for example in choose(env, "train", settings.num_train)]
    validation = [Task("eval", example) for example in choose(env, "eval", settings.num_val)]
    check_columns(settings.state_columns, [task.example for task in (*train, *validation)])
    one_round = 2 * settings.minibatch_size + len(validation)
    if settings.max_calls < len(validation) + one_round:
        raise ValueError(
            f"max_calls={settings.max_calls} has no room for one round: the start takes "
            f"{len(validation)} rollouts (num_val) and a round up to {one_round} (2 * "
            f"minibatch_size + num_val): use at least {len(validation) + one_round}, or lower "
            "num_val"
        )
    return train, validation


def _teacher_folder(reflection: Reflection, run_folder: RunFolder) -> RunFolder:
    """Return the folder of the teacher's vLLM, which knows its model where we serve one.

    Raises:
        ValueError: there is no such model, or it was built for shorter rows.

    """
    folder = RunFolder(run_folder.path / "teacher")
    if reflection.path is not None:
        local = local_folder(reflection.path, reflection.revision, "reflection")
        check_length(local, reflection.max_seq_len, "reflection")
        folder.path.mkdir(exist_ok=True)
        folder.set_model(local)
    return folder


@dataclass
class _Whole:
    """One search, with all that it needs."""

    _settings: PromptOptimization
    _run_folder: RunFolder
    _env: Environment
    _reflection: Reflection
    _teacher_folder: RunFolder
    _console: Console
    failures: Counter[str] = field(default_factory=Counter)  # unscored rollouts by cause

    def search(
        self, start: str, train: list[Task], validation: list[Task]
    ) -> tuple[Candidates, str]:
        """Return the candidates, and why the search ended."""
        from rl.prompts.search import GepaLog, Search  # GEPA: a quarter of a second

        settings, folder = self._settings, self._run_folder.path
        summary = {"config": yaml.safe_load(self._run_folder.config.read_text())}
        with ExitStack() as stack:
            self._serve(stack)
            runner = stack.enter_context(asyncio.Runner())
            chats = self._chats()
            policy, teaching = runner.run(chats.__aenter__())
            stack.callback(lambda: runner.run(chats.__aexit__(None, None, None)))
            progress = stack.enter_context(Progress(self._console, settings.max_calls))
            search = Search(
                settings,
                self._player(policy, runner, progress),
                Teacher(
                    teaching,
                    runner,
                    Journal(folder / "reflections.jsonl", teacher.QUESTION),
                    self._reflection.timeout,
                ),
                progress,
                lambda candidates: write_outputs(folder, candidates, validation, summary),
                GepaLog(self._run_folder.log_of("gepa")),
            )
            candidates = search.run(start, train, validation)
        write_outputs(folder, candidates, validation, summary | {"ended_by": search.ended_by})
        return candidates, search.ended_by

    def _player(self, chat: Chat, runner: asyncio.Runner, progress: Progress) -> PromptPlayer:
        path = self._run_folder.path / "rollouts.jsonl"
        journal = Journal(path, prompt_player.QUESTION, failed=is_unscored)
        if journal.num_kept:
            self._say(f"{journal.num_kept} rollouts are there already and are not played again")
        sampler = build(self._settings.sampler)()
        seed = self._settings.seed if sampler.seeded else None

        def told(record: Record) -> None:
            progress.call()
            if is_unscored(record):
                self.failures[record["error"]] += 1

        player = Player(sampler, self._env, chat, seed=seed)
        return PromptPlayer(player, runner, journal, self._console.print, told)

    def _serve(self, stack: ExitStack) -> None:
        """Start what is ours to serve."""
        settings, reflection = self._settings, self._reflection
        if settings.model is not None:
            self._say("starting vLLM (logs/inference.log)")
            stack.enter_context(serving_policy(settings, self._run_folder))
        if reflection.path is not None:
            self._say("starting the teacher's vLLM (teacher/logs/inference.log)")
            server: VLLMServer = build(settings.inference or {})()
            lengths = {"dtype": reflection.dtype, "max_seq_len": reflection.max_seq_len}
            rest = {"seed": settings.seed, "adapter": None}
            vllm = stack.enter_context(serving(server, self._teacher_folder, **lengths, **rest))
            vllm.set_version(0)

    @asynccontextmanager
    async def _chats(self) -> AsyncIterator[tuple[Chat, Chat]]:
        """The chats with the policy and with the teacher."""
        reflection = self._reflection
        setting = chat_setting(self._settings, self._run_folder, self._env)
        async with build(self._settings.client)().connect(setting) as policy:
            if reflection.endpoint is not None:
                async with reflection.at_endpoint(reflection.endpoint) as teaching:
                    yield policy, teaching
            elif reflection.path is not None:
                theirs = _teachers_setting(setting, reflection, self._teacher_folder)
                async with RendererClient(on_rewrite="fork").connect(theirs) as teaching:
                    yield policy, teaching
            else:
                yield policy, policy.asking(reflection.sampler)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


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
        socket=folder.vllm_socket,
        served_as=SERVED_AS["shm"],
        model=folder.model(),
        renderer=reflection.renderer,
    )
