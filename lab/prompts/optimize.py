"""Run a prompt search: check the options, start servers, search, print the result."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from envs.protocol import Environment
from lab.evaluation.served import (
    as_run_failures,
    chat_settings,
    lock_run_folder,
    prepare_settings,
    record_start,
    serving_policy,
)
from lab.evaluation.settings import PolicySettings
from lab.prompts.describe import Task, check_columns, starting_prompt
from lab.prompts.outputs import PROMPT, Candidate, closing_lines, index_of_best, write_outputs
from lab.prompts.settings import PromptOptimization, check_search
from lab.prompts.teacher import Reflection
from rl.config.build import build
from rl.config.nodes import ModelNode
from rl.config.schema import as_config_error
from rl.evaluation.play import choose_examples
from rl.model.pretrained import check_length, local_folder
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import resume_command
from rl.sampling.chat import ChatSettings
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererClient
from rl.terminal.progress import Progress

if TYPE_CHECKING:
    from lab.prompts.search import Search


def optimize_prompt(
    config: dict[str, Any], *, overrides: list[str], choices: dict[str, str], command: Sequence[str]
) -> float:
    """Run a prompt search, and return the validation score of the best prompt.

    Arguments: fields of `Job` (lab/cli/launch.py). Raise ConfigError, FolderUnusable or RunFailed.
    """
    settings = prepare_settings(config, check_search)
    console = Console()
    env: Environment = build(settings.env)()
    with lock_run_folder(settings) as run_folder:
        with as_config_error():
            if env.scores_groups:
                raise ValueError(
                    f"the environment {env.name} compares rollouts of a group (score_group), but "
                    "a prompt search samples one rollout per example: choose another environment"
                )
            train, validation = _examples(settings, env, _num_played(run_folder))
            start = starting_prompt(env, [task.example for task in (*train, *validation)])
            best = run_folder.path / PROMPT  # exists if this start resumes a search
            start = best.read_text(encoding="utf-8")[:-1] if best.is_file() else start
            _reflection_policy(settings)  # downloads the model if necessary
        record_start(
            run_folder, settings, overrides=overrides, choices=choices, command=list(command)
        )
        resume_hint = f"to continue from the best prompt so far:  {resume_command(run_folder)}"
        try:
            with as_run_failures():
                search = _search(settings, run_folder, env, console, start, train, validation)
        except RunFailed as error:
            raise RunFailed(f"{error}\n{resume_hint}") from error
        except KeyboardInterrupt:
            console.print(resume_hint, markup=False, highlight=False, soft_wrap=True)
            raise
    found, ended = search.candidates, f"{search.ended_by}, {search.progress.done} calls"
    lines = closing_lines(found, ended, search.failures, run_folder, overrides, choices)
    console.print(lines, soft_wrap=True)  # no line breaks inside commands, which users copy
    return found[index_of_best(found)].mean


def _num_played(run_folder: RunFolder) -> int:
    """Return the number of lines in rollouts.jsonl. Add a newline if the last line lacks one."""
    path = run_folder.evaluated
    content = path.read_bytes() if path.is_file() else b""
    if content and not content.endswith(b"\n"):
        path.write_bytes(content + b"\n")
    return len(content.splitlines())


def _examples(
    settings: PromptOptimization, env: Environment, num_played: int
) -> tuple[list[Task], list[Task]]:
    """Return training and validation examples. Raise ValueError if max_calls allows no round."""
    train = [Task("train", one) for one in choose_examples(env, "train", settings.num_train)]
    validation = [Task("eval", one) for one in choose_examples(env, "eval", settings.num_val)]
    check_columns(settings.state_columns, [task.example for task in (*train, *validation)])
    one_round = 2 * settings.minibatch_size + len(validation)
    minimum = num_played + len(validation) + one_round
    if settings.max_calls < minimum:
        earlier = f"{num_played} rollouts were played before, " if num_played else ""
        raise ValueError(
            f"max_calls={settings.max_calls} is too low for one round: {earlier}scoring the first "
            f"prompt takes {len(validation)} rollouts (num_val), and a round up to {one_round} "
            f"(2 * minibatch_size + num_val): set max_calls={minimum} or more, or lower num_val"
        )
    return train, validation


def _reflection_policy(settings: PromptOptimization) -> PolicySettings | None:
    """Return settings to serve `reflection.path` with a second vLLM; None if the path is null."""
    reflection: Reflection = build(settings.reflection)()
    if reflection.path is None:
        return None
    length = reflection.max_seq_len
    local = local_folder(reflection.path, reflection.revision, "reflection")
    check_length(local, length, "reflection")
    model = {
        "_target_": "rl.model.pretrained.PretrainedModel",
        "path": str(local),
        "revision": None,
        "renderer": reflection.renderer,
        "dtype": reflection.dtype,
        "head_dtype": None,
        "max_seq_len": length,
        "max_tokens": reflection.max_tokens,
        **{"learning_rate": 0.0, "describe_tools": True, "warm_start": None},  # required but unused
    }
    return replace(settings, model=ModelNode.of(model), adapter_path=None, max_seq_len=length)


def _search(
    settings: PromptOptimization,
    run_folder: RunFolder,
    env: Environment,
    console: Console,
    start: str,
    train: list[Task],
    validation: list[Task],
) -> "Search":
    from lab.prompts.search import Search  # imported late, because importing GEPA takes 0.25 s

    reflection: Reflection = build(settings.reflection)()
    teacher, teacher_folder = _reflection_policy(settings), RunFolder(run_folder.path / "teacher")
    with ExitStack() as stack:
        stack.enter_context(serving_policy(settings, run_folder, console))
        if teacher is not None:
            teacher_folder.path.mkdir(exist_ok=True)
            stack.enter_context(serving_policy(teacher, teacher_folder, console))
        runner = stack.enter_context(asyncio.Runner())
        chats = AsyncExitStack()
        stack.callback(lambda: runner.run(chats.aclose()))

        def connect(client: Any, setting: ChatSettings) -> Any:
            return runner.run(chats.enter_async_context(client.connect(setting)))

        setting = chat_settings(settings, run_folder, env)
        policy = connect(build(settings.client)(), setting)
        client = reflection.client or build(settings.client)()
        if teacher is not None:
            setting = chat_settings(teacher, teacher_folder, env)
            client = RendererClient(on_rewrite="fork")
        sampler = reflection.sampler(setting.sampler)
        reflecting = connect(client, replace(setting, sampler=sampler, is_multi_turn=False))
        if reflection.client is not None:
            runner.run(reflecting.endpoint.check_access(reflecting.client))
        bar = Progress(console, settings.max_calls, "calls", done=_num_played(run_folder))
        progress = stack.enter_context(bar)
        seed = settings.seed if policy.sampler.seeded else None
        player = Player(policy.sampler, env, policy, seed=seed)

        def save(candidates: list[Candidate], **more: Any) -> None:
            more |= {"num_calls": progress.done, "config": settings.plain()}
            write_outputs(run_folder.path, candidates, validation, **more)

        search = Search(settings, run_folder, player, reflecting, runner, progress, save)
        search.run(start, train, validation)
    save(search.candidates, ended_by=search.ended_by)
    return search
