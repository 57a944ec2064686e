"""What a push of all weights costs on one machine, part by part, beside a plain copy of the bytes.

    python -m benchmarks.pushing [--hidden 1024] [--layers 28] [--repeats 5]

A Qwen3 of 440 million bfloat16 parameters is made on the spot. One JSON line a part:

    {"part": "write and hash", "seconds": ..., "GB_per_s": ..., "of_copy": ...}

`of_copy` is its time as a part of a plain copy of the same bytes into memory that is there already.
Rounds take turns, and medians count. What vLLM does with them, loading and repacking, is not in it:
a run's time/push holds that too.
"""

import argparse
import json
import statistics
import time

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks._timing import seconds
from rl.weights.fingerprint import fingerprint
from rl.weights.memory_file import memory_file, read_weights


def weights_of(hidden: int, layers: int) -> dict[str, torch.Tensor]:
    """The tied weights of a Qwen3 under Hugging Face names."""
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        vocab_size=320,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main() -> None:
    """Measure, and print at the end of all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    weights = weights_of(arguments.hidden, arguments.layers)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    def three_passes() -> None:
        """The plain way, a pass each: hashed, then serialised, then copied."""
        fingerprint(weights)
        bytearray(save(weights))

    parts: dict[str, list[float]] = {}
    for _ in range(arguments.repeats + 1):
        parts.setdefault("copy", []).append(seconds(copy))
        parts.setdefault("hash, serialise, copy", []).append(seconds(three_passes))
        began = time.perf_counter()
        with memory_file(weights) as file:
            parts.setdefault("write and hash", []).append(time.perf_counter() - began)
            took = seconds(lambda file=file: read_weights(file.path, file.fingerprint))
            parts.setdefault("map and check", []).append(took)
    medians = {part: statistics.median(times[1:]) for part, times in parts.items()}
    for part, median in medians.items():
        line = {
            "part": part,
            "seconds": round(median, 3),
            "GB_per_s": round(size / median / 1e9, 2),
            "of_copy": round(median / medians["copy"], 2),
        }
        print(json.dumps({**line, "GB": round(size / 1e9, 3)}), flush=True)


if __name__ == "__main__":
    main()
