"""The trainer's loop with a fake learner and pusher, on a real socket.

The last tests are of the delivery of a version that no vLLM takes: every rank decides the same, and
no step is lost.
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from rl.config.build import build
from rl.config.schema import Run
from rl.records import MicroBatch, RankBatch, columns_of
from rl.runtime.endpoint import WAIT_VARIABLE, Endpoint, read_restart_request
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile, read_metrics
from rl.runtime.status import STOPPED, Status, read_statuses, training_is_done
from rl.runtime.stop_request import pass_on_signals
from rl.trainer import loop
from rl.trainer.delivery import Delivery, Receivers
from rl.trainer.nonfinite import NonFiniteSteps
from rl.weights.pusher import NoReceiver, WeightPusher
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack
from tests.rl.weights.test_pusher import OnePolicy, Scorer, two_rows
from tests.support.composing import composed
from tests.support.policy_setup import PlainSteps
from tests.support.ranks import on_ranks, worlds
from tests.support.receiving import opened, refuse, replica
from tests.support.replicas import inference

NUMBERS = ("rollout_ids", "group_ids", "first_positions", "row_numbers")
EMPTY = MicroBatch(
    **{name: np.zeros((1, 2), column.dtype) for name, column in columns_of(MicroBatch).items()},
    **dict.fromkeys(NUMBERS, np.zeros(1, np.int32)),
)
EVALUATION = {
    "_target_": "rl.evaluation.periodic.PeriodicEvaluation",
    **{"num_examples": 2, "rollouts_per_example": 1, "temperature": 1.0, "pass_threshold": 1.0},
}
STATS = {"train/grad_norm": 1.0, "train/learning_rate": 1e-3, "train/skipped": 0.0}


def answer(value: Any) -> Answer:
    return Answer(value=msgspec.Raw(pack(value)))


class WithoutReplicas(Receivers):
    """Replicas that are ready without waiting."""

    def wait(self):
        pass


class Rehearsal(loop.TrainingRun):
    """One rank whose learner and pusher are fakes, and a rollouts process that answers at once.

    `answers` has answers by call; None means the default answer.
    """

    def __init__(self, folder, *, max_steps, start=0, checkpoint_every=0, stats=None, **changes):
        settings = [f"trainer.checkpoint_every={checkpoint_every}", f"max_steps={max_steps}"]
        run = Run.of(composed(f"output_dir={folder.path.parent}", *settings))
        self.run, self.run_folder, self.start = replace(run, **changes), folder, start
        self.alarms = SimpleNamespace(add=lambda line: None)
        self.settings = self.run.trainer
        self.status = Status(folder, "trainer.rank0")
        self.profiler = None
        ranks: Any = SimpleNamespace(first=True, rank=0, from_first=str, any=bool)
        ranks.gather = lambda text: [text, "000001.0"]  # another rank's text
        self.ranks = ranks
        self.nonfinite = NonFiniteSteps(folder, self.ranks, self.settings.max_nonfinite_steps)
        stats = STATS | (stats or {})
        self.learner = SimpleNamespace(
            policy=None, shares_prefixes=True, update=lambda batch, observer: dict(stats)
        )
        self.metrics, self.logger = MetricsFile(folder), build(self.run.logger)()
        self.pushed: list[tuple[int, bool]] = []
        pusher: Any = self
        replicas = WithoutReplicas(folder, inference(1), timeout=5.0)
        self.delivery = Delivery(pusher, replicas, self.learner.policy, ranks, folder)
        self.calls: list[Call] = []
        self.answers: dict[str, Callable[[Call], Answer | None]] = {}
        self.checkpoints: list[dict[str, Any]] = []

    def serve(self, listener: socket.socket) -> None:
        connection = listener.accept()[0].makefile("rwb")
        while header := connection.read(HEADER.size):
            call = unpack(connection.read(HEADER.unpack(header)[0]), Call)
            self.calls.append(call)
            batch = RankBatch(step=call.step, micro_batches=(EMPTY,))
            default = answer(batch if call.what == "next_batch" else {})
            given = pack(self.answers.get(call.what, lambda call: None)(call) or default)
            connection.write(HEADER.pack(len(given)) + given)
            connection.flush()

    def versions(self, what: str) -> list[int]:
        return [call.version for call in self.calls if call.what == what]

    @property
    def saved(self) -> list[int]:
        return [checkpoint["step"] for checkpoint in self.checkpoints]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_folder)

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
def rehearsal(folder, monkeypatch):
    """Return a function that makes a run, which notes its checkpoints instead of writing them."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder.private.rollouts_socket))
    listener.listen()

    def make(**given) -> Rehearsal:
        run = Rehearsal(folder, **given)
        monkeypatch.setattr(loop, "save_checkpoint", lambda *_, **at: run.checkpoints.append(at))
        threading.Thread(target=run.serve, args=(listener,), daemon=True).start()
        return run

    yield make
    listener.close()


