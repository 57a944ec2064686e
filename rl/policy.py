"""The policy in training: a Hugging Face model in a DeepSpeed engine, which only we know."""

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from rl.adapter import Recipe, adapter_weights, full_weights, has_adapter, write_adapter
from rl.logprobs import PolicyModule
from rl.model_files import copy_tokenizer, write_model
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
    ) -> None:
        self.ranks, self._optim, self._max_steps = ranks, optim, max_steps
        self._temperature = temperature
        self._max_grad_norm = max_grad_norm
        module = PolicyModule(model, chunk=logprob_chunk)
        self._adapted = has_adapter(model)
        if self._adapted:
            module.register_state_dict_post_hook(_forget_frozen)
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
        optimizer = optim.optimizer(module.parameters())
        _set_rate(optimizer, 0.0)  # DeepSpeed may take a step of its own on the way
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
        self.engine: Any = engine  # DeepSpeed's own annotations are of little use
        self.zero_stage: int = self.engine.zero_optimization_stage()
        if self.zero_stage == 3:
            # Used outside of the head's own forward (rl/logprobs.py): gathered once for a pass.
            for parameter in module.heads.parameters():
                deepspeed.zero.register_external_parameter(module, parameter)
        if self.zero_stage == 0 and half:
            # DeepSpeed has taken a step without gradients, which would make Adam's first too short.
            self.engine.optimizer.state.clear()
        elif self.zero_stage == 0:
            # Here DeepSpeed keeps the norm to itself, and steps on gradients that are not finite.
            self.engine.clip_fp32_gradients = self._clip

    def update(self, batch: RankBatch, objective: Objective) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a batch.

        Returns metrics of the global batch, the same on every rank. A step whose gradient is not
        finite is skipped: the weights stay as they were and `train/skipped` is 1.
        """
        sums = TokenSums()
        for micro in batch.micro_batches:
            on_device = Batch.of(micro, self.ranks.device)
            logprobs, entropies = self.engine(
                on_device.token_ids, on_device.mask, self._temperature
            )
            value, metrics = objective(on_device, logprobs)
            # DeepSpeed averages gradients over ranks; the objective is a sum over them.
            self.engine.backward(_minimised(value, logprobs) * self.ranks.world)
            gap = (logprobs.detach() - on_device.rollout_logprobs).abs()
            fresh = on_device.token_versions == batch.step
            sums.add(value, gap, fresh, {**metrics, "entropy": entropies})
        rate = self._optim.rate(batch.step, self._max_steps)
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

    @torch.no_grad()
    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Tensor:
        """Return logprobs [B, T] of all `token_ids` [B, T] given those before (0 at position 0).

        Without dropout. All ranks must call it together.
        """
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.ranks.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        self.engine.module.eval()
        flat, _ = self.engine(tokens, mask, temperature)
        self.engine.module.train()
        result = flat.new_zeros(tokens.shape)
        result[mask] = flat
        return result.cpu()

    def weights(self) -> dict[str, Tensor]:
        """Return all weights under Hugging Face names, tied ones once; on rank 0, else empty.

        An adapter is merged in. All ranks must call it together: under ZeRO-3 each holds a part.
        """
        return self._collected(full_weights(self.engine.module.model))

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the adapter alone, under peft's names; otherwise like `weights`."""
        return self._collected(adapter_weights(self.engine.module.model))

    def _collected(self, recipes: Iterable[Recipe]) -> dict[str, Tensor]:
        collected: dict[str, Tensor] = {}
        for recipe in recipes:
            whole = (
                deepspeed.zero.GatheredParameters(recipe.parts)
                if self.zero_stage == 3
                else nullcontext()
            )
            with whole:
                if self.ranks.first:
                    tensor = recipe.make(*recipe.parts).cpu()
                    collected[recipe.name] = tensor.clone() if self.zero_stage == 3 else tensor
        return collected

    def export(self, folder: Path, source: Path, *, merged: bool = False) -> None:
        """Write the model in Hugging Face form with the tokenizer of `source`. Collective.

        With an adapter that is the adapter in peft's form, or all weights if it is to be `merged`.
        """
        model, only_adapter = self.engine.module.model, self._adapted and not merged
        weights = self.adapter_weights() if only_adapter else self.weights()
        if not self.ranks.first:
            return
        if only_adapter:
            write_adapter(model, weights, folder)
            copy_tokenizer(source, folder)
        else:
            write_model(model, weights, folder, source)

    def save(self, folder: Path) -> None:
        """Write what is trained, optimizer and schedule state for `load`. Collective."""
        self.engine.save_checkpoint(
            str(folder), tag="deepspeed", exclude_frozen_parameters=self._adapted
        )

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote. Collective."""
        found, _ = self.engine.load_checkpoint(
            str(folder), tag="deepspeed", load_module_strict=not self._adapted
        )
        if found is None:
            raise ValueError(f"{folder} holds no DeepSpeed state that can be loaded")


def _set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _forget_frozen(module: Any, state: dict[str, Any], *_: object) -> None:
    """Leave only what is trained in a state dict: the rest comes from the model's own files.

    DeepSpeed's own exclusion overlooks the second name of tied weights.
    """
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in state.keys() - trained:
        del state[name]


def _minimised(value: Tensor, logprobs: Tensor) -> Tensor:
    """`value`, or something with a gradient of NaN if it is not finite.

    DeepSpeed looks at gradients only. A NaN in one of them reaches every rank, and each ZeRO
    stage then skips the step and empties its own buffers, which `zero_grad` does not do under all
    of them.
    """
    return value if value.isfinite() else logprobs.sum() * float("nan")


def _finite(value: float) -> bool:
    return abs(value) < float("inf")
