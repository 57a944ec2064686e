"""The policy as a module: logprobs of the completion tokens, never holding all logits at once.

Logits of a batch are tokens times vocabulary, often larger than the model. Here the output head
runs over the completion tokens only, a chunk at a time, and each chunk is recomputed in the
backward pass.

B: rows, T: padded length, N: completion tokens, H: hidden size, V: vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rl.learner.candidates import candidate_logprobs, most_likely
from rl.model.lora import in_force


class PolicyModule(nn.Module):
    """A causal language model that returns logprobs of chosen tokens instead of logits."""

    def __init__(
        self, model: PreTrainedModel, *, chunk: int, entropy_gradient: bool = False
    ) -> None:
        """`chunk`: tokens whose logits exist at once; `entropy_gradient`: entropies carry one."""
        super().__init__()
        self.model = model
        self._chunk, self._entropy_gradient = chunk, entropy_gradient
        if not isinstance(self.head, nn.Linear):
            raise ValueError(
                f"the output head is a {type(self.head).__name__}, and only a plain linear one can "
                "be applied chunk by chunk: leave lm_head out of the adapter's target modules"
            )

    @property
    def heads(self) -> nn.Module:
        """The output head, with its original where an adapter trains a copy."""
        return cast("nn.Module", self.model.get_output_embeddings())

    @property
    def head(self) -> nn.Linear:
        """The output head, which turns hidden states into logits."""
        return cast("nn.Linear", in_force(self.heads))

    @property
    def embeddings(self) -> list[nn.Parameter]:
        """Parameters with a row per word: of the embedding and of the head, tied or not."""
        return [*self.model.get_input_embeddings().parameters(), *self.head.parameters()]

    def forward(
        self,
        token_ids: Tensor,
        mask: Tensor,
        temperature: float,
        *,
        candidates: Tensor | None = None,
        top_k: tuple[int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return logprobs [N] and entropies [N] of the masked tokens, row by row.

        Rows are padded on the right. No attention mask is needed: attention is causal, so no real
        token ever sees the padding after it.

        Args:
            token_ids: [B, T].
            mask: [B, T]; a token at position 0 cannot be chosen, nothing precedes it.
            temperature: logits are divided by it, as vLLM did when it sampled.
            candidates: [N, K] tokens whose logprobs [N, K] are to be returned as well.
            top_k: how many tokens, out of how many, are to be returned as well: the likeliest
                [N, K] with their logprobs [N, K].

        """
        hidden = self.model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        chosen = mask[:, 1:]
        before = hidden[:, :-1][chosen]  # [N, H] what each chosen token was predicted from
        targets = token_ids[:, 1:][chosen]  # [N]
        # Without any token there still is one, empty, chunk: the graph reaches every parameter.
        parts = [
            self._of_chunk(h, t, temperature)
            for h, t in zip(before.split(self._chunk), targets.split(self._chunk), strict=True)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        outputs = torch.cat(logprobs), torch.cat(entropies)
        if candidates is not None:
            common = temperature, self._chunk
            outputs += (candidate_logprobs(self.head, before, candidates, *common),)
        if top_k is not None:
            outputs += most_likely(self.head, before, *top_k, temperature, self._chunk)
        return outputs

    def _of_chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        arguments = self.head, hidden, targets, temperature, self._entropy_gradient
        if torch.is_grad_enabled():
            return checkpoint(_logprobs, *arguments, use_reentrant=False)
        return _logprobs(*arguments)


def _logprobs(
    head: nn.Linear, hidden: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    # Not head(hidden): under ZeRO-3 a module call is a collective, and ranks differ in chunks.
    logits = nn.functional.linear(hidden, head.weight, head.bias)  # [chunk, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normaliser = logits.logsumexp(-1)  # [chunk]
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - normaliser
    # Most runs only log it: without a graph nothing of size [chunk, V] is kept for it.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = normaliser - ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(-1)
    return logprobs, entropies
