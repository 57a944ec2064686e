"""A whole evaluation: start vLLM unless somebody else serves the model, play, write, say. No torch.

outputs/<run_name>/  config.yaml  summary.json  rollouts.jsonl  rollouts.html  logs/inference.log
"""

import asyncio
import json
import shlex
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from envs.episode import Example
from envs.protocol import Environment
from rl.config.build import build, construct
from rl.config.evaluation import Evaluation, checked, evaluation_folder_problems
from rl.config.schema import ConfigError
from rl.evaluation.page import page
from rl.evaluation.play import choose, play, write_rollouts
from rl.evaluation.served import chat_setting, failing, prepare_model, serving_policy
from rl.evaluation.summary import Played, Summary, summarise
from rl.evaluation.table import Progress, report
from rl.placement.settings import settled_inference
from rl.run.devices import visible_gpus
from rl.run.folder import RunFolder
from rl.run.json_lines import plain
from rl.run.lock import ensure_free, locked
from rl.run.open_files import raise_open_files
from rl.run.stop_request import stopped_by_signals
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog


def evaluate(config: dict[str, Any], *, overrides: list[str], choices: dict[str, str]) -> float:
    """Do a whole evaluation and return the mean reward.

    Args:
        config: resolved configuration.
        overrides: what the command line changed, as written.
        choices: which file of each group was chosen.

    Raises:
        ConfigError: the configuration cannot work; nothing was started.
        RunFailed: the evaluation ended early; the message is for the user.

    """
    run_folder = RunFolder(Path(str(config.get("output_dir")), str(config.get("run_name"))))
    ensure_free(run_folder)  # before anything slow: a name that is taken is known at once
    evaluation = checked(config, choices)
    if evaluation.inference is not None:
        suited = settled_inference(evaluation.inference, evaluation.sampler, bool(visible_gpus()))
        evaluation = replace(evaluation, inference=suited)
    construct(evaluation, ("model", "env", "sampler", "client", "inference"))
    raise_open_files()  # a connection for every rollout in flight
    console = Console()
    env: Environment = build(evaluation.env)()
    ours = locked(run_folder, undone_by=ConfigError)
    with stopped_by_signals(), ours, failing(), ExitStack() as stack:
        if problems := list(evaluation_folder_problems(config)):  # another came and went meanwhile
            raise ConfigError(problems)
        examples = choose(env, evaluation.split, evaluation.num_examples)
        evaluation.save(run_folder.config)
        record = {"overrides": overrides, "choices": choices}
        run_folder.overrides.write_text(yaml.safe_dump(record, sort_keys=False))
        if evaluation.model is not None:
            prepare_model(evaluation, run_folder)
            console.print("starting vLLM (logs/inference.log)", highlight=False)
            stack.enter_context(serving_policy(evaluation, run_folder))
        played = asyncio.run(_play(evaluation, run_folder, env, examples, console))
    summary = summarise(played, evaluation.pass_threshold)
    _write(run_folder.path, played, summary, _facts(evaluation, overrides))
    console.print(report(summary, evaluation.pass_threshold, run_folder.path))
    return summary.reward


async def _play(
    evaluation: Evaluation,
    run_folder: RunFolder,
    env: Environment,
    examples: list[Example],
    console: Console,
) -> list[Played]:
    sampler = build(evaluation.sampler)()
    setting = chat_setting(evaluation, run_folder, env)
    async with build(evaluation.client)().connect(setting) as chat:
        rollouts_per_example = evaluation.rollouts_per_example
        with (
            Watchdog(console.print) as watchdog,
            Progress(console, len(examples), rollouts_per_example) as progress,
        ):
            seed = evaluation.seed if sampler.seeded else None
            return await play(
                Player(sampler, env, chat, watchdog, seed=seed).play_group,
                examples,
                rollouts_per_example,
                max_concurrent=sampler.max_concurrent,
                done=progress.add,
            )


def _facts(evaluation: Evaluation, overrides: list[str]) -> dict[str, str]:
    """What was evaluated and how, by name."""
    client, model = evaluation.client, evaluation.model
    named = f"{client['model']} at {client['url']}" if model is None else model.get("path", "")
    return {
        **({"model": str(named)} if named else {}),
        **({"adapter": evaluation.adapter_path} if evaluation.adapter_path else {}),
        "command": shlex.join(["python", "evaluate.py", *overrides]),
    }


def _write(folder: Path, played: list[Played], summary: Summary, facts: dict[str, str]) -> None:
    """Leave the numbers, every rollout, and a page to read some of them."""
    (folder / "summary.json").write_text(json.dumps(plain(asdict(summary)), indent=1) + "\n")
    write_rollouts(folder / "rollouts.jsonl", played)
    (folder / "rollouts.html").write_text(
        page(folder.name, played, summary, facts), encoding="utf-8"
    )
