"""Logprobs and entropies of chosen tokens from hidden states, and their gradient, by chunks.

    z       = (h W^T + b) / temperature        logits
    logprob = z[target] - logsumexp(z)         d logprob / d z = onehot(target) - p
    entropy = logsumexp(z) - sum(p * z)        d entropy / d z = -p * (log p + entropy)

Logits of a batch are tokens times vocabulary, often larger than the model. Here they exist a chunk
at a time and are made once more in the backward pass. Autograd over such chunks would add up the
gradient of W in its own dtype, and in bfloat16 lose what a chunk adds; this sum is in float32.

N: completion tokens, H: hidden size, V: vocabulary, C: tokens of a chunk.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl.learner.weight_gradients import weight_gradient


class OutputHead(torch.autograd.Function):
    """`apply` returns logprobs, as many as targets, and entropies [N], or None in their place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        dtype: torch.dtype,
        with_entropies: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Go through all chunks.

        Args:
            ctx: autograd's.
            hidden: [N, H] what each token was predicted from.
            weight: [V, H].
            bias: [V].
            targets: [N] the tokens, or [N, M] several at each place.
            temperature: logits are divided by it.
            chunk: tokens whose logits exist at once.
            dtype: hidden states and weight are multiplied in it.
            with_entropies: whether entropies are computed.
            entropy_gradient: whether they carry a gradient.

        """
        ctx.settings = temperature, chunk, dtype
        ctx.entropy_gradient = with_entropies and entropy_gradient
        cast = weight.to(dtype)
        normalisers, logprobs, entropies = [], [], []
        # Without any token there still is one, empty, chunk.
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = chunk_logits(h, cast, bias, temperature)  # [C, V]
            normaliser = logits.logsumexp(-1)  # [C]
            normalisers.append(normaliser)
            logprobs.append(logits.gather(-1, _columns(t)) - normaliser.unsqueeze(-1))
            if with_entropies:
                p = (logits - normaliser.unsqueeze(-1)).exp_()
                entropies.append(normaliser - p.mul_(logits).sum(-1))
        entropy = torch.cat(entropies) if with_entropies else None
        ctx.save_for_backward(hidden, weight, bias, targets, torch.cat(normalisers), entropy)
        if entropy is not None and not ctx.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs).view_as(targets), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] its decorator's
        ctx: Any, logprob_slopes: Tensor, entropy_slopes: Tensor
    ) -> Any:
        """Go through all chunks again; the slopes are those of the outputs.

        Autograd casts what is returned.
        """
        hidden, weight, bias, targets, normalisers, entropies = ctx.saved_tensors
        targets, logprob_slopes = map(_columns, (targets, logprob_slopes))  # [N, M]
        temperature, chunk, dtype = ctx.settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        cast, exact = weight.to(dtype), normalisers.dtype
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=exact) if of_weight else None
        bias_grad = torch.zeros_like(bias, dtype=exact) if of_bias else None
        for begin in range(0, len(targets), chunk):
            part = slice(begin, begin + chunk)
            logits = chunk_logits(hidden[part], cast, bias, temperature)  # [C, V]
            log_p = logits.sub_(normalisers[part].unsqueeze(-1))
            p = log_p.exp()
            slopes = p * -logprob_slopes[part].sum(-1, keepdim=True)  # [C, V] in the logits
            if ctx.entropy_gradient:
                surprise = log_p.add_(entropies[part].unsqueeze(-1))
                slopes.sub_(p.mul_(surprise).mul_(entropy_slopes[part].unsqueeze(-1)))
            slopes.scatter_add_(-1, targets[part], logprob_slopes[part]).div_(temperature)
            if hidden_grad is not None:
                hidden_grad[part] = slopes.to(dtype) @ cast
            if weight_grad is not None:
                weight_gradient(slopes, hidden[part].to(dtype), weight_grad)
            if bias_grad is not None:
                bias_grad += slopes.sum(0)
        return hidden_grad, weight_grad, bias_grad, *[None] * 6


def _columns(tensor: Tensor) -> Tensor:
    """[N] as [N, 1]; [N, M] as it is."""
    return tensor if tensor.dim() == 2 else tensor.unsqueeze(-1)


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Of hidden states [C, H], at least in float32."""
    bias = None if bias is None else bias.to(weight)
    logits = nn.functional.linear(hidden.to(weight), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