def test_a_line_of_metrics_has_the_numbers_of_batch_and_step_and_their_rate(rehearsal, folder):
    numbers = {"train/tokens": 500.0, "rollout/forks": 2.0}

    def batch(call: Call) -> Answer:
        ids = ("000000.0",) * call.step  # only the second step is recorded
        return answer(RankBatch(call.step, (EMPTY,), metrics=numbers, record_ids=ids))

    run = rehearsal(max_steps=2)
    run.answers["next_batch"] = batch
    run.train()
    assert [row["train/policy_version"] for row in run.rows] == [1, 2]
    for row in run.rows:
        assert row | numbers | STATS == row
        assert row["rollout/tokens_per_s"] == pytest.approx(500.0 / row["time/step"])
    files = [folder.tokens_of(step, "trainer.rank0") for step in range(2)]
    assert [file.is_file() for file in files] == [False, True]


@pytest.mark.parametrize(
    "stats", [{"train/grad_norm": 0.0}, {"train/grad_norm": math.nan}, {"train/learning_rate": 0.0}]
)
def test_a_step_without_gradient_or_rate_need_not_change_the_weights(stats, rehearsal):
    run = rehearsal(max_steps=1, stats=stats)
    run.train()
    assert run.pushed == [(0, False), (1, False)]


def test_a_resumed_run_pushes_each_version_and_has_every_line_once(rehearsal, folder):
    with_later = MetricsFile(folder)
    for step in range(5):  # the run was killed after its checkpoint of step 3
        with_later.append(step, {"old": 1.0})
    for step in (2, 3):
        folder.rollouts_of(step).write_text("")
    run = rehearsal(start=3, max_steps=6)
    run.train()
    assert run.pushed == [(3, False), (4, True), (5, True), (6, True)]
    assert run.versions("publish") == [3, 4, 5, 6]
    asked = [(c.step, c.shares_prefixes) for c in run.calls if c.what == "next_batch"]
    assert asked == [(3, True), (4, True), (5, True)]
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3, 4, 5]
    assert ["old" in row for row in run.rows] == [True] * 3 + [False] * 3
    assert [row.get("train/policy_version") for row in run.rows[3:]] == [4, 5, 6]
    assert [folder.rollouts_of(step).exists() for step in (2, 3)] == [True, False]


@pytest.mark.parametrize(
    ("every", "steps", "expected"),  # the state is that from before groups of the next version
    [
        (0, [5], [0, 1, 2, 3, 4, "state", 5]),
        (2, [2, 4, 5], [0, 1, "state", 2, 3, "state", 4, "state", 5]),
    ],
)
def test_checkpoints_are_saved_when_due_and_at_the_end(every, steps, expected, rehearsal, folder):
    run = rehearsal(max_steps=5, checkpoint_every=every)
    run.answers["state"] = lambda call: answer({"next": 1})
    run.settings = replace(run.settings, keep_checkpoints=7)
    run.train()
    state = {"rollouts": {"next": 1}, "model": folder.initial_model(), "keep": 7}
    assert run.checkpoints == [{"step": step, **state} for step in steps]
    asked = [c.version if c.what == "publish" else c.what for c in run.calls]
    assert [each for each in asked if each != "next_batch"] == expected


