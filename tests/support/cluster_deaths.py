"""Who dies in mid-batch of a real cluster=ray run, and what becomes of it: a JSON line a life.

    python -m tests.support.cluster_deaths [--output DIR] [replica node rank gcs head supervisor]

The tiny policy from scratch, real vLLMs, a real Ray whose nodes are pretended: one a replica, one a
rank. When all have died, each run is taken up again (`resume=true`) on a new Ray, and in the end
every rollout must have been trained once, each token under a version that may be trained.
"""

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

from rl.run.endpoint import Endpoint
from rl.run.folder import RunFolder
from rl.run.metrics import read_metrics
from rl.run.status import read_statuses
from tests.support.launching import Launcher, below, stop, wait_for
from tests.support.ray_nodes import ray_nodes
from tests.support.whole_runs import (
    every_token_has_a_version_that_may_be_trained,
    nothing_is_lost_or_trained_twice,
)

DEATHS = ("replica", "node", "rank", "gcs", "head", "supervisor")
GO_ON = ("replica", "node")  # what a run survives
RUN = [
    *("cluster=ray", "cluster.gpus=false", "cluster.ranks_per_node=1"),
    *("model.warm_start=null", "entropy_bonus=0.01", "inference.cpu_kv_cache_gib=1"),
    *("record=all", "max_steps=500", "trainer.checkpoint_every=5"),
]
KILLED_AFTER, MORE_STEPS = 7, 3  # steps: some of the seven are in no checkpoint
STARTS_S, ENDS_S, GONE_S = 600.0, 200.0, 60.0

# Lines that every run prints.
_USUAL = re.compile(r" *(\d\d:\d\d:\d\d |\d+/\d+ steps )|vLLM |trainer |others |memory: | *runs on")

Process = tuple[int, float]  # id and time of start, for ids are used again


@dataclass(frozen=True)
class Life:
    """A run from one start to its end, on a Ray of its own."""

    cluster: Any
    folder: RunFolder
    process: Popen[str]

    def num_steps(self) -> int:
        return len(read_metrics(self.folder))

    def await_steps(self, number: int) -> None:
        """Return when so many are done and the next batch is being sampled."""
        done = wait_for(lambda: self.num_steps() >= number or self.is_over(), STARTS_S)
        assert done, f"no {number} steps after {STARTS_S:g} s"
        assert not self.is_over(), self.process.communicate()[0]
        assert wait_for(lambda: "in flight" in read_statuses(self.folder)["rollouts"].doing, 60)

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def of_run(self) -> set[Process]:
        """Every process of the run on every node."""
        supervisor = self.process.pid
        return known({supervisor, *below(supervisor)}) | on_nodes(os.getpid())

    def kill(self, who: str) -> set[Process]:
        """Let somebody die; returns what must be gone by that alone."""
        if who == "replica":
            pid = vllm_of(self.folder, "inference0")
            dying = known({pid, *below(pid)})
            os.kill(pid, signal.SIGKILL)
            return dying
        if who == "gcs":
            self.cluster.head_node.kill_gcs_server()
            return self.of_run()
        if who == "supervisor":
            dying = self.of_run()
            self.process.kill()
            return dying
        node = self.node_of(who)
        dying = on_nodes(raylet_of(node)) if who == "node" else self.of_run()
        self.cluster.remove_node(node, allow_graceful=False)
        return dying

    def node_of(self, who: str) -> Any:
        """The node of a replica, of a rank, or the head."""
        if who == "head":
            return self.cluster.head_node
        part = "vllm.entrypoints" if who == "node" else "rl.trainer"
        holders = [n for n in self.cluster.list_all_nodes() if has(raylet_of(n), part)]
        return max(holders, key=lambda n: n.node_ip_address)


