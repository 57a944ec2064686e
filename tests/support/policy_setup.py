"""Policies, batches and optimizers for tests that run on ranks (tests/support/ranks.py)."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from losses.aggregation import token_mean
from losses.cispo import cispo
from rl.config.schedules import split_schedules
from rl.dry_call.learn import run_with_facts
from rl.learner.learner import Learner
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, Objective
from rl.learner.optim import AdamW
from rl.learner.policy import Policy
from rl.model.loading import compile_layers, enable_gradient_checkpointing, load_model
from rl.model.lora import adapter_recipes
from rl.model.shared_prefixes import share_prefixes
from rl.rollouts.plan import plan, weighted_rows
from rl.runtime.folder import RunFolder
from tests.support import tiny_policy as tiny
from tests.support.composing import chosen, composed

BUDGETS = {"one": 10_000, "several": 60, "rows": 1}  # tokens of a micro-batch
RATE = 0.01


class ObservedSGD(torch.optim.SGD):
    """Counts its steps, and keeps the gradient that reaches it: this rank's share."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        held = [p.grad for group in self.param_groups for p in group["params"]]
        flat = [g.detach().double().flatten() for g in held if g is not None]
        self.gradient = torch.cat([torch.zeros(0), *flat])
        super().step(closure)


class PlainSteps:
    """Plain SGD in the place of rl.learner.optim.AdamW.

    At a rate of 1 the weights move by the gradient itself, and at 0 they stay.
    """

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate

    def optimizer(self, parameters: Any, embeddings: Any) -> torch.optim.Optimizer:
        self.made = ObservedSGD([p for p in parameters if p.requires_grad], lr=123.0)
        return self.made

    def rate(self, step: int, max_steps: int) -> float:
        return self._rate


class ConvertingPolicy(Policy):
    """A policy that converts the micro-batches of a batch unless they are given."""

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, batch: Any, objective: Any, *, batches: Any = None, **options: Any
    ) -> Any:
        device = self.ranks.device
        made = batches or [Batch.of(micro, device, batch.step) for micro in batch.micro_batches]
        return super().update(batch.step, made, objective, **options)