def test_steps_in_a_row_without_a_gradient_end_the_run(rehearsal, folder, caplog):
    run = rehearsal(max_steps=99)
    most = run.settings.max_nonfinite_steps
    several = [1.0] * (most - 1) + [0.0]
    skipped = [*several * 3, *[0.5] * most]  # at last half of the updates of each step
    left = [{**STATS, "train/skipped": each} for each in skipped]
    run.learner.update = lambda batch, observer: left.pop(0)
    run.answers["record_all"] = lambda call: answer(["000000.0"])
    with pytest.raises(RunFailed, match=f"steps in a row: {most}") as caught:
        run.train()
    ends = len(skipped) - 1
    # No update has damaged the weights, and the run may have to go on from an older checkpoint.
    keep = run.settings.keep_checkpoints + 1
    assert [(saved["step"], saved["keep"]) for saved in run.checkpoints] == [(ends + 1, keep)]
    assert run.rows[-1]["step"] == ends
    assert f"{folder} steps={ends} loss=<another>" in str(caught.value)
    assert "at tokens of 1 of 1 rollouts, for example of 000001.0 (steps" in str(caught.value)
    *first, last = [step for step, each in enumerate(skipped) if each]
    recorded = [*first[:5], last]  # more would fill the disk
    assert [call.step for call in run.calls if call.what == "record_all"] == recorded
    written = [n for n in range(99) if folder.tokens_of(n, "trainer.rank0").is_file()]
    assert written == recorded
    warned = [message for message in caplog.messages if "was NaN or infinite" in message]
    assert len(warned) == len(recorded) - 1


@pytest.mark.parametrize(("message", "stopped"), [(STOPPED, True), ("the task is too hard", False)])
def test_a_run_that_ends_early_saves_and_has_no_further_evaluation(message, stopped, rehearsal):
    run = rehearsal(max_steps=9, evaluation={**EVALUATION, "every": 5})
    end = Answer(over=message, stopped=stopped)
    run.answers["next_batch"] = lambda call: end if call.step == 2 else None
    run.answers["evaluation"] = lambda call: answer({"eval/reward": 0.5})
    with nullcontext() if stopped else pytest.raises(RunFailed, match=message):
        run.train()
    assert run.saved == [2]
    assert run.versions("evaluation") == [0]
    assert [(row["step"], row.get("eval/reward")) for row in run.rows] == [(0, 0.5), (1, None)]


def test_a_run_that_misses_its_last_evaluation_has_saved_and_is_not_done(rehearsal, folder):
    run = rehearsal(max_steps=2, evaluation={**EVALUATION, "every": 5})
    run.answers["evaluation"] = lambda call: Answer(over="no version 2") if call.version else None
    with pytest.raises(NoMoreBatches, match="no version 2"):
        run.train()
    assert run.saved == [2]
    assert not training_is_done(folder)


