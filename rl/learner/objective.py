"""The objective, which training minimises over all completion tokens of the global batch:

    sum of  token_weight * (correction * loss + beta * kl - entropy_bonus * entropy)

rl/rollouts/plan.py computes the token weights over the whole global batch. So the objective is a
plain sum over micro-batches and ranks, with the same value and gradient for every split.

B: rows, T: padded length (H with hints), N: completion tokens of the micro-batch, K: candidates.
S: maximum number of kept tokens. pi: policy in training, mu: policy that sampled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from losses.tokens import TokenLoss, Tokens, describe, log_ratio
from rl.learner.kl import KLPenalty
from rl.learner.value_credit import ValueTargets
from rl.records import MicroBatch, columns_of

TokenLossFunction = Callable[[Tokens], TokenLoss]
CorrectionFunction = Callable[[Tokens], Any]  # returns a Correction (losses/correction.py)


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Tokens):
    """A micro-batch on the trainer's device, with the inputs of the model and of the token loss.

    `logprobs` and `entropies` are NaN until the forward pass. rl/learner/preparation.py sets old
    and reference logprobs, candidates and value targets if the run uses them.
    """

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, True at the N completion tokens
    token_weights: Tensor  # [N] weight of each token in the objective
    envs: tuple[str, ...]  # [B] name of each row's environment
    # The same rows with hints in their prompts, or None if the reference sees no hints:
    hinted_token_ids: Tensor | None = None  # [B, H] int64
    hinted_mask: Tensor | None = None  # [B, H] bool, True at the N completion tokens
    temperatures: Tensor | None = None  # [N, 1], or None if the run has only one temperature
    value_targets: ValueTargets | None = None  # training targets of the critic
    candidates: Tensor | None = None  # [N, K] most likely tokens of the reference
    kept: Tensor | None = None  # [N, S] tokens from which each token was sampled; -1 pads

    @staticmethod
    def of(micro: MicroBatch, device: torch.device, step: int) -> "Batch":
        """Return a micro-batch on `device`, with its completion tokens flattened row by row."""
        # Flatten on the CPU, because on a GPU every boolean index would synchronise with the CPU.
        mask = torch.tensor(micro.completion_mask)
        rows = mask.nonzero()[:, 0]  # [N]
        positions = micro.first_positions[:, None] + micro.completion_mask.cumsum(1) - 1  # [B, T]
        unknown = torch.full(rows.shape, torch.nan)  # [N]
        tensors: dict[str, Any] = {
            **{name: _to_tensor(getattr(micro, name))[mask] for name in _FLAT},
            "token_ids": _to_tensor(micro.token_ids),
            "mask": mask,
            "logprobs": unknown,
            "entropies": unknown,
            "sequence_ids": rows,
            # `step` is the version of pi. A token that no policy sampled has version -1.
            "staleness": step - _to_tensor(micro.token_versions)[mask],
            "rollout_ids": _to_tensor(micro.rollout_ids)[rows],
            "group_ids": _to_tensor(micro.group_ids)[rows],
            "positions": _to_tensor(positions)[mask],
        }
        if micro.hinted_token_ids is not None and micro.hinted_mask is not None:
            tensors["hinted_token_ids"] = _to_tensor(micro.hinted_token_ids)
            tensors["hinted_mask"] = torch.tensor(micro.hinted_mask)
        if micro.kept is not None:
            tensors["kept"] = torch.tensor(micro.kept)  # keep int32 to save memory
        on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
        return Batch(**on_device, num_sequences=len(micro.token_ids), envs=micro.envs)

    def weighted_sum(self, loss: Tensor) -> Tensor:
        return (self.token_weights.to(loss.dtype) * loss).sum()


def with_outputs(
    tokens: Tokens, logprobs: Tensor, entropies: Tensor, candidate_logprobs: Tensor | None = None
) -> Tokens:
    """Return the tokens with the outputs of a forward pass. The entropies are detached."""
    return replace(
        tokens,
        logprobs=logprobs,
        rollout_logprobs=tokens.rollout_logprobs.to(logprobs.dtype),
        advantages=tokens.advantages.to(logprobs.dtype),
        entropies=entropies.detach(),
        candidate_logprobs=candidate_logprobs,
    )


# `Batch.of` flattens these columns of MicroBatch to the N completion tokens.
_FLAT = (columns_of(MicroBatch).keys() & {field.name for field in fields(Batch)}) - {"token_ids"}


def _to_tensor(values: np.ndarray) -> Tensor:
    return torch.tensor(values, dtype=None if values.dtype.kind == "f" else torch.int64)


@dataclass(frozen=True)
class Objective:
    token_loss: TokenLossFunction
    # Used only if the batch has old logprobs. Otherwise a token loss with a ratio computes pi / mu,
    # which already corrects for the difference between trainer and vLLM.
    correction: CorrectionFunction | None = None
    kl: KLPenalty | None = None
    entropy_bonus: float = 0.0

    def per_token(
        self,
        batch: Tokens,
        logprobs: Tensor,  # [N] log pi of the completion tokens
        entropies: Tensor,  # [N] entropy of pi's distribution of each token
        beta: float,  # current weight of the KL penalty
        candidate_logprobs: Tensor | None = None,  # [N, K] log pi of candidates
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the unweighted loss of each token [N], and metrics ([N] or one number each)."""
        tokens = with_outputs(batch, logprobs, entropies, candidate_logprobs)
        result = self.token_loss(tokens)
        loss = getattr(result, "loss", result)
        if not isinstance(loss, Tensor) or loss.shape != logprobs.shape:
            raise ValueError(
                f"{self.token_loss} returned {describe(loss)} for {len(logprobs)} tokens: return "
                "TokenLoss(loss, metrics) of losses/tokens.py, with one number per token"
            )
        gap = log_ratio(tokens.rollout_logprobs, logprobs.detach())  # [N] log(pi / mu)
        metrics = {
            **_detach(result.metrics),
            "entropy": tokens.entropies,
            "kl_to_rollout": gap.expm1() - gap,  # k3 estimate of KL(mu || pi)
        }
        if result.ratio_clamped is not None:
            metrics["ratio_clamped"] = result.ratio_clamped.detach()
        if self.correction and tokens.old_logprobs is not None:
            corrected = self.correction(tokens)
            loss = corrected.weights * loss
            metrics["correction"] = corrected.weights
            metrics |= _detach(corrected.metrics)
        if self.kl and tokens.ref_logprobs is not None:
            divergence = self.kl.estimator(logprobs, tokens.ref_logprobs)  # [N]
            # Report the divergence whenever there is a reference, even if beta is 0.
            metrics["kl_divergence"] = divergence.detach()
            if self.kl.place == "loss" and self.kl.beta > 0:
                loss = loss + beta * divergence
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * entropies
        return loss, metrics


def _detach(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values.detach() for name, values in metrics.items()}
