"""The proof of a push inside vLLM names layers and adapter matrices that are one step behind.

The last test compares the functions of NCCL that we call with vLLM's declarations.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.server]

STEP = 1e-3  # relative change of a weight: most bfloat16 weights round back to their old value


def layer(**parameters: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, value in parameters.items():
        setattr(made, name, torch.nn.Parameter(value, requires_grad=False))
    return made


class Model(torch.nn.Module):
    """A model like those of vLLM after a push: q, k and v fused, one more layer, a norm."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"]}  # noqa: RUF012 as vLLM has it

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        super().__init__()
        self.qkv = layer(weight=torch.cat([weights[f"{part}.weight"] for part in "qkv"]))
        self.out = layer(weight=weights["out.weight"].clone())
        self.norm = layer(weight=weights["norm.weight"].clone())
        for linear in (self.qkv, self.out):
            dispatch_cpu_unquantized_gemm(linear, remove_weight=True)


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


def differing(model: torch.nn.Module, sent: dict[str, torch.Tensor]) -> list[str]:
    from rl.weights.vllm_proof import compare_parameters

    return [name for name, equal in compare_parameters(model, sent) if not equal]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", [1, 5])
def test_a_layer_that_is_one_step_behind_is_named_and_no_other(dtype, step):
    last = sent = weights(dtype)
    for number in range(step):
        last, sent = sent, a_step_later(sent, number)
    assert differing(Model(sent), sent) == []
    for name, layer in (("k", "qkv"), ("out", "out"), ("norm", "norm")):
        stale = Model({**sent, f"{name}.weight": last[f"{name}.weight"]})
        assert differing(stale, sent) == [f"{layer}.weight"]


def test_if_weights_can_be_compared_a_single_difference_is_found():
    """On a GPU no layer is repacked, so a difference of one rounding in one weight is found."""
    sent = weights(torch.bfloat16)
    model = torch.nn.ModuleDict({"out": layer(weight=sent["out.weight"].clone())})
    assert differing(model, sent) == []
    model.get_parameter("out.weight").data[3, 5] *= 1 + 2**-7
    assert differing(model, sent) == ["out.weight"]


def test_a_layer_that_vllm_names_in_its_own_way_is_compared_too():
    from vllm.model_executor.models.utils import WeightsMapper

    from rl.weights.vllm_proof import as_vllm_names

    sent = weights(torch.bfloat16)
    theirs = {f"theirs.{name}": tensor for name, tensor in sent.items()}
    for factor, found in ((1, []), (1.01, ["out.weight"])):
        model = Model({**sent, "out.weight": sent["out.weight"] * factor})
        model.hf_to_vllm_mapper = WeightsMapper(
            orig_to_new_prefix={"theirs.": ""}, orig_to_new_stacked={".q": (".qkv", "q")}
        )
        assert differing(model, as_vllm_names(model, theirs)) == found


