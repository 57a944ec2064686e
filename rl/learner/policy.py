"""The policy in training: a Hugging Face model in a DeepSpeed engine."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl.learner.deepspeed_engine import (
    linearised,
    load_engine,
    moves,
    save_engine,
    start_engine,
    take_step,
    whole,
)
from rl.learner.logprobs import PolicyModule
from rl.learner.objective import Batch, Objective
from rl.learner.observation import Observer, observation
from rl.learner.optim import AdamW
from rl.learner.ranks import Ranks
from rl.learner.rows import Rows, Scores
from rl.learner.token_sums import TokenSums
from rl.model.folder import copy_tokenizer, holds_weights
from rl.model.loading import write_model
from rl.model.lora import (
    Recipe,
    adapter_weights,
    full_weights,
    has_adapter,
    without_adapter,
    write_adapter,
)
from rl.records import Ints, RankBatch

# A step in which nothing trains: truncation=mask, and all of the batch cut off.
_EMPTY = {"train/loss": 0.0, "train/grad_norm": 0.0, "train/skipped": 0.0, "train/empty": 1.0}


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
        head_dtype: torch.dtype | None = None,
    ) -> None:
        self.ranks, self._optim, self._max_steps = ranks, optim, max_steps
        self._temperature = temperature
        module = PolicyModule(
            model,
            chunk=logprob_chunk,
            entropy_gradient=entropy_gradient,
            head_dtype=head_dtype,
        )
        self.has_adapter = has_adapter(model)
        optimizer = optim.optimizer(module.parameters(), module.embeddings)
        half = model.dtype == torch.bfloat16
        self.engine = start_engine(
            module,
            optimizer,
            deepspeed_config,
            max_grad_norm=max_grad_norm,
            half=half,
            external=module.heads.parameters(),  # applied chunk by chunk
        )
        self.zero_stage: int = self.engine.zero_optimization_stage()
        self.vocabulary = module.head.out_features

    def update(
        self,
        batch: RankBatch,
        objective: Objective,
        *,
        batches: Sequence[Batch] | None = None,
        updates: int = 1,
        beta: float = 0.0,
        observer: Observer | None = None,
    ) -> dict[str, float]:
        """Take `updates` optimizer steps on this rank's share of a batch, each on all of it.

        Returns metrics of the global batch, the same on every rank, averaged over the updates;
        what compares the trainer with vLLM is that of the first. A step whose gradient is
        not finite is skipped: the weights stay as they were and `train/skipped` is above 0. So is
        one without a token that counts, on any rank: `train/empty` is 1, and no momentum moves.

        Args:
            batch: this rank's share.
            objective: what is minimised.
            batches: its micro-batches with what preparation.py added; None: as they came.
            updates: optimizer steps.
            beta: weight of the divergence from a reference.
            observer: is shown what the first of the updates makes of every token.

        """
        batches = batches or [
            Batch.of(micro, self.ranks.device, batch.step) for micro in batch.micro_batches
        ]
        rate = self._optim.rate(batch.step, self._max_steps)
        metrics = [
            self._update(batches, objective, beta, rate, None if later else observer)
            for later in range(updates)
        ]
        means = {name: sum(one[name] for one in metrics) / updates for name in metrics[0]}
        # By the second update the policy has moved: only the first compares the same weights.
        compared = {name: v for name, v in metrics[0].items() if name.startswith("mismatch/")}
        return {**means, **compared}

    def _update(
        self,
        batches: Sequence[Batch],
        objective: Objective,
        beta: float,
        rate: float,
        observer: Observer | None,
    ) -> dict[str, float]:
        # Agreed on by all ranks: one that skips alone would leave the others in a collective.
        if not self.ranks.any(any(bool(batch.token_weights.any()) for batch in batches)):
            return {**_EMPTY, "train/learning_rate": rate}
        sums = TokenSums()
        for number, batch in enumerate(batches):
            outputs = self.engine(
                *(batch.token_ids, batch.mask, self._temperature),
                entropies=True,
                candidates=batch.candidates,
            )
            # The graph is cut at the module's outputs. The slopes there cost next to nothing, and
            # where no rank has any, the pass through the model, most of the work, adds zeros.
            seen = [output.detach().requires_grad_() for output in outputs]
            logprobs, entropies, *candidates = seen
            loss, metrics = objective.per_token(batch, logprobs, entropies, beta, *candidates)
            value = batch.weighted_sum(loss)
            slopes = torch.autograd.grad(value, seen, materialize_grads=True)
            if observer:
                observer(number, observation(batch, logprobs, loss, slopes, metrics))
            # The first always goes backward: a step wants gradients, be they zero.
            idle = number > 0 and not self.ranks.any(moves(value, slopes))
            if not idle:
                # DeepSpeed averages gradients over ranks; the objective is a sum over them.
                self.engine.backward(linearised(value, slopes, outputs) * self.ranks.world)
            metrics["zero_gradient_fraction"] = torch.full_like(logprobs, float(idle))
            fresh = batch.staleness == 0
            sums.add(value, logprobs, batch.rollout_logprobs, fresh, metrics)
        return {**sums.means(), **self._step(rate)}

    def _step(self, rate: float) -> dict[str, float]:
        norm = take_step(self.engine, rate)
        return {
            "train/learning_rate": rate,
            "train/grad_norm": norm,
            "train/skipped": float(math.isnan(norm)),
            "train/empty": 0.0,
        }

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        """Return logprobs [N] of a micro-batch as it is sampled: at its temperature, no dropout.

        All ranks must call it together.
        """
        return self._score(batch.token_ids, batch.mask, self._temperature)[0]

    @torch.no_grad()
    def base_scores(self, rows: Rows, top_k: int = 0) -> Scores:
        """Return what the model below the adapter thinks, with its `top_k` likeliest tokens.

        As `score` otherwise.
        """
        likeliest = (top_k, self.vocabulary) if top_k else None
        with without_adapter(self.engine.module.model):
            outputs = self._score(rows.token_ids, rows.mask, self._temperature, likeliest)
        return Scores(outputs[0], *outputs[2:])

    @torch.no_grad()
    def logprobs(self, token_ids: Ints, temperature: float = 1.0) -> Tensor:
        """Return logprobs [B, T] of all `token_ids` [B, T] given those before (0 at position 0).

        Without dropout. All ranks must call it together.
        """
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self.ranks.device)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        mask[:, 0] = False
        flat = self._score(tokens, mask, temperature)[0]
        result = flat.new_zeros(tokens.shape)
        result[mask] = flat
        return result.cpu()

    def _score(
        self,
        token_ids: Tensor,
        mask: Tensor,
        temperature: float,
        top_k: tuple[int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        """What the module returns of the masked tokens, without dropout."""
        self.engine.eval()
        outputs = self.engine(token_ids, mask, temperature, top_k=top_k)
        self.engine.train()
        return outputs

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
            with whole(self.engine, recipe.parts):
                if self.ranks.first:
                    tensor = recipe.make(*recipe.parts).cpu()
                    # What ZeRO-3 gathered is freed at the end of the block.
                    collected[recipe.name] = tensor.clone() if self.zero_stage == 3 else tensor
        return collected

    def export(self, folder: Path, source: Path, *, merged: bool = False) -> None:
        """Write the model in Hugging Face form with the tokenizer of `source`. Collective.

        With an adapter that is the adapter in peft's form, or all weights if it is to be `merged`
        or if its base, initialised here, is nowhere else.
        """
        model = self.engine.module.model
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
        """Write what is trained, optimizer and schedule state for `load`. Collective."""
        save_engine(self.engine, folder, partly_frozen=self.has_adapter)

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote. Collective."""
        load_engine(self.engine, folder, partly_frozen=self.has_adapter)
