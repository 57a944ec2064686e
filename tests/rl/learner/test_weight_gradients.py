"""Layers whose weights get gradients in float32 while all else is bfloat16."""

import pytest
import torch
from torch import nn

from rl.learner.weight_gradients import use_float32_gradients

torch.set_num_threads(1)


def layers(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 4), nn.Linear(4, 3, False)
    )
    return model.to(dtype)


TOKENS = torch.tensor([[1, 2, 3, 3], [4, 3, 2, 10]])


def gradients(model, slopes):
    (model(TOKENS) * slopes).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_an_exact_dtype_they_are_the_layers_they_were(dtype):
    slopes = torch.randn(2, 4, 3, dtype=dtype)
    plain, kept = layers(dtype), layers(dtype)
    names = list(kept.state_dict())
    use_float32_gradients(kept)
    assert list(kept.state_dict()) == names
    torch.testing.assert_close(kept(TOKENS), plain(TOKENS), rtol=0, atol=0)
    torch.testing.assert_close(gradients(kept, slopes), gradients(plain, slopes))


def test_in_bfloat16_all_weights_get_the_sum_of_their_gradients_before_it_is_rounded():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)).bfloat16()
    use_float32_gradients(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    words, matrix = model.get_parameter("0.weight"), model.get_parameter("1.weight")
    words.data[1] = torch.tensor([2.0, 3.0]).bfloat16()
    matrix.data = torch.eye(2).bfloat16()
    # Each small number is lost beside 1, and bfloat16 cannot represent the sum.
    slopes = torch.tensor([1.0, *[2**-9] * 65]).bfloat16()[:, None]
    (model(torch.ones(1, 66, dtype=torch.long)) * slopes).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    of_embedding, of_weight, of_bias = (gradient.tolist() for gradient in gradients)
    total = 1 + 65 * 2**-9
    assert of_embedding == [[0.0, 0.0], [total, total], [0.0, 0.0]]
    assert of_weight == [[2 * total, 3 * total]] * 2
    assert of_bias == [total, total]


@pytest.mark.parametrize("frozen", [True, False])
def test_inputs_are_kept_for_the_gradient_of_a_weight_and_a_frozen_one_has_none(frozen):
    """Those of all layers are most of what a pass with LoRA would keep."""
    model = layers(torch.bfloat16)
    use_float32_gradients(model)
    model[1].requires_grad_(not frozen)
    inputs = torch.randn(2, 5, 6, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model[1](inputs).sum().backward()
    assert any(tensor.shape == inputs.shape for tensor in kept) != frozen
    weight = model.get_parameter("1.weight")
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand_as(inputs))
