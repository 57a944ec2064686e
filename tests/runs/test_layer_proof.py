"""The proof of a push inside vLLM names layers and adapter matrices that are one step behind.

The last test compares the functions of NCCL that we call with vLLM's declarations.
"""

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from rl.inference.server import STARTED_BY_RUN

pytestmark = [pytest.mark.server]

STEP = 1e-3  # relative change of a weight: most bfloat16 weights round back to their old value


class Model(torch.nn.Module):
    """A model like those of vLLM after a push: q, k and v fused, one more layer, a norm."""

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
    layer = torch.nn.Linear(64, 128, bias=False).bfloat16()
    layer.weight.data.copy_(sent["out.weight"])
    model = torch.nn.ModuleDict({"out": layer})
    assert differing(model, sent) == []
    layer.weight.data[3, 5] *= 1 + 2**-7
    assert differing(model, sent) == ["out.weight"]


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
    assert differing(model, named) == (["out.weight"] if behind else [])


def test_the_log_names_the_parameters_that_cannot_be_compared():
    from rl.weights.vllm_proof import compare_parameters, coverage_line

    sent = weights(torch.bfloat16)
    whole = dict(compare_parameters(Model(sent), sent))
    assert coverage_line(whole) == "3 of 3 parameters are compared with what was sent"
    del sent["out.weight"]  # as if it had an unknown name
    part = dict(compare_parameters(Model(weights(torch.bfloat16)), sent))
    assert part == {"qkv.weight": True, "out.weight": None, "norm.weight": True}
    expected = "2 of 3 parameters are compared with what was sent; not compared: out.weight"
    assert coverage_line(part) == expected


def experts(w13: torch.Tensor, w2: torch.Tensor) -> torch.nn.Module:
    """Return fused experts as vLLM holds them on a CPU: repacked, in a layer of the runner's."""
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    kernel = object.__new__(CPUUnquantizedExperts)
    kernel.moe_config = SimpleNamespace(intermediate_size_per_partition=32, activation="silu")
    layer = torch.nn.Module()
    for name, weight in (("w13_weight", w13), ("w2_weight", w2)):
        packed = cpu_prepack_moe_weight(weight, "vec")
        setattr(layer, name, torch.nn.Parameter(packed, requires_grad=False))
    layer.moe_config = kernel.moe_config
    layer.quant_method = SimpleNamespace(
        unquantized_backend=UnquantizedMoeBackend.CPU,
        moe_kernel=SimpleNamespace(fused_experts=kernel),
    )
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.routed_experts = layer
    return model


def test_an_expert_that_is_one_step_behind_is_found_in_the_fused_weights():
    w13, w2 = torch.randn(3, 64, 32).bfloat16(), torch.randn(3, 32, 32).bfloat16()
    sent = {"experts.gate_up_proj": w13, "experts.down_proj": w2}
    assert differing(experts(w13, w2), sent) == []
    stale = w2.clone()
    stale[1, 5, 7] *= 1 + 2**-7
    assert differing(experts(w13, stale), sent) == ["experts.routed_experts.w2_weight"]
    unpacked = experts(w13, w2)
    unpacked.get_parameter("experts.routed_experts.w13_weight").data.copy_(
        w13
    )  # as after a reload by vLLM 0.32
    assert differing(unpacked, sent) == ["experts.routed_experts.w13_weight"]
    assert len(differing(experts(w13, w2), {})) == 2  # no weight has a known name


def test_a_tied_head_and_a_fused_bias_are_compared_under_the_names_that_were_sent():
    sent = {"embed.weight": torch.randn(8, 4)}
    sent |= {f"{part}.{leaf}": torch.randn(4, *size) for part in "qkv" for leaf, size in LEAVES}
    model = torch.nn.Module()
    model.packed_modules_mapping = {"qkv": ["q", "k", "v"]}
    model.embed, model.lm_head, model.qkv = (torch.nn.Module() for _ in range(3))
    padded = torch.cat([sent["embed.weight"], torch.zeros(2, 4)])  # as vLLM pads a vocabulary
    model.embed.weight = torch.nn.Parameter(padded)
    model.lm_head.weight = model.embed.weight
    for leaf, _ in LEAVES:
        fused = torch.cat([sent[f"{part}.{leaf}"] for part in "qkv"])
        setattr(model.qkv, leaf, torch.nn.Parameter(fused))
    assert differing(model, sent) == []
    model.get_parameter("qkv.bias").data[9] += 1
    assert differing(model, sent) == ["qkv.bias"]


