"""Muon for the hidden matrices and AdamW for the rest, as one optimizer.

    B <- momentum * B + (1 - momentum) * G                  G: gradient of the matrix W [m, n]
    U <- (1 - momentum) * G + momentum * B                  Nesterov; else U = B
    W <- W - rate * 0.2 * sqrt(max(m, n)) * orthogonal(U)

orthogonal: Newton-Schulz iterations in bfloat16 that bring all singular values near 1. The factor
gives the update the root mean square that AdamW's usually has, so that one learning rate suits
both (arXiv:2502.16982). Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural
networks". The maths are torch.optim.Muon's and torch.optim.AdamW's; here they become one object.
"""

from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonAndAdamW(Optimizer):
    """What DeepSpeed, checkpoints and the schedule see: one list of groups, one state."""

    def __init__(self, muon: Muon, adamw: AdamW | None) -> None:
        """`adamw`: None where nothing but hidden matrices is trained (LoRA)."""
        self._parts: dict[str, Optimizer] = {"muon": muon}
        if adamw is not None:
            self._parts["adamw"] = adamw
        for name, part in self._parts.items():
            for group in part.param_groups:
                group["part"] = name
        super().__init__([g for part in self._parts.values() for g in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Let each part step with its own groups."""
        assert closure is None, "the gradients are there already"
        for name, part in self._parts.items():
            # Afresh each time: DeepSpeed exchanges the weights of a group, a checkpoint all of it.
            part.param_groups = [group for group in self.param_groups if group["part"] == name]
            part.state = self.state
            part.step()
