"""What stands in rollouts/step_*.jsonl: which rollouts trained, and each rejected group once."""

import asyncio
import json

import numpy as np
import pytest

from envs.episode import Example, StopReason
from rl.inference.client import RequestTally
from rl.records import Credit, Group, Rollout, Sequence
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.dispatcher import Dispatcher, DispatcherState
from rl.rollouts.service import RolloutService, trained_line
from rl.run.folder import RunFolder
from rl.run.status import Status
from tests.support.composing import chosen
from tests.support.orders import shuffled
from tests.support.world import EXAMPLES, Pool

ROW = Sequence(
    np.array([1, 2, 3], np.int32),
    np.array([False, True, True]),
    np.zeros(3, np.float32),
    np.array([-1, 4, 5], np.int32),
    np.array([-1, 0, 0], np.int32),
)


def group(index, *trains):
    rollout = Rollout((ROW,), [], 1.0, {}, StopReason.STOP, 1, 0.0)
    credits = tuple(Credit(1.0, (0.0,), trains=one) for one in trains)
    return Group(index, Example(0, "scripted", []), 4, (rollout,) * len(trains), credits)


@pytest.mark.parametrize(
    ("trains", "used", "expected"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_rollout_was_used_where_its_group_was_and_its_tokens_count(trains, used, expected):
    one = group(0, trains)
    line = trained_line(one, one.rollouts[0], one.credits[0], used)
    assert line["used"] is expected
    assert (line["tokens"], line["versions"]) == (2, [4, 5])


def test_a_rejected_group_stands_in_the_file_of_one_step_only(tmp_path):
    class Run:
        aggregation, record = chosen("aggregation", "token_mean"), chosen("record", "none")

    folder = RunFolder(tmp_path)
    dispatcher = Dispatcher(
        play_group=None,
        order=shuffled([Pool(1.0, EXAMPLES)], 0),
        credit=None,
        buffer=FifoBuffer(),
        group_size=1,
        groups_per_step=1,
        max_staleness=0,
        max_concurrent=1,
        state=DispatcherState(),
    )

    async def lines():
        service = RolloutService(
            Run(), folder, dispatcher, Status(folder, "rollouts"), RequestTally()
        )
        dispatcher.on_rejected(group(7, True))
        service._write(0, [group(8, True)])
        service._write(1, [group(9, True)])
        files = [folder.rollouts_of(step).read_text().splitlines() for step in (0, 1)]
        return [[(json.loads(x)["group"], json.loads(x)["used"]) for x in file] for file in files]

    assert asyncio.run(lines()) == [[(8, True), (7, False)], [(9, True)]]
