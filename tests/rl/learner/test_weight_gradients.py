"""Layers whose weights get gradients in float32 while all else is bfloat16."""

import pytest
import torch
from torch import nn

from rl.learner.weight_gradients import use_float32_gradients, weight_gradient

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


def test_in_bfloat16_the_gradient_of_a_weight_is_the_sum_before_it_is_rounded():
    model, plain = layers(torch.bfloat16), layers(torch.bfloat16)
    use_float32_gradients(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    slopes = torch.randn(2, 4, 3).bfloat16()
    found, rounded = gradients(model, slopes), gradients(plain, slopes)
    assert {gradient.dtype for gradient in found} == {torch.float32}
    # The last layer's, by hand from the very inputs that it had.
    hidden = model[1](model[0](TOKENS)).flatten(0, 1)
    expected = slopes.flatten(0, 1).double().T @ hidden.double()
    torch.testing.assert_close(found[3].double(), expected, rtol=1e-6, atol=1e-6)
    for one, other in zip(found, rounded, strict=True):
        torch.testing.assert_close(one.bfloat16(), other, rtol=1e-2, atol=1e-2)
    assert not found[0][2].any()  # the padding's word


def test_a_frequent_token_and_a_bias_get_the_exact_sum_of_their_gradients():
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 2)).bfloat16()
    use_float32_gradients(model)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    model[1].weight.data = torch.eye(2).bfloat16()
    # Each small number is lost beside 1, and bfloat16 cannot represent the sum.
    slopes = torch.tensor([1.0, *[2**-9] * 65]).bfloat16()[:, None]
    (model(torch.ones(1, 66, dtype=torch.long)) * slopes).sum().backward()
    of_embedding, _, of_bias = [parameter.grad for parameter in model.parameters()]
    total = 1 + 65 * 2**-9
    assert of_embedding is not None
    assert of_bias is not None
    assert of_embedding.tolist() == [[0.0, 0.0], [total, total], [0.0, 0.0]]
    assert of_bias.tolist() == [total, total]


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


def test_a_sum_takes_in_another_product_in_place():
    slopes, inputs = torch.randn(5, 3), torch.randn(5, 4)
    total = torch.ones(3, 4)
    assert weight_gradient(slopes, inputs, total) is total
    torch.testing.assert_close(total, 1 + slopes.T @ inputs)