class Setup:
    """Policies of any dtype and ZeRO stage and batches of any split, the same on every rank."""

    def __init__(self, folder: Path, ranks: Any) -> None:
        self.folder, self.ranks = folder, ranks
        self._numbers = itertools.count()
        # One folder per rank, because the ranks would race for a shared one.
        sources = folder / f"models{ranks.rank}"
        self.sources = {d: tiny.model_folder(sources / d, d) for d in ("float32", "bfloat16")}
        self.loss = functools.partial(cispo, clip_low=0.0, clip_high=5.0)
        self.objective = Objective(self.loss)
        self.twin = tiny.exact_model(self.sources["float32"])
        groups = (tiny.groups(self.twin, seed=seed) for seed in range(2))
        self.batches = [weighted_rows(made, token_mean) for made in groups]
        self.rows = self.batches[0]

    def new_folder(self) -> Path:
        """Return an empty folder that all ranks share."""
        folder = self.folder / f"test{next(self._numbers)}"
        folder.mkdir(exist_ok=True)
        return folder

    def run_folder(self) -> RunFolder:
        """Return the folder of a new run with the tiny model."""
        run_folder = RunFolder(self.new_folder())
        run_folder.set_model(self.sources["float32"])
        return run_folder

    def learner(self, run_folder: RunFolder, *overrides: str) -> Learner:
        config = split_schedules(composed("model.dtype=float32", *overrides))
        return Learner(run_with_facts(config), run_folder, self.ranks)

    def policy(self, dtype: str, mode: str, optim: Any, seed: int = 0, **changes: Any) -> Any:
        model = self.model(dtype, seed)
        with_layers(model, mode)
        settings = {"max_steps": 10, "max_grad_norm": 1e9, "temperature": tiny.TEMPERATURE}
        settings |= {name: changes.pop(name) for name in settings.keys() & changes.keys()}
        module = PolicyModule(model.train(), chunk=7, compiled="compiled" in mode, **changes)
        return ConvertingPolicy(
            module, optim, self.ranks, deepspeed_config=deepspeed_config(mode), **settings
        )

    def model(self, dtype: str, seed: int) -> Any:
        return load_model(self.sources[dtype], getattr(torch, dtype), seed)

    def adamw(self, **changes: Any) -> Any:
        knobs = {"learning_rate": RATE, "beta1": 0.9, "beta2": 0.99, "eps": 1e-12}
        knobs |= {"weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0, "min_ratio": 0.1}
        return AdamW(**(knobs | changes))

    def batch(self, rows: Any, split: str = "several", step: int = 0) -> Any:
        return self.split(rows, BUDGETS.get(split, 1), step)

    def split(self, rows: Any, budget: int, step: int = 0, *, shared: bool = False) -> Any:
        shares = plan(
            rows,
            step=step,
            ranks=self.ranks.world,
            tokens_per_micro_batch=budget,
            metrics={},
            shares_prefixes=shared,
        )
        return shares[self.ranks.rank]

    def plain(self, weights: dict[str, Tensor], rows: Any) -> tuple[float, dict[str, Tensor]]:
        """Return the value and gradient of the whole batch at these weights, by plain torch."""
        self.twin.load_state_dict(weights, strict=False)
        return tiny.reference(self.twin, rows, self.loss)

    def everywhere(self, policy: Any) -> dict[str, Tensor]:
        """Return a copy of the weights on every rank."""
        return self.from_first({name: t.clone() for name, t in policy.weights().items()})

    def from_first(self, value: Any) -> Any:
        """Return what rank 0 has."""
        found = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def difference(self, one: Tensor, other: Tensor) -> float:
        """Return |one - other| / |other|, over the shares of all ranks."""
        squares = torch.stack([(one - other).square().sum(), other.square().sum()])
        dist.all_reduce(squares)
        return float((squares[0] / squares[1]).sqrt())


class Adapted(Setup):
    """Policies with an adapter that is not zero; their weights are those of the adapter."""

    def __init__(self, folder: Path, ranks: Any, saved: Any, dropout: float) -> None:
        super().__init__(folder, ranks)
        self.saved, self.dropout = list(saved), dropout
        self.twin = self.adapted(self.twin, 0)

    def model(self, dtype: str, seed: int) -> Any:
        return self.adapted(self.base(dtype), seed)

    def base(self, dtype: str) -> Any:
        return super().model(dtype, 0)

    def adapted(self, model: Any, seed: int) -> Any:
        adapter = dataclasses.replace(
            tiny.ADAPTER, dropout=self.dropout, modules_to_save=self.saved
        )
        model = adapter.attach(model, seed, str(self.sources["float32"]))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data += 0.1 * noise.to(parameter.dtype)
        return model

    def plain(self, weights: dict[str, Tensor], rows: Any) -> tuple[float, dict[str, Tensor]]:
        trained = {recipe.name: recipe.parts[0] for recipe in adapter_recipes(self.twin)}
        for name, parameter in trained.items():
            parameter.data.copy_(weights[name])
        value, gradient = tiny.reference(self.twin, rows, self.loss)
        names = {id(parameter): name for name, parameter in self.twin.named_parameters()}
        return value, {name: gradient[names[id(p)]] for name, p in trained.items()}

    def everywhere(self, policy: Any) -> dict[str, Tensor]:
        return self.from_first({n: t.clone() for n, t in policy.adapter_weights().items()})


@functools.cache
def adapted(setup: Setup, saved: Any = (), dropout: float = 0.0) -> Adapted:
    return Adapted(setup.new_folder(), setup.ranks, saved, dropout)


_compile = torch.compile


def with_layers(model: Any, mode: str) -> None:
    """Share prefixes, recompute and compile the layers as the mode says."""
    if "shared" in mode:
        share_prefixes(model)
    if "checkpointing" in mode:
        enable_gradient_checkpointing(model)
    if "compiled" in mode:
        torch.compile = functools.partial(_compile, backend="aot_eager")  # inductor takes minutes
        compile_layers(model, "aot_eager")


def deepspeed_config(mode: str) -> dict[str, Any]:
    """Return conf/deepspeed's file of a mode; `scattered` shards even a tiny model."""
    stage, *how = mode.split()
    config = chosen("deepspeed", stage)
    if "scattered" in how:
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
