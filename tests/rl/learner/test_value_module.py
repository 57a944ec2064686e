"""The value model as a module."""

import torch

from rl.learner.critic import ValueModule
from rl.learner.weight_gradients import keep_weight_gradients
from rl.model.loading import load_model
from tests.support.tiny_policy import model_folder

torch.set_num_threads(1)


def test_in_bfloat16_the_gradient_of_the_head_is_the_sum_before_it_is_rounded(tmp_path):
    model = load_model(model_folder(tmp_path, "bfloat16"), torch.bfloat16, 0)
    module = ValueModule(model)
    keep_weight_gradients(module)
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    token_ids = torch.arange(120).reshape(8, 15) % 40
    mask = torch.ones_like(token_ids, dtype=torch.bool)
    mask[:, 0] = False
    slopes = torch.randn(8 * 14, generator=torch.Generator().manual_seed(0))

    (module(token_ids, mask) * slopes).sum().backward()

    hidden = module.body(input_ids=token_ids).last_hidden_state[:, :-1].flatten(0, 1)
    expected = (slopes.double() @ hidden.double())[None]
    assert module.head.weight.grad is not None
    torch.testing.assert_close(module.head.weight.grad.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.head.bias.grad, slopes.sum()[None], rtol=1e-5, atol=1e-5)
