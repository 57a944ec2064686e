"""The policy in training: a Hugging Face model in a DeepSpeed engine. N: completion tokens."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.learner.batch_statistics import reads_statistics, with_statistics
from rl.learner.deepspeed_engine import (
    gather,
    linearise,
    load_engine,
    save_engine,
    start_engine,
    take_step,
)
from rl.learner.logprobs import Logprobs, PolicyModule, Rows
from rl.learner.objective import Batch, Objective, with_outputs
from rl.learner.observation import Observer, observation
from rl.learner.optim import AdamW
from rl.learner.ranks import Ranks
from rl.learner.token_sums import TokenSums
from rl.model.folder import copy_tokenizer, holds_weights
from rl.model.loading import write_model
from rl.model.lora import (
    Recipe,
    adapter_recipes,
    full_recipes,
    has_adapter,
    without_adapter,
    write_adapter,
)
from rl.records import Ints

# `Policy` returns these metrics if it takes no optimizer step because all token weights are 0.
_EMPTY = {"train/loss": 0.0, "train/grad_norm": 0.0, "train/skipped": 0.0, "train/empty": 1.0}


class Policy:
    """The policy and its optimizer on one rank."""

    def __init__(
        self,
        module: PolicyModule,
        optim: AdamW,
        ranks: Ranks,
        *,
        deepspeed_config: dict[str, Any],
        max_steps: int,
        max_grad_norm: float,
        temperature: float,
    ) -> None:
        self.ranks, self._optim, self._max_steps = ranks, optim, max_steps
        self._temperature = temperature
        # `_outputs` names the module's outputs. The last one exists only if a batch has candidates.
        own = ("logprobs", "entropies", *["kl_from_uniform"] * module.kl_from_uniform)
        self._outputs = (*own, "candidate_logprobs")
        self.has_adapter = has_adapter(module)
        self.engine = start_engine(
            module,
            optim.optimizer(module.parameters(), module.embeddings),
            deepspeed_config,
            max_grad_norm=max_grad_norm,
            half=module.model.dtype == torch.bfloat16,
            # Tell ZeRO-3 which weights OutputHead reads without calling the module that owns them.
            external=module.output_embeddings.parameters(),
        )
        self.zero_stage: int = self.engine.zero_optimization_stage()
        self.vocabulary = module.head.out_features

    def update(
        self,
        step: int,
        batches: Sequence[Batch],
        objective: Objective,
        *,
        updates: int = 1,
        beta: float = 0.0,  # weight of the KL penalty
        observer: Observer | None = None,  # receives each token's logprob, loss and gradient
    ) -> dict[str, float]:
        """Take `updates` optimizer steps, and return metrics of the global batch on every rank.

        `train/skipped`: fraction of updates that DeepSpeed skipped because of non-finite gradients.
        """
        rate = self._optim.rate(step, self._max_steps)
        metrics = [
            self._update(batches, objective, beta, rate, observer and partial(observer, update))
            for update in range(updates)
        ]
        # A metric counts as 0 in the updates in which the loss omits it.
        names = dict.fromkeys(name for one in metrics for name in one)
        means = {name: sum(one.get(name, 0.0) for one in metrics) / updates for name in names}
        # Take `mismatch/` metrics from the first update, because vLLM lacks the later weights.
        compared = {name: v for name, v in metrics[0].items() if name.startswith("mismatch/")}
        return {**means, **compared}

    def _update(
        self,
        batches: Sequence[Batch],
        objective: Objective,
        beta: float,
        rate: float,
        observer: Callable[[int, Mapping[str, Tensor]], None] | None,
    ) -> dict[str, float]:
        # Skip an update only if all ranks skip it, because each rank waits for the others.
        if not self.ranks.any(any(bool(batch.token_weights.any()) for batch in batches)):
            return {**_EMPTY, "train/learning_rate": rate}
        sums = TokenSums()
        if reads_statistics(objective) and len(batches) > 1:
            objective = with_statistics(objective, [self.with_scores(b) for b in batches])
        for number, batch in enumerate(batches):
            outputs = self.engine(
                *(batch.token_ids, batch.mask, self._temperature_of(batch)),
                entropies=True,
                candidates=batch.candidates,
                kept=batch.kept,
            )
            if "kl_from_uniform" in self._outputs:  # this output has no gradient
                batch = replace(batch, kl_from_uniform=outputs[2])
                outputs = (*outputs[:2], *outputs[3:])
            # First differentiate with respect to the outputs only, which is cheap. If the gradients
            # are zero on all ranks, skip the backward pass through the model.
            leaves = [output.detach().requires_grad_() for output in outputs]
            logprobs, entropies, *candidates = leaves
            # With one micro-batch per rank, compute the batch's statistics from these outputs.
            if reads_statistics(objective):
                objective = with_statistics(objective, [with_outputs(batch, *leaves)])
            loss, metrics = objective.per_token(batch, logprobs, entropies, beta, *candidates)
            value = batch.weighted_sum(loss)
            gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
            if observer:
                observer(number, observation(batch, logprobs, loss, gradients, metrics))
            # Never skip the first micro-batch, because each update needs a backward pass. Never
            # skip a non-finite `value`, because its NaN gradients make DeepSpeed skip the step.
            idle = number > 0 and not self.ranks.any(
                not value.isfinite() or any(bool(each.any()) for each in gradients)
            )
            if not idle:
                # DeepSpeed averages gradients over ranks, but the objective is a sum over ranks.
                self.engine.backward(linearise(value, gradients, outputs) * self.ranks.world)
            metrics["zero_gradient_fraction"] = torch.full_like(logprobs, float(idle))
            sums.add(value, logprobs, batch.rollout_logprobs, batch.staleness == 0, metrics)
        means, norm = sums.means(), take_step(self.engine, rate)
        return {
            **means,
            "train/learning_rate": rate,
            "train/grad_norm": norm,
            "train/skipped": float(math.isnan(norm)),
            "train/empty": 0.0,
        }

    def _temperature_of(self, rows: Batch | Rows) -> float | Tensor:
        return self._temperature if rows.temperatures is None else rows.temperatures

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Return logprobs [N] of a micro-batch at the sampler's temperature. Collective."""
        return self._score(batch)[0]

    @torch.no_grad()
    def with_scores(self, batch: Batch) -> Batch:
        """Return the micro-batch with the current policy's logprobs and entropies. Collective."""
        outputs = self._score(batch, entropies=True, candidates=batch.candidates)
        return replace(batch, **dict(zip(self._outputs, outputs, strict=False)))

    @torch.no_grad()
    def base_scores(self, rows: Rows, top_k: int = 0) -> Logprobs:
        """Return base-model logprobs of `rows` and of the `top_k` likeliest tokens. Collective."""
        likeliest = (top_k, self.vocabulary) if top_k else None
        with without_adapter(self.engine.module.model):
            outputs = self._score(rows, top_k=likeliest)
        return Logprobs(outputs[0], *outputs[2:])

    @torch.no_grad()
    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Tensor:
        """Return logprobs [B, T] of all `token_ids` [B, T], with 0 at position 0. Collective."""
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.ranks.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        flat = self._score(Rows(tokens, mask, ()), temperature)[0]
        return flat.new_zeros(tokens.shape).masked_scatter(mask, flat).cpu()

    def _score(
        self, rows: Batch | Rows, temperature: float | None = None, **options: Any
    ) -> tuple[Tensor, ...]:
        self.engine.eval()
        divisor = temperature or self._temperature_of(rows)
        outputs = self.engine(rows.token_ids, rows.mask, divisor, kept=rows.kept, **options)
        self.engine.train()
        return outputs

    def weights(self, buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """On rank 0, return all weights by Hugging Face name, with the adapter merged into them.

        A weight on a GPU is copied into `buffers[name]` if shape and dtype are equal, else to the
        CPU. Other ranks return {}. Collective.
        """
        return self._collect_weights(full_recipes(self.engine.module.model), buffers)

    def adapter_weights(self) -> dict[str, Tensor]:
        """On rank 0, return the adapter's weights by peft's names, else return {}. Collective."""
        return self._collect_weights(adapter_recipes(self.engine.module.model))

    def _collect_weights(
        self, recipes: Iterable[Recipe], buffers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        collected: dict[str, Tensor] = {}
        for recipe in recipes:
            with gather(self.engine, recipe.parts):
                if self.ranks.first:
                    made = recipe.make(*recipe.parts)
                    old = (buffers or {}).get(recipe.name) if made.is_cuda else None
                    if old is not None and (old.shape, old.dtype) == (made.shape, made.dtype):
                        collected[recipe.name] = old.copy_(made)
                        continue
                    tensor = made.cpu()
                    # At the end of the block ZeRO-3 frees the gathered weights, so copy the tensor.
                    is_freed = self.zero_stage == 3 and not made.is_cuda
                    collected[recipe.name] = tensor.clone() if is_freed else tensor
        return collected

    def export(self, folder: Path, source: Path, *, merged: bool = False) -> None:
        """Write the model, or its adapter if not `merged`, and `source`'s tokenizer. Collective."""
        model = self.engine.module.model
        # The folder of a new tiny model has no weights, so an adapter would lack its base model.
        only_adapter = self.has_adapter and not merged and holds_weights(source)
        weights = self.adapter_weights() if only_adapter else self.weights()
        if not self.ranks.first:
            return
        if only_adapter:
            write_adapter(model, weights, folder)
            copy_tokenizer(source, folder)
        else:
            write_model(model, weights, folder, source)

    def save(self, folder: Path) -> None:
        save_engine(self.engine, folder)

    def load(self, folder: Path) -> None:
        load_engine(self.engine, folder)
