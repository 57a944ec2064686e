"""The memory that a plan takes, and the refusal where there is too little."""

import re
from dataclasses import replace

import pytest

from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, Shape, shape
from rl.placement.budget import need_on_host, process_memory
from rl.placement.memory import Need, trained_parameters
from rl.placement.page import plan_text
from rl.placement.placement import placement
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.support.composing import composed

QWEN_4B = {
    "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
SIZES = shape(QWEN_4B)
assert SIZES is not None
CPU = [Host(cores=8, cpus=8, memory=512 * GIB)]
STATES = ("weights", "gradients", "optimizer")
LORA = "adapter=lora"
FEW, SOME, MANY = (f"trainer.tokens_per_micro_batch={n}" for n in (256, 1024, 4096))


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


def small_need(hosts: list[Host], *overrides: str) -> Need:
    """Return the need of the last rank with rows of 256 and micro-batches of 512 tokens."""
    return last_need(hosts, "max_seq_len=256", "trainer.tokens_per_micro_batch=512", *overrides)


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        ({}, 4_022_272_000),  # Qwen3-4B has 4,022,468,096, norms included
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}, 3_032_104_960),
        ({"tie_word_embeddings": False}, 4_411_228_160),
    ],
)
def test_parameters_are_counted_from_the_sizes(keys, parameters):
    made = shape(QWEN_4B | keys)
    assert made is not None
    assert made.parameters == parameters
    assert shape({"d_model": 512, "n_layer": 4}) is None  # names of other keys
    assert shape({"text_config": QWEN_4B, "vision_config": {}}) == SIZES


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


@pytest.mark.parametrize(
    ("zero", "bytes_each"),  # weights, gradients and optimizer, per parameter on one of four ranks
    [
        ("zero0", (2, 4, 12)),
        ("zero1", (2, 9, 12 / 4)),  # DeepSpeed keeps all gradients on every rank, and copies
        ("zero2", (2, 4 / 4, 12 / 4)),
        ("zero3", (2 / 4, 4 / 4, 12 / 4)),
    ],
)
def test_zero_shares_more_among_the_ranks_with_every_stage(zero, bytes_each):
    _, parts, _ = planned(gpus(8, 800), "trainer.ranks=4", f"deepspeed={zero}")
    for need in (part.need.device for part in parts if part.name == "trainer"):
        assert tuple(need[key] / SIZES.parameters for key in STATES) == bytes_each


def test_offloaded_states_are_in_the_memory_of_the_host_and_not_on_the_gpu():
    whole, moved = (
        last_need(gpus(8, 800), "trainer.ranks=4", f"deepspeed={zero}")
        for zero in ("zero3", "zero3_offload")
    )
    assert [moved.device[key] for key in STATES] == [0, 0, 0]
    assert [moved.host[key] for key in STATES] == [whole.device[key] for key in STATES]


def test_only_the_first_rank_holds_the_weights_that_it_pushes_and_every_rank_loads_all():
    checkpointing = "trainer.gradient_checkpointing=true"
    _, parts, _ = planned(gpus(8, 800), "trainer.ranks=2", "deepspeed=zero3", checkpointing)
    hosts = [part.need.host for part in parts if part.name == "trainer"]
    # The packed weights, and their copy.
    assert [host["push"] for host in hosts] == [2 * 2 * SIZES.parameters, 0]
    assert hosts[-1]["loading"] == 2 * SIZES.parameters


def test_a_small_batch_or_chunk_bounds_activations_and_logits():
    """On two ranks, a batch of three rows has at most two rows of 256 tokens on a rank."""
    head = 4 * 151936 * 2560
    small = small_need(CPU, "trainer.ranks=2", "batch_size=3", MANY).host
    assert small == small_need(CPU, "trainer.ranks=2").host
    assert small["logits"] == 14 * 512 * 151936 + head
    chunk, float32 = "trainer.logprob_chunk=64", "model.head_dtype=float32"
    assert small_need(CPU, chunk, float32).host["logits"] == 14 * 64 * 151936 + 2 * head


def test_muon_has_one_moment_and_more_copies_during_its_step():
    adamw, muon = (small_need(CPU, f"optim={name}").host for name in ("adamw", "muon"))
    assert adamw["optimizer"] - muon["optimizer"] == 4 * SIZES.parameters
    assert muon["step"] - adamw["step"] == 7 * SIZES.parameters


