"""The policy in training: a Hugging Face model in a DeepSpeed engine, which only we know."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from rl.logprobs import PolicyModule
from rl.model_files import write_model
from rl.objective import Batch, Objective
from rl.optim import AdamW
from rl.ranks import Ranks
from rl.records import Ints, RankBatch
from rl.token_sums import TokenSums


class Policy:
    """Weights, optimizer and the two things done with them: update and logprobs."""

    def __init__(
        self,
        model: PreTrainedModel,
        optim: AdamW,
        ranks: Ranks,
        *,
        deepspeed_config: dict[str, Any],
        max_steps: int,
        max_grad_norm: float,
        logprob_chunk: int,
        temperature: float,
        entropy_gradient: bool = False,
    ) -> None:
        self.ranks, self._optim, self._max_steps = ranks, optim, max_steps
        self._temperature = temperature
        self._max_grad_norm = max_grad_norm
        module = PolicyModule(model, chunk=logprob_chunk, entropy_gradient=entropy_gradient)
        half = model.dtype == torch.bfloat16
        config = {
            **deepspeed_config,
            "train_micro_batch_size_per_gpu": 1,  # required, unused: the plan decides
            "gradient_accumulation_steps": 1,
            # Gradients add up over any number of backward passes until we call step().
            "managed_gradient_accumulation": False,
            "gradient_clipping": max_grad_norm,
            "bf16": {"enabled": half},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = optim.optimizer(module.parameters(), module.embeddings)
        _set_rate(optimizer, 0.0)  # DeepSpeed may take a step of its own on the way
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.engine: Any = engine  # DeepSpeed's own annotations are of little use
        self.zero_stage: int = self.engine.zero_optimization_stage()
        if self.zero_stage == 3:
            # Used outside of the head's own forward (rl/logprobs.py): gathered once for a pass.
            for parameter in module.head.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        if self.zero_stage == 0 and half:
            # DeepSpeed has taken a step without gradients, which would make Adam's first too short.
            self.engine.optimizer.state.clear()
        elif self.zero_stage == 0:
            # Here DeepSpeed keeps the norm to itself, and steps on gradients that are not finite.
            self.engine.clip_fp32_gradients = self._clip

    def update(
        self,
        batch: RankBatch,
        objective: Objective,
        *,
        batches: Sequence[Batch] | None = None,
        updates: int = 1,
        beta: float = 0.0,
    ) -> dict[str, float]:
        """Take `updates` optimizer steps on this rank's share of a batch, each on all of it.

        Returns metrics of the global batch, the same on every rank, averaged over the updates;
        what compares the trainer with the engine is that of the first. A step whose gradient is
        not finite is skipped: the weights stay as they were and `train/skipped` is above 0.

        Args:
            batch: this rank's share.
            objective: what is minimised.
            batches: its micro-batches with what rl/anchors.py added; None: as they came.
            updates: optimizer steps.
            beta: weight of the divergence from a reference.

        """
        batches = batches or [Batch.of(micro, self.ranks.device) for micro in batch.micro_batches]
        rate = self._optim.rate(batch.step, self._max_steps)
        found = [self._update(batch.step, batches, objective, beta, rate) for _ in range(updates)]
        means = {name: sum(one[name] for one in found) / updates for name in found[0]}
        compared = {name: v for name, v in found[0].items() if name.startswith("mismatch/")}
        return {**means, **compared}

    def _update(
        self, step: int, batches: Sequence[Batch], objective: Objective, beta: float, rate: float
    ) -> dict[str, float]:
        sums = TokenSums()
        for batch in batches:
            logprobs, entropies = self.engine(batch.token_ids, batch.mask, self._temperature)
            value, metrics = objective(batch, logprobs, entropies, beta)
            # DeepSpeed averages gradients over ranks; the objective is a sum over them.
            self.engine.backward(_minimised(value, logprobs) * self.ranks.world)
            gap = (logprobs.detach() - batch.rollout_logprobs).abs()
            sums.add(value, gap, batch.token_versions == step, metrics)
        return {**sums.means(self.ranks.device), **self._step(rate)}

    def _step(self, rate: float) -> dict[str, float]:
        _set_rate(self.engine.optimizer, rate)
        self.engine.step()  # skips, and forgets the gradient, if its norm is not finite
        norm = float(self.engine.get_global_grad_norm())
        return {
            "train/learning_rate": rate,
            "train/grad_norm": norm if _finite(norm) else float("nan"),
            "train/skipped": float(not _finite(norm)),
        }

    def _clip(self) -> None:
        """Clip as every other stage does; without gradients the optimizer steps nowhere."""
        norm = clip_grad_norm_(self.engine.module.parameters(), self._max_grad_norm)
        self.engine._global_grad_norm = norm  # what get_global_grad_norm returns
        if not norm.isfinite():
            self.engine.zero_grad()

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter trains and the model below it stays."""
        return hasattr(self.engine.module.model, "peft_config")

    @torch.no_grad()
    def score(self, batch: Batch, *, adapter: bool = True) -> Tensor:
        """Return logprobs [N] of a micro-batch as it is sampled: at its temperature, no dropout.

        All ranks must call it together; `adapter=False` asks the model below the adapter.
        """
        self.engine.eval()
        model = self.engine.module.model
        with nullcontext() if adapter else model.disable_adapter():
            logprobs, _ = self.engine(batch.token_ids, batch.mask, self._temperature)
        self.engine.train()
        return logprobs

    @torch.no_grad()
    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Tensor:
        """Return logprobs [B, T] of all `token_ids` [B, T] given those before (0 at position 0).

        All ranks must call it together.
        """
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.ranks.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        flat, _ = self.engine(tokens, mask, temperature)
        result = flat.new_zeros(tokens.shape)
        result[mask] = flat
        return result.cpu()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights under Hugging Face names, tied ones once; on rank 0, else empty.

        All ranks must call it together: under ZeRO-3 each holds a part.
        """
        collected: dict[str, Tensor] = {}
        for name, parameter in self.engine.module.model.named_parameters():
            whole = (
                deepspeed.zero.GatheredParameters([parameter])
                if self.zero_stage == 3
                else nullcontext()
            )
            with whole:
                if self.ranks.first:
                    tensor = parameter.detach().cpu()
                    collected[name] = tensor.clone() if self.zero_stage == 3 else tensor
        return collected

    def export(self, folder: Path, source: Path) -> None:
        """Write the model in Hugging Face form with the tokenizer of `source`. Collective."""
        weights = self.weights()
        if not self.ranks.first:
            return
        write_model(self.engine.module.model, weights, folder, source)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule state for `load`. Collective."""
        self.engine.save_checkpoint(str(folder), tag="deepspeed")

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote. Collective."""
        found, _ = self.engine.load_checkpoint(str(folder), tag="deepspeed")
        if found is None:
            raise ValueError(f"{folder} holds no DeepSpeed state that can be loaded")


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_ratio", 1.0)


def _minimised(value: Tensor, logprobs: Tensor) -> Tensor:
    """`value`, or something with a gradient of NaN if it is not finite.

    DeepSpeed looks at gradients only. A NaN in one of them reaches every rank, and each ZeRO
    stage then skips the step and empties its own buffers, which `zero_grad` does not do under all
    of them.
    """
    return value if value.isfinite() else logprobs.sum() * float("nan")


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
