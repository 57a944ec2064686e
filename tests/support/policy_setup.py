"""What the cases of policy_worker.py are made of: policies, batches, and optimizers that watch."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REPO = Path(__file__).parents[2]
BUDGETS = {"one": 10_000, "several": 60, "rows": 1}  # tokens of a micro-batch
RATE = 0.01


def without_advantage(row: Any) -> Any:
    return dataclasses.replace(row, advantages=0.0)


def zero_gradient_fraction(rows: Any) -> float:
    """Share of the completion tokens whose row has no advantage."""
    idle = sum(r.row.num_completion for r in rows if not r.teaches)
    return idle / sum(r.row.num_completion for r in rows)


class CountingSGD(torch.optim.SGD):
    """Weights before minus weights after are the gradient itself."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step(closure)


class Watched:
    """A configured optimizer that keeps the gradients of every step, and whose they are."""

    def __init__(self, optim: Any) -> None:
        self.rate = optim.rate
        self._optim = optim
        self.gradients: list[list[Tensor]] = []

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        made = self._optim.optimizer(parameters, embeddings)
        self.owners = [id(p) for group in made.param_groups for p in group["params"]]
        made.register_step_pre_hook(self._keep)
        return made

    def _keep(self, optimizer: Any, *_: Any) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append([gradient.clone() for gradient in held if gradient is not None])


class PlainSteps:
    """Stands in for rl.learner.optim.AdamW."""

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        self.made = CountingSGD([p for p in parameters if p.requires_grad], lr=123.0)
        return self.made

    def rate(self, step: int, max_steps: int) -> float:
        return self._rate


class Setup:
    """Policies of any size and batches of any split, the same on every rank."""

    def __init__(self, folder: Path, ranks: Any) -> None:
        from losses.aggregation import token_mean
        from losses.cispo import cispo
        from rl.learner.objective import Objective
        from tests.support import tiny_policy as tiny

        self.folder, self.ranks = folder, ranks
        # Every rank writes a folder of its own: they would race for a shared one.
        sources = folder / f"models{ranks.rank}"
        self.sources = {d: tiny.model_folder(sources / d, d) for d in ("float32", "bfloat16")}
        self.loss = functools.partial(cispo, clip_low=0.0, clip_high=5.0)
        self.objective = Objective(self.loss)
        self.twin = tiny.exact_model(self.sources["float32"])
        self.batches = [tiny.weighted(self.twin, token_mean, seed) for seed in range(2)]
        self.rows = self.batches[0]

    def policy(self, dtype: str, mode: str, optim: Any, seed: int = 0, **changes: Any) -> Any:
        from rl.learner.policy import Policy
        from tests.support.tiny_policy import TEMPERATURE

        model = self.model(dtype, seed)
        with_layers(model, mode)
        model.train()
        settings = {"max_steps": 10, "max_grad_norm": 1e9, "logprob_chunk": 7, **changes}
        return Policy(
            model,
            optim,
            self.ranks,
            deepspeed_config=deepspeed_config(mode),
            temperature=TEMPERATURE,
            **settings,
        )

    def model(self, dtype: str, seed: int) -> Any:
        from rl.model.loading import load_model

        return load_model(self.sources[dtype], getattr(torch, dtype), seed)

    def adamw(self, **changes: Any) -> Any:
        from rl.learner.optim import AdamW

        knobs = {
            "learning_rate": RATE,
            "beta1": 0.9,
            "beta2": 0.99,
            "eps": 1e-12,
            "weight_decay": 0.0,
            "schedule": "constant",
            "warmup_steps": 0,
            "min_ratio": 0.1,
        }
        return AdamW(**{**knobs, **changes})

    def batch(self, rows: Any, split: str = "several", step: int = 0) -> Any:
        return self.split(rows, BUDGETS.get(split, 1), step)

    def split(self, rows: Any, budget: int, step: int = 0) -> Any:
        from rl.rollouts.plan import plan

        shares = plan(
            rows,
            step=step,
            ranks=self.ranks.world,
            tokens_per_micro_batch=budget,
            metrics={},
        )
        return shares[self.ranks.rank]

    def everywhere(self, policy: Any) -> dict[str, Tensor]:
        """A copy of the weights, on every rank."""
        found = [{name: tensor.clone() for name, tensor in policy.weights().items()}]
        dist.broadcast_object_list(found, src=0)
        return found[0]


def with_layers(model: Any, mode: str) -> None:
    """Recompute and compile the layers as the mode says."""
    from rl.learner.layers import compile_layers, recompute_layers

    if "checkpointing" in mode:
        recompute_layers(model)
    if "compiled" in mode:
        compile_layers(model, "aot_eager")  # inductor takes minutes


def deepspeed_config(mode: str) -> dict[str, Any]:
    import yaml

    stage, *how = mode.split()
    config = yaml.safe_load((REPO / f"conf/deepspeed/{stage}.yaml").read_text())
    if "scattered" in how:  # the weights of so small a model would stay whole on every rank
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
        }
    if "sums" in how:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def all_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
