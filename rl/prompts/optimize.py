"""A whole search for a system prompt: check, search (served_search.py), say. No torch.

outputs/<run_name>/  system_prompt.txt  results.jsonl  pareto_frontier.jsonl  metadata.json
                     config.yaml  rollouts.jsonl  reflections.jsonl  logs/{gepa,inference}.log
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from envs.protocol import Environment
from rl.config.build import build, construct
from rl.config.prompt_optimization import PromptOptimization, checked
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import ConfigError, refused
from rl.evaluation.play import choose
from rl.evaluation.served import failing
from rl.model.pretrained import check_length, local_folder
from rl.placement.settings import settled_inference
from rl.prompts.closing_lines import closing_lines
from rl.prompts.lesson import check_columns
from rl.prompts.prompt_player import Task, starting_prompt
from rl.prompts.reflection import Reflection
from rl.prompts.served_search import ServedSearch
from rl.report.finished_runs import resume_command
from rl.run.devices import visible_gpus
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.run.lock import ensure_free, locked
from rl.run.open_files import raise_open_files
from rl.run.stop_request import stopped_by_signals


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
    if settings.inference is not None:
        suited = settled_inference(settings.inference, settings.sampler, bool(visible_gpus()))
        settings = replace(settings, inference=suited)
    construct(settings, ("model", "env", "sampler", "client", "inference", "reflection"))
    raise_open_files()  # a connection for every rollout in flight
    console = Console()
    env: Environment = build(settings.env)()
    with stopped_by_signals(), locked(run_folder, undone_by=ConfigError):
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
            whole = ServedSearch(settings, run_folder, env, reflection, teacher_folder, console)
            candidates, ended_by = whole.search(start, train, validation)
    lines = closing_lines(candidates, ended_by, whole.failures, run_folder, overrides, choices)
    console.print(lines, soft_wrap=True)  # commands are there to be copied
    return candidates.means[candidates.best]


@contextmanager
def _saying_how_to_go_on(run_folder: RunFolder, console: Console) -> Iterator[None]:
    line = f"nothing that was played or asked is lost; go on  {resume_command(run_folder)}"
    try:
        yield
    except RunFailed as error:
        raise RunFailed(f"{error}\n{line}") from error
    except KeyboardInterrupt:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
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
