"""Provide a policy of 35 thousand parameters, batches for it, and gradients by plain torch.

`reference` uses no chunks, padding, plans or ranks. For each row it computes all logits,
log_softmax, the token loss, the result of `terms`, and multiplies by the token weight.

Reference logprobs, and old ones where no policy gives them, are a function of the token and its
rollout logprob (`fixed`), so that they are the same however a batch is split.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from envs.episode import Example
from losses.tokens import TokenLoss, Tokens
from rl.learner.objective import Batch, Objective
from rl.model.lora import LoRA
from rl.model.tiny import TinyModel, TinyMoE
from rl.records import Credit, Group
from rl.rollouts.plan import WeightedRow
from tests.support.rollouts import rollout
from tests.support.rollouts import row as row_of

TEMPERATURE = 0.8
ADAPTER = LoRA(
    rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear", modules_to_save=[], rslora=False
)


def model_folder(folder: Path, dtype: str = "float32", **sizes: int) -> Path:
    """Write a tiny model; `num_experts` and `experts_per_token` make a mixture of experts."""
    return (TinyMoE if "num_experts" in sizes else TinyModel)(
        **{"hidden_size": 32, "head_dim": 16, **sizes},
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        dtype=dtype,
        max_seq_len=64,
        max_tokens=16,
        learning_rate=1e-3,
        describe_tools=False,
        rope_theta=100.0,
        tokenizer=None,
        warm_start=None,
        head_dtype=None,
    ).prepare(folder)


def exact_model(folder: Path, seed: int = 0) -> PreTrainedModel:
    """Compute in float64 throughout, because transformers computes norms in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32
    )
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen3RMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(name, norm)
    return model.double()


def groups(model: PreTrainedModel, *, num_groups: int = 4, seed: int = 0) -> list[Group]:
    """Return groups of three rollouts; one rollout of the last group has no completion token.

    Rollout logprobs differ by 0, 1e-4 or 0.3 from the model's own: within and beyond the clips.
    """
    rng = np.random.default_rng(seed)
    made = []
    for index in range(num_groups):
        rollouts = []
        for member in range(3):
            prompt, completion = rng.integers(2, 7), rng.integers(1, 12)
            length = prompt + completion
            token_ids = rng.integers(0, 256, length).astype(np.int32)
            chosen = np.arange(length) >= prompt
            chosen[prompt + 2 : prompt + 4] = False  # a tool's reply inside of the completion
            chosen &= not (index == num_groups - 1 and member == 1)
            own = _row_logprobs(model, torch.tensor(token_ids)).numpy()
            noise = rng.choice([0.0, 1e-4, 0.3]) * rng.standard_normal(length)
            turns = np.where(chosen, np.arange(length) >= prompt + 3, -1)
            logprobs = np.where(chosen, own + noise, 0).astype(np.float32)
            one = replace(row_of(*turns), token_ids=token_ids, rollout_logprobs=logprobs)
            rollouts.append(rollout(0.0, one, fields={"turns": 2}))
        example = Example(id=index, env="none", messages=[])
        credits = tuple(Credit(0.0, (float(a),)) for a in 3 * rng.standard_normal(3))
        made.append(Group(index, example, 0, tuple(rollouts), credits))
    return made


@torch.no_grad()
def _row_logprobs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1].double()
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    own = logprobs.gather(-1, token_ids[1:, None].long())[:, 0]
    return torch.cat([own.new_zeros(1), own])


