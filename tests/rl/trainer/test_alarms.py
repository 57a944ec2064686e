"""Warnings about well-known problems; docs/troubleshooting.md has each of their names."""

import pytest

from rl.config.learned import Learned
from rl.dry_call.learn import run_with_facts
from rl.runtime.failure import message_of
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import MetricsFile
from rl.trainer.alarms import WINDOW, Alarms, peak_memory_gib
from tests.support.composing import composed, learned

FINE = {"train/reward": 0.5, "train/entropy": 0.4}
FINE |= {"rollout/zero_spread": 0.3, "rollout/truncated": 0.0}


def warnings(caplog, *rows: dict, loss_reads: tuple[str, ...] = ("advantages",)) -> list[str]:
    facts = learned(advantage_compares=True, loss_reads=loss_reads)
    alarms = Alarms(Learned(**facts))
    for row in (row for row in rows for _ in range(WINDOW)):
        alarms.add(FINE | row)
    return caplog.messages


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"train/entropy": 0.001, "train/reward": 0.9},  # the policy has learned the task
        {"train/reward": None, "train/entropy": float("nan")},
        {"train/reward": 0.3, "train/entropy": None},  # nothing was trained
        # Each is just within its limit, or equal to it.
        {"rollout/zero_spread": 0.89, "rollout/truncated": 0.49, "rollout/untrained": 0.49},
        {"train/reward": 0.25},  # half of the best
        {"train/reward": 0.3, "train/entropy": 0.021},  # a twentieth of the first would be 0.02
        {"train/reward": 0.41, "train/entropy": 0.01},  # 0.8 times the best would be 0.4
    ],
)
def test_no_alarm_without_a_problem(row, caplog):
    assert warnings(caplog, {}, row) == []
    # Rewards that were never above a twentieth do not fall.
    assert warnings(caplog, {"train/reward": 0.046875}, {"train/reward": 0.0}) == []
    # A loss that reads no advantages needs no spread.
    assert warnings(caplog, {"rollout/zero_spread": 1.0}, loss_reads=("ref_logprobs",)) == []


def test_each_problem_beyond_its_limit_is_named_once(caplog):
    row = {"rollout/truncated": 0.5, "rollout/untrained": 0.5, "rollout/zero_spread": 0.91}
    row |= {"train/reward": 0.24, "train/entropy": 0.01}
    said = warnings(caplog, {}, row, row)
    pages = [message.partition("docs/troubleshooting.md, ")[2] for message in said]
    # The first rows have no untrained rollouts, and their steps are not averaged.
    assert pages == ["masked)", "no spread)", "instability)", "entropy)", "length)"]
    assert "the mean reward fell from 0.50 to 0.24" in said[2]


@pytest.mark.parametrize(
    ("early", "last", "warns"),
    [(2.0, 3.0, False), (2.0, 3.1, True), (1.0, 1.9, False), (4.0, 5.9, False)],
)
def test_memory_that_grows_by_half_and_a_gib_is_named(early, last, warns, caplog):
    left = [early, *[last] * WINDOW]
    alarms = Alarms(Learned(**learned()), memory=lambda: left.pop(0))
    reward = None if last > 3 else 0.5  # None: the run trains on demonstrations
    for _ in range(2 * WINDOW - 1):
        alarms.add(FINE | {"train/reward": reward})
    said = "the memory of rank 0 grew from 2.0 to 3.1 GiB"
    assert [said in message for message in caplog.messages] == [True] * warns
    assert 0.01 < peak_memory_gib() < 100


def test_errors_of_a_process_without_memory_or_files_name_the_remedy():
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert "lower trainer.tokens_per_micro_batch" in message_of(caught.value)
    page = "(docs/troubleshooting.md, memory)"
    assert page in message_of(OSError(12, "Cannot allocate memory"))
    assert page in message_of(MemoryError())
    assert page in message_of(RuntimeError("std::bad_alloc"))
    assert "ulimit -Hn" in message_of(OSError(24, "Too many open files"))


def test_a_resumed_run_remembers_best_reward_first_entropy_and_the_warnings_given(tmp_path, caplog):
    folder, run = RunFolder(tmp_path), run_with_facts(composed())
    metrics, bad = MetricsFile(folder), {"rollout/truncated": 0.6}
    for step in range(2 * WINDOW):
        metrics.append(step, FINE | (bad if step >= WINDOW else {}))
    alarms = Alarms.of(run, folder, 2 * WINDOW)
    assert caplog.messages == []
    for _ in range(WINDOW):
        alarms.add(FINE | bad | {"train/reward": 0.2})
    (message,) = caplog.messages
    assert "the mean reward fell from 0.50 to 0.2" in message
    caplog.clear()
    again = Alarms.of(run, folder, WINDOW)  # from a checkpoint before the first warning
    for _ in range(WINDOW):
        again.add(FINE | bad)
    assert ["cut off" in message for message in caplog.messages] == [True]
