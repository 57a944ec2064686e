"""A module around the policy that returns logprobs of completion tokens instead of logits.

With sampler.top_p, top_k or min_p, vLLM samples each token from a set, the kept tokens. vLLM
renormalises its logprobs over this set. The module does the same if it gets the set (`kept`):

    log pi(a) = logit(a) - logsumexp of the logits of the kept tokens

B: rows, T: padded length, N: completion tokens, H: hidden size, K: candidates of each token,
S: largest number of kept tokens.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl.learner.output_head import OutputHead, most_likely
from rl.learner.weight_gradients import without_gradients
from rl.model.lora import active_module
from rl.model.shared_prefixes import states_before


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of tokens, padded on the right, and a mask of the tokens to score."""

    token_ids: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] bool, N of them True
    envs: tuple[str, ...]  # [B] name of each row's environment, "" for an empty row
    temperatures: Tensor | None = None  # [N, 1], or None if the run has only one temperature
    kept: Tensor | None = None  # [N, S] kept tokens, padded with -1; None: the whole vocabulary


@dataclass(frozen=True, eq=False)
class Logprobs:
    """The logprobs of the N tokens at which `Rows.mask` is True, row by row, without gradient."""

    logprobs: Tensor  # [N]
    # These are the K most likely tokens at each of the N positions, or None if K is 0:
    candidates: Tensor | None = None  # [N, K] token ids
    candidate_logprobs: Tensor | None = None  # [N, K] in descending order


class PolicyModule(nn.Module):
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int,  # number of tokens whose logits are in memory at a time
        entropy_gradient: bool = False,  # whether entropies have a gradient
        kl_from_uniform: bool = False,  # return KL(uniform || pi) with the entropies
        head_dtype: torch.dtype | None = None,  # dtype of the head, or None for the model's dtype
        compiled: bool = False,  # whether torch.compile fuses the operations on logits
    ) -> None:
        super().__init__()
        self.model = model
        self._chunk, self._entropy_gradient = chunk, entropy_gradient
        self.kl_from_uniform, self._head_dtype = kl_from_uniform, head_dtype
        self._compiled = compiled
        if not isinstance(self.head, nn.Linear):
            raise ValueError(
                f"the output head is a {type(self.head)}, but logprobs need torch.nn.Linear: "
                "leave lm_head out of adapter.target_modules, or use another model"
            )
        if not _has_plain_logits(model, self.head):
            raise ValueError(
                f"the logits of {type(model).__name__} are not the outputs of its output head, but "
                "scaled or capped, which is not supported: use another model"
            )

    @property
    def output_embeddings(self) -> nn.Module:
        return cast("nn.Module", self.model.get_output_embeddings())

    @property
    def head(self) -> nn.Linear:
        """The linear layer that computes the logits, or peft's trained copy of it if one exists."""
        return cast("nn.Linear", active_module(self.output_embeddings))

    @property
    def embeddings(self) -> list[nn.Parameter]:
        return [*self.model.get_input_embeddings().parameters(), *self.head.parameters()]

    def forward(
        self,
        token_ids: Tensor,  # [B, T]
        mask: Tensor,  # [B, T] False at position 0, which has no preceding token
        temperature: float | Tensor,  # divides the logits, as in sampling; one number, or [N, 1]
        *,
        entropies: bool = False,  # return entropies, at the cost of another pass over the logits
        candidates: Tensor | None = None,  # [N, K] additional tokens to score at each position
        top_k: tuple[int, int] | None = None,  # (K, V): also find the K likeliest token ids below V
        kept: Tensor | None = None,  # [N, S] renormalise logprobs [N] over these tokens; -1 pads
    ) -> tuple[Tensor | None, ...]:
        """Return (logprobs [N], entropies [N] or None, ...) of tokens where `mask` is True.

        KL(uniform || pi) [N] follows the entropies if the module computes it. The last items are
        the logprobs [N, K] of `candidates` or, without candidates, the K most likely tokens [N, K]
        and their logprobs [N, K] if `top_k` is given. Only the logprobs [N] depend on `kept`. All
        other numbers are those of the full distribution.
        """
        with without_gradients(self) if self._compiled else nullcontext():
            before = states_before(self.model.base_model, token_ids, mask)  # [N, H]
        targets = token_ids[:, 1:][mask[:, 1:]]  # [N]
        if kept is not None:  # a reference may have fewer logits than the policy
            kept = kept.masked_fill(kept >= self.head.out_features, -1)
        also = [each for each in (kept, candidates) if each is not None]
        if also:  # [N, 1+S+K]; the scores of token 0, which replaces -1, are not used
            targets = torch.cat([targets.unsqueeze(-1), *also], -1).clamp(min=0)
        # Never call `head`, because ZeRO-3 makes calls collective and ranks differ in chunk counts.
        head, dtype = self.head, self._head_dtype or before.dtype
        logprobs, *others = OutputHead.apply(
            before,
            head.weight,
            head.bias,
            targets,
            temperature,
            self._chunk,
            dtype,
            entropies,
            self._entropy_gradient,
            entropies and self.kl_from_uniform,
            self._compiled,
        )
        if also:
            num_kept = 0 if kept is None else kept.shape[1]
            own, of_kept, of_candidates = logprobs.split(
                [1, num_kept, logprobs.shape[1] - 1 - num_kept], -1
            )
            logprobs = own.squeeze(-1)
            if kept is not None:
                logprobs = logprobs - kept_logprob(kept, of_kept)
            if candidates is not None:
                return logprobs, *others, of_candidates
        if top_k is not None:
            likeliest = most_likely(head, before, *top_k, temperature, self._chunk, dtype)
            return logprobs, *others, *likeliest
        return logprobs, *others


class _States(tuple[Tensor]):
    """Hidden states as the outputs of a decoder whose other attributes are None."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


def _has_plain_logits(model: Any, head: nn.Linear) -> bool:
    """Return whether the model's logits equal its head's outputs, neither scaled nor capped."""
    # The states are large, so that a soft cap changes the logits visibly even in bfloat16.
    decoder, states = model.get_decoder(), head.weight.new_full((1, 1, head.in_features), 1e3)
    # Replace the decoder's result, because some decoders can run only on a GPU.
    decoder.forward = lambda *args, **kwargs: _States([states])  # noqa: ARG005
    with torch.no_grad():
        logits, outputs = model(states.new_ones(1, 1, dtype=torch.int64)).logits, head(states)
    del decoder.forward
    return torch.equal(logits.float(), outputs.float())


def kept_logprob(kept: Tensor, logprobs: Tensor) -> Tensor:
    """Return the log of the total probability [N] of the kept tokens, from their logprobs [N, S].

    Where a row of `kept` has only -1 (sampling was not limited), return 0 without gradient.
    """
    filled = torch.full_like(logprobs, -torch.inf)
    filled[:, 0].masked_fill_(kept[:, 0] < 0, 0.0)
    return torch.where(kept < 0, filled, logprobs).logsumexp(-1)