def experts(w13: torch.Tensor, w2: torch.Tensor) -> torch.nn.Module:
    """Return fused experts as vLLM holds them on a CPU: repacked, in a layer of the runner's."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    kernel = object.__new__(CPUUnquantizedExperts)
    kernel.moe_config = SimpleNamespace(intermediate_size_per_partition=32, activation="silu")
    packed = {"w13_weight": w13, "w2_weight": w2}
    fused = layer(**{name: cpu_prepack_moe_weight(w, "vec") for name, w in packed.items()})
    fused.moe_config = kernel.moe_config
    fused.quant_method = SimpleNamespace(
        unquantized_backend=UnquantizedMoeBackend.CPU,
        moe_kernel=SimpleNamespace(fused_experts=kernel),
    )
    return torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"routed_experts": fused})})


def test_an_expert_that_is_one_step_behind_is_found_in_the_fused_weights():
    w13, w2 = torch.randn(3, 64, 32).bfloat16(), torch.randn(3, 32, 32).bfloat16()
    sent = {"experts.gate_up_proj": w13, "experts.down_proj": w2}
    assert differing(experts(w13, w2), sent) == []
    stale = w2.clone()
    stale[1, 5, 7] *= 1 + 2**-7
    assert differing(experts(w13, stale), sent) == ["experts.routed_experts.w2_weight"]
    unpacked = experts(w13, w2)  # as after a reload by vLLM 0.32
    unpacked.get_parameter("experts.routed_experts.w13_weight").data.copy_(w13)
    assert differing(unpacked, sent) == ["experts.routed_experts.w13_weight"]
    assert len(differing(experts(w13, w2), {})) == 2  # no weight has a known name


def test_a_tied_head_and_a_fused_bias_are_compared_under_the_names_that_were_sent():
    leaves = ("weight", "bias")
    sent = {f"{part}.weight": torch.randn(4, 4) for part in "qkv"}
    sent |= {f"{part}.bias": torch.randn(4) for part in "qkv"}
    sent["embed.weight"] = torch.randn(8, 4)
    padded = torch.cat([sent["embed.weight"], torch.zeros(2, 4)])  # as vLLM pads a vocabulary
    fused = {leaf: torch.cat([sent[f"{part}.{leaf}"] for part in "qkv"]) for leaf in leaves}
    parts = {"embed": layer(weight=padded), "lm_head": layer(), "qkv": layer(**fused)}
    parts["lm_head"].weight = parts["embed"].weight
    model = torch.nn.ModuleDict(parts)
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
    assert differing(model, sent) == []
    model.get_parameter("qkv.bias").data[9] += 1
    assert differing(model, sent) == ["qkv.bias"]


def updated_engine(monkeypatch, received, held=None):
    """Return an engine of ours before it finishes an update of a model that holds `held`."""
    from rl.weights import vllm_plugin

    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(vllm_plugin, name, lambda *_: None)  # they need vLLM's own models
    engine = object.__new__(vllm_plugin.WholeWeightsEngine)
    engine.model, engine.model_config = Model(held or received), None
    engine.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    engine._received = received
    return engine


def test_an_update_with_a_stale_or_unknown_parameter_is_refused_before_it_is_finished(monkeypatch):
    from rl.weights import vllm_plugin

    sent = weights(torch.bfloat16)
    later = a_step_later(sent, 0)
    engine = updated_engine(monkeypatch, later, sent)
    said = r"pushed weights in \['norm.weight', 'out.weight', 'qkv.weight'\]"
    with pytest.raises(RuntimeError, match=said):
        engine.finish_weight_update()
    engine.parallel_config.tensor_parallel_size = 2  # each worker holds a part of a parameter
    engine.finish_weight_update()
    monkeypatch.setattr(vllm_plugin, "finalize_layerwise_reload", pytest.fail)
    engine.finish_weight_update()  # nothing was received since
    engine = updated_engine(monkeypatch, sent)
    engine.model.scale = torch.nn.Parameter(torch.ones(3))
    engine._loaded = {"scale"}
    engine.finish_weight_update()
    engine._loaded, engine._received = {"qkv.weight"}, sent
    with pytest.raises(RuntimeError, match=r"pushed weights in \['scale'\]"):
        engine.finish_weight_update()


def test_a_parameter_that_shares_memory_with_the_push_is_named():
    from rl.weights.vllm_proof import parameters_sharing_memory

    sent = weights(torch.float32)
    model = Model(sent)
    assert list(parameters_sharing_memory(model, sent)) == []
    model.norm.weight = torch.nn.Parameter(sent["norm.weight"][:], requires_grad=False)
    assert list(parameters_sharing_memory(model, sent)) == ["norm.weight"]


def test_an_adapter_matrix_that_differs_from_the_sent_one_is_named():
    from vllm.lora.peft_helper import PEFTHelper

    from rl.weights.vllm_proof import adapted_layers_that_differ

    form = PEFTHelper(r=2, lora_alpha=6, target_modules=["q", "v", "o"])
    sent = {(n, a): torch.randn(2, 5) if a else torch.randn(4, 2) for n in "qvo" for a in (0, 1)}

    def layer_of(*parts):  # two slots of rank 8, of which the second is in use
        layer = SimpleNamespace()
        for a, stack in ((1, "lora_a_stacked"), (0, "lora_b_stacked")):
            tensors = [torch.zeros(2, 1, *((8, 5) if a else (4, 8))) for _ in parts]
            for tensor, part in zip(tensors, parts, strict=True):
                rows, columns = sent[part, a].shape
                tensor[1, 0, :rows, :columns] = sent[part, a] * (1 if a else 3)
            setattr(layer, stack, tuple(tensors))
        return layer

    manager = SimpleNamespace(
        modules={"qv": layer_of("q", "v"), "o": layer_of("o")}, packed_modules={"qv": ["q", "v"]}
    )

    def wrong(slot=1):
        return sorted(set(adapted_layers_that_differ(manager, slot, sent, form)))

    assert wrong() == []
    assert wrong(slot=0) == ["o", "q", "v"]
    manager.modules["qv"].lora_b_stacked[1][1, 0, 3, 1] += 1e-3
    assert wrong() == ["v"]
    del manager.modules["o"]
    assert wrong() == ["o", "v"]


def test_the_functions_of_nccl_are_declared_as_in_vllm():
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclDataTypeEnum

    from rl.weights import nccl

    def plain(kind):
        is_id = getattr(kind, "__name__", "").endswith("niqueId")
        return (ctypes.sizeof(kind), [*kind._fields_]) if is_id else kind

    theirs = {one.name: one for one in NCCLLibrary.exported_functions}
    for name, ours in nccl.ARGUMENTS.items():
        assert [plain(kind) for kind in ours] == [plain(kind) for kind in theirs[name].argtypes]
        assert theirs[name].restype is ctypes.c_int  # as CDLL assumes
    assert ncclDataTypeEnum.from_torch(torch.uint8) == nccl.UINT8
