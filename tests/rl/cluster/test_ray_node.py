"""What is reserved of a Ray cluster, and our process on a node; both tested without Ray."""

import os
import sys
from hashlib import sha256

import pytest

from rl.cluster import ray_node
from rl.cluster.bundles import Bundle, bundles_for
from rl.cluster.host import Demand
from rl.cluster.ray_node import RayNode

EIGHT = Bundle(devices=8, cores=96)
CPUS = Bundle(devices=0, cores=4)


def shape(demand, nodes, ranks_per_node=None):
    options = {"on_gpus": CPUS not in nodes, "cores_per_replica": 2, "cores_per_rank": 2}
    bundles = bundles_for(demand, nodes, ranks_per_node=ranks_per_node, **options)
    return [(bundle.devices, bundle.cores, bundle.ranks) for bundle in bundles]


@pytest.mark.parametrize(
    ("demand", "nodes", "ranks_per_node", "expected"),
    [
        (Demand(1, 1, 1), [EIGHT], None, [(1, 2, 0), (1, 2, 1)]),
        (Demand(2, 4, 8), [EIGHT] * 2, None, [(4, 2, 0), (4, 2, 0), (8, 16, 8)]),
        (Demand(0, 1, 9), [EIGHT] * 2, None, [(4, 8, 4), (5, 10, 5)]),  # not 8 and 1
        (Demand(0, 1, 8), [EIGHT] * 4, 2, [(2, 4, 2)] * 4),
        (Demand(0, 1, 4), [Bundle(2, 8), EIGHT], None, [(4, 8, 4)]),  # the largest node counts
        (Demand(2, 1, 2), [CPUS] * 3, None, [(0, 2, 0), (0, 2, 0), (0, 4, 2)]),  # no GPU anywhere
        (Demand(4, 1, 2), [CPUS] * 3, None, [(0, 2, 0)] * 4 + [(0, 4, 2)]),  # all 12 CPUs
        (Demand(1, 1, 3), [CPUS] * 3, 1, [(0, 2, 0), (0, 2, 1), (0, 2, 1), (0, 2, 1)]),
    ],
)
def test_each_replica_and_each_trainer_node_has_a_bundle(demand, nodes, ranks_per_node, expected):
    assert shape(demand, nodes, ranks_per_node) == expected


@pytest.mark.parametrize(
    ("demand", "nodes", "ranks_per_node", "said"),
    [
        (Demand(1, 16, 1), [EIGHT] * 4, None, "must have 16 GPUs and 2 CPUs for a replica"),
        (Demand(1, 1, 16), [EIGHT] * 4, 16, "must have 16 GPUs and 32 CPUs for 16 ranks"),
        (Demand(9, 1, 8), [EIGHT] * 2, None, "the run needs 17 GPUs, but the cluster has 16"),
        (Demand(6, 1, 2), [CPUS] * 3, None, "the run needs 16 CPUs, but the cluster has 12"),
        (Demand(1, 1, 1), [Bundle(0, 8)], None, "0 GPUs and 8 CPUs.*or set cluster.gpus=false"),
    ],
)
def test_an_impossible_reservation_is_refused_before_waiting(demand, nodes, ranks_per_node, said):
    with pytest.raises(ValueError, match=said):
        shape(demand, nodes, ranks_per_node)


@pytest.fixture
def node(monkeypatch):
    monkeypatch.setattr(ray_node, "_NEW_FILE_TIMEOUT_S", 0.2)
    monkeypatch.chdir(os.getcwd())  # the node changes the working folder
    node = RayNode()
    yield node
    node.end()


def test_a_node_says_what_it_lacks_and_changes_to_the_folder_of_the_supervisor(node, tmp_path):
    (tmp_path / "key").write_text("secret")
    path, digest, here = tmp_path / "key", sha256(b"secret").hexdigest(), str(tmp_path)
    assert "does not see" in node.prepare(tmp_path / "no", digest, sys.executable, here)
    other = sha256(b"of another run").hexdigest()  # another folder at the same path
    assert "set output_dir to" in node.prepare(path, other, sys.executable, here)
    assert "has no /no/python" in node.prepare(path, digest, "/no/python", here)
    assert f"has no {here}/no" in node.prepare(path, digest, sys.executable, f"{here}/no")
    assert node.prepare(path, digest, sys.executable, here) == ""
    assert os.getcwd() == here
