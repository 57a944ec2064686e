"""Compute logprobs, entropies and their gradients from hidden states, in chunks of tokens.

    z       = (h W^T + b) / temperature        logits, p = softmax(z)
    logprob = z[target] - logsumexp(z)         d logprob / d z = onehot(target) - p
    entropy = logsumexp(z) - sum(p * z)        d entropy / d z = -p * (log p + entropy)
    kl_from_uniform = logsumexp(z) - mean(z) - log V, which is KL(uniform || p), without gradient

The logits of a batch (tokens times vocabulary) are often larger than the model. So OutputHead
computes one chunk of logits at a time, and recomputes each chunk in the backward pass. It sums the
chunks' gradients of W in float32, because autograd's sum in bfloat16 would lose small gradients.

N: completion tokens, H: hidden size, V: vocabulary, C: tokens of a chunk, K: most likely tokens.
"""

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl.learner.weight_gradients import weight_gradient


class OutputHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [N, H] hidden state from which each token is predicted
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N] token ids, or [N, M] with M tokens per position
        temperature: float | Tensor,  # one number, or [N, 1]
        chunk: int,
        dtype: torch.dtype,  # dtype of the product of hidden states and weight
        with_entropies: bool,
        entropy_gradient: bool,
        with_kl_from_uniform: bool,
    ) -> tuple[Tensor | None, ...]:
        """Return (logprobs shaped like `targets`, entropies [N] if `with_entropies` else None).

        With `with_kl_from_uniform`, also return the KL divergences [N].
        """
        ctx.settings = temperature, chunk, dtype
        ctx.entropy_gradient = with_entropies and entropy_gradient
        cast = weight.to(dtype)
        normalisers, logprobs, entropies, divergences = [], [], [], []
        # `strict=False`, because `_split` repeats a single temperature without end.
        for h, t, divisor in zip(
            hidden.split(chunk), targets.split(chunk), _split(temperature, chunk), strict=False
        ):
            logits = chunk_logits(h, cast, bias, divisor)  # [C, V]
            normaliser = logits.logsumexp(-1)  # [C]
            normalisers.append(normaliser)
            logprobs.append(logits.gather(-1, _as_columns(t)) - normaliser.unsqueeze(-1))
            if with_entropies:
                p = (logits - normaliser.unsqueeze(-1)).exp_()
                entropies.append(normaliser - p.mul_(logits).sum(-1))
            if with_kl_from_uniform:
                divergences.append(normaliser - logits.mean(-1) - math.log(len(weight)))
        entropy = torch.cat(entropies) if with_entropies else None
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalisers), entropy)
        constant = [torch.cat(divergences)] if with_kl_from_uniform else []
        outputs = torch.cat(logprobs).view_as(targets), entropy, *constant
        if entropy is not None and not ctx.entropy_gradient:
            constant.append(entropy)
        ctx.mark_non_differentiable(*constant)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] because of the decorator
        ctx: Any, logprob_grads: Tensor, entropy_grads: Tensor, *_: Tensor
    ) -> Any:
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        targets, logprob_grads = map(_as_columns, (targets, logprob_grads))  # [N, M]
        temperature, chunk, dtype = ctx.settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        cast, exact = weight.to(dtype), normalisers.dtype
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if of_weight else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if of_bias else None
        divisors = _split(temperature, chunk)
        for begin, divisor in zip(range(0, len(targets), chunk), divisors, strict=False):
            part = slice(begin, begin + chunk)
            logits = chunk_logits(hidden[part], cast, bias, divisor)  # [C, V]
            log_p = logits.sub_(normalisers[part].unsqueeze(-1))
            p = log_p.exp()
            grads = p * -logprob_grads[part].sum(-1, keepdim=True)  # [C, V] gradient of the logits
            if ctx.entropy_gradient:
                surprise = log_p.add_(entropies[part].unsqueeze(-1))
                grads.sub_(p.mul_(surprise).mul_(entropy_grads[part].unsqueeze(-1)))
            grads.scatter_add_(-1, targets[part], logprob_grads[part]).div_(divisor)
            if hidden_grad is not None:
                hidden_grad[part] = grads.to(dtype) @ cast
            if weight_grad is not None:
                weight_gradient(grads, hidden[part].to(dtype), weight_grad)
            if bias_grad is not None:
                bias_grad += grads.sum(0)
        return hidden_grad, weight_grad, bias_grad, *[None] * 7


def _as_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(-1)


def _split(temperature: float | Tensor, chunk: int) -> Iterable[float | Tensor]:
    return temperature.split(chunk) if isinstance(temperature, Tensor) else repeat(temperature)


def chunk_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float | Tensor
) -> Tensor:
    """Return the logits [C, V] / `temperature` of hidden states [C, H], in float32 or float64."""
    bias = None if bias is None else bias.to(weight)
    logits = nn.functional.linear(hidden.to(weight), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


@torch.no_grad()
def most_likely(
    head: nn.Linear,
    hidden: Tensor,
    top_k: int,
    vocabulary: int,
    temperature: float | Tensor,
    chunk: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the most likely tokens [N, K] after hidden states [N, H], and their logprobs [N, K].

    Leave out ids >= `vocabulary`, the policy's number of tokens, because a teacher may have more.
    """
    weight = head.weight.to(dtype)
    best = [
        chunk_logits(part, weight, head.bias, divisor).log_softmax(-1)[:, :vocabulary].topk(top_k)
        for part, divisor in zip(hidden.split(chunk), _split(temperature, chunk), strict=False)
    ]
    return torch.cat([part.indices for part in best]), torch.cat([part.values for part in best])
