"""Placement and memory of six models on 1, 2, 4, 8 and 2 x 8 GPUs of 80 GiB, and stored plans."""

from dataclasses import replace

import pytest
import yaml

from rl.config.schema import ConfigError, Run
from rl.model.shape import GIB, Shape, shape
from rl.placement.budget import process_memory
from rl.runtime.devices import Host
from rl.supervisor.resolve import assign_devices
from tests.rl.placement.test_budget import gpus, planned
from tests.support import golden as stored
from tests.support.composing import with_choices

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
# GPUs, hosts, and the ranks and replicas that they get.
MACHINES = {
    "1": (1, 1, 1, 1), "2": (2, 1, 1, 1), "4": (4, 1, 2, 2), "8": (8, 1, 4, 4), "2x8": (8, 2, 8, 8),
}  # fmt: skip
ALL = "1 2 4 8 2x8"
# The machines on which the model trains. Weights alone take 2 GiB a billion parameters. All weights
# take 18 GiB, of which ZeRO 3 gives each rank its share, and DeepSpeed's step another 12.
FIT = {
    "lora": {"0.6b": ALL, "1.7b": ALL, "4b": ALL, "8b": ALL, "32b": "", "30b-a3b": "2 4 8 2x8"},
    "none": {"0.6b": ALL, "1.7b": ALL, "4b": "4 8 2x8", "8b": "8 2x8", "32b": "", "30b-a3b": ""},
}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_that_the_publisher_counts(model):
    made, published = MODELS[model]
    assert made.parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("adapter", FIT)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_placed_or_refused_as_in_the_table(model, machine, adapter):
    (count, hosts, ranks, replicas), made = MACHINES[machine], MODELS[model][0]
    overrides = [f"adapter={adapter}", "trainer.tokens_per_micro_batch=4096"]
    if adapter == "none":
        overrides += ["deepspeed=zero3", "trainer.gradient_checkpointing=true"]
    machines = gpus(count, 80, hosts=hosts)
    if machine not in FIT[adapter][model].split():
        with pytest.raises(ConfigError, match=r"GPU \d+ has 80\.0 GiB"):
            planned(machines, *overrides, sizes=made)
        return
    _, processes, _ = planned(machines, *overrides, sizes=made)
    trainers, servers = ([p for p in processes if p.name == name] for name in ("trainer", "vLLM"))
    assert (len(trainers), len(servers)) == (ranks, replicas)
    first = trainers[0].need.device
    assert first["weights"] == 2 * made.parameters / (ranks if adapter == "none" else 1)
    if adapter == "none":
        assert first["gradients"] + first["optimizer"] == 16 * made.parameters / ranks
    for device in machines[0].devices:
        for host in range(hosts):
            on_it = [p for p in processes if p.place.host == host and device in p.place.devices]
            needed = sum(p.need.on_device for p in on_it)
            assert needed <= 80 * GIB / 0.93  # the share of an estimate that must fit
    assert servers[0].need.device["weights"] == 2 * made.parameters


def test_one_gpu_trains_all_weights_of_4b_if_the_optimizer_is_in_host_memory():
    made = MODELS["4b"][0]
    overrides = ("deepspeed=zero3_offload_optimizer", "trainer.gradient_checkpointing=true")
    _, processes, page = planned(gpus(1, 80), *overrides, sizes=made)
    need = processes[-1].need
    assert need.host["optimizer"] + need.host["gradients"] == 16 * made.parameters
    assert "step" not in {key for key, value in need.device.items() if value}
    assert "activations" in page


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
CPU = Host(cores=8, cpus=16, memory=64 * GIB, free_memory=20 * GIB)
NAMED_MACHINES = {
    "cpu": [CPU], "small": [replace(CPU, memory=3 * GIB)],
    "two": [CPU, Host(cores=4, cpus=4, memory=16 * GIB)],
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
