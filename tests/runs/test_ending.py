"""Processes that are killed: a server is restarted, and every other end leaves no process.

`python -m tests.faults` has further cases.
"""

import json
import os
import signal

import httpx
import psutil
import pytest

from rl.inference.replica import Replica
from rl.inference.routes import http_client
from rl.runtime.endpoint import Endpoint
from rl.runtime.folder import RunFolder
from rl.runtime.metrics import read_metrics
from rl.runtime.status import read_statuses
from tests.faults.table import NEVER
from tests.support.launching import COLD, SCRIPTED, alive, below, groups_below, wait_for
from tests.support.whole_runs import (
    every_token_has_a_version_that_may_be_trained,
    nothing_is_lost_or_trained_twice,
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


# test_my_lab.py ends a run by SIGINT.
def test_a_killed_supervisor_leaves_nothing(launcher):
    with launcher.start("without-supervisor", "max_steps=5000", warm=COLD) as process:
        run_folder = RunFolder(launcher.output / "without-supervisor")
        assert wait_for(lambda: len(read_metrics(run_folder)) > 0, 400)
        groups = groups_below(process.pid)
        # The reaper, the rollouts, the trainer, and two processes of vLLM.
        assert len(alive(groups)) >= 5
        process.kill()
        assert wait_for(lambda: not alive(groups), 5), alive(groups)


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(launcher):
    demonstrations = ["loss=sft", "sampler=demonstrations"]
    sizes = ["trainer.ranks=2", "max_steps=5000", "trainer.checkpoint_every=0"]
    run_folder = RunFolder(launcher.output / "two-ranks")
    with launcher.start("two-ranks", *demonstrations, *sizes, warm=COLD) as process:
        assert wait_for(lambda: len(read_metrics(run_folder)) > 2, 400)
        groups = groups_below(process.pid)
        for pid in [*below(process.pid), process.pid]:
            os.kill(pid, signal.SIGUSR2)
        screen, _ = process.communicate(timeout=60)
    assert process.returncode == 0, screen
    assert wait_for(lambda: not alive(groups), 5), alive(groups)
    assert run_folder.resume_point().step == len(read_metrics(run_folder)) > 2


@pytest.mark.slow
def test_a_run_whose_server_does_not_start_quotes_vllm(launcher):
    result = launcher.run("no-server", "+inference.args.kv_cache_dtype=none", warm=COLD)
    assert result.status == 1
    assert "argument --kv-cache-dtype: invalid choice: 'none'" in result.screen
    assert "nothing is lost, and run_name can be used again" in result.screen
    assert "Traceback" not in result.screen.partition("The end of")[0]


RUN = ["record=all", "entropy_bonus=0.01", "batch_size=16", "group_size=4"]
TWO = ["inference.replicas=2", "inference.listen=tcp", "inference.cpu_kv_cache_gib=1"]
NAMES = ("inference0", "inference1")
PRIVATE = ("rl.trainer", "VLLM::")  # ports of gloo and of the engine, on loopback and without keys


@pytest.mark.slow
def test_a_server_that_is_killed_in_a_batch_loses_and_repeats_nothing(launcher):
    folder = RunFolder(launcher.output / "replicas")
    with launcher.start("replicas", *RUN, *TWO, "max_steps=500", warm=COLD) as process:
        assert wait_for(lambda: len(read_metrics(folder)) >= 2, 400)
        groups = groups_below(process.pid)
        every_port_asks_for_the_key(process.pid, folder)
        assert wait_for(lambda: "in flight" in read_statuses(folder)["rollouts"].doing, 60)
        os.kill(Endpoint.read(folder, "inference0").pid, signal.SIGKILL)
        killed_at = len(read_metrics(folder))
        assert wait_for(lambda: Endpoint.read(folder, "inference0").incarnation == 1, 60)
        assert wait_for(lambda: len(read_metrics(folder)) >= killed_at + 3, 100)  # with one server
        # The restarted server samples some of a batch.
        assert wait_for(lambda: read_metrics(folder)[-1].get("inference0/tokens", 0) > 0, 300)
        newest = read_metrics(folder)[-1]
        assert (newest["inference/replicas_alive"], newest["inference/restarts"]) == (2, 1)
        for pid in [*below(process.pid), process.pid]:  # as a preempted job; vLLM ends first
            os.kill(pid, signal.SIGTERM)
        screen, _ = process.communicate(timeout=120)
        assert process.returncode == 0, screen
        assert wait_for(lambda: not alive(groups), 5), alive(groups)
    assert "inference0: ended with status -9 (killed, " in screen
    assert "the server is restarted, and the other" in screen
    assert "ended before max_steps=500: stopped, as asked" in screen
    assert "run_name=replicas resume=true" in screen
    assert folder.num_saved_steps() == len(read_metrics(folder))
    assert not folder.private.path.exists()
    nothing_is_lost_or_trained_twice(folder)
    every_token_has_a_version_that_may_be_trained(folder)


def test_the_only_server_is_restarted_and_every_token_has_the_right_version(launcher):
    folder = RunFolder(launcher.output / "only-one")
    slow = launcher.output / "slow.json"  # so that the server is killed while it answers
    slow.write_text(json.dumps([{"fault": "Hang", "seconds": 0.1, "times": NEVER}]))
    engine = [*SCRIPTED, f"+inference.args.faults={slow}"]
    with launcher.start("only-one", *RUN, *engine, "max_steps=20", warm=COLD) as process:
        assert wait_for(lambda: len(read_metrics(folder)) >= 2, 400)
        groups = groups_below(process.pid)
        assert wait_for(lambda: "in flight" in read_statuses(folder)["rollouts"].doing, 60)
        os.kill(Endpoint.read(folder, "inference").pid, signal.SIGKILL)
        screen, _ = process.communicate(timeout=400)
    assert process.returncode == 0, screen
    assert Endpoint.read(folder, "inference").incarnation == 1
    assert "the server is restarted, and the run waits for it" in screen
    assert wait_for(lambda: not alive(groups), 5), alive(groups)
    assert len(read_metrics(folder)) == 20
    nothing_is_lost_or_trained_twice(folder)
    # The script invents its logprobs, so they say nothing about the version.
    every_token_has_a_version_that_may_be_trained(folder, most_mismatch=float("inf"))


def every_port_asks_for_the_key(supervisor: int, folder: RunFolder) -> None:
    """Check that only ports of PRIVATE processes, and no route of vLLM, answer without the key."""
    ports = {}
    for pid in below(supervisor):
        part = psutil.Process(pid)
        command = " ".join(part.cmdline())
        for connection in part.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip == "127.0.0.1", (command, connection)
                ports[connection.laddr.port] = command
    addresses = {Endpoint.read(folder, name).address.port: name for name in NAMES}
    assert addresses.keys() <= ports.keys()
    for port, command in ports.items():
        assert port in addresses or any(name in command for name in PRIVATE), (port, command)
    for name in NAMES:
        address = Endpoint.read(folder, name).address
        with http_client(Replica(name, address, key=folder.private.read_key()), 20.0) as http:
            listed = http.get("/openapi.json").json()["paths"]
        routes = [(kind.upper(), path) for path, kinds in listed.items() for kind in kinds]
        assert ("POST", "/pause") in routes
        for key in ("x" * 43, None):
            with http_client(Replica(name, address, key=key), 20.0) as http:
                for method, path in [*routes, ("GET", "/metrics"), ("GET", "/openapi.json")]:
                    status = http.request(method, path).status_code
                    assert status == httpx.codes.UNAUTHORIZED, (method, path, status)
