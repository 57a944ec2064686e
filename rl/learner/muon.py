"""Muon for the hidden matrices and AdamW for the rest, as one optimizer.

    B <- momentum * B + (1 - momentum) * G                  G: gradient of the matrix W [m, n]
    U <- (1 - momentum) * G + momentum * B                  if Nesterov, else U = B
    W <- W - rate * 0.2 * sqrt(max(m, n)) * orthogonal(U)   after decoupled weight decay

B: running mean of the gradients. orthogonal: Newton-Schulz iterations in bfloat16 that bring all
singular values near 1. The factor 0.2 * sqrt(max(m, n)) scales the update to the usual root mean
square of an AdamW update, so that one learning rate suits Muon and AdamW (arXiv:2502.16982). Jordan
et al. 2024, "Muon: An optimizer for hidden layers in neural networks". torch.optim.Muon and
torch.optim.AdamW compute the updates.
"""

from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """Muon and AdamW as one optimizer with one state, which DeepSpeed and checkpoints require."""

    def __init__(self, muon: Muon, adamw: AdamW | None) -> None:
        self._parts: dict[str, Optimizer] = {"muon": muon}
        if adamw is not None:
            self._parts["adamw"] = adamw
        for name, part in self._parts.items():
            for group in part.param_groups:
                group["part"] = name
        super().__init__([g for part in self._parts.values() for g in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None, "closures are not supported"
        for name, part in self._parts.items():
            # Assign groups and state at each step, because DeepSpeed and a resume replace them.
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.state = self.state
            part.step()
