"""The trainer's loop with a fake learner and pusher, on a real socket."""

import math
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from rl.config.build import build
from rl.config.schema import Run
from rl.records import MicroBatch, RankBatch, columns_of
from rl.runtime.endpoint import WAIT_VARIABLE
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile, read_metrics, steps_done
from rl.runtime.status import STOPPED, Status, read_statuses, training_is_done
from rl.runtime.stop_request import pass_on_signals
from rl.terminal.panel import RunView
from rl.terminal.screen import final_summary
from rl.trainer import loop
from rl.trainer.delivery import Delivery, Receivers
from rl.trainer.early_stop import warn_of_missing_metric
from rl.trainer.nonfinite import NonFiniteSteps
from rl.weights.pusher import NoReceiver
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack
from tests.support.composing import composed
from tests.support.replicas import inference

EMPTY = MicroBatch(
    **{name: np.zeros((1, 2), column.dtype) for name, column in columns_of(MicroBatch).items()},
    **dict.fromkeys(
        ("rollout_ids", "group_ids", "first_positions", "row_numbers"), np.zeros(1, np.int32)
    ),
)
EVALUATION = {
    "_target_": "rl.evaluation.periodic.PeriodicEvaluation",
    **{"num_examples": 2, "rollouts_per_example": 1, "temperature": 1.0, "pass_threshold": 1.0},
}
STATS = {"train/grad_norm": 1.0, "train/learning_rate": 1e-3, "train/skipped": 0.0}


STEP = {"train/reward": 0.5, "time/step": 1.0, "eval/reward": 0.25}
LAST = {"eval/reward": 0.75, "eval/pass@1": 0.5}


class WithoutReplicas(Receivers):
    """Replicas that are ready without waiting."""

    def wait(self):
        pass


class Rehearsal(loop.TrainingRun):
    """One rank whose learner and pusher are fakes."""

    def __init__(self, folder, *, start, max_steps, checkpoint_every, **changes):
        settings = [f"trainer.checkpoint_every={checkpoint_every}", f"max_steps={max_steps}"]
        self.run = Run.of(composed(f"output_dir={folder.path.parent}", *settings))
        self.run_folder, self.start = folder, start
        self.alarms = SimpleNamespace(add=lambda line: None)
        self.settings = self.run.trainer
        self.status = Status(folder, "trainer.rank0")
        self.profiler = None
        self.ranks = SimpleNamespace(first=True, rank=0, from_first=lambda word: word, any=bool)
        self.nonfinite = NonFiniteSteps(folder, self.ranks, self.settings.max_nonfinite_steps)
        stats = STATS | changes
        self.learner = SimpleNamespace(
            policy=None, shares_prefixes=True, update=lambda batch, observer: dict(stats)
        )
        self.metrics, self.logger = MetricsFile(folder), build(self.run.logger)()
        self.pushed: list[tuple[int, bool]] = []
        pusher: Any = self
        replicas = WithoutReplicas(folder, inference(1), timeout=5.0)
        ranks: Any = self.ranks
        self.delivery = Delivery(pusher, replicas, self.learner.policy, ranks, folder)

    def add(self, receivers):
        pass

    def take_lost(self):
        return {}

    def push(self, policy, version, *, must_differ):
        self.pushed.append((version, must_differ))

    def probe(self, policy, batch, version):
        return {}


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "r")
    made.path.mkdir()
    made.private.make()
    made.set_model(tmp_path)
    return made


@pytest.fixture
def answers() -> dict[str, Callable[[Call], Answer | None]]:
    """Return answers of the rollouts process by call; None means the default answer."""
    return {}


@pytest.fixture
def calls(folder, answers):
    """Yield the calls to a rollouts process that answers at once."""
    asked: list[Call] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder.private.rollouts_socket))
    listener.listen()

    def serve():
        connection = listener.accept()[0].makefile("rwb")
        while header := connection.read(HEADER.size):
            call = unpack(connection.read(HEADER.unpack(header)[0]), Call)
            asked.append(call)
            batch = RankBatch(step=call.step, micro_batches=(EMPTY,))
            value = msgspec.Raw(pack(batch if call.what == "next_batch" else {}))
            special = answers.get(call.what, lambda call: None)(call)
            answer = pack(special or Answer(value=value))
            connection.write(HEADER.pack(len(answer)) + answer)
            connection.flush()

    threading.Thread(target=serve, daemon=True).start()
    yield asked
    listener.close()


@pytest.fixture
def saved(monkeypatch):
    """Return the steps of the checkpoints."""
    steps: list[int] = []
    monkeypatch.setattr(loop, "save_checkpoint", lambda *_, step, **__: steps.append(step))
    return steps


