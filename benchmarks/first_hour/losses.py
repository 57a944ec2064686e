"""The gradients of all losses on the device."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from losses.aggregation import token_mean
from rl.config.build import component
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, Objective, with_outputs
from rl.learner.weight_gradients import use_float32_gradients
from rl.model.loading import load_model
from rl.rollouts.plan import plan
from tests.support import tiny_policy

LOSSES = Path(__file__).parents[2] / "conf/loss"


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
