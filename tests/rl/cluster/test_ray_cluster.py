"""Processes on three nodes of a real Ray with pretended GPUs, and how they end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rl.cluster.host import Demand, HostLost, Start
from rl.cluster.ray_cluster import RayCluster
from rl.runtime.child import Reaper
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from tests.rl.runtime.test_child import Family, alive
from tests.support.launching import wait_for

ray = pytest.importorskip("ray", reason="Ray is not installed: make cluster")
DEMAND = Demand(replicas=1, devices_per_replica=2, ranks=2)
NODES = ("127.0.0.2", "127.0.0.3")
ENDED_S = 20.0  # 5 s on idle cores

# A supervisor that starts a family of processes on each host, and then does nothing.
SUPERVISOR = """
import sys, time
from pathlib import Path
from tests.rl.cluster.test_ray_cluster import DEMAND, Family, Reaper, RunFolder, Start, settings

folder, address = Path(sys.argv[1]), sys.argv[2]
with Reaper() as reaper, settings(address).hosts(RunFolder(folder), reaper, DEMAND) as hosts:
    for name, host in {"vllm": hosts.replicas[0], "rank": hosts.ranks[0]}.items():
        host.start(Start(name, Family(folder / name).command, folder / f"{name}.log"))
    time.sleep(300)
"""


def settings(address: str) -> RayCluster:
    given = {"gpus": True, "interface": None, "ranks_per_node": None, "reserve_timeout": 60.0}
    return RayCluster(address=address, cores_per_replica=1, cores_per_rank=1, **given)


@pytest.fixture(scope="module")
def ray_cluster():
    """Start a real Ray on this machine: a head, and two nodes with two pretended GPUs each."""
    health = {"period_ms": 200, "failure_threshold": 5, "timeout_ms": 1000}
    quick = {"_system_config": {f"health_check_{name}": value for name, value in health.items()}}
    least = {"object_store_memory": 80_000_000}  # bytes; we store no objects there
    utils, head = pytest.importorskip("ray.cluster_utils"), {**least, **quick, "num_cpus": 1}
    cluster = utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        for address in NODES:
            cluster.add_node(node_ip_address=address, num_cpus=2, num_gpus=2, **least)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_folder = RunFolder(tmp_path_factory.mktemp("run"))
    run_folder.private.make()
    run_folder.private.make_key()
    return run_folder


@pytest.fixture(scope="module")
def hosts(ray_cluster, folder):
    """Return hosts for all tests after the first that needs them: they take all GPUs."""
    with Reaper() as reaper, settings(ray_cluster.address).hosts(folder, reaper, DEMAND) as hosts:
        yield hosts


def start_family(host, folder):
    family = Family(folder / f"pids-{host.address}")
    return family, host.start(Start("part", family.command, folder / "part.log"))


# These two tests come first, because they need GPUs that are free.
def test_a_missing_or_too_small_ray_is_one_sentence(ray_cluster, folder):
    with Reaper() as reaper:
        too_many = settings(ray_cluster.address).hosts(folder, reaper, Demand(3, 2, 2))
        with pytest.raises(RunFailed, match="needs 8 GPUs, but the cluster has 4"), too_many:
            pass
        nowhere = settings("127.0.0.1:1").hosts(folder, reaper, DEMAND)
        with pytest.raises(RunFailed, match="no Ray cluster at cluster"), nowhere:
            pass


def test_a_killed_supervisor_leaves_no_process_on_any_node(ray_cluster, folder):
    command = [sys.executable, "-c", SUPERVISOR, str(folder.path), ray_cluster.address]
    supervisor = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    families = [Family(folder.path / "vllm"), Family(folder.path / "rank")]
    try:
        assert wait_for(lambda: all(f.pids.exists() for f in families), 60)
    finally:
        supervisor.kill()
        supervisor.wait()
    pids = [pid for family in families for pid in family()]
    assert wait_for(lambda: not any(alive(pid) for pid in pids), ENDED_S)


def test_every_process_has_a_host_with_its_gpus_and_its_end_is_seen(hosts, folder, tmp_path):
    (replica,), (first, second) = hosts.replicas, hosts.ranks
    assert first is second
    assert {replica.address, first.address} == set(NODES)
    assert [hosts.local_rank(rank) for rank in (0, 1)] == [0, 1]
    assert replica.devices == first.devices == ("0", "1")
    log = tmp_path / "part.log"
    code = "echo $GREETING; pwd; nice; exit 3"
    part = replica.start(Start("part", ["sh", "-c", code], log, {"GREETING": "hello"}))
    assert wait_for(lambda: part.returncode is not None, 5)
    assert part.returncode == 3
    # The same priority as this process; Ray's own processes have a lower one.
    assert part.tail().split("\n") == ["hello", os.getcwd(), f"{os.nice(0)}"]
    family, other = start_family(first, tmp_path)
    assert all(alive(pid) for pid in family())
    other.kill()
    assert not any(alive(pid) for pid in family())
    assert wait_for(lambda: other.returncode == -signal.SIGTERM, 5)


# This test comes last, because it loses a host.
def test_a_lost_node_and_our_killed_process_end_only_the_processes_there(
    ray_cluster, hosts, tmp_path
):
    (lost,), other = hosts.replicas, hosts.ranks[0]
    family, part = start_family(lost, tmp_path)
    family_elsewhere, part_elsewhere = start_family(other, tmp_path)
    psutil.Process(family()[0]).parent().kill()
    assert wait_for(lambda: part.returncode is not None, ENDED_S)
    assert wait_for(lambda: not any(alive(pid) for pid in family()), ENDED_S)
    assert f"the host {lost.address} is lost" in part.tail()
    with pytest.raises(HostLost):
        lost.start(Start("part", ["true"], tmp_path / "part.log"))
    assert part_elsewhere.returncode is None
    assert all(alive(pid) for pid in family_elsewhere())
    node = next(n for n in ray_cluster.list_all_nodes() if n.node_ip_address == other.address)
    ray_cluster.remove_node(node, allow_graceful=False)
    assert wait_for(lambda: not any(alive(pid) for pid in family_elsewhere()), ENDED_S)
    assert wait_for(lambda: part_elsewhere.returncode is not None, ENDED_S)
