"""Parts of a step: products with a float32 result, the gradients of all losses, a push."""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml
from transformers import AutoModelForCausalLM

from benchmarks.first_hour.update import config, seconds
from losses.aggregation import token_mean
from rl.config.build import component
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, Objective, with_outputs
from rl.learner.weight_gradients import use_float32_gradients, weight_gradient
from rl.model.loading import load_model
from rl.rollouts.plan import plan
from rl.weights.memory_file import MemoryFile
from tests.support import tiny_policy

LOSSES = Path(__file__).parents[2] / "conf/loss"


def products(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield error and time of a weight's gradient in float32, beside bfloat16 products."""
    tokens, width = (64, 32) if tiny else (8192, 4096)
    grads = torch.randn(tokens, width, device=device).bfloat16()
    inputs = torch.randn(tokens, width, device=device).bfloat16()
    exact = grads.double().T @ inputs.double()
    for name, work in {
        "mm": lambda: weight_gradient(grads, inputs),
        "addmm": lambda: weight_gradient(grads, inputs, torch.zeros_like(exact).float()),
        "bfloat16": lambda: grads.T @ inputs,
    }.items():
        found = work()
        error = float((found.double() - exact).norm() / exact.norm())
        took = seconds(work, device, repeats=10)
        rate = round(2 * tokens * width * width / took / 1e12, 1)
        yield {"product": name, "dtype": str(found.dtype), "error": f"{error:.1e}", "tflops": rate}


def losses(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001
    """Yield the error of each loss's gradient in bfloat16, on the CPU and on the device.

    Both errors are relative to the float32 gradient on the CPU.
    """
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_policy.model_folder(Path(name, "model"))
        rows = tiny_policy.weighted(tiny_policy.exact_model(folder).float(), token_mean)
        (share,) = plan(rows, step=1, ranks=1, tokens_per_micro_batch=10_000, metrics={})
        for path in sorted(LOSSES.glob("*.yaml")):
            loss = component(_node(path.stem))
            exact = _gradient(folder, loss, share, cpu, torch.float32)
            errors = {
                where: float((_gradient(folder, loss, share, on, torch.bfloat16) - exact).norm())
                / float(exact.norm())
                for where, on in (("cpu", cpu), ("device", device))
            }
            yield {"loss": path.stem, **{key: f"{error:.1e}" for key, error in errors.items()}}


def _node(name: str) -> dict[str, Any]:
    """Return the options of a loss from its YAML, without Hydra."""
    node = yaml.safe_load((LOSSES / f"{name}.yaml").read_text())
    inherited = {}
    for base in node.pop("defaults", ()):
        inherited |= _node(base) if isinstance(base, str) and base != "_self_" else {}
    return inherited | node


def _gradient(
    folder: Path, loss: Any, share: Any, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of all weights as one float64 vector on the CPU."""
    model: Any = load_model(folder, dtype, 0)
    module = PolicyModule(model.to(device), chunk=64)
    use_float32_gradients(module)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    (micro,) = share.micro_batches
    batch = tiny_policy.filled(Batch.of(micro, device, 1), old=False, dtype=torch.float32)
    found = module(batch.token_ids, batch.mask, 0.8, entropies=True, candidates=batch.candidates)
    logprobs, entropies, *candidates = found
    if hasattr(loss, "statistics"):
        loss = partial(loss, statistics=loss.statistics(with_outputs(batch, *found)))
    value, _ = Objective(loss).per_token(batch, logprobs, entropies, 0.0, *candidates)
    batch.weighted_sum(value).backward()
    given = [p.grad for p in module.parameters() if p.grad is not None]
    return torch.cat([g.double().flatten().cpu() for g in given])


def push(size: str, device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield the time of each part of a push of all weights through the memory file."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(size, tiny), dtype=torch.bfloat16)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    host = {name: tensor.cpu() for name, tensor in weights.items()}
    total = sum(tensor.nbytes for tensor in weights.values())
    with closing(MemoryFile()) as file:
        file.write(weights)  # the first write pays for the pages
        with memoryview(file.content) as content:
            for part, work, repeats in (
                ("write", lambda: file.write(weights), 3),
                ("hash", lambda: xxhash.xxh3_64(content), 1),
                ("copy and hash", lambda: file.write(host), 3),
                ("collect", lambda: [tensor.cpu() for tensor in weights.values()], 1),
            ):
                took = seconds(work, device, repeats=repeats)
                rate = round(total / took / 1e9, 2)
                yield {"part": part, "ms": round(1000 * took, 1), "gb_per_s": rate}
