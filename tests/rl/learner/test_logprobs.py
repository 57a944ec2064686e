"""Logprobs in chunks are those of one log_softmax over all logits; N tokens, V words."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.first_hour.update import ADAPTER
from rl.learner.logprobs import PolicyModule
from rl.learner.output_head import _maybe_compiled
from rl.learner.weight_gradients import use_float32_gradients
from rl.model.loading import compile_layers, enable_recompute, load_model
from tests.support import tiny_policy

torch.set_num_threads(1)

VOCAB, HIDDEN = 320, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("logprobs") / "model")


@pytest.fixture(scope="module")
def model(folder):
    return tiny_policy.exact_model(folder)


@pytest.fixture(scope="module")
def rows():
    """(token ids, chosen) of rows of several lengths; the third has no chosen token."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (9, 2, 5, 13):
        token_ids = torch.randint(0, 256, (length,), generator=generator)
        chosen = torch.rand(length, generator=generator) < 0.6
        chosen[0], chosen[-1] = False, True
        made.append((token_ids, chosen & (length != 5)))
    return made


def stacked(rows, extra=0):
    width = max(len(token_ids) for token_ids, _ in rows) + extra
    token_ids = torch.full((len(rows), width), 7)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, (ids, chosen) in enumerate(rows):
        token_ids[i, : len(ids)], mask[i, : len(ids)] = ids, chosen
    return token_ids, mask


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def plain(model, rows, temperature):
    """Row after row, without padding, from all logits."""
    logprobs, entropies = [], []
    for token_ids, chosen in rows:
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        full = torch.log_softmax(logits / temperature, -1)
        own = full.gather(-1, token_ids[1:, None])[:, 0]
        logprobs.append(own[chosen[1:]])
        entropies.append(-(full.exp() * full).sum(-1)[chosen[1:]])
    return torch.cat(logprobs), torch.cat(entropies)


def weights_of(count):
    """Something to weigh tokens with, so that no two gradients look alike."""
    return torch.linspace(-1.0, 2.0, count, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("chunk", "extra"), [(1, 0), (4, 3), (7, 0), (1000, 11)])
def test_logprobs_entropies_and_gradients_are_those_of_plain_log_softmax(
    model, rows, chunk, extra, temperature
):
    token_ids, mask = stacked(rows, extra)
    logprobs, entropies = PolicyModule(model, chunk=chunk)(
        token_ids, mask, temperature, entropies=True
    )
    expected, expected_entropies = plain(model, rows, temperature)
    assert len(expected) == mask.sum() > 10
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-12, atol=1e-12)
    assert not entropies.requires_grad
    weights = weights_of(len(expected))
    found = gradients(model, (weights * logprobs).sum())
    wanted = gradients(model, (weights * expected).sum())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 7, 1000])
def test_entropies_carry_the_gradient_of_plain_log_softmax_if_asked(model, rows, chunk):
    module = PolicyModule(model, chunk=chunk, entropy_gradient=True)
    logprobs, entropies = module(*stacked(rows, 3), 0.6, entropies=True)
    expected, expected_entropies = plain(model, rows, 0.6)
    weights = weights_of(len(expected))
    found = gradients(model, (weights * logprobs - 0.3 * entropies).sum())
    wanted = gradients(model, (weights * expected - 0.3 * expected_entropies).sum())
    alone = gradients(model, (weights * plain(model, rows, 0.6)[0]).sum())
    assert max(float((wanted[n] - alone[n]).abs().max()) for n in wanted) > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_kl_from_uniform_follows_the_entropies_and_is_computed_only_with_them(model, rows):
    token_ids, mask = stacked(rows, 3)
    module, plain_module = (PolicyModule(model, chunk=4, kl_from_uniform=x) for x in (True, False))
    candidates = token_ids[mask][:, None].expand(-1, 2)
    logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1][mask[:, 1:]] / 0.6
    expected = -logits.log_softmax(-1).mean(-1) - torch.tensor(VOCAB).log()
    for options in ({}, {"candidates": candidates}, {"top_k": (2, VOCAB)}):
        first, second, kl, *others = module(token_ids, mask, 0.6, entropies=True, **options)
        torch.testing.assert_close(kl, expected, rtol=1e-6, atol=1e-6)
        assert not kl.requires_grad
        same = plain_module(token_ids, mask, 0.6, entropies=True, **options)
        torch.testing.assert_close((first, second, *others), same, rtol=0, atol=0)
    assert len(module(token_ids, mask, 0.6)) == 2


def test_a_micro_batch_without_completion_tokens_has_a_gradient_of_zero_everywhere(model):
    logprobs, entropies = PolicyModule(model, chunk=4)(
        torch.zeros(1, 2, dtype=torch.int64),
        torch.zeros(1, 2, dtype=torch.bool),
        1.0,
        entropies=True,
    )
    assert logprobs.shape == entropies.shape == (0,)
    found = gradients(model, logprobs.sum())
    assert all(gradient.eq(0).all() for gradient in found.values())