@pytest.mark.parametrize(
    ("condition", "num_steps"),
    [("eval/reward >= 0.6", 3), ("eval/reward > 0.95", 4), ("train/skiped > 0", 4)],
)
def test_stop_when_ends_the_run_when_fulfilled(condition, num_steps, rehearsal, folder, caplog):
    run = rehearsal(max_steps=4, evaluation={**EVALUATION, "every": 1}, stop_when=condition)
    run.answers["evaluation"] = lambda call: answer({"eval/reward": 0.3 * call.version})
    run.train()
    steps = [row["step"] for row in run.rows if "train/loss" in row or "time/step" in row]
    assert steps == list(range(num_steps))
    last = [(row["step"], row["eval/reward"]) for row in run.rows if "time/step" not in row]
    assert last == [(4, pytest.approx(1.2))] * (num_steps == 4)
    assert run.saved == [num_steps]
    doing = read_statuses(folder)["trainer.rank0"].doing
    assert doing == ("done" if num_steps == 4 else f"done: stop_when={condition} is fulfilled")
    assert caplog.text.count("did you mean train/skipped?") == ("skiped" in condition)


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
def test_a_signal_drops_and_repeats_no_step(phase, rehearsal, folder, passing_on, monkeypatch):
    def no_more(call: Call) -> Answer | None:
        return Answer(over=STOPPED, stopped=True) if folder.stop_request.exists() else None

    run = rehearsal(max_steps=9, checkpoint_every=2)
    run.answers["next_batch"] = no_more  # as rl/rollouts/service.py answers all ranks
    owner = run.learner if phase == "update" else run
    method, seen = getattr(owner, phase), []

    def signalled(*given, **named):
        seen.append(phase)
        if len(seen) == (1 if phase == "add" else 2):
            os.kill(os.getpid(), signal.SIGUSR2)
        return method(*given, **named)

    monkeypatch.setattr(owner, phase, signalled)
    run.train()
    # The second push and publication are those of the first step.
    num_steps = {"add": 0, "push": 1, "_publish": 1}.get(phase, 2)
    assert [row["step"] for row in run.rows] == list(range(num_steps))
    assert run.saved == [num_steps] * (num_steps > 0)


@pytest.mark.parametrize("noticed", [True, False])
def test_a_step_that_cannot_be_pushed_is_saved(noticed, rehearsal, folder, monkeypatch):
    def push(policy, version, *, must_differ):
        if version > 3:
            raise NoReceiver("vLLM is out of reach")

    if noticed:
        folder.stop_request.touch()
    run = rehearsal(start=3, max_steps=6)
    monkeypatch.setattr(run, "push", push)
    monkeypatch.setattr(run.delivery._receivers, "restart_timeout", 0.1)
    with nullcontext() if noticed else pytest.raises(RunFailed, match="out of reach"):
        run.train()
    assert run.saved == [4] * noticed
    assert [row["step"] for row in run.rows] == [3] * noticed
    assert run.versions("publish") == [3]


def test_no_line_is_lost_between_a_step_and_its_checkpoint(rehearsal, monkeypatch):
    def killed(step, state):
        if step == 2:
            raise KeyboardInterrupt

    run = rehearsal(max_steps=4, checkpoint_every=1)
    monkeypatch.setattr(run, "_save", killed)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    assert [line["step"] for line in run.rows] == [0, 1]
    # The time is that of the checkpoint of the step before.
    assert ["time/checkpoint" in line for line in run.rows] == [False, True]