LEAVES = (("weight", (4,)), ("bias", ()))


def test_a_parameter_that_was_neither_compared_nor_loaded_ends_the_push(monkeypatch):
    engine = updated_engine(monkeypatch, weights(torch.float32))
    engine.model.scale = torch.nn.Parameter(torch.ones(3))
    engine._loaded = {"scale"}
    received = engine._received
    engine.finish_weight_update()
    engine._loaded, engine._received = {"qkv.weight"}, received
    with pytest.raises(RuntimeError, match=r"pushed weights in \['scale'\]"):
        engine.finish_weight_update()


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


@pytest.mark.parametrize("behind", [False, True])
def test_an_update_with_a_stale_layer_is_refused_before_it_is_finished(behind, monkeypatch):
    from rl.weights import vllm_plugin

    sent = weights(torch.bfloat16)
    received = a_step_later(sent, 0) if behind else sent
    engine = updated_engine(monkeypatch, received, sent)
    if behind:
        with pytest.raises(
            RuntimeError, match=r"pushed weights in \['norm.weight', 'out.weight', 'qkv.weight'\]"
        ):
            engine.finish_weight_update()
    else:
        engine.finish_weight_update()
        monkeypatch.setattr(vllm_plugin, "finalize_layerwise_reload", pytest.fail)
        engine.finish_weight_update()  # nothing was received since
    engine = updated_engine(monkeypatch, received, sent)
    engine.parallel_config.tensor_parallel_size = 2  # each worker holds a part of a parameter
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
    names = ["q", "v", "o"]
    sent = {(n, a): torch.randn(2, 5) if a else torch.randn(4, 2) for n in names for a in (0, 1)}

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
    assert wrong(slot=0) == sorted(names)
    manager.modules["qv"].lora_b_stacked[1][1, 0, 3, 1] += 1e-3
    assert wrong() == ["v"]
    del manager.modules["o"]
    assert wrong() == ["o", "v"]


def test_a_vllm_that_no_run_started_starts_as_without_our_plugin(monkeypatch):
    from vllm.platforms import current_platform

    from rl.inference.quick_start import patch_cpu_start

    platform, name = type(current_platform), "check_and_update_config"
    before = vars(platform)[name]
    monkeypatch.setattr(platform, name, before)  # restores it after the test
    monkeypatch.delenv(STARTED_BY_RUN, raising=False)
    patch_cpu_start()
    assert vars(platform)[name] is before
    monkeypatch.setenv(STARTED_BY_RUN, "1")
    patch_cpu_start()
    assert (vars(platform)[name] is not before) == current_platform.is_cpu()
    monkeypatch.setattr(platform, name, staticmethod(lambda config: None))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    patch_cpu_start()
    for world_size, backend in ((1, "uni"), (2, "mp")):  # several workers need processes
        parallel = SimpleNamespace(world_size=world_size, distributed_executor_backend="mp")
        config = SimpleNamespace(parallel_config=parallel, model_config=None)
        getattr(platform, name)(config)
        changed = parallel.distributed_executor_backend
        assert changed == (backend if current_platform.is_cpu() else "mp")


@pytest.mark.parametrize("is_ours", [True, False])
def test_vllm_of_a_run_imports_from_the_working_folder_after_all_libraries(
    is_ours, monkeypatch, tmp_path
):
    from rl.weights import vllm_plugin

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(vllm_plugin, "patch_cpu_start", lambda: None)
    monkeypatch.setattr(vllm_plugin.WeightTransferEngineFactory, "_registry", {})
    monkeypatch.delenv(STARTED_BY_RUN, raising=False)
    if is_ours:
        monkeypatch.setenv(STARTED_BY_RUN, "1")
    vllm_plugin.register()
    assert (sys.path[-1] == str(tmp_path)) == is_ours


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