def raylet_of(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return raylet.process.pid


def has(ancestor: int, word: str) -> bool:
    return any(word in command_of(pid) for pid in below(ancestor))


def command_of(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def on_nodes(ancestor: int) -> set[Process]:
    """Of the processes below it our own ones, less Ray's."""
    ours = {pid for pid in below(ancestor) if "RayNode" in command_of(pid)}
    return known(ours.union(*(below(pid) for pid in ours)))


def vllm_of(folder: RunFolder, name: str) -> int:
    endpoint = Endpoint.read(folder, name)
    assert endpoint is not None
    flag = f"--port {endpoint.address.port}"
    (pid,) = [pid for pid in below(os.getpid()) if flag in command_of(pid)]
    return pid


def known(pids: set[int]) -> set[Process]:
    found = set()
    for pid in pids:
        with suppress(psutil.Error):
            found.add((pid, psutil.Process(pid).create_time()))
    return found


def alive(processes: set[Process]) -> list[str]:
    """The commands of those that have not ended."""
    left = []
    for pid, began in processes:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == began and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:120])
    return left


def until_gone(processes: set[Process]) -> float | list[str]:
    """Seconds until they have ended, or who has not."""
    began = time.monotonic()
    gone = wait_for(lambda: not alive(processes), GONE_S)
    return round(time.monotonic() - began, 1) if gone else alive(processes)


def first_life(life: Life, who: str) -> dict[str, Any]:
    """Have somebody die in mid-batch and the run end, by that or by a TERM."""
    life.await_steps(KILLED_AFTER)
    dying, steps, began = life.kill(who), life.num_steps(), time.monotonic()
    seen: dict[str, Any] = {"killed_after": steps}
    if who in GO_ON:
        seen["its_gone_s"] = until_gone(dying)
        life.await_steps(steps + MORE_STEPS)
        if who == "replica":
            assert wait_for(lambda: serves_again(life.folder), STARTS_S)
            seen["again_after"] = life.num_steps() - steps
        dying = life.of_run()
        os.kill(life.process.pid, signal.SIGTERM)
    screen = life.process.communicate(timeout=ENDS_S)[0]
    assert "(raylet)" not in screen, screen  # Ray's log stays where it is
    seen |= {"status": life.process.returncode, "ended_s": round(time.monotonic() - began, 1)}
    seen["gone_s"] = until_gone(dying)
    return {**seen, "said": [line for line in screen.splitlines()[-60:] if not _USUAL.match(line)]}


def serves_again(folder: RunFolder) -> bool:
    line = read_metrics(folder)[-1]
    both = line["inference/replicas_alive"], line["inference/restarts"]
    return both == (2, 1) and line.get("inference0/tokens", 0) > 0


def second_life(life: Life) -> dict[str, Any]:
    """Have the run go on for some steps and end well; everything of both lives is right."""
    saved = life.folder.num_saved_steps()
    life.await_steps(life.num_steps() + MORE_STEPS)  # those behind the checkpoint are done again
    processes = life.of_run()
    os.kill(life.process.pid, signal.SIGTERM)
    screen = life.process.communicate(timeout=ENDS_S)[0]
    assert life.process.returncode == 0, screen
    return {
        "resumed_after": saved,
        "steps": life.num_steps(),
        "again_gone_s": until_gone(processes),
        "rollouts": nothing_is_lost_or_trained_twice(life.folder),
        "tokens_by_age": every_token_has_a_version_that_may_be_trained(life.folder),
    }


def life_of(who: str, launcher: Launcher, *, resume: bool) -> dict[str, Any]:
    """Return what there was to see of a run until that death, or of the same run afterwards."""
    replicas, ranks = 2 if who in GO_ON else 1, 2 if who == "rank" else 1
    sizes = [f"inference.replicas={replicas}", f"trainer.ranks={ranks}"]
    with ray_nodes([1] * (replicas + ranks)) as cluster:
        where = [f"cluster.address={cluster.address}", f"resume={str(resume).lower()}"]
        process = launcher.start(who, *RUN, *sizes, *where, warm=[])
        life = Life(cluster, RunFolder(launcher.output / who), process)
        try:
            return second_life(life) if resume else first_life(life, who)
        finally:
            stop(process)


def main(arguments: Sequence[str]) -> None:
    """Print a JSON line a life."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("who", nargs="*", help=", ".join(DEATHS))
    parser.add_argument("--output", type=Path, default=None)
    asked = parser.parse_args(arguments)
    launcher = Launcher(asked.output or Path(tempfile.mkdtemp(prefix="deaths-")), {})
    for resume in (False, True):
        for who in asked.who or DEATHS:
            seen = life_of(who, launcher, resume=resume)
            print(json.dumps({"killed": who, **seen}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
