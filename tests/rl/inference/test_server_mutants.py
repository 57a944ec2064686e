"""vLLM's command line, and the room it keeps for an adapter."""

from itertools import pairwise

import pytest

from rl.config.transport import VLLM_RANKS
from rl.inference.server import VLLMServer, adapter_room
from rl.run.address import Address
from tests.support.scripted import tiny_model

KNOBS = {
    "replicas": 1,
    "listen": "unix",
    "startup_timeout": 1.0,
    "devices": None,
    "tensor_parallel_size": 1,
    "cpu_kv_cache_gib": 1,
}


def test_logprobs_are_those_of_the_distribution_that_was_sampled(tmp_path):
    server = VLLMServer(**KNOBS, args={"max_num_seqs": 64})
    command = server.command(
        tiny_model(tmp_path),
        Address(path=tmp_path / "s"),
        seed=3,
        dtype="float32",
        max_seq_len=256,
        adapter=None,
    )
    flags = dict(pairwise(command))
    assert flags["--logprobs-mode"] == "processed_logprobs"
    assert flags["--seed"] == "3"
    assert flags["--max-model-len"] == "256"
    assert flags["--max-num-seqs"] == "64"
    assert flags["--load-format"] == "dummy"  # the folder holds no weights


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_an_adapter_has_the_least_room_that_vllm_can_keep_for_it(rank, room, tmp_path):
    assert room in VLLM_RANKS
    node = {
        "_target_": "rl.model.lora.LoRA",
        "rank": rank,
        "target_modules": ["model.q_proj", "v_proj"],
    }
    kept = adapter_room("adapter", node, tmp_path)
    assert (kept.rank, kept.layers) == (room, ["q_proj", "v_proj"])
    assert adapter_room("shm", node, tmp_path) is None
