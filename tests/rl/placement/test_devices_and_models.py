"""Placement and memory of six models on 1, 2, 4, 8 and 2 x 8 GPUs of 80 GiB."""

import pytest

from rl.config.schema import ConfigError
from rl.model.shape import GIB, Shape, shape
from tests.rl.placement.test_budget import QWEN_4B, gpus, planned

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
MODELS = {  # sizes, and the parameters that the publisher counts
    "0.6b": (sizes(1024, 28, 16, 3072, **TIED), 596_049_920),
    "1.7b": (sizes(2048, 28, 16, 6144, **TIED), 1_720_574_976),
    "4b": (shape(QWEN_4B), 4_022_468_096),
    "8b": (sizes(4096, 36, 32, 12288), 8_190_735_360),
    "32b": (sizes(5120, 64, 64, 25600), 32_762_123_264),
    "30b-a3b": (sizes(2048, 48, 32, 6144, num_key_value_heads=4, **EXPERTS), 30_532_122_624),
}
MACHINES = {"1": (1, 1), "2": (2, 1), "4": (4, 1), "8": (8, 1), "2x8": (8, 2)}  # GPUs, hosts
PLACES = {"1": (1, 1), "2": (1, 1), "4": (2, 2), "8": (4, 4), "2x8": (8, 8)}  # ranks, replicas
# The machines on which the model trains. Weights alone take 2 GiB a billion parameters. All weights
# take 18 GiB, of which ZeRO 3 gives each rank its share, and DeepSpeed's step another 12.
FIT = {
    "lora": {"0.6b": "1 2 4 8 2x8", "1.7b": "1 2 4 8 2x8", "4b": "1 2 4 8 2x8",
             "8b": "1 2 4 8 2x8", "32b": "", "30b-a3b": "2 4 8 2x8"},
    "none": {"0.6b": "1 2 4 8 2x8", "1.7b": "1 2 4 8 2x8", "4b": "4 8 2x8", "8b": "8 2x8",
             "32b": "", "30b-a3b": ""},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_those_that_the_publisher_counts(model):
    made, published = MODELS[model]
    assert made is not None
    assert made.parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("adapter", FIT)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_placed_or_refused_as_in_the_table(model, machine, adapter):
    (count, hosts), (ranks, replicas), made = MACHINES[machine], PLACES[machine], MODELS[model][0]
    assert made is not None
    overrides = [f"adapter={adapter}", "trainer.tokens_per_micro_batch=4096"]
    if adapter == "none":
        overrides += ["deepspeed=zero3", "trainer.gradient_checkpointing=true"]
    machines = gpus(count, 80, hosts=hosts)
    if machine not in FIT[adapter][model].split():
        with pytest.raises(ConfigError, match=r"GPU \d+ has 80\.0 GiB"):
            planned(machines, *overrides, sizes=made)
        return
    _, processes, _ = planned(machines, *overrides, sizes=made)
    kinds = [process.name for process in processes]
    assert (kinds.count("trainer"), kinds.count("vLLM")) == (ranks, replicas)
    first = next(p.need.device for p in processes if p.name == "trainer")
    share = ranks if adapter == "none" else 1
    assert first["weights"] == 2 * made.parameters / share
    if adapter == "none":
        assert first["gradients"] + first["optimizer"] == 16 * made.parameters / ranks
    for device in machines[0].devices:
        for host in range(hosts):
            on_it = [p for p in processes if p.place.host == host and device in p.place.devices]
            assert (
                sum(p.need.on_device for p in on_it) <= 80 * GIB / 0.93
            )  # the share of an estimate that must fit
    server = next(p.need.device for p in processes if p.name == "vLLM")
    assert server["weights"] == 2 * made.parameters


def test_one_gpu_trains_all_weights_of_4b_if_the_optimizer_is_in_host_memory():
    made = MODELS["4b"][0]
    assert made is not None
    overrides = ("deepspeed=zero3_offload_optimizer", "trainer.gradient_checkpointing=true")
    _, processes, page = planned(gpus(1, 80), *overrides, sizes=made)
    need = processes[-1].need
    assert need.host["optimizer"] + need.host["gradients"] == 16 * made.parameters
    assert "step" not in {key for key, value in need.device.items() if value}
    assert "activations" in page
