"""The vLLM server: stock vLLM in a process of its own, behind a Unix socket in the run folder.

A socket needs no port, cannot collide with another run, and the folder's permissions guard it
(vLLM's own API keys do not cover the routes that load weights).
"""

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from rl.config.transport import VLLM_RANKS, Node, Transport
from rl.model.folder import holds_weights, linear_layers
from rl.run.child import Child, last_lines

# What requests name as their model: vLLM holds the base and the adapter under different names.
SERVED_AS: dict[Transport, str] = {"shm": "policy", "adapter": "policy-adapter"}


@dataclass(frozen=True)
class AdapterRoom:
    """What vLLM keeps free for an adapter that it has not seen yet."""

    rank: int
    layers: list[str]  # last names of those that may be adapted


def adapter_room(chosen: Transport, adapter: Node, model: Path) -> AdapterRoom | None:
    """Return the room to keep beside the model in a folder, None where no adapter is loaded.

    Only layers that are adapted get any. It saves time at every token, and an adapted head would
    break the probe: vLLM cannot give logprobs of a prompt then (vllm-project/vllm#51594).
    """
    if chosen != "adapter":
        return None
    wanted = adapter["target_modules"]
    names = linear_layers(model) if wanted == "all-linear" else wanted
    rank = next(rank for rank in VLLM_RANKS if rank >= adapter["rank"])
    return AdapterRoom(rank, sorted({name.rpartition(".")[2] for name in names}))


class ServerError(RuntimeError):
    """vLLM did not start, died, or refused a request."""


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """How vLLM is started (conf/inference).

    Attributes:
        startup_timeout: seconds until it must answer.
        cpu_kv_cache_gib: GiB for the key-value cache on CPU; on a GPU vLLM takes its share itself.
        args: further vLLM flags, passed through: `{max_num_seqs: 64}` is `--max-num-seqs 64`.

    """

    startup_timeout: float
    cpu_kv_cache_gib: int
    args: dict[str, Any]

    def command(
        self,
        model: Path,
        socket: Path,
        *,
        dtype: str,
        max_seq_len: int,
        adapter: AdapterRoom | None,
    ) -> list[str]:
        """Return the command line; `vllm serve` is avoided because the CPU build lacks it.

        `adapter` is the room for one that the trainer will push, None for whole weights.
        """
        ours: dict[str, Any] = {
            "model": model,
            "served-model-name": SERVED_AS["shm"],
            "uds": socket,
            "dtype": dtype,
            "max-model-len": max_seq_len,
            "logprobs-mode": "processed_logprobs",  # after temperature, as the policy sampled
            "enable-scale-out": True,  # token-in, token-out route
            "weight-transfer-config": f'{{"backend": "{"adapter" if adapter else "shm"}"}}',
            "enable-lora": adapter is not None,
            "max-lora-rank": adapter and adapter.rank,
            "lora-target-modules": adapter and adapter.layers,
            "disable-uvicorn-access-log": True,
        }
        if not holds_weights(model):
            ours["load-format"] = "dummy"  # the trainer initialises them and pushes before sampling
        flags: list[str] = []
        for key, value in {**ours, **self.args}.items():
            name = f"--{key.replace('_', '-')}"
            if value is True:
                flags.append(name)
            elif isinstance(value, list):
                flags += [name, *map(str, value)]
            elif value is not False and value is not None:
                flags += [name, str(value)]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]

    def environment(self, *, adapter: AdapterRoom | None) -> dict[str, str]:
        """Return what vLLM reads from the environment; `adapter` as in `command`."""
        threads = {} if has_gpu() else {"OMP_NUM_THREADS": str(_threads())}
        return {
            **threads,
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load and resume
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if adapter else "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # the model folder is local by now
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "offbyone"),
        }


def has_gpu() -> bool:
    """Whether this machine has a GPU, asked without importing torch."""
    return shutil.which("nvidia-smi") is not None


def _threads() -> int:
    """CPU threads for vLLM: as many as it would bind, one a core and one core less than there are.

    Whoever sets OMP_NUM_THREADS wins.
    """
    if asked := os.environ.get("OMP_NUM_THREADS"):
        return int(asked)
    folder = Path("/sys/devices/system/cpu")
    names = [f"cpu{i}/topology/thread_siblings_list" for i in os.sched_getaffinity(0)]
    cores = {(folder / n).read_text() if (folder / n).exists() else n for n in names}
    return max(len(cores) - 1, 1)


def connect(socket: Path, timeout: float) -> httpx.Client:
    """Return a blocking HTTP client for the server behind a Unix socket.

    Every request opens a connection of its own: the server closes those that were idle for 5 s, and
    a request that meets the closing one fails. That is a step that takes as long.
    """
    fresh = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.HTTPTransport(uds=str(socket), limits=fresh)
    return httpx.Client(transport=transport, base_url="http://vllm", timeout=timeout)


def healthy(socket: Path) -> bool:
    """True when the server answers on its socket."""
    if not socket.exists():
        return False
    try:
        with connect(socket, timeout=2.0) as client:
            return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def wait_until_healthy(
    server: Child, socket: Path, timeout: float, tick: Callable[[], None] = lambda: None
) -> None:
    """Block until the server answers, calling `tick` meanwhile.

    Raises:
        ServerError: the process ended, or the deadline passed; quotes the end of its log.

    """
    deadline = time.monotonic() + timeout
    while not healthy(socket):
        if server.returncode is not None:
            raise ServerError(
                f"vLLM ended with status {server.returncode} while starting. The end of "
                f"{server.log}:\n{last_lines(server.log)}"
            )
        if time.monotonic() > deadline:
            raise ServerError(
                f"vLLM did not answer within inference.startup_timeout={timeout:g} s. The end of "
                f"{server.log}:\n{last_lines(server.log)}"
            )
        tick()
        time.sleep(0.2)