def fixed(token_ids: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return old and reference logprobs [N] of tokens [N]."""
    return (
        rollout_logprobs + 0.1 * torch.sin(token_ids.double()).to(rollout_logprobs),
        rollout_logprobs + 0.5 * torch.cos(token_ids.double()).to(rollout_logprobs),
    )


def fixed_candidates(token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return two candidates [N, 2] for each token [N], and a teacher's logprobs of them."""
    first = 0.4 + 0.1 * torch.cos(token_ids.double())  # [N] probability
    logprobs = torch.stack([first, 0.5 * first], -1).log()
    return torch.stack([(token_ids + 1) % 256, (token_ids + 100) % 256], -1), logprobs


def filled(batch: Batch, *, old: bool, dtype: torch.dtype = torch.float64) -> Batch:
    """Return the batch with reference logprobs and candidates, and old logprobs if `old`."""
    token_ids = batch.token_ids[batch.mask]
    old_logprobs, ref = fixed(token_ids, batch.rollout_logprobs.to(dtype))
    candidates, likes = fixed_candidates(token_ids)
    return replace(
        batch,
        old_logprobs=old_logprobs if old else None,
        ref_logprobs=ref,
        candidates=candidates,
        ref_candidate_logprobs=likes.to(dtype),
    )


def own(model: PreTrainedModel, rows: Sequence[WeightedRow]) -> list[Tensor]:
    """Return the model's own logprobs [N] of each row."""
    return [
        _row_logprobs(model, torch.tensor(r.token_ids))[torch.tensor(r.completion_mask)]
        for r in rows
    ]


def completion(row: WeightedRow) -> tuple[Tensor, Tensor]:
    """Token ids [N] and rollout logprobs [N]."""
    mask = torch.tensor(row.completion_mask)
    return torch.tensor(row.token_ids)[mask], torch.tensor(row.rollout_logprobs)[mask].double()


class SummedObjective(Objective):
    """Returns the micro-batch's share of the objective, and the metrics."""

    def __call__(
        self,
        batch: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        beta: float = 0.0,
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = self.per_token(batch, logprobs, entropies, beta, candidate_logprobs)
        return batch.weighted_sum(loss), metrics


def among(logits: Tensor, kept: Tensor) -> Tensor:
    """Return log_softmax [N, V] after masking, as vLLM computes it, where there is a set."""
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for allowed, ids in zip(mask, kept, strict=True):
        allowed[ids[ids >= 0]] = True
        allowed |= (ids < 0).all()
    return logits.masked_fill(~mask, -torch.inf).log_softmax(-1)


def kl_from_uniform(logprobs: Tensor) -> Tensor:
    """Return KL(uniform || pi) [N] from all logprobs [N, V], token by token of the vocabulary."""
    uniform = torch.full_like(logprobs, 1 / logprobs.shape[1])
    return (uniform * (uniform.log() - logprobs)).sum(-1)


Terms = Callable[[Tensor, Tokens, Tensor], Tensor]
"""(token loss [N], tokens of one row, entropies [N]) -> what is minimised [N]"""


def reference(
    model: PreTrainedModel,
    rows: Sequence[WeightedRow],
    token_loss: Callable[[Tokens], TokenLoss],
    terms: Terms | None = None,
    *,
    old: Sequence[Tensor] | None = None,
    candidates: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the value and gradient of the whole batch.

    `old`: old logprobs [N] of each row. `candidates`: token ids and logprobs [N, K] of each row.
    """
    model.zero_grad()
    total = 0.0
    for i, row in enumerate(rows):
        mask = torch.tensor(row.completion_mask)
        if not mask.any():
            continue
        token_ids = torch.tensor(row.token_ids, dtype=torch.int64)
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
        own = logprobs.gather(-1, token_ids[1:, None])[:, 0][mask[1:]]
        if row.kept is not None:
            allowed = among(logits[mask[1:]] / TEMPERATURE, torch.tensor(row.kept).long())
            own = allowed.gather(-1, token_ids[mask][:, None])[:, 0]
        sampled = torch.tensor(row.rollout_logprobs)[mask].to(own.dtype)
        given, likes = candidates[i] if candidates else fixed_candidates(token_ids[mask])
        tokens = Tokens(
            logprobs=own,
            rollout_logprobs=sampled,
            advantages=torch.tensor(row.advantages)[mask].to(own.dtype),
            sequence_ids=torch.zeros(len(own), dtype=torch.int64),
            num_sequences=1,
            staleness=-torch.tensor(row.token_versions)[mask].long(),
            entropies=-(logprobs.exp() * logprobs).sum(-1)[mask[1:]].detach(),
            positions=row.first_position + torch.arange(len(own)),
            turns=torch.tensor(row.turns)[mask].long(),
            rollout_ids=torch.full(own.shape, row.rollout_id),
            group_ids=torch.full(own.shape, row.group_id),
            source=torch.tensor(row.source)[mask].long(),
            old_logprobs=old[i] if old else None,
            ref_logprobs=fixed(token_ids[mask], sampled)[1],
            kl_from_uniform=kl_from_uniform(logprobs.detach())[mask[1:]],
            candidate_logprobs=logprobs[mask[1:]].gather(-1, given),
            ref_candidate_logprobs=likes.to(own.dtype),
        )
        loss = token_loss(tokens).loss
        if terms:
            loss = terms(loss, tokens, -(logprobs.exp() * logprobs).sum(-1)[mask[1:]])
        value = (torch.tensor(row.token_weights)[mask].to(own.dtype) * loss).sum()
        value.backward()
        total += float(value.detach())
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradient


def informed(
    model: PreTrainedModel, rows: Sequence[WeightedRow], loss: Any, **given: Any
) -> Callable[[Tokens], TokenLoss]:
    """Return a loss with the statistics of all rows, or unchanged if it reads none."""
    if not hasattr(loss, "statistics"):
        return loss
    found = []

    def gather(tokens: Tokens) -> TokenLoss:
        found.append(loss.statistics(tokens).detach())
        return TokenLoss(0 * tokens.logprobs, {})

    reference(model, rows, gather, **given)
    return partial(loss, statistics=torch.stack(found).sum(0))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def relative_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return float((flat(found) - flat(expected)).norm() / flat(expected).norm())