def test_every_step_pushes_and_publishes_one_version(folder, calls, saved):
    run = Rehearsal(folder, start=3, max_steps=6, checkpoint_every=0)
    run.train()
    assert run.pushed == [(3, False), (4, True), (5, True), (6, True)]
    assert [c.version for c in calls if c.what == "publish"] == [3, 4, 5, 6]
    asked = [(c.step, c.shares_prefixes) for c in calls if c.what == "next_batch"]
    assert asked == [(3, True), (4, True), (5, True)]


def test_a_line_of_metrics_has_the_numbers_of_batch_and_step_and_their_rate(
    folder, calls, saved, answers
):
    numbers = {"train/tokens": 500.0, "rollout/forks": 2.0}

    def batch(call: Call) -> Answer:
        ids = ("000000.0",) * call.step  # only the second step is recorded
        made = RankBatch(call.step, (EMPTY,), metrics=numbers, record_ids=ids)
        return Answer(value=msgspec.Raw(pack(made)))

    answers["next_batch"] = batch
    Rehearsal(folder, start=0, max_steps=2, checkpoint_every=0).train()
    rows = read_metrics(folder)
    assert [row["train/policy_version"] for row in rows] == [1, 2]
    for row in rows:
        assert row | numbers | STATS == row
        assert row["rollout/tokens_per_s"] == pytest.approx(500.0 / row["time/step"])
    files = [folder.tokens_of(step, "trainer.rank0") for step in range(2)]
    assert [file.is_file() for file in files] == [False, True]


@pytest.mark.parametrize(
    "changes",
    [{"train/grad_norm": 0.0}, {"train/grad_norm": math.nan}, {"train/learning_rate": 0.0}],
)
def test_a_step_without_gradient_or_rate_need_not_change_the_weights(folder, calls, saved, changes):
    run = Rehearsal(folder, start=0, max_steps=1, checkpoint_every=0, **changes)
    run.train()
    assert run.pushed == [(0, False), (1, False)]


def test_a_resumed_run_has_every_line_once(folder, calls, saved):
    with_later = MetricsFile(folder)
    for step in range(5):  # the run was killed after its checkpoint of step 3
        with_later.append(step, {"old": 1.0})
    with_later.close()
    for step in (2, 3):
        folder.rollouts_of(step).write_text("")
    Rehearsal(folder, start=3, max_steps=6, checkpoint_every=0).train()
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert ["old" in row for row in rows] == [True] * 3 + [False] * 3
    assert [row.get("train/policy_version") for row in rows[3:]] == [4, 5, 6]
    assert [folder.rollouts_of(step).exists() for step in (2, 3)] == [True, False]


