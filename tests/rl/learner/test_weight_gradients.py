"""Layers whose weights get gradients in float32 while all else is bfloat16."""

import copy

import torch
from torch import nn

from rl.learner.weight_gradients import use_float32_gradients

torch.set_num_threads(1)


TOKENS = torch.tensor([[1, 2, 3, 3], [4, 3, 2, 10]])


def test_in_float32_they_are_the_layers_they_were():
    plain = nn.Sequential(
        nn.Embedding(11, 6, padding_idx=2), nn.Linear(6, 4), nn.Linear(4, 3, False)
    )
    changed, slopes = copy.deepcopy(plain), torch.randn(2, 4, 3)
    use_float32_gradients(changed)
    assert list(changed.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(changed(TOKENS), plain(TOKENS), rtol=0, atol=0)
    for model in (changed, plain):
        (model(TOKENS) * slopes).sum().backward()
    found, expected = ([p.grad for p in model.parameters()] for model in (changed, plain))
    torch.testing.assert_close(found, expected)


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
