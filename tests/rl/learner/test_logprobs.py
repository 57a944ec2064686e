"""Logprobs in chunks are those of one log_softmax over all logits; N tokens, V words."""

from contextlib import nullcontext
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
from rl.model.loading import compile_layers, enable_gradient_checkpointing, load_model
from tests.support import tiny_policy

torch.set_num_threads(1)

VOCAB, HIDDEN = 320, 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_policy.model_folder(tmp_path_factory.mktemp("logprobs") / "model")


@pytest.fixture(scope="module")
def model(folder):
    """With a bias in the output head, which no model of ours has."""
    model = tiny_policy.exact_model(folder)
    bias = torch.linspace(-1.0, 1.0, VOCAB, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias)
    return model


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


@pytest.mark.parametrize(("temperature", "entropy_gradient"), [(1.0, False), (0.6, True)])
@pytest.mark.parametrize(("chunk", "extra"), [(1, 0), (4, 3), (7, 0), (1000, 11)])
def test_logprobs_entropies_and_gradients_are_those_of_plain_log_softmax(
    model, rows, chunk, extra, temperature, entropy_gradient
):
    token_ids, mask = stacked(rows, extra)
    module = PolicyModule(model, chunk=chunk, entropy_gradient=entropy_gradient)
    found = module(token_ids, mask, temperature, entropies=True)
    expected = plain(model, rows, temperature)
    assert len(expected[0]) == mask.sum() > 10
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[1].requires_grad == entropy_gradient
    weights = torch.linspace(-1.0, 2.0, len(expected[0]), dtype=torch.float64)
    ours, theirs = (
        gradients(model, (weights * logprobs - entropy_gradient * 0.3 * entropies).sum())
        for logprobs, entropies in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert ours["lm_head.bias"].abs().max() > 0.01
    if entropy_gradient:
        alone = gradients(model, (weights * plain(model, rows, temperature)[0]).sum())
        assert max(float((ours[name] - alone[name]).abs().max()) for name in ours) > 0.01


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


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "options", "is_plain"),
    [
        ("granite", {"logits_scaling": 8.0}, False),
        ("granite", {"logits_scaling": 1.0}, True),
        ("cohere", {"logit_scale": 0.0625}, False),
        ("gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}, False),
        ("gemma2", {"final_logit_softcapping": None, "head_dim": 8}, True),
        ("minicpm3", {}, False),  # it scales the hidden states instead
        ("glm4_moe", {"moe_intermediate_size": 16, "output_router_logits": True}, True),
        ("opt", {"word_embed_proj_dim": 16, "ffn_dim": 64}, True),  # the head is narrower
        ("qwen3_next", {"linear_num_value_heads": 32}, True),
    ],
)
def test_a_model_that_changes_its_logits_after_the_head_is_refused(kind, options, is_plain):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    with nullcontext() if is_plain else pytest.raises(ValueError, match="CausalLM are not the out"):
        module = PolicyModule(model.eval().bfloat16(), chunk=4)
        token_ids, mask = torch.arange(1, 9)[None], torch.arange(8)[None] > 0
        expected = model(token_ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = expected.gather(-1, token_ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(module(token_ids, mask, 1.0)[0], expected, rtol=0.02, atol=0.02)


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
            enable_gradient_checkpointing(model)
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
