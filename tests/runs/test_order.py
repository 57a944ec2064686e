"""A run with order=difficulty that is killed goes on with the pools it had, at the same places."""

import json
import os
import signal

import pytest

from rl.run.folder import RunFolder
from rl.run.metrics import read_metrics
from tests.support.launching import alive, groups_below, stop, wait_for

pytestmark = [pytest.mark.server, pytest.mark.timeout(1200)]

# A scripted server: what is asked here is what comes next, and vLLM has no part in that.
SCRIPTED = [
    "inference._target_=tests.support.scripted_vllm.ScriptedVLLM",
    *("sync.max_mismatch=1e9", "model.warm_start=null", "sampler=async"),
    *("batch_size=32", "group_size=4", "env.num_train=40", "trainer.checkpoint_every=1"),
    # Its answers are right now and then, so groups fall into all three pools, and few are
    # drawn from easy and hard: what fell there stays, whatever the speed makes of the order.
    *("order=difficulty", "order.easy_threshold=0.45", "order.hard_threshold=0.1"),
    *("order.easy_weight=0.1", "order.normal_weight=0.8", "order.hard_weight=0.1"),
]


def played(run_folder: RunFolder, first: int, last: int) -> dict[int, int]:
    """The example of every group that stands in the files of these steps."""
    lines = [
        json.loads(line)
        for step in range(first, last)
        for line in run_folder.rollouts_of(step).read_text().splitlines()
    ]
    return {line["group"]: line["example"] for line in lines}


def test_a_killed_run_goes_on_with_the_same_pools_and_its_pending_groups_as_they_were(launcher):
    process = launcher.start("pools", *SCRIPTED, "max_steps=500", warm=[])
    run_folder = RunFolder(launcher.output / "pools")

    def filled() -> bool:
        """Whether a checkpoint holds some examples in every pool."""
        rows = read_metrics(run_folder)[-2:]
        shares = [row[f"order/{level}"] for row in rows for level in ("easy", "normal", "hard")]
        return run_folder.num_saved_steps() >= 6 and min(shares) > 0.08

    try:
        assert wait_for(filled, 500), process.poll()
        parts = groups_below(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        assert wait_for(lambda: not alive(parts), 5), alive(parts)
    finally:
        stop(process)
    saved = run_folder.resumed()
    assert saved is not None
    state = saved.rollouts
    (pools,) = state["order"]["played"]
    assert all(pools.values())  # some are easy, some normal, some hard
    assert len(state["pending"]) == len(state["places"]) > 0

    last = saved.step + 3
    result = launcher.run("pools", *SCRIPTED, f"max_steps={last}", "resume=true", warm=[])
    assert result.status == 0, result.screen
    assert [line["step"] for line in result.metrics] == list(range(last))
    # A pool loses and gains a few examples a step, and keeps the rest.
    later = run_folder.resumed()
    assert later is not None
    (after,) = later.rollouts["order"]["played"]
    waiting = [place[1] for place in state["places"] + later.rollouts["places"]]
    observed = {*waiting, *played(run_folder, saved.step, last).values()}
    for level in ("easy", "hard"):
        assert set(pools[level]) - observed <= set(after[level])
    replayed = played(run_folder, saved.step, last)
    places = dict(zip(state["pending"], state["places"], strict=True))
    known = {index: example for index, example in replayed.items() if index in places}
    assert len(known) >= 8  # a batch at least
    assert known == {index: places[index][1] for index in known}
    for line in result.metrics:
        assert sum(line[f"order/{level}"] for level in pools) == pytest.approx(1.0)
    assert result.metrics[saved.step]["order/seen"] >= sum(map(len, pools.values()))
