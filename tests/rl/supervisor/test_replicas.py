"""vLLMs that die while others serve; scripted servers in their own processes act as vLLM."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl.cluster.host import HostLost
from rl.inference.replica import Replica
from rl.inference.routes import healthy
from rl.inference.server import ServedPolicy, vllm_process
from rl.runtime.child import Child, Reaper, group_alive
from rl.runtime.endpoint import Endpoint, request_restart
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address, free_port
from rl.runtime.status import read_statuses
from rl.supervisor import replicas as module
from rl.supervisor.replicas import Replicas
from tests.support.families import wait_until
from tests.support.scripted import tiny_model
from tests.support.scripted_vllm import ScriptedVLLM

KILLED = "ended with status -9 (killed, perhaps by the kernel because memory ran out)"
NAMES = ("inference0", "inference1")


def replica_on(folder: RunFolder, name: str, listen: str) -> Replica:
    """A replica on its socket, or on a free port."""
    if listen == "unix":
        return Replica(name, Address(path=folder.private.vllm_socket_of(name)))
    if folder.private.read_key() is None:
        folder.private.make_key()
    address = Address(host="127.0.0.1", port=free_port("127.0.0.1"))
    return Replica(name, address, key=folder.private.read_key())


class Run:
    """Two replicas and a step counter."""

    def __init__(self, folder: RunFolder, reaper: Reaper, listen: str, **limits: float) -> None:
        self.folder, self.num_steps = folder, 0
        server = ScriptedVLLM(
            replicas=2, listen=listen, startup_timeout=20.0, cpu_kv_cache_gib=1, args={}
        )
        given = {"startup_timeout": 20.0, "wait_timeout": 600.0, **limits}

        def start(replica: Replica):
            policy = ServedPolicy(dtype="float32", max_seq_len=256, seed=0)
            command, env = vllm_process(server, folder, replica, policy)
            log = folder.log_of(replica.name)
            child = Child(replica.name, command, log=log, reaper=reaper, env=env)
            child.start()
            return child

        replicas = [replica_on(folder, name, listen) for name in NAMES]
        self.replicas = Replicas(replicas, folder, start, num_steps=self.steps, **given)
        self.replicas.start()

    def steps(self) -> int:
        return self.num_steps

    def look_until(self, true: Callable[[], bool], **knobs: bool) -> tuple[str, str] | None:
        """Look as the supervisor does, until it is so or the run ends."""
        deadline = time.monotonic() + 20
        while not true():
            if ending := self.replicas.look(**{"may_restart": True, **knobs}):
                return ending
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.02)
        return None

    def incarnations(self) -> list[int]:
        return [Endpoint.read(self.folder, name).incarnation for name in NAMES]

    def all_serve(self) -> bool:
        statuses = read_statuses(self.folder)
        return all(statuses[name].doing == "serving" for name in NAMES)

    def kill(self, name: str) -> None:
        os.kill(Endpoint.read(self.folder, name).pid, signal.SIGKILL)

    def warnings(self) -> str:
        return "".join(path.read_text() for path in self.folder.warnings.glob("*.log"))

    def end(self) -> None:
        for child in self.replicas.children:
            child.end()


@pytest.fixture
def started(tmp_path, monkeypatch) -> Iterator[Callable[..., Run]]:
    """Start a run whose replicas both serve."""
    monkeypatch.setattr(module, "_HEALTH_EVERY_S", 0.05)
    folder, runs = RunFolder(tmp_path / "r"), []
    folder.path.mkdir()
    folder.private.make()
    folder.set_model(tiny_model(tmp_path))
    with Reaper() as reaper:

        def start(listen: str = "unix", **limits: float) -> Run:
            runs.append(run := Run(folder, reaper, listen, **limits))
            assert run.look_until(run.all_serve) is None
            return run

        try:
            yield start
        finally:
            for run in runs:
                run.end()


@pytest.mark.parametrize("listen", ["unix", "tcp"])
def test_a_replica_that_dies_is_restarted_at_its_address_and_keeps_its_log(started, listen):
    run = started(listen)
    before = Endpoint.read(run.folder, "inference1")
    run.folder.log_of("inference1").write_text("what it said before\n")
    run.kill("inference1")
    assert run.look_until(lambda: run.incarnations() == [0, 1]) is None
    assert not run.all_serve()  # it is still starting
    assert run.look_until(run.all_serve) is None
    after = Endpoint.read(run.folder, "inference1")
    assert (after.address, after.incarnation) == (before.address, 1)
    assert after.pid != before.pid
    assert healthy(Replica("inference1", after.address, key=run.folder.private.read_key()))
    assert run.folder.log_of("inference1").read_text().startswith("what it said before\n")
    assert run.warnings() == (f"{KILLED}; it is started again, and the other one goes on\n")


def test_a_replica_on_a_lost_machine_is_not_restarted(started, monkeypatch):
    run = started()

    def lost(_: Replica):
        raise HostLost("node 2 is gone")

    monkeypatch.setattr(run.replicas, "_start_child", lost)
    run.kill("inference1")
    assert run.look_until(lambda: run.incarnations() == [0, 1]) is None
    assert run.look_until(lambda: True) is None
    assert read_statuses(run.folder)["inference1"].doing == "its machine is gone"
    assert run.warnings().endswith("node 2 is gone; the other one goes on without it\n")
    run.kill("inference0")  # the last one
    assert run.look_until(lambda: False) == ("inference0", KILLED)


def test_a_replica_that_dies_three_times_ends_the_run(started):
    run = started()
    for deaths in (1, 2):
        run.kill("inference0")
        assert run.look_until(lambda n=deaths: run.incarnations() == [n, 0]) is None
        assert run.look_until(run.all_serve) is None
    run.kill("inference0")
    name, what = run.look_until(lambda: False)
    assert (name, what) == ("inference0", f"{KILLED} for the 3rd time within 10 steps")


@pytest.mark.parametrize(
    ("steps", "again"),
    [([3, 3], False), ([3, 3, 3], True), ([0, 4, 9], True), ([0, 5, 10], False),
     ([0, 1, 20, 21], False), ([0, 20, 21, 22], True)],
)  # fmt: skip
def test_only_deaths_within_ten_steps_count_as_too_many(steps, again):
    watched = module.Watched(Replica("inference0", Address(host="h", port=1)), status=None)
    watched.deaths.extend(steps)
    assert watched.dies_too_often is again


def test_the_death_of_the_last_serving_replica_ends_the_run(started):
    run = started()
    run.kill("inference0")
    assert run.look_until(lambda: run.incarnations() == [1, 0]) is None
    run.kill("inference1")  # while the other one starts
    assert run.look_until(lambda: False) == ("inference1", KILLED)


def test_an_engine_that_outlives_its_server_is_ended(tmp_path):
    """Such an engine keeps the socket open, and the ranks would wait there."""
    folder = RunFolder(tmp_path / "r")
    folder.path.mkdir()
    log = folder.log_of("inference")
    with Reaper() as reaper:

        def start(replica: Replica) -> Child:
            command = ["sh", "-c", "sleep 60 & echo up; wait"]
            child = Child(replica.name, command, log=log, reaper=reaper)
            child.start()
            return child

        only = [Replica("inference", Address(path=str(tmp_path / "socket")))]
        limits = {"startup_timeout": 20.0, "wait_timeout": 600.0}
        replicas = Replicas(only, folder, start, num_steps=lambda: 0, **limits)
        replicas.start()
        (child,) = replicas.children
        assert wait_until(lambda: "up" in log.read_text())
        child.kill_leader()
        assert wait_until(lambda: child.returncode is not None)
        assert group_alive(child.group)
        assert replicas.look(may_restart=True) == ("inference", KILLED)
        assert not group_alive(child.group)
        child.end()


def test_no_replica_is_restarted_if_all_are_gone_at_once(started):
    """The ranks wait for the answer, and a start takes seconds."""
    run = started()
    for name in NAMES:
        run.kill(name)
    gone = run.replicas.children
    assert wait_until(lambda: all(child.returncode is not None for child in gone))
    assert run.look_until(lambda: False) is not None
    assert run.incarnations() == [0, 0]


def test_no_replica_is_restarted_when_restarts_are_not_allowed(started):
    run = started()
    run.kill("inference0")
    assert run.look_until(lambda: False, may_restart=False) == (
        "inference0",
        KILLED,
    )


def test_a_replica_that_hangs_is_restarted_while_another_serves(started, monkeypatch):
    monkeypatch.setattr(module, "_SILENT_S", 0.5)
    run = started()
    os.kill(Endpoint.read(run.folder, "inference0").pid, signal.SIGSTOP)
    assert run.look_until(lambda: run.incarnations() == [1, 0]) is None
    assert run.warnings().startswith("has stopped answering; it is started again")


def test_a_requested_restart_happens_once(started):
    run = started()
    request_restart(run.folder, "inference0", 0, "it took no weights")
    assert run.look_until(lambda: run.incarnations() == [1, 0]) is None
    assert run.look_until(run.all_serve) is None
    assert run.warnings().startswith("was given up: it took no weights; it is started again")
    request_restart(run.folder, "inference0", 0, "said late")  # of a start that is over
    for _ in range(5):
        assert run.replicas.look(may_restart=True) is None
    assert run.incarnations() == [1, 0]


def test_replicas_on_ports_differ_and_no_command_shows_the_key(started):
    run = started("tcp")
    addresses = [Endpoint.read(run.folder, name).address for name in NAMES]
    assert len({address.port for address in addresses}) == 2
    assert {address.host for address in addresses} == {"127.0.0.1"}
    key = run.folder.private.read_key()
    for child in run.replicas.children:
        assert key not in " ".join(child.command)
        assert key not in Path(f"/proc/{child.group}/environ").read_text()
    assert not healthy(Replica("inference0", addresses[0]))
    assert not healthy(Replica("inference0", addresses[0], key="x"))
    assert key not in json.dumps([p.read_text() for p in run.folder.endpoints.iterdir()])