@pytest.mark.parametrize(("every", "steps"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_checkpoints_are_saved_when_due_and_at_the_end(
    every, steps, folder, calls, answers, monkeypatch
):
    given = []
    monkeypatch.setattr(loop, "save_checkpoint", lambda *_, **named: given.append(named))
    answers["state"] = lambda call: Answer(value=msgspec.Raw(pack({"next": 1})))
    run = Rehearsal(folder, start=0, max_steps=5, checkpoint_every=every)
    run.settings = replace(run.settings, keep_checkpoints=7)
    run.train()
    state = {"rollouts": {"next": 1}, "model": folder.initial_model(), "keep": 7}
    assert given == [{"step": step, **state} for step in steps]


def test_a_checkpoint_has_the_state_from_before_groups_of_the_next_version_start(
    folder, calls, saved
):
    Rehearsal(folder, start=0, max_steps=4, checkpoint_every=2).train()
    asked = [c.version if c.what == "publish" else c.what for c in calls]
    asked = [each for each in asked if each != "next_batch"]
    assert asked == [0, 1, "state", 2, 3, "state", 4]


def test_only_steps_in_a_row_without_a_gradient_end_the_run_and_each_is_recorded(
    folder, calls, saved, answers, caplog, monkeypatch
):
    monkeypatch.chdir(folder.path)  # in which there is no compare_losses.py
    run = Rehearsal(folder, start=0, max_steps=99, checkpoint_every=0)
    most = run.settings.max_nonfinite_steps
    several = [1.0] * (most - 1) + [0.0]
    skipped = [*several * 3, *[0.5] * most]  # at last half of the updates of each step
    left = [{**STATS, "train/skipped": each} for each in skipped]
    run.learner.update = lambda batch, observer: left.pop(0)
    answers["record_all"] = lambda call: Answer(value=msgspec.Raw(pack(["000000.0"])))
    with pytest.raises(RunFailed, match=f"{most} times in a row") as caught:
        run.train()
    ends = len(skipped) - 1
    assert f"offbyone compare-losses {folder} steps={ends} loss=<another>" in str(caught.value)
    *first, last = [step for step, each in enumerate(skipped) if each]
    recorded = [*first[:5], last]  # more would fill the disk
    assert [call.step for call in calls if call.what == "record_all"] == recorded
    assert [
        step for step in range(99) if folder.tokens_of(step, "trainer.rank0").is_file()
    ] == recorded
    warned = [message for message in caplog.messages if "was NaN or infinite" in message]
    assert len(warned) == len(recorded) - 1


@pytest.mark.parametrize(("message", "stopped"), [(STOPPED, True), ("the task is too hard", False)])
def test_a_run_that_ends_early_saves_and_has_no_further_evaluation(
    message, stopped, folder, calls, saved, answers
):
    answers["next_batch"] = lambda call: (
        Answer(over=message, stopped=stopped) if call.step == 2 else None
    )
    answers["evaluation"] = lambda call: Answer(value=msgspec.Raw(pack({"eval/reward": 0.5})))
    run = Rehearsal(folder, start=0, max_steps=9, checkpoint_every=0)
    run.run = replace(run.run, evaluation={**EVALUATION, "every": 5})
    with nullcontext() if stopped else pytest.raises(RunFailed, match=message):
        run.train()
    assert saved == [2]
    assert [c.version for c in calls if c.what == "evaluation"] == [0]
    rows = [(row["step"], row.get("eval/reward")) for row in read_metrics(folder)]
    assert rows == [(0, 0.5), (1, None)]


@pytest.mark.parametrize(
    ("condition", "steps"),
    [
        ("eval/reward >= 0.6", [0, 1, 2]),
        ("eval/reward > 0.95", [0, 1, 2, 3]),
        ("eval/reward > 0.8", [0, 1, 2, 3]),  # in the last step, which needs no early end
        ("train/skipped > 0", [0, 1, 2, 3]),
    ],
)
def test_stop_when_ends_the_run_after_the_first_step_that_fulfils_it(
    condition, steps, folder, calls, saved, answers
):
    answers["evaluation"] = lambda call: Answer(
        value=msgspec.Raw(pack({"eval/reward": 0.3 * call.version}))
    )
    run = Rehearsal(folder, start=0, max_steps=4, checkpoint_every=0)
    run.run = replace(run.run, evaluation={**EVALUATION, "every": 1}, stop_when=condition)
    run.train()
    rows = read_metrics(folder)
    assert [row["step"] for row in rows if "train/loss" in row or "time/step" in row] == steps
    last = [(row["step"], row["eval/reward"]) for row in rows if "time/step" not in row]
    assert last == [(4, pytest.approx(1.2))] * (len(steps) == 4)
    assert saved == [len(steps)]
    doing = read_statuses(folder)["trainer.rank0"].doing
    assert doing == ("done" if len(steps) == 4 else f"done: stop_when={condition} is fulfilled")


def test_a_metric_of_stop_when_that_no_line_has_is_one_warning(folder, calls, saved, caplog):
    run = Rehearsal(folder, start=0, max_steps=3, checkpoint_every=0)
    run.run = replace(run.run, stop_when="train/skiped > 0")
    run.train()
    missing = "stop_when: there is no metric train/skiped yet: did you mean train/skipped?"
    assert caplog.messages.count(missing) == 1
    assert steps_done(read_metrics(folder)) == 3


def test_a_metric_of_stop_when_in_an_earlier_line_is_known(folder, caplog):
    run = Run.of(composed("evaluation=default", 'stop_when="eval/reward > 1"'))
    metrics = MetricsFile(folder)
    metrics.append(0, {"eval/reward": 0.5})
    metrics.append(1, {"train/loss": 0.5})
    metrics.close()
    warn_of_missing_metric(run, folder)
    assert not caplog.messages


def test_a_rank_that_shares_its_gpu_waits_for_vllm_before_it_uses_memory(folder, monkeypatch):
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", WAIT_VARIABLE: "1"}
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "")  # are set
    for name, value in {**names, **interfaces, "DS_ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(name, value)
    joined, threads = list[object](), list[int]()
    monkeypatch.setattr(loop.torch, "set_num_threads", threads.append)

    def join(*given):
        joined.append(given)
        raise RunFailed("no other rank")

    monkeypatch.setattr(loop.Ranks, "join", join)
    given = ("inference.startup_timeout=0.01", "trainer.wait_timeout=70", "trainer.num_threads=3")
    Run.of(composed(*given)).save(folder.config)
    with pytest.raises(RunFailed, match="not every vLLM has started"):
        loop.TrainingRun(folder)
    assert not joined
    assert read_statuses(folder)["trainer.rank0"].doing.startswith("waiting for vLLM to start")
    monkeypatch.delenv(WAIT_VARIABLE)
    hosts = ("cluster=ray", "cluster.interface=lo")
    for more, meeting in (((), folder.private.rendezvous), (hosts, None)):
        Run.of(composed(*given, *more)).save(folder.config)
        with pytest.raises(RunFailed, match="no other rank"):
            loop.TrainingRun(folder)
        # A request times out before a collective does.
        assert joined.pop() == (meeting, 140.0)
    assert threads == [3, 3]


PHASES = ("add", "update", "push", "probe", "_publish", "_log", "_save")


@pytest.fixture
def passing_on(folder):
    """Handle signals to this process as a rank does."""
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    pass_on_signals(folder)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_any_phase_neither_loses_nor_repeats_a_step(
    phase, folder, calls, saved, answers, passing_on, monkeypatch
):
    def no_more(call: Call) -> Answer | None:
        return Answer(over=STOPPED, stopped=True) if folder.stop_request.exists() else None

    answers["next_batch"] = no_more  # as rl/rollouts/service.py answers all ranks
    run = Rehearsal(folder, start=0, max_steps=9, checkpoint_every=2)
    owner = run.learner if phase == "update" else run
    method, seen = getattr(owner, phase), []

    def signalled(*given, **named):
        seen.append(phase)
        if len(seen) == (1 if phase == "add" else 2):
            os.kill(os.getpid(), signal.SIGUSR2)
        return method(*given, **named)

    monkeypatch.setattr(owner, phase, signalled)
    run.train()
    done = [row["step"] for row in read_metrics(folder)]
    # The second push and publication are those of the first step.
    num_steps = {"add": 0, "push": 1, "_publish": 1}.get(phase, 2)
    assert done == list(range(num_steps))
    assert saved == [num_steps] * (num_steps > 0)


class WithoutServer(Rehearsal):
    def push(self, policy, version, *, must_differ):
        super().push(policy, version, must_differ=must_differ)
        if version > self.start:
            raise NoReceiver("vLLM is out of reach")


@pytest.mark.parametrize("noticed", [True, False])
def test_a_step_that_cannot_be_pushed_is_saved_if_the_supervisor_stops_the_run(
    folder, calls, saved, monkeypatch, noticed
):
    if noticed:
        folder.stop_request.touch()
    run = WithoutServer(folder, start=3, max_steps=6, checkpoint_every=0)
    monkeypatch.setattr(run.delivery._receivers, "restart_timeout", 0.1)
    with nullcontext() if noticed else pytest.raises(RunFailed, match="out of reach"):
        run.train()
    assert saved == [4] * noticed
    assert [row["step"] for row in read_metrics(folder)] == [3] * noticed
    assert [call.version for call in calls if call.what == "publish"] == [3]


class KilledRun(Rehearsal):
    def _save(self, step, state):
        if step == 2:
            raise KeyboardInterrupt


def test_no_line_is_lost_between_a_step_and_its_checkpoint(folder, calls):
    with pytest.raises(KeyboardInterrupt):
        KilledRun(folder, start=0, max_steps=4, checkpoint_every=1).train()
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [0, 1]
    assert ["time/checkpoint" in line for line in lines] == [False, True]  # that of the step before


def test_the_line_of_the_last_evaluation_joins_the_last_step_and_is_no_step(tmp_path):
    rows = [{"step": 0, **STEP}, {"step": 1, "train/reward": 0.6}]
    view, metrics = RunView("run", 2), MetricsFile(RunFolder(tmp_path))
    for row in rows:
        view.add(row)
    assert view.rows[-1]["eval/reward"] == 0.25  # that of the step before
    view.add({"step": 2, **LAST})
    assert view.done == 2
    assert view.rows[-1] == {**rows[1], **LAST}
    assert steps_done([]) == 0
    assert steps_done(rows) == steps_done([*rows, {"step": 2, "time": 1.0, **LAST}]) == 2
    for step, row in enumerate((STEP, STEP, LAST)):
        metrics.append(step, row)
    summary = final_summary(RunFolder(tmp_path))
    assert "2 steps in" in summary
    assert "0.250 -> 0.750" in summary


def test_a_run_that_misses_its_last_evaluation_has_saved_and_is_not_done(
    folder, calls, saved, answers
):
    answers["evaluation"] = lambda call: Answer(over="no version 2") if call.version else None
    run = Rehearsal(folder, start=0, max_steps=2, checkpoint_every=0)
    run.run = replace(run.run, evaluation={**EVALUATION, "every": 5})
    with pytest.raises(NoMoreBatches, match="no version 2"):
        run.train()
    assert saved == [2]
    assert not training_is_done(folder)
