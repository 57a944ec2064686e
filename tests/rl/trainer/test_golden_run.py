"""What a run writes and shows: metrics, panel, lines, summary, warnings, and its defaults."""

import io
import json
import logging
import math
import re
from dataclasses import replace

from rich.console import Console

from envs.messages import tool_call
from rl.config.learned import Learned
from rl.evaluation.summary import PlayedExample, summarise
from rl.placement.placement import Place
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile, read_metrics
from rl.runtime.status import ProcessStatus
from rl.supervisor.children import _device_environment
from rl.terminal.panel import RunView, live_panel
from rl.terminal.screen import final_summary, step_line
from rl.trainer.alarms import Alarms
from rl.trainer.loggers import rollout_rows
from tests.rl.rollouts.test_golden_batch import MASKED
from tests.rl.terminal.test_screen import STEP
from tests.support.composing import composed, learned
from tests.support.golden import golden

TEXTS = {
    "inference0": "serving", "inference1": "starting vLLM", "rollouts": "batch 12: 3 of 8 rollouts",
    "trainer.rank0": "training step 12", "trainer.rank1": "training step 12", "other": "idle",
}  # fmt: skip


def made_row(step: int) -> dict[str, float | None]:
    """Return the metrics of a step: a rise, a collapse from step 30 on, and all that is rare."""
    fallen, wave, broken = step >= 30, round(math.sin(step), 2), float(step % 20 == 19)
    return {
        **STEP,
        "train/reward": None if step == 3 else 0.1 if fallen else 0.1 + step / 50,
        "train/entropy": 0.01 if fallen else 2.0 - step / 40,
        "train/loss": wave / 8, "time/update": 3 + wave, "time/step": 5 + wave, "time/push": 0.5,
        "train/clip_fraction": 0.012, "train/nonfinite": math.inf, "train/skipped": broken,
        "rollout/errors": broken / 8, "rollout/zero_spread": 0.95 * fallen,
        "rollout/truncated": 0.6 * fallen, "rollout/untrained": 0.5 * fallen,
        **({"eval/reward": step / 60, "eval/pass@1": step / 70} if step % 10 == 0 else {}),
    }  # fmt: skip


def test_a_run_in_files_and_on_the_screen(tmp_path, caplog):
    """Metrics of 60 steps: file, step lines, panel in two widths, summary, and alarms."""
    folder, lines = RunFolder(tmp_path / "run"), []
    texts = enumerate(TEXTS.items())
    statuses = {name: ProcessStatus(text, 900.0 + 9 * i, i) for i, (name, text) in texts}
    view = RunView("run", 60, started=600.0, statuses=statuses)
    metrics, memory = MetricsFile(folder), iter([1.0] * 30 + [2.5] * 30)
    facts = learned(advantage_compares=True, loss_reads=["advantages"])
    alarms = Alarms(Learned(**facts), lambda: next(memory))
    for step in range(60):
        metrics.append(step, made_row(step))
        row = read_metrics(folder)[-1] | {"time": 600.0 + 6 * step}
        view.add(row)
        with caplog.at_level(logging.WARNING):
            alarms.add(row)
        lines += [step_line(view, row["time"] + 1)] if step % 7 == 0 or step > 56 else []
        for width in (60, 110) if step in (2, 39, 59) else ():
            console = Console(file=io.StringIO(), width=width, force_terminal=False)
            console.print(live_panel(view, row["time"] + 2))
            lines += console.file.getvalue().splitlines()
    lines += [record.getMessage() for record in caplog.records]
    lines += [re.sub('"time": [^,]*, ', "", folder.metrics.read_text().split("\n")[-2])]
    metrics.truncate_after(40)
    metrics.append(41, {"eval/reward": 0.5, "eval/pass@1": 0.25})
    lines += [str(len(folder.dropped_metrics.read_text().splitlines())), final_summary(folder)]
    golden("trainer/screen", "\n".join(lines).replace(str(tmp_path), ""))


def test_a_table_environments_and_defaults(tmp_path):
    """wandb's table, an evaluation, variables of ranks, and the values of conf/train.yaml."""
    folder = RunFolder(tmp_path)
    call = tool_call("f", x=1)
    said = [[{"role": "user", "content": "q" * n}, call] for n in (3994, 3995, 1, 1, 1, 1, 1)]
    rows = enumerate(said)
    texts = [{"id": i, "messages": m, "advantage": [0.5, i], "reward": i} for i, m in rows]
    folder.rollouts_of(4).write_text("".join(json.dumps(text) + "\n" for text in texts))
    found = {"table": [rollout_rows(folder, 4, count) for count in (3, 9)]}
    played = [PlayedExample(group.example, group.rollouts) for group in MASKED]
    found["evaluated"] = [summarise(played[:n], 1.0).metrics() for n in (1, 4)]
    gpu = Place(host=0, devices=("2",), threads=3, visible=("1", "2"), local_rank=1)
    cpu = replace(gpu, devices=(), visible=(), threads=None)
    for name, place in {"gpu": gpu, "cpu": cpu}.items():
        variables = [_device_environment(place, shared=shared) for shared in (True, False)]
        found[name] = [place.environment(), *variables]
    found["defaults"] = composed("run_name=x", "output_dir=y")
    golden("trainer/run", found)
