"""vLLMs that die while others serve; each test says which of them answer."""

import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rl.cluster.host import HostLost
from rl.inference.replica import Replica
from rl.runtime.endpoint import Endpoint, request_restart
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.runtime.status import read_statuses
from rl.supervisor import replicas as module
from rl.supervisor.replicas import Replicas

KILLED = (
    "ended with status -9 (killed, perhaps because memory ran out: docs/troubleshooting.md, memory)"
)
NAMES = ("inference0", "inference1")
SERVING = "serving"


class FakeProcess:
    """A process of the host; `returncode` is its end."""

    group = 7

    def __init__(self):
        self.returncode, self.num_kills = None, 0

    def kill(self):
        self.num_kills += 1
        self.returncode = self.returncode or -signal.SIGTERM

    end = kill


class Fleet:
    """The vLLMs of a run as the supervisor sees them, at the time `now`."""

    def __init__(self, folder: RunFolder, names=NAMES, **limits: Any) -> None:
        self.folder, self.num_steps, self.lost, self.external = folder, 0, False, False
        self.processes: dict[str, FakeProcess] = {}
        self.answering, self.closed, self.now = set(names), set[str](), 0.0
        servers = [Replica(name, Address(host="h", port=1)) for name in names]
        given = {"startup_timeout": 20.0, "wait_timeout": 600.0, **limits}
        given["num_steps"] = lambda: self.num_steps
        self.replicas = Replicas(servers, folder, self.start, **given)

    def start(self, replica: Replica) -> FakeProcess | None:
        if self.lost:
            raise HostLost("node 2 is gone")
        if self.external:
            return None
        self.processes[replica.name] = FakeProcess()
        return self.processes[replica.name]

    def kill(self, *names: str) -> None:
        for name in names:
            self.processes[name].returncode = -signal.SIGKILL

    def look(self, *, may_restart: bool = True) -> tuple[str, str] | None:
        return self.replicas.check_and_restart(may_restart=may_restart)

    def incarnations(self) -> list[int]:
        return [Endpoint.read(self.folder, name).incarnation for name in NAMES]

    def statuses(self) -> list[str]:
        statuses = read_statuses(self.folder)
        return [statuses[name].doing.partition(" (")[0] for name in NAMES]

    def warnings(self) -> list[str]:
        paths = self.folder.warnings.glob("*.log")
        return [line for path in paths for line in path.read_text().splitlines()]


@pytest.fixture
def fleet_of(tmp_path, monkeypatch) -> Callable[..., Fleet]:
    """Return a function that starts the vLLMs of a run."""

    def start(*given, **limits) -> Fleet:
        fleet = Fleet(RunFolder(tmp_path), *given, **limits)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: fleet.now))
        monkeypatch.setattr(module, "is_healthy", lambda one, **_: one.name in fleet.answering)
        monkeypatch.setattr(module, "refuses_connections", lambda one: one.name in fleet.closed)
        fleet.replicas.start()
        return fleet

    return start


@pytest.fixture
def fleet(fleet_of, monkeypatch) -> Fleet:
    """Return a run whose replicas both serve."""
    monkeypatch.setattr(module, "_HEALTH_EVERY_S", 0.0)
    fleet = fleet_of()
    assert (fleet.look(), fleet.statuses()) == (None, [SERVING, SERVING])
    return fleet


def test_a_replica_that_dies_is_restarted_at_its_address_if_that_is_allowed(fleet):
    before, dead = Endpoint.read(fleet.folder, "inference1"), fleet.processes["inference1"]
    fleet.kill("inference1")
    assert (fleet.look(), fleet.incarnations()) == (None, [0, 1])
    assert fleet.statuses() == [SERVING, "starting vLLM, again"]
    assert Endpoint.read(fleet.folder, "inference1") == replace(before, incarnation=1)
    assert before.pid == FakeProcess.group
    assert dead.num_kills  # its engine may live on and keep the socket open
    assert (fleet.look(), fleet.statuses()) == (None, [SERVING, SERVING])
    assert fleet.warnings() == [f"{KILLED}; the server is restarted, and the other one continues"]
    fleet.kill("inference0")
    assert fleet.look(may_restart=False) == ("inference0", KILLED)


def test_a_replica_on_a_lost_machine_is_not_restarted(fleet):
    fleet.lost = True
    fleet.kill("inference1")
    assert fleet.look() is fleet.look() is None
    assert fleet.incarnations() == [0, 1]
    assert fleet.statuses() == [SERVING, "its host is lost"]
    assert fleet.warnings()[-1] == "node 2 is gone; the other one continues without it"
    fleet.kill("inference0")  # the last one
    assert fleet.look() == ("inference0", KILLED)


@pytest.mark.parametrize(
    ("steps", "ends"),
    [([3, 3], False), ([3, 3, 3], True), ([0, 4, 9], True), ([0, 5, 10], False),
     ([0, 1, 20, 21], False), ([0, 20, 21, 22], True)],
)  # fmt: skip
def test_three_deaths_within_ten_steps_end_the_run(steps, ends, fleet):
    found = None
    for step in steps:
        fleet.num_steps = step
        fleet.kill("inference0")
        found = fleet.look()
        assert found is None or step == steps[-1]
        fleet.look()
    expected = ("inference0", f"{KILLED} for the 3rd time within 10 steps")
    assert found == (expected if ends else None)


