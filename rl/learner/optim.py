"""Optimizers and learning rate schedules (conf/optim)."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from msgspec import Meta

from rl.config.ranges import BelowOne, NonNegativeFloat, NonNegativeInt, PositiveFloat, Probability

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with a learning rate schedule (conf/optim/adamw). Vectors get no weight decay."""

    learning_rate: PositiveFloat
    beta1: BelowOne
    beta2: BelowOne
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: NonNegativeInt
    min_ratio: Probability

    def optimizer(
        self,
        parameters: Iterable["torch.nn.Parameter"],
        embeddings: Collection["torch.nn.Parameter"] = (),  # noqa: ARG002 only Muon uses them
    ) -> "torch.optim.Optimizer":
        """Return the optimizer. `embeddings`: parameters of input embedding and output head."""
        import torch

        trained = [p for p in parameters if p.requires_grad]
        matrices = [p for p in trained if p.ndim >= 2]
        vectors = [p for p in trained if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=torch.cuda.is_available() or None,  # fused AdamW is 3 times as fast on an H100
        )

    def rate(self, step: int, max_steps: int) -> float:
        """Return the learning rate of training step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = min((step - self.warmup_steps) / max(max_steps - 1 - self.warmup_steps, 1), 1.0)
        match self.schedule:
            case "constant":
                return self.learning_rate
            case "linear":
                remaining = 1.0 - progress
            case "cosine":
                remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (self.min_ratio + (1.0 - self.min_ratio) * remaining)


@dataclass(frozen=True, kw_only=True)
class Muon(AdamW):
    """Muon (muon.py) for matrices of hidden layers, AdamW for all other parameters."""

    whole_matrices: ClassVar[bool] = True  # makes rl/config refuse ZeRO, which splits matrices

    momentum: BelowOne
    nesterov: bool
    ns_steps: Annotated[int, Meta(ge=1, lt=100)]
    adamw_ratio: PositiveFloat

    def optimizer(
        self,
        parameters: Iterable["torch.nn.Parameter"],
        embeddings: Collection["torch.nn.Parameter"] = (),
    ) -> "torch.optim.Optimizer":
        """Return Muon and AdamW as one optimizer."""
        import torch

        from rl.learner.muon import MuonAndAdamW

        embedding_ids = {id(p) for p in embeddings}
        hidden, rest = [], []
        for p in parameters:
            if p.requires_grad:
                (hidden if p.ndim == 2 and id(p) not in embedding_ids else rest).append(p)
        muon = torch.optim.Muon(
            hidden,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            nesterov=self.nesterov,
            ns_steps=self.ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        if not rest:
            return MuonAndAdamW(muon, None)
        adamw = super().optimizer(rest)
        assert isinstance(adamw, torch.optim.AdamW)
        for group in adamw.param_groups:
            group["lr_ratio"] = self.adamw_ratio  # deepspeed_engine.py multiplies the rate by it
            group["lr"] *= self.adamw_ratio
        return MuonAndAdamW(muon, adamw)
