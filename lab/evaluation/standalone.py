"""Run an evaluation without torch: start vLLM if necessary, sample rollouts, write the files.

outputs/<run_name>/  config.yaml  summary.json  rollouts.jsonl  rollouts.html  logs/inference.log
An interrupted evaluation keeps the finished examples in rollouts.incomplete.jsonl.
"""

import asyncio
import json
import math
import shlex
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from envs.episode import Example
from envs.protocol import Environment
from lab.evaluation.served import (
    as_run_failures,
    chat_settings,
    lock_run_folder,
    prepare_settings,
    record_start,
    serving_policy,
)
from lab.evaluation.settings import Evaluation, check_evaluation
from lab.evaluation.table import replace_nan, result_lines
from rl.config.build import build
from rl.evaluation.play import choose_examples, play, write_rollouts
from rl.evaluation.summary import PlayedExample, Summary, summarise
from rl.runtime.files import to_json
from rl.runtime.folder import RunFolder
from rl.runtime.start_record import program
from rl.sampling.player import Player
from rl.sampling.watchdog import Watchdog
from rl.terminal.progress import Progress

_INCOMPLETE = "rollouts.incomplete.jsonl"
_LONGEST_EXPECTED = 500  # maximum number of characters of the right answer in rollouts.jsonl


def evaluate(config: dict[str, Any], *, overrides: list[str]) -> float:
    """Evaluate. Return the mean reward, or raise ConfigError, FolderUnusable or RunFailed."""
    evaluation = prepare_settings(config, check_evaluation)
    console = Console()
    env: Environment = build(evaluation.env)()
    with lock_run_folder(evaluation) as run_folder, as_run_failures():
        examples = choose_examples(env, evaluation.split, evaluation.num_examples)
        record_start(run_folder, evaluation, overrides=overrides)
        with serving_policy(evaluation, run_folder, console):
            played = _run_coroutine(_play_examples(evaluation, run_folder, env, examples, console))
        summary = summarise(played, evaluation.pass_threshold)
        client, model = evaluation.client, evaluation.model
        name = f"{client['model']} at {client['url']}" if model is None else model.path
        command = f"{program('evaluate')} {shlex.join(overrides)}"
        note = " · ".join(filter(None, [name, evaluation.adapter_path, command]))
        write_files(run_folder, played, summary, note)
    console.print(result_lines(summary, evaluation.pass_threshold, run_folder.path))
    return summary.reward


def _run_coroutine(work: Coroutine[Any, Any, list[PlayedExample]]) -> list[PlayedExample]:
    """Return the result of `work`. If an event loop already runs (in a notebook), use a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()


async def _play_examples(
    evaluation: Evaluation,
    run_folder: RunFolder,
    env: Environment,
    examples: list[Example],
    console: Console,
) -> list[PlayedExample]:
    sampler = build(evaluation.sampler)()
    setting = chat_settings(evaluation, run_folder, env)
    async with build(evaluation.client)().connect(setting) as chat:
        rollouts_per_example, total, num_scored = evaluation.rollouts_per_example, 0.0, 0
        finished = list[PlayedExample]()
        bar = Progress(console, len(examples) * rollouts_per_example, "rollouts")
        with Watchdog(console.print) as watchdog, bar as progress:

            def show_progress(played: PlayedExample) -> None:
                nonlocal total, num_scored
                finished.append(played)
                total, num_scored = total + sum(played.rewards), num_scored + len(played.rewards)
                mean = f"{total / num_scored:.3f}" if num_scored else "-"
                progress.advance(len(played.rollouts), f"mean reward {mean}")

            seed = evaluation.seed if sampler.seeded else None
            try:
                return await play(
                    Player(sampler, env, chat, watchdog, seed=seed).play_group,
                    examples,
                    rollouts_per_example,
                    max_concurrent=sampler.max_concurrent,
                    done=show_progress,
                )
            except BaseException:  # after Ctrl-C asyncio raises CancelledError
                if finished:
                    path = run_folder.path / _INCOMPLETE
                    write_rollouts(path, finished, _expected_answer)
                    kept = f"{len(finished)} of {len(examples)} examples were finished: {path}"
                    console.print(kept, markup=False)
                raise


def write_files(
    run_folder: RunFolder, played: Sequence[PlayedExample], summary: Summary, note: str
) -> None:
    """Write summary.json, rollouts.jsonl and rollouts.html. The page's heading contains `note`."""
    from lab.viewer.export import write_page  # imported late, because the import takes a second

    folder = run_folder.path
    (folder / "summary.json").write_text(json.dumps(to_json(asdict(summary)), indent=1) + "\n")
    write_rollouts(run_folder.evaluated, played, _expected_answer)
    (folder / _INCOMPLETE).unlink(missing_ok=True)
    reward = replace_nan(f"reward {summary.reward:.3f} ± {summary.reward_standard_error:.3f}")
    write_page(run_folder, folder / "rollouts.html", f"{reward} · {note}")


def read_summary(run_folder: RunFolder) -> Summary | None:
    """Return the summary that `write_files` wrote; None if the folder has none."""
    path = run_folder.path / "summary.json"
    if not path.is_file():
        return None

    def null_to_nan(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: math.nan if value is None else value for name, value in fields.items()}

    content = json.loads(run_folder.read(path), object_hook=null_to_nan)
    return msgspec.convert(content, Summary, strict=False)  # the keys of `passes` become numbers


def _expected_answer(example: Example) -> dict[str, str]:
    """Return {"expected": the answer in `info`, or else all of `info`}; {} if `info` is empty."""
    answer = example.info.get("answer", dict(example.info))
    if not example.info:
        return {}
    text = answer if isinstance(answer, str) else json.dumps(to_json(answer), ensure_ascii=False)
    return {"expected": text[:_LONGEST_EXPECTED]}