@pytest.mark.parametrize(("second", "ends"), [(2, True), (11, True), (12, False), (40, False)])
def test_a_second_crash_of_all_within_ten_steps_ends_the_run(second, ends, fleet):
    fleet.num_steps = 2
    fleet.kill(*NAMES)
    assert (fleet.look(), fleet.incarnations()) == (None, [1, 1])
    assert (fleet.look(), fleet.statuses()) == (None, [SERVING, SERVING])
    fleet.num_steps = second
    fleet.kill(*NAMES)
    expected = ("inference0", f"{KILLED} for the 2nd time within 10 steps")
    assert fleet.look() == (expected if ends else None)


def test_the_last_serving_replica_is_restarted_but_not_one_that_fails_to_start(fleet):
    fleet.answering.remove("inference0")
    fleet.kill("inference0")
    assert fleet.look() is None
    fleet.kill("inference1")  # while the other one starts
    assert (fleet.look(), fleet.incarnations()) == (None, [1, 1])
    fleet.num_steps = 50
    fleet.answering.clear()
    fleet.kill("inference0")  # before it has served again
    assert fleet.look() == ("inference0", KILLED)


@pytest.mark.parametrize(
    ("names", "wait_timeout", "tolerated", "go_on"),
    [
        (NAMES, 600.0, 60.0, "the other one continues"),
        (NAMES, 40.0, 40.0, "the other one continues"),
        (NAMES[:1], 600.0, 300.0, "the run waits for it"),
    ],
)
def test_a_replica_that_is_silent_too_long_is_restarted(
    names, wait_timeout, tolerated, go_on, fleet_of, monkeypatch
):
    fleet, asked = fleet_of(names, wait_timeout=wait_timeout), []
    healthy = lambda one, **_: asked.append(one.name) or one.name in fleet.answering  # noqa: E731
    monkeypatch.setattr(module, "is_healthy", healthy)
    assert fleet.look() is None
    fleet.answering.remove("inference0")
    for seconds, num_asked in ((4.9, 1), (5.0, 2), (tolerated, 3)):  # a recent answer suffices
        fleet.now = seconds
        assert fleet.look() is None
        assert (asked.count("inference0"), fleet.warnings()) == (num_asked, [])  # it may be busy
    fleet.now = tolerated + 0.1
    assert fleet.look() is None
    assert fleet.warnings() == [f"has stopped answering; the server is restarted, and {go_on}"]


def test_a_server_that_refuses_connections_or_must_restart_is_restarted_once(fleet):
    fleet.answering.remove("inference0")
    fleet.closed.add("inference0")
    assert fleet.look() is None
    assert fleet.processes["inference0"].num_kills == 1
    assert (fleet.look(), fleet.incarnations()) == (None, [1, 0])
    request_restart(fleet.folder, "inference1", 0, "it took no weights")
    fleet.answering, fleet.closed = {*NAMES}, set()
    assert (fleet.look(), fleet.incarnations()) == (None, [1, 1])
    said = "is unusable: it took no weights; the server is restarted, and the other one continues"
    assert said in fleet.warnings()
    request_restart(fleet.folder, "inference1", 0, "said late")  # of a start that is over
    assert [fleet.look() for _ in range(3)] == [None] * 3
    assert fleet.incarnations() == [1, 1]


def test_an_only_server_that_answers_but_cannot_be_used_ends_the_run(fleet_of):
    problems = ["has no route"]
    fleet = fleet_of(NAMES[:1], why_unusable=lambda _: problems[-1])
    assert fleet.look() == ("inference0", "has no route")
    problems.append(None)
    assert fleet.look() is None
    fleet.kill("inference0")
    fleet.num_steps = 20  # long after the failure before
    assert fleet.look() is None  # it is restarted
    problems.append("has no route")  # a server that has just restarted may lack it
    for fleet.now, found in ((59.9, None), (60.0, ("inference0", "has no route"))):
        fleet.num_steps += 20
        assert fleet.look() == found
    problems.append(None)
    assert fleet.look() is None
    fleet.num_steps += 20
    request_restart(fleet.folder, "inference0", 1, "it took no weights")
    assert fleet.look() == ("inference0", "is unusable: it took no weights")


def test_an_external_server_that_refuses_the_key_ends_the_run_at_once(fleet_of, monkeypatch):
    fleet = fleet_of(NAMES[:1], why_unusable=lambda _: "refuses the key")
    monkeypatch.setattr(module, "is_healthy", lambda _, or_unusable: or_unusable)
    assert fleet.look() is None  # a server of the run itself, which has the right key
    fleet.external = True
    fleet.replicas.start()
    assert fleet.look() == ("inference0", "refuses the key")


def test_an_external_server_may_come_back_however_often(fleet):
    fleet.external = True
    fleet.replicas.start()
    for incarnation in range(4):
        fleet.answering.add("inference0")
        assert fleet.look() is None
        assert fleet.statuses() == [SERVING, SERVING]
        fleet.answering.remove("inference0")
        fleet.closed = {"inference0"} if incarnation < 3 else set()
        assert fleet.look() is None
        fleet.closed.clear()
        assert fleet.incarnations()[0] == min(incarnation + 1, 3)
    said = "accepts no connections any more; waiting for its answer, and the other one continues"
    assert set(fleet.warnings()) == {said}
