"""The files, the table and the settings of evaluations, as stored files."""

import json
from io import StringIO
from math import nan

import numpy as np
from rich.console import Console

from envs.episode import StopReason
from envs.messages import assistant
from lab.evaluation.served import chat_settings, record_start
from lab.evaluation.settings import check_evaluation, without_training_keys
from lab.evaluation.standalone import write_files
from lab.evaluation.table import result_lines
from rl.config.build import build
from rl.evaluation.summary import summarise
from rl.records import TrainingRow
from rl.runtime.folder import RunFolder
from tests.lab.evaluation.test_standalone import played, rollout
from tests.support.composing import composed
from tests.support.golden import golden
from tests.support.outcomes import without


def row(length):
    ints, mask = np.arange(length, dtype=np.int32), np.arange(length) > 2
    return TrainingRow(ints, mask, np.zeros(length, np.float32), ints * 0, ints * 0)


def shown(summary, threshold):
    console = Console(file=StringIO(), width=110)
    console.print(result_lines(summary, threshold, "outputs/x"))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_summary_the_table_and_the_files(tmp_path):
    """All numbers of a mixture with tools, truncation, errors and NaN, and its files."""
    tools = {"rewards": {"exact": 1.0, "f1": 0.5}, "turns": 3, "tool_calls": 4, "tool_errors": 1}
    cut = {"stop_reason": StopReason.MAX_TOKENS, "rewards": {"exact": 0.0, "f1": nan}}
    broken = {"error": "the tool broke " * 20, "stop_reason": StopReason.ENV_ERROR}
    one = [
        rollout(0.75, assistant("a"), rows=(row(9), row(2000)), **tools),
        rollout(0.25, assistant("b"), rows=(row(30),), **cut),
        *(rollout(None, assistant(""), **broken) for _ in range(2)),
    ]
    two = [rollout(1.0, assistant("c"), rows=(row(5),)), rollout(0.5, rows=(row(7),), turns=2)]
    errors = [rollout(None, error=f"error {number}", retries=2) for number in range(6)]
    some = [played(*one, env="wiki", answer="x" * 600), played(*two, env="wiki", answer=["y", 2])]
    some += [played(*two, *two, env="maths", level=3), played(*two[:1], *errors, env="maths")]
    summary = summarise(some, 0.5)
    write_files(RunFolder(tmp_path), some, summary, "my/model · python evaluate.py")
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    tables = [shown(summarise(some[2:3], threshold), threshold) for threshold in (1.0, 2.0)]
    found = [shown(summary, 0.5), *tables, json.loads((tmp_path / "summary.json").read_text())]
    golden("evaluation/results", [*found, lines[:2], lines[4:7:2], summary.metrics()])


def test_the_settings_of_an_evaluation_and_of_its_chat(tmp_path):
    """What evaluate.py leaves out, its chat with and without an adapter, and its files."""
    described = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    kinds = {
        "local": ["model.path=Qwen/Qwen3-0.6B", "+inference.args.max_num_seqs=7"],
        "adapter": [f"model.path={tmp_path}", "env=arithmetic"],
        "remote": ["client=messages", "client.url=http://h:1/v1", "client.model=m"],
    }
    found = {}
    for name, overrides in kinds.items():
        lines = [*overrides, f"output_dir={tmp_path}", f"run_name={name}"]
        config = composed(*lines, primary="evaluate")
        evaluation, folder = check_evaluation(config), RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.set_model(tmp_path / "model")
        record_start(folder, evaluation, overrides=overrides)
        chat = vars(chat_settings(evaluation, folder, build(evaluation.env)()))
        chat = {key: value for key, value in chat.items() if key not in ("router", "tally")}
        kept = without_training_keys(config)
        files = [folder.overrides.read_text(), folder.config.read_text().splitlines()[:8]]
        names = ("model", "inference", "adapter_path")
        found[name] = [{key: kept[key] for key in names}, sorted(kept), files, chat]
    golden("evaluation/settings", without(tmp_path, found))
