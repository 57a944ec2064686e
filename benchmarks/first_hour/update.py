"""Tokens per second, model FLOPs and peak memory of an update, for networks drawn from a config.

The optimizer step is that of ZeRO 0: float32 gradients, master weights and moments. The published
work of an update is 6 FLOPs a parameter and token (LoRA: 4), and attention's products.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks._measuring import Work, rounds, seconds
from rl.learner.logprobs import PolicyModule
from rl.learner.weight_gradients import use_float32_gradients
from rl.model.loading import compile_layers, enable_gradient_checkpointing
from rl.model.lora import LoRA
from rl.model.shape import GIB, shape
from rl.model.shared_prefixes import share_prefixes
from rl.weights.memory_file import MemoryFile

PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16
SIZES = {  # hidden, inner, layers, heads
    "0.6b": (1024, 3072, 28, 16),
    "1.7b": (2048, 6144, 28, 16),
    "4b": (2560, 9728, 36, 32),
    "moe": (1024, 3072, 16, 16),  # 2.7B parameters, of which a token uses 0.56B
}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
ADAPTER = LoRA(
    rank=8, alpha=32.0, dropout=0.0, target_modules="all-linear", modules_to_save=[], rslora=False
)


def config(size: str, tiny: bool) -> PreTrainedConfig:
    """Return the configuration of a Qwen3 of this size."""
    hidden, inner, layers, heads = (64, 128, 2, 4) if tiny else SIZES[size]
    kind: Any = Qwen3MoeConfig if size == "moe" else Qwen3Config
    return kind(
        vocab_size=1024 if tiny else 151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=min(heads, 8),
        head_dim=16 if tiny else 128,
        tie_word_embeddings=True,
        **(EXPERTS if size == "moe" else {}),
    )


class Updater:
    """A policy with float32 master weights, which takes steps as the trainer's engine does."""

    def __init__(
        self, made: PreTrainedConfig, device: torch.device, adapter: str, how: str
    ) -> None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
            model = ADAPTER.attach(model, 0, "none") if adapter == "lora" else model
        if "checkpointed" in how:
            enable_gradient_checkpointing(model)
        if "shared" in how:
            share_prefixes(model)
        if "compiled" in how:
            compile_layers(model)
        self.module = PolicyModule(model.train(), chunk=1024, compiled="compiled" in how)
        use_float32_gradients(self.module)
        self.adapter = adapter
        self.trained = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in self.trained:
            parameter.grad_dtype = torch.float32
        self.masters = [p.detach().float() for p in self.trained]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-6)

    def step(self, token_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Train one micro-batch with REINFORCE, entropies included, as an update does."""
        self.passes(token_ids, mask)
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        for parameter, master in zip(self.trained, self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        self.optimizer.step()
        for parameter, master in zip(self.trained, self.masters, strict=True):
            parameter.data.copy_(master)
            master.grad = None

    def passes(self, token_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the gradient of a micro-batch."""
        logprobs, _ = self.module(token_ids, mask, 1.0, entropies=True)[:2]
        (-logprobs.sum() / len(logprobs)).backward()


def prefixes(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of an update of a group, with shared prefixes and with plain rows."""
    made, rows = config("0.6b", tiny), 16
    for prompt, answer in ((8, 4),) if tiny else ((200, 400), (1000, 400), (2000, 200)):
        line: dict[str, Any] = {"prompt": prompt, "answer": answer, "rows": rows}
        length = prompt + answer
        token_ids = torch.randint(0, made.vocab_size, (rows, length), device=device)
        token_ids[:, :prompt] = token_ids[0, :prompt]
        mask = torch.arange(length, device=device).expand(rows, -1) >= prompt
        for how in ("plain", "shared", "plain compiled", "shared compiled"):
            reset(device)
            passes = partial(Updater(made, device, "lora", how).passes, token_ids, mask)
            line[f"{how}_ms"] = round(1000 * median_seconds(passes, repeats=3), 1)
            if device.type == "cuda":
                line[f"{how}_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 1)
        yield line


def updates(size: str, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a line for each adapter and way of computing the layers."""
    made, rows, length = config(size, tiny), 8, 32 if tiny else 1024
    token_ids = torch.randint(0, made.vocab_size, (rows, length), device=device)
    mask = torch.arange(length, device=device).expand(rows, -1) >= length // 4
    variants = [(how, adapter) for how in ("plain", "compiled") for adapter in ("lora", "none")]
    if size == "4b":  # all weights need more than 80 GB
        variants = [(how, "lora") for how in ("plain", "compiled", "checkpointed compiled")]
    for how, adapter in variants:
        line: dict[str, Any] = {"adapter": adapter, "layers": how}
        try:
            reset(device)
            step = partial(Updater(made, device, adapter, how).step, token_ids, mask)
            line["first_s"] = round(seconds(step, clock), 1)  # it compiles
            took = median_seconds(step, repeats=5)
            line["tokens_per_s"] = round(token_ids.numel() / took)
            line["mfu"] = round(flops(made, adapter, token_ids) / took / PEAK_FLOPS, 3)
        except torch.OutOfMemoryError:
            line["result"] = "out of memory"
        if device.type == "cuda":
            line["peak_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 1)
        yield line


def flops(made: PreTrainedConfig, adapter: str, token_ids: torch.Tensor) -> float:
    """Return the FLOPs of an update that every implementation must compute."""
    sizes = shape(made.to_dict())
    assert sizes
    products = 4 if adapter == "lora" else 6
    attention = 2 * sizes.layers * sizes.query * token_ids.shape[1] / 2  # causal: half of the pairs
    unused = 3 * sizes.hidden * (sizes.expert * sizes.experts - sizes.inner) if sizes.expert else 0
    used = sizes.parameters - sizes.layers * unused
    return products * token_ids.numel() * (used + attention)


def push(size: str, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of the trainer's part of a push of all weights through the memory file."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(size, tiny), dtype=torch.bfloat16)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with closing(MemoryFile()) as file:
        took = median_seconds(lambda: file.write(weights), repeats=3)
    total = sum(tensor.nbytes for tensor in weights.values())
    yield {"write and hash, ms": round(1000 * took, 1), "gb_per_s": round(total / took / 1e9, 2)}


def reset(device: torch.device) -> None:
    """Free cached memory, and count its peak anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def clock() -> float:
    """Return the time in seconds at which the device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def median_seconds(work: Work, repeats: int) -> float:
    """Return the median seconds of `work`, after one that warms up."""
    return statistics.median(rounds({"": work}, repeats, clock)[""])
