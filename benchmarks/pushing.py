"""Compare each stage of a push of all weights on one machine with a plain copy.

    python -m benchmarks.pushing [--layers 28] [--vllm]

The model is a Qwen3 with 440 million bfloat16 parameters. `of_copy` divides the median time by that
of a copy of the same bytes into allocated memory. --vllm also pushes to a real vLLM: `whole push`
lasts from the first byte written to the last answer. The program of 07b74374 also measured the
stages of this push, and pushes to processes that only read and check (`gloo to 2`: to two).
"""

import argparse
import statistics
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks._measuring import folder_with, rounds, say
from rl.config.build import build
from rl.inference.routes import VLLMRoutes
from rl.inference.server import ServedPolicy, run_vllm
from rl.model.loading import load_model
from rl.placement.settings import with_device_flags
from rl.runtime.devices import visible_gpus
from rl.weights.gloo import GlooSender
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.pusher import WeightPusher
from rl.weights.shm import ShmSender
from tests.support.composing import composed

Weights = dict[str, torch.Tensor]
Stages = dict[str, list[float]]
REPEATS, TIMEOUT_S = 5, 600.0
SIZES = {"hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128}


def our_stages(weights: Weights) -> Stages:
    """Time a plain copy and the stages of a push outside vLLM."""
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    with closing(MemoryFile()) as file:
        fingerprint = file.write(weights)
        works = {
            "copy": copy,
            "write and hash": partial(file.write, weights),
            "map and check": partial(read_weights, file.path, fingerprint),
        }
        return rounds(works, REPEATS)


def push_seconds(
    kind: type[ShmSender | GlooSender], receivers: list[VLLMRoutes], weights: Weights
) -> list[float]:
    """Return the seconds of each push to all receivers."""
    sender = kind(probe_every=0, probe_rows=1, max_mismatch=1.0)
    sender.open(TIMEOUT_S)
    pusher = WeightPusher(sender)
    pusher.add(receivers)
    policy: Any = SimpleNamespace(ranks=SimpleNamespace(first=True), weights=lambda _: weights)
    return rounds({"": partial(pusher.push, policy, 0, must_differ=False)}, REPEATS)[""]


def main() -> None:
    """Measure all rounds, then print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vllm", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [f"model.{key}={value}" for key, value in SIZES.items()]
    config = composed(*sizes, f"model.num_layers={asked.layers}", "model.warm_start=null")
    with folder_with(config["model"]) as folder:
        model = load_model(folder.initial_model(), torch.bfloat16, 0)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        stages = our_stages(weights)
        if asked.vllm:
            flags = with_device_flags(config["inference"], config["sampler"], bool(visible_gpus()))
            served = ServedPolicy(dtype="bfloat16", max_seq_len=256, seed=0)
            with run_vllm(build(flags)(), folder, served) as vllm:
                for name, kind in (("whole push", ShmSender), ("whole push, gloo", GlooSender)):
                    stages[name] = push_seconds(kind, [vllm], weights)
    size = sum(tensor.nbytes for tensor in weights.values())
    medians = {part: statistics.median(times) for part, times in stages.items()}
    for part, took in medians.items():
        say(part=part, seconds=took, GB_per_s=size / took / 1e9, of_copy=took / medians["copy"])


if __name__ == "__main__":
    main()
