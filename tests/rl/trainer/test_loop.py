"""What the loop writes and when; the last version's evaluation is no step of its own."""

import json
import socketserver
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from rl.records import RankBatch
from rl.report.finished_runs import steps_done
from rl.report.panel import RunView
from rl.report.screen import final_summary, with_evaluation
from rl.run.folder import RunFolder
from rl.run.metrics import MetricsFile
from rl.run.status import Status
from rl.trainer.loggers import ConsoleLogger
from rl.trainer.loop import TrainingRun
from rl.wire import HEADER, Answer, Call, pack, unpack

STEP = {"train/reward": 0.5, "time/step": 1.0, "eval/reward": 0.25}
LAST = {"eval/reward": 0.75, "eval/pass@1": 0.5}


def test_it_joins_the_last_step_on_the_screen():
    view = RunView("run", 2)
    for row in ({"step": 0, **STEP}, {"step": 1, "train/reward": 0.6}, {"step": 2, **LAST}):
        view.add(with_evaluation(view, row))
    assert view.done == 2
    assert view.rows[-1] == {"step": 1, "train/reward": 0.6, **LAST}


def test_a_step_without_an_evaluation_shows_the_one_before():
    view = RunView("run", 3)
    for row in ({"step": 0, **STEP}, {"step": 1, "train/reward": 0.6}):
        view.add(with_evaluation(view, row))
    assert view.rows[-1]["eval/reward"] == 0.25


def test_it_is_not_counted_as_a_step(tmp_path):
    metrics = MetricsFile(RunFolder(tmp_path))
    metrics.append(0, STEP)
    metrics.append(1, STEP)
    metrics.append(2, LAST)
    summary = final_summary(RunFolder(tmp_path))
    assert "2 steps in" in summary
    assert "0.250 -> 0.750" in summary


def test_steps_are_counted_with_and_without_it():
    rows = [{"step": 0, **STEP}, {"step": 1, **STEP}]
    assert steps_done([]) == 0
    assert steps_done(rows) == steps_done([*rows, {"step": 2, "time": 1.0, **LAST}]) == 2


class RolloutsProcess(socketserver.StreamRequestHandler):
    """Answers every call with an empty batch or nothing."""

    def handle(self):
        while head := self.rfile.read(HEADER.size):
            call = unpack(self.rfile.read(HEADER.unpack(head)[0]), Call)
            batch = RankBatch(call.step, (), np.empty(0, np.float32), np.empty(0, np.int32), {})
            value = msgspec.Raw(pack(batch if call.what == "next_batch" else {}))
            answer = pack(Answer(value=value))
            self.wfile.write(HEADER.pack(len(answer)) + answer)


@dataclass
class ShortRun:
    max_steps: int = 4
    run_name: str = "run"


class KilledRun(TrainingRun):
    """A run of demonstrations that ends as its second step's checkpoint is written."""

    def __init__(self, run_folder: RunFolder) -> None:
        trained = {"train/grad_norm": 1.0, "train/learning_rate": 1.0, "train/skipped": 0.0}
        self.run_folder, self.start, self.nonfinite = run_folder, 0, 0
        self.run = ShortRun()
        self.settings = SimpleNamespace(wait_timeout=60.0, max_nonfinite_steps=3)
        self.sampler = SimpleNamespace(uses_vllm=False)
        self.ranks = SimpleNamespace(first=True, rank=0)
        self.learner = SimpleNamespace(update=lambda batch, observer: dict(trained))
        self.status, self.logger = Status(run_folder, "trainer.rank0"), ConsoleLogger()
        self.metrics = MetricsFile(run_folder)
        self.delivery = None

    def _evaluation(self, rollouts, watch, version, *, last=False) -> dict[str, float]:
        return {}

    def _checkpoint(self, step: int, rollouts: object) -> None:
        if step == 2:
            raise KeyboardInterrupt


def test_no_line_is_lost_between_a_step_and_its_checkpoint(tmp_path):
    folder = RunFolder(tmp_path)
    folder.private.rollouts_socket.parent.mkdir(parents=True, exist_ok=True)
    with socketserver.ThreadingUnixStreamServer(
        str(folder.private.rollouts_socket), RolloutsProcess
    ) as s:
        s.daemon_threads = True
        threading.Thread(target=s.serve_forever, args=(0.01,), daemon=True).start()
        run = KilledRun(folder)
        with pytest.raises(KeyboardInterrupt):
            run.train()
        s.shutdown()
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert ["time/checkpoint" in line for line in lines] == [False, True]  # that of the step before