class LargestLogits(TorchDispatchMode):
    """Records the most rows of a tensor [rows, V] that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_logits = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,)
            if is_logits and tensor.shape != (HIDDEN, VOCAB):  # the head's weight, transposed
                self.largest = max(self.largest, tensor.numel() // VOCAB)
        return result


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("kl", [True, False])
def test_no_more_than_a_chunk_of_logits_exists_at_once(folder, rows, with_gradient, kl):
    model = load_model(folder, torch.float32, 0)
    token_ids, mask = stacked(rows)
    with LargestLogits() as seen, torch.set_grad_enabled(with_gradient):
        module = PolicyModule(model, chunk=4, kl_from_uniform=kl)
        logprobs, *_ = module(token_ids, mask, 1.0, entropies=True)
        if with_gradient:
            logprobs.sum().backward()
    assert 8 < mask.sum() < HIDDEN
    assert seen.largest == 4


def test_nothing_of_size_v_waits_for_the_backward_pass(folder, rows):
    model = load_model(folder, torch.float32, 0)
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        PolicyModule(model, chunk=4, kl_from_uniform=True)(*stacked(rows), 1.0, entropies=True)
    assert kept
    assert not [shape for shape in kept if shape[-1:] == (VOCAB,)]


def test_recomputed_layers_run_once_more_in_the_backward_pass(folder, rows):
    model, calls = load_model(folder, torch.float32, 0).train(), []
    enable_recompute(model)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    PolicyModule(model, chunk=4)(*stacked(rows), 0.8)[0].sum().backward()
    assert len(calls) == 2 * len(model.model.layers)


def test_a_model_without_marked_layers_is_not_compiled():
    with pytest.raises(ValueError, match="Linear has no layers that can be compiled"):
        compile_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_the_weights_at_both_ends(folder, tied):
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    found = {id(parameter) for parameter in PolicyModule(model, chunk=4).embeddings}
    named = {name for name, parameter in model.named_parameters() if id(parameter) in found}
    ends = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert named == ends


def test_a_fresh_bfloat16_model_keeps_its_rotary_frequencies_in_float32(folder, tmp_path):
    """As one that was saved and loaded, which is what vLLM will do with it."""
    fresh = load_model(folder, torch.bfloat16, 0)
    fresh.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.bfloat16, 1)
    assert {p.dtype for p in fresh.parameters()} == {torch.bfloat16}
    for name, expected in loaded.named_buffers():
        torch.testing.assert_close(fresh.get_buffer(name), expected, rtol=0, atol=0)
    for name, expected in loaded.named_parameters():
        torch.testing.assert_close(fresh.get_parameter(name), expected, rtol=0, atol=0)


def test_a_model_without_weights_is_drawn_from_the_seed(folder):
    one, same, other = (load_model(folder, torch.float32, seed).state_dict() for seed in (3, 3, 4))
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    name = "model.embed_tokens.weight"
    assert not torch.equal(one[name], other[name])


def test_a_float32_head_has_the_logprobs_of_float32_logits(folder, rows):
    model, (token_ids, mask) = load_model(folder, torch.bfloat16, 0), stacked(rows)
    hidden = model.model(input_ids=token_ids).last_hidden_state[:, :-1][mask[:, 1:]]
    full = (hidden.float() @ model.lm_head.weight.float().T / 0.6).log_softmax(-1)
    expected = full.gather(-1, token_ids[mask][:, None])[:, 0]
    exact, rounded = (
        PolicyModule(model, chunk=4, head_dtype=dtype)(token_ids, mask, 0.6)[0]
        for dtype in (torch.float32, None)
    )
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=1e-5)
    assert (rounded - expected).abs().max() > 1e-4


def test_an_output_head_s_bias_counts_in_logprobs_entropies_and_gradients(folder, rows):
    """No model of ours has one; `plain` calls the head itself and cannot forget it."""
    model = tiny_policy.exact_model(folder, seed=2)
    bias = torch.linspace(-1.0, 1.0, VOCAB, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)
    token_ids, mask = stacked(rows)
    module = PolicyModule(model, chunk=4)
    expected = plain(model, rows, 0.6)
    found = module(token_ids, mask, 0.6, entropies=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    weights = weights_of(len(found[0]))
    (found_gradient,) = torch.autograd.grad((weights * found[0]).sum(), [model.lm_head.bias])
    (expected_gradient,) = torch.autograd.grad((weights * expected[0]).sum(), [model.lm_head.bias])
    torch.testing.assert_close(found_gradient, expected_gradient)
    assert found_gradient.abs().max() > 0.01


@pytest.mark.parametrize("way", ["adapter checkpointing", "all weights"])
def test_compiled_layers_are_whole_and_compiled_once_for_each_kind_of_pass(
    tmp_path, monkeypatch, way
):
    """The layers are compiled again for a single row, while their weights have gradients."""
    torch._dynamo.reset()
    counters.clear()
    _maybe_compiled.cache_clear()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    folder, found = tiny_policy.model_folder(tmp_path, "bfloat16"), []
    for compiled in (False, True):
        model = load_model(folder, torch.bfloat16, 0)
        model = model if way == "all weights" else ADAPTER.attach(model, 0, "base")
        if "checkpointing" in way:
            enable_recompute(model)
        if compiled:
            compile_layers(model, backend)
        module = PolicyModule(model.train(), chunk=7, compiled=compiled)
        use_float32_gradients(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad_dtype = torch.float32
        for count, length in ((3, 21), (5, 27), (1, 31)):
            token_ids = torch.arange(count * length).view(count, length)
            mask = torch.arange(length).expand(count, -1) > 4
            with torch.no_grad():
                module(token_ids, mask, 0.8)
            module(token_ids, mask, 0.8)[0].sum().backward()
        found.append([parameter.grad for parameter in trained])
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0.02)
    assert not counters["graph_break"]
    # With and without gradients, and for the recomputation; each for several rows and for one.
    assert len(graphs) == (6 if "checkpointing" in way else 4)
    _maybe_compiled.cache_clear()