def test_a_rank_waits_for_vllm_on_its_gpu_and_requests_end_before_collectives(folder, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", WAIT_VARIABLE: "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(loop.Ranks, "join", join := Mock(side_effect=RunFailed("no other rank")))
    Run.of(composed("inference.startup_timeout=0.01", "trainer.wait_timeout=7")).save(folder.config)
    for said in ("not every vLLM has started", "no other rank"):
        with pytest.raises(RunFailed, match=said):
            loop.TrainingRun(folder)
        monkeypatch.delenv(WAIT_VARIABLE, raising=False)
    join.assert_called_once_with(folder.private.rendezvous, 14.0)


SLOW_S = 1.0  # of the first rank, which alone talks to vLLM
CASES = {  # pushes and probes, x loses the last vLLM; new_replicas; stop asked; result; must_differ
    "live": (".", ".", 0, False, True, [True]),
    "stop after push": ("x", "", 0, True, False, [True]),
    "stop after probe": (".", "x", 0, True, False, [True]),
    "again after push": ("x.", ".", 2, False, True, [True, False]),
    "again after probe": ("..", "x.", 2, False, True, [True, False]),
    "fail": ("x", "", 0, False, "vLLM is out of reach", [True]),
}


class Faulty:
    """Collect as a pusher does; lose the last vLLM on the first rank where a case says so."""

    def __init__(self, first, pushes, probes):
        self.first, self.pushes, self.probes = first, list(pushes), list(probes)
        self.differs = []

    def add(self, receivers):
        pass

    def take_lost(self):
        return {}

    def push(self, policy, version, *, must_differ):
        policy.weights()
        self.differs.append(must_differ)
        self.end(self.pushes.pop(0))

    def probe(self, policy, batch, version):
        policy.logprobs(batch.token_ids[:1])
        self.end(self.probes.pop(0))
        return {"mismatch/mean_abs": 0.0} if self.first else {}

    def end(self, case):
        if self.first and case == "x":
            time.sleep(SLOW_S)
            raise NoReceiver("vLLM is out of reach")


@worlds
@on_ranks
def test_all_ranks_decide_the_same_wherever_the_last_vllm_is_lost(setup):
    policy = setup.policy("float32", "zero3", PlainSteps())
    batch = setup.batch(setup.rows).micro_batches[0]
    for name, (pushes, probes, new_replicas, stop, result, differs) in CASES.items():
        pusher, left = Faulty(setup.ranks.first, pushes, probes), [new_replicas]

        def arrive(pusher=pusher, left=left):
            left[0] -= 1
            return [object()] if left[0] >= 0 and pusher.differs else []

        asked = SimpleNamespace(exists=lambda stop=stop: stop)
        replicas = SimpleNamespace(new_replicas=arrive, updated={}, restart_timeout=0.3)
        run_folder = SimpleNamespace(stop_request=asked)
        one = Delivery(pusher, replicas, policy, setup.ranks, run_folder)
        try:
            found = one.deliver(1, batch, dict(STATS), lambda name, doing: nullcontext())
        except RunFailed as error:
            found = str(error)
        assert (found, pusher.differs) == (result, differs), name


@pytest.mark.parametrize("route", ["/pause", "/inference/v1/generate"])
def test_a_vllm_that_starts_meanwhile_replaces_the_last(route, tmp_path):
    """The supervisor ends no run in which another vLLM answers."""
    folder, policy = RunFolder(tmp_path / "run"), OnePolicy(tmp_path / "model")
    folder.path.mkdir()
    policy.ranks = SimpleNamespace(first=True, from_first=lambda word: word)
    policy.logprobs = Scorer(0.0).logprobs
    receivers = Receivers(folder, inference(2), timeout=30.0)
    assert receivers.restart_timeout == 20.0  # the smaller of both limits
    delivery = Delivery(WeightPusher(opened("shm")), receivers, policy, policy.ranks, folder)

    def started(vllm, incarnation):
        """Report that a vLLM listens, after so many restarts."""
        known = vllm.receiver.replica
        Endpoint(known.address, incarnation).write(folder, known.name)

    def deliver(version):
        policy.step()
        return delivery.deliver(version, two_rows(), dict(STATS), lambda *_: nullcontext())

    def fail_as_the_other_one_comes_back():
        started(other, 1)
        refuse()

    names = ("inference0", "inference1")
    with ExitStack() as stack:
        last, other = (stack.enter_context(replica(tmp_path / name, name)) for name in names)
        started(last, 0)
        started(other, 0)
        delivery.begin(0)
        other.server.faults["/pause"] = refuse
        assert deliver(1)
        assert delivery.updated_replicas() == {"inference0": 0}
        other.server.faults.clear()
        last.server.faults[route] = fail_as_the_other_one_comes_back
        assert deliver(2)
        assert delivery.updated_replicas() == {"inference1": 1}
        assert other.server.version == 2
    assert "refused" in (read_restart_request(folder, "inference0", 0) or "")
