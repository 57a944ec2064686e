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
from collections.abc import Callable, Iterable
from functools import cache
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from rl.learner.weight_gradients import weight_gradient

_Factors = tuple[Tensor, Tensor, Tensor | None, float | Tensor]  # parameters of chunk_logits


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
        compiled: bool = False,  # whether torch.compile fuses a chunk's operations
    ) -> tuple[Tensor | None, ...]:
        """Return (logprobs shaped like `targets`, entropies [N] if `with_entropies` else None).

        With `with_kl_from_uniform`, also return the KL divergences [N].
        """
        ctx.settings = temperature, chunk, dtype, compiled
        ctx.entropy_gradient = with_entropies and entropy_gradient
        # Detach the weight, because torch.compile refuses bfloat16 weights with float32 gradients.
        cast, also = weight.detach().to(dtype), (with_entropies, with_kl_from_uniform)
        divisors = _chunk_temperatures(temperature, chunk)
        parts = [  # `strict=False`, because `divisors` may repeat one temperature without end
            _maybe_compiled(_chunk_scores, compiled)((h, cast, bias, d), _as_columns(t), *also)
            for h, t, d in zip(hidden.split(chunk), targets.split(chunk), divisors, strict=False)
        ]
        normalisers, logprobs, entropies, divergences = zip(*parts, strict=True)
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
        temperature, chunk, dtype, compiled = ctx.settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        cast, exact = weight.detach().to(dtype), normalisers.dtype
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if of_weight else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if of_bias else None
        rounds = weight.is_cuda and not of_bias  # weight_gradient rounds gradients on a GPU
        divisors = _chunk_temperatures(temperature, chunk)
        for begin, divisor in zip(range(0, len(targets), chunk), divisors, strict=False):
            part = slice(begin, begin + chunk)
            of_entropy = (entropies[part], entropy_grads[part]) if ctx.entropy_gradient else None
            grads, narrow = _maybe_compiled(_logit_gradients, compiled)(
                *((hidden[part], cast, bias, divisor), targets[part], normalisers[part]),
                *(logprob_grads[part], of_entropy, rounds),
            )
            if hidden_grad is not None:
                hidden_grad[part] = narrow @ cast
            if weight_grad is not None:
                weight_gradient(grads, hidden[part].to(dtype), weight_grad)
            if bias_grad is not None:
                bias_grad += grads.sum(0)
        return hidden_grad, weight_grad, bias_grad, *[None] * 8


def _chunk_scores(
    factors: _Factors, targets: Tensor, with_entropies: bool, with_kl_from_uniform: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return normalisers [C], logprobs [C, M], entropies [C] and KL divergences [C] of a chunk."""
    logits = chunk_logits(*factors)  # [C, V]
    normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets) - normaliser.unsqueeze(-1)
    entropy = divergence = None
    if with_kl_from_uniform:
        divergence = normaliser - logits.mean(-1) - math.log(logits.shape[1])
    if with_entropies:
        p = (logits - normaliser.unsqueeze(-1)).exp_()
        entropy = normaliser - p.mul_(logits).sum(-1)
    return normaliser, logprobs, entropy, divergence


def _logit_gradients(
    factors: _Factors,
    targets: Tensor,  # [C, M]
    normaliser: Tensor,  # [C]
    logprob_grads: Tensor,  # [C, M]
    of_entropy: tuple[Tensor, Tensor] | None,  # entropies [C] and their gradients [C]
    rounds: bool,  # whether only gradients in the weight's dtype are needed
) -> tuple[Tensor, Tensor]:
    """Return (gradients [C, V] of a chunk's logits, the same gradients in the weight's dtype)."""
    log_p = chunk_logits(*factors).sub_(normaliser.unsqueeze(-1))  # [C, V]
    p = log_p.exp()
    grads = p * -logprob_grads.sum(-1, keepdim=True)
    if of_entropy:
        entropy, entropy_grads = (each.unsqueeze(-1) for each in of_entropy)
        grads.sub_(p.mul_(log_p.add_(entropy)).mul_(entropy_grads))
    _, weight, _, temperature = factors
    if torch.compiler.is_compiling() and targets.shape[1] == 1:  # a scatter needs its own kernel
        columns = torch.arange(grads.shape[1], device=grads.device)
        grads = torch.where(columns == targets, grads + logprob_grads, grads)
    else:
        grads.scatter_add_(-1, targets, logprob_grads)
    narrow = grads.div_(temperature).to(weight.dtype)
    return (narrow if rounds else grads), narrow


@cache
def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    if not compiled:
        return function
    made = torch.compile(function, dynamic=True)
    # Copy slices, because torch.compile recompiles when the ratio of slice to tensor size changes.
    return lambda *given: made(*tree_map_only(Tensor, _copy_if_slice, given))


def _copy_if_slice(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor.clone()


def _as_columns(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(-1)


def _chunk_temperatures(value: float | Tensor, chunk: int) -> Iterable[float | Tensor]:
    return value.split(chunk) if isinstance(value, Tensor) else repeat(value)


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
    divisors = _chunk_temperatures(temperature, chunk)
    best = [
        chunk_logits(part, weight, head.bias, divisor).log_softmax(-1)[:, :vocabulary].topk(top_k)
        for part, divisor in zip(hidden.split(chunk), divisors, strict=False)
    ]
    return torch.cat([part.indices for part in best]), torch.cat([part.values for part in best])