def test_the_buffer_of_deepspeed_is_no_larger_than_what_is_trained():
    offloaded = ("trainer.ranks=2", LORA, "deepspeed=zero3_offload_optimizer")
    trained = trained_parameters(planned(gpus(8, 80), *offloaded)[0], SIZES)
    assert small_need(gpus(8, 80), *offloaded).host["step"] == 12 * trained / 2 + 12 * trained


def test_attention_of_short_rows_on_a_cpu_is_in_float32():
    short, long = (last_need(CPU, f"max_seq_len={n}", MANY).host for n in (512, 513))
    more = 36 * (6 * 4096 + 4 * 1024) * 1.6  # bytes per token, of queries and keys
    assert short["activations"] - long["activations"] == pytest.approx(4096 * more)


@pytest.mark.parametrize(
    ("reference", "adapter", "copies"),
    [
        (["initial"], "none", 1),
        (["initial"], "lora", 0),
        (["model", "reference.path=x"], "lora", 1),
        (["endpoint", "reference.url=http://x/v1", "reference.model=y"], "none", 0),
    ],
)
def test_only_a_reference_in_the_process_of_a_rank_is_a_copy(reference, adapter, copies):
    kind, *options = reference
    penalty = (f"reference={kind}", *options, f"adapter={adapter}", "kl=k3", "kl.beta=0.1")
    need = small_need(gpus(8, 800), *penalty)
    assert need.device["reference"] == copies * 2 * SIZES.parameters


@pytest.mark.parametrize("sizes", [(80, 48), (48, 80), (80,)])
def test_a_shared_gpu_leaves_to_vllm_what_the_trainer_does_not_need_on_the_smallest(sizes):
    machines = [gpus(1, size)[0] for size in sizes]
    same = ("trainer.devices=[0]", "inference.devices=[0]")
    run, parts, page = planned(machines, *same, LORA, MANY)
    taken = parts[-1].need.on_device / (min(sizes) * GIB)
    assert parts[0].need.device["push"] == 0  # only the adapter is pushed
    assert run.inference.args["gpu_memory_utilization"] == round(1 - taken - 0.03, 2)
    assert f"each GPU has {'at least ' * (len(sizes) > 1)}{min(sizes)}.0" in page
    assert planned(gpus(2, 80), LORA)[0].inference.args == {}


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
    trainer = r"utilization=0\.9 reserves 72\.0 of 80\.0 GiB .* needs 43\.4 GiB: .* at most 0\.43"
    refused(gpus(1, 80), LORA, f"{fraction}=0.9", match=trainer)
    planned(gpus(1, 80), LORA, f"{fraction}=0.3")
    # 93 % of 43.4 is 40.4 of 40.0 GiB
    refused(gpus(1, 80), LORA, f"{fraction}=0.5", match=r"=0\.5 reserves")


def test_what_does_not_fit_is_refused_with_the_arithmetic_and_the_options_that_lower_it():
    sentence = (
        r"GPU 0 has 80\.0 GiB for vLLM and trainer, but [\d.]+ GiB are needed: "
        r"vLLM [\d.]+ = weights 7\.5 .*; "
        r"trainer [\d.]+ = optimizer 45\.0 .* Lower trainer\.tokens_per_micro_batch"
    )
    refused(gpus(1, 80), MANY, match=sentence)
    sentence = r"but 93\.9 GiB are needed: .*; trainer 83\.4 = .* \+ step 15"
    refused(gpus(1, 80), SOME, match=sentence)  # 17 % more than the GPU has
    planned(gpus(1, 80), "deepspeed=zero3_offload_optimizer", SOME)  # is not refused
    refused(gpus(1, 28), LORA, MANY, match=r"GPU 0 has 28\.0 GiB for vLLM and trainer")
    planned(gpus(2, 28), LORA, MANY)  # is not refused
    sentence = r"host 0 has 8\.0 GiB .* Largest process: trainer [\d.]+ = optimizer 45"
    refused([Host(cores=8, cpus=8, memory=8 * GIB)], FEW, match=sentence)


def test_a_gpu_that_the_estimate_exceeds_by_a_little_is_warned_of_and_by_more_refused():
    own = ("trainer.ranks=1", SOME, "inference.devices=[1]")
    taken = last_need(gpus(2, 800), *own).on_device
    larger, smaller, small = (
        [replace(gpus(2, 80)[0], device_memory=int(share * taken))] for share in (1.01, 0.97, 0.9)
    )
    assert "the run may fail" not in planned(larger, *own)[2]
    assert "the run may fail" in planned(smaller, *own)[2]
    refused(small, *own, match=r"GPU 0 has [\d.]+ GiB for trainer, but")


