"""Layers whose weights have float32 gradients, while everything else stays in bfloat16.

A matrix multiplication sums in float32, but returns the dtype of its factors. So autograd would
round each micro-batch's weight gradients to bfloat16 (an error of 0.16 %), and their sum would
depend on the split into micro-batches. The layers in this file compute the same outputs, but do not
round their weight gradients. `Tensor.grad_dtype` (deepspeed_engine.py) keeps the sums in float32.

N: tokens, I and O: input and output width of a layer, B: rows, T: padded length, H: hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def use_float32_gradients(model: nn.Module) -> None:
    """Make the linear layers and embeddings of `model` compute weight gradients in float32."""
    for module in model.modules():
        # Changing only the class keeps names, parameters and hooks.
        if type(module) is nn.Linear:
            module.__class__ = _Linear
        elif type(module) is nn.Embedding:
            module.__class__ = _Embedding


def weight_gradient(grads: Tensor, inputs: Tensor, total: Tensor | None = None) -> Tensor:
    """Return grads [N, O] transposed times inputs [N, I], added to `total` in place if given."""
    exact = torch.promote_types(inputs.dtype, torch.float32)
    how: dict[str, Any]  # Any, because torch's annotations lack out_dtype
    if inputs.is_cuda and inputs.dtype != exact:
        # A GPU's tensor cores can multiply bfloat16 and return float32.
        factors, how = (grads.to(inputs.dtype).T, inputs), {"out_dtype": exact}
    else:
        factors, how = (grads.to(exact).T, inputs.to(exact)), {}
    if total is None:
        return torch.mm(*factors, **how)
    return torch.addmm(total, *factors, **how, out=total)


@contextmanager
def without_gradients(module: nn.Module) -> Iterator[None]:
    """Hide the gradients of earlier micro-batches from torch.compile during a forward pass.

    torch.compile would split a layer's graph at each bfloat16 weight that has a float32 gradient.
    """
    found = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    for parameter, _ in found:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in found:
            parameter.grad = gradient


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., I] times weight [O, I] transposed, plus bias, in the inputs' dtype."""
    return _LinearFunction.apply(inputs, weight, bias)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_inputs, of_weight, _ = ctx.needs_input_grad
        # Do not save the inputs if the weight is frozen (LoRA), because it needs no gradient.
        ctx.save_for_backward(inputs if of_weight else None, weight if of_inputs else None)
        # Cast here, because autograd would round the gradients of weights that the caller casts.
        bias = None if bias is None else bias.to(inputs.dtype)
        return nn.functional.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] because of the decorator
        ctx: Any, grads: Tensor
    ) -> Any:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        flat = grads.flatten(0, -2)  # [N, O]
        return (
            grads @ weight.to(grads.dtype) if of_inputs else None,
            weight_gradient(flat, inputs.flatten(0, -2)) if of_weight else None,
            flat.sum(0, dtype=torch.promote_types(flat.dtype, torch.float32)) if of_bias else None,
        )


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.num_embeddings, ctx.padding = len(weight), padding
        return nn.functional.embedding(token_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] because of the decorator
        ctx: Any, grads: Tensor
    ) -> Any:
        (token_ids,) = ctx.saved_tensors
        exact = grads.to(torch.promote_types(grads.dtype, torch.float32))  # [B, T, H]
        make = torch.ops.aten.embedding_dense_backward
        return None, make(exact, token_ids, ctx.num_embeddings, ctx.padding, False), None


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        # The embedding with the index `padding` gets no gradient.
        padding = -1 if self.padding_idx is None else self.padding_idx
        return _EmbeddingFunction.apply(input, self.weight, padding)
