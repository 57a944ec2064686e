"""Inside vLLM: a layer that is one step behind is named, with the kernels that vLLM computes by."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.server]

STEP = 1e-3  # of a weight's own size: most bfloat16 weights round back to where they were


class Model(torch.nn.Module):
    """q, k and v fused, one more layer, a norm; like those of vLLM after their weights came."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"]}  # noqa: RUF012 as vLLM has it

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        fused = torch.cat([weights[f"{part}.weight"] for part in "qkv"])
        for name, weight in (("qkv", fused), ("out", weights["out.weight"])):
            self.add_module(name, linear(weight))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(weights["norm.weight"].clone(), requires_grad=False)


def linear(weight: torch.Tensor) -> torch.nn.Module:
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"q": (64, 128), "k": (32, 128), "v": (32, 128), "out": (128, 64), "norm": (4096,)}
    return {
        f"{name}.weight": (0.08 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }


def a_step_later(sent: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    return {
        name: (t.float() * (1 + STEP * torch.randn(t.shape, generator=generator))).to(t.dtype)
        for name, t in sent.items()
    }


def layers_that_differ(model: torch.nn.Module, sent: dict[str, torch.Tensor]) -> list[str]:
    from rl.weights.vllm_proof import compared_layers

    return [name for name, equal in compared_layers(model, sent) if not equal]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", [1, 5])
def test_a_layer_that_is_one_step_behind_is_named_and_no_other(dtype, step):
    last = sent = weights(dtype)
    for number in range(step):
        last, sent = sent, a_step_later(sent, number)
    assert layers_that_differ(Model(sent), sent) == []
    for name, layer in (("k", "qkv"), ("out", "out"), ("norm", "norm")):
        stale = Model({**sent, f"{name}.weight": last[f"{name}.weight"]})
        assert layers_that_differ(stale, sent) == [layer]


def test_where_the_weights_can_be_looked_at_each_of_them_counts():
    """A GPU's layers: nothing is repacked, so one weight by one rounding is seen."""
    sent = weights(torch.bfloat16)
    layer = torch.nn.Linear(64, 128, bias=False).bfloat16()
    layer.weight.data.copy_(sent["out.weight"])
    model = torch.nn.ModuleDict({"out": layer})
    assert layers_that_differ(model, sent) == []
    layer.weight.data[3, 5] *= 1 + 2**-7
    assert layers_that_differ(model, sent) == ["out"]


@pytest.mark.parametrize("behind", [False, True])
def test_a_layer_that_vllm_names_in_its_own_way_is_compared_too(behind):
    from vllm.model_executor.models.utils import WeightsMapper

    from rl.weights.vllm_proof import as_vllm_names

    sent = weights(torch.bfloat16)
    model = Model({**sent, "out.weight": sent["out.weight"] * 1.01} if behind else sent)
    model.hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"theirs.": ""}, orig_to_new_stacked={".q": (".qkv", "q")}
    )
    theirs = {f"theirs.{name}": tensor for name, tensor in sent.items()}
    named = as_vllm_names(model, theirs)
    assert layers_that_differ(model, named) == (["out"] if behind else [])


def test_the_log_says_of_how_many_layers_nothing_is_known():
    from rl.weights.vllm_proof import compared_layers, coverage

    sent = weights(torch.bfloat16)
    whole = dict(compared_layers(Model(sent), sent))
    assert coverage(whole) == "3 of 3 layers are compared with what was sent"
    del sent["out.weight"]  # it came under a name that nobody knows
    part = dict(compared_layers(Model(weights(torch.bfloat16)), sent))
    assert part == {"qkv": True, "out": None, "norm": True}
    expected = "2 of 3 layers are compared with what was sent; nothing is known of out"
    assert coverage(part) == expected


@pytest.mark.parametrize("behind", [False, True])
def test_an_update_with_a_stale_layer_is_refused_before_it_is_finished(behind, monkeypatch):
    from rl.weights import vllm_plugin

    sent = weights(torch.bfloat16)
    received = a_step_later(sent, 0) if behind else sent
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(vllm_plugin, name, lambda *_: None)  # vLLM's own, for its own models
    engine = object.__new__(vllm_plugin.WholeWeightsEngine)
    engine.model, engine.model_config = Model(sent), None
    engine.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    engine._received = received
    if behind:
        with pytest.raises(RuntimeError, match=r"other weights in \['norm', 'out', 'qkv'\]"):
            engine.finish_weight_update()
    else:
        engine.finish_weight_update()


def test_a_parameter_in_the_memory_of_the_push_is_named():
    from rl.weights.vllm_proof import layers_that_share

    sent = weights(torch.float32)
    model = Model(sent)
    assert list(layers_that_share(model, sent)) == []
    model.norm.weight = torch.nn.Parameter(sent["norm.weight"][:], requires_grad=False)
    assert list(layers_that_share(model, sent)) == ["norm.weight"]