def test_vllm_keeps_room_outside_of_its_share_for_copies_of_the_largest_layer():
    run, parts, _ = planned(gpus(1, 80), LORA, "sync=shm", MANY)
    push = 2 * 2 * QWEN_4B["vocab_size"] * QWEN_4B["hidden_size"]
    assert parts[0].need.device["push"] == push
    taken = (parts[-1].need.on_device + push) / (80 * GIB)
    assert run.inference.args["gpu_memory_utilization"] == round(1 - taken - 0.03, 2)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    mixture = shape(QWEN_4B | {"hidden_size": 2048} | experts)
    assert mixture is not None
    assert mixture.largest_weight == 128 * 2 * 768 * 2048  # gate and up of all experts of a layer


@pytest.mark.parametrize(("sync", "group"), [("ipc", 1), ("nccl", 1), ("nccl", 2), ("shm", 1)])
def test_weights_that_stay_on_gpus_are_counted_once_more_there(sync, group):
    size, whole = f"inference.tensor_parallel_size={group}", 2 * SIZES.parameters
    _, parts, _ = planned(gpus(4, 80), LORA, MANY, f"sync={sync}", size)
    needs = [(part.name, part.need.device.get("push", 0)) for part in parts]
    each = 2 * 2 * SIZES.largest_weight / group + whole * (sync == "nccl")  # every GPU gets all
    assert [need for name, need in needs if name == "vLLM"] == [each] * (2 // group)
    assert [need for name, need in needs if name == "trainer"] == [whole * (sync != "shm"), 0]


def test_the_cache_on_a_cpu_holds_at_least_one_row():
    host = [Host(cores=2, cpus=2, memory=512 * GIB)]
    longer = ("model.max_seq_len=16384", LORA, FEW, "max_seq_len=16384")
    assert planned(host, *longer)[0].inference.cpu_kv_cache_gib == 3
    sentence = r"cpu_kv_cache_gib=1, .* need 2\.2 GiB: set .*=3 or null"
    refused(host, *longer, "inference.cpu_kv_cache_gib=1", match=sentence)
    own = {"args": {"enforce_eager": True, "max_num_seqs": 256}, "cpu_kv_cache_gib": 1}
    others = {**composed("run_name=x")["inference"], "replicas": 1}
    assert planned(host, FEW)[0].inference.plain() == {**others, **own}


def test_a_plan_that_is_larger_than_the_machine_says_so_and_its_rows_add_up():
    host = Host(cores=4, cpus=8, memory=512 * GIB)
    _, parts, page = planned([host])
    rows = [re.search(r" (\d+\.\d)(  |$)", line) for line in page.splitlines()[1:-1]]
    total = need_on_host(parts, 0)
    assert sum(float(row[1]) for row in rows if row) == pytest.approx(total / GIB, abs=0.2)
    assert "exceeds the memory" not in page
    _, _, page = planned([replace(host, memory=int(0.86 * total))])
    assert page.splitlines()[-1].startswith("the run may fail: the estimate exceeds")
    refused([replace(host, memory=int(0.84 * total))], match="host 0 has")
    # Of two hosts, the page warns about the one with the least memory left.
    _, parts, _ = planned([host, host])
    page = planned([host, replace(host, memory=int(0.9 * need_on_host(parts, 1)))])[2]
    assert need_on_host(parts, 1) < need_on_host(parts, 0)
    assert "host 1, the fullest, needs " in page
    assert "the run may fail" in page


def test_the_page_of_a_model_of_unknown_sizes_says_where_things_run():
    host = [Host(cores=4, cpus=8)]
    page = plan_text(placement(Run.of(composed("run_name=x")), host), None, host)
    vllm, trainer = (line.split() for line in page.splitlines()[1:])
    assert vllm == ["vLLM", "3", "threads", "?"]
    assert trainer == ["trainer", "7", "threads", "?"]


@pytest.mark.parametrize(
    ("override", "on_gpu", "on_cpu"),
    [
        ("trainer.compile=null", True, False),
        ("deepspeed=zero3", False, False),
        ("trainer.compile=false", False, False),
        ("trainer.compile=true", True, True),
    ],
)
def test_layers_are_compiled_on_a_gpu_unless_the_run_says_otherwise(override, on_gpu, on_cpu):
    run = Run.of(composed("run_name=x", override))
    assert (run.compiles(on_gpu=True), run.compiles(on_gpu=False)) == (on_gpu, on_cpu)
