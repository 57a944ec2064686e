"""The vLLM server: stock vLLM in a process of its own, behind a Unix socket in the run folder.

A socket needs no port, cannot collide with another run, and the folder's permissions guard it
(vLLM's own API keys do not cover the routes that load weights).
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rl.config.transport import VLLM_RANKS, Node, Transport
from rl.inference.routes import VLLMRoutes, wait_until_healthy
from rl.model.folder import holds_weights, linear_layers
from rl.run.child import Child, Reaper, last_lines
from rl.run.devices import core_of, visible_cores, visible_gpus
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder

_ENDING_S = 0.2  # from the end of its connections to that of the process
# What requests name as their model: vLLM holds the base and the adapter under different names.
SERVED_AS: dict[Transport, str] = {
    **dict.fromkeys(("shm", "disk", "gloo"), "policy"),
    "adapter": "policy-adapter",
}


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
    targets = adapter["target_modules"]
    names = linear_layers(model) if targets == "all-linear" else targets
    rank = next(rank for rank in VLLM_RANKS if rank >= adapter["rank"])
    return AdapterRoom(rank, sorted({name.rpartition(".")[2] for name in names}))


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """How vLLM is started (conf/inference).

    Attributes:
        startup_timeout: seconds until it must answer.
        devices: GPUs that it may use; rl/placement shares them out.
        tensor_parallel_size: GPUs, or processes on CPU, of one vLLM.
        cpu_kv_cache_gib: GiB for the key-value cache on CPU; on a GPU vLLM takes its share itself.
        args: further vLLM flags, passed through: `{max_num_seqs: 64}` is `--max-num-seqs 64`.

    """

    starts_vllm: ClassVar[bool] = True  # so `args` are vLLM's flags

    startup_timeout: float
    devices: list[int | str] | None
    tensor_parallel_size: int
    cpu_kv_cache_gib: int | None
    args: dict[str, Any]

    def command(
        self,
        model: Path,
        socket: Path,
        *,
        dtype: str,
        max_seq_len: int,
        seed: int,
        adapter: AdapterRoom | None,
        head_dtype: str | None = None,
    ) -> list[str]:
        """Return the command line; `vllm serve` is avoided because the CPU build lacks it.

        `seed` is what tokens are drawn with; without one every vLLM draws the same.
        `adapter` is the room for one that the trainer will push, None for whole weights.
        `head_dtype` is what the output head computes in, if not in `dtype`.
        """
        options: dict[str, Any] = {
            "model": model,
            "served-model-name": SERVED_AS["shm"],
            "uds": socket,
            "dtype": dtype,
            "hf-overrides": head_dtype and json.dumps({"head_dtype": head_dtype}),
            "max-model-len": max_seq_len,
            "seed": seed,
            "tensor-parallel-size": self.tensor_parallel_size,
            "logprobs-mode": "processed_logprobs",  # after temperature, as the policy sampled
            "enable-scale-out": True,  # token-in, token-out route
            "weight-transfer-config": f'{{"backend": "{"adapter" if adapter else "whole"}"}}',
            "enable-lora": adapter is not None,
            "max-lora-rank": adapter and adapter.rank,
            "lora-target-modules": adapter and adapter.layers,
            "disable-uvicorn-access-log": True,
        }
        if not holds_weights(model):
            # The trainer initialises them, and pushes before anything is sampled.
            options["load-format"] = "dummy"
        flags: list[str] = []
        for key, value in {**options, **self.args}.items():
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
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib or 1),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # the model folder is local by now
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "offbyone"),
        }


def with_seeds(server: VLLMServer, seeded: bool) -> VLLMServer:
    """Return the server, ready for requests that bring a seed of their own where they do.

    On CPU vLLM 0.32 ends with "CPU Generator does not use offset" as soon as it takes the prompt of
    such a request in two pieces; and a prompt in one piece is rounded the same way every time.
    """
    if not seeded or has_gpu():
        return server
    return replace(server, args={"no_enable_chunked_prefill": True, **server.args})


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether there is a GPU for us."""
    return bool(visible_gpus(devices))


def _threads() -> int:
    """CPU threads for vLLM: as many as it would bind, one a core and one core less than there are.

    Whoever sets OMP_NUM_THREADS wins.
    """
    if num_threads := os.environ.get("OMP_NUM_THREADS"):
        return int(num_threads)
    return max(len({core_of(cpu) for cpu in visible_cores()}) - 1, 1)


def vllm_child(
    server: VLLMServer,
    run_folder: RunFolder,
    reaper: Reaper,
    *,
    dtype: str,
    max_seq_len: int,
    seed: int,
    adapter: AdapterRoom | None,
    head_dtype: str | None = None,
    place: Mapping[str, str] | None = None,
) -> Child:
    """Return vLLM for the model of a run folder, not yet started; it listens on the run's socket.

    `place`: its environment where it runs; `dtype` and so on as in `VLLMServer.command`.
    """
    command = server.command(
        run_folder.model(),
        run_folder.vllm_socket,
        dtype=dtype,
        max_seq_len=max_seq_len,
        seed=seed,
        adapter=adapter,
        head_dtype=head_dtype,
    )
    log = run_folder.log_of("inference")
    env = {**run_folder.environment(), **server.environment(adapter=adapter), **(place or {})}
    return Child("inference", command, log=log, reaper=reaper, env=env)


@contextmanager
def serving(
    server: VLLMServer,
    run_folder: RunFolder,
    *,
    dtype: str,
    max_seq_len: int,
    seed: int,
    adapter: AdapterRoom | None,
    head_dtype: str | None = None,
) -> Iterator[VLLMRoutes]:
    """Serve the model of a run folder for as long as the block lasts; yield its routes.

    Raises:
        RunFailed: it did not start, or it ended during the block; quotes the end of its log.

    """
    run_folder.make_sockets_folder()
    with ExitStack() as stack:
        stack.callback(run_folder.clear_sockets)
        child = vllm_child(
            server,
            run_folder,
            stack.enter_context(Reaper()),
            dtype=dtype,
            max_seq_len=max_seq_len,
            seed=seed,
            adapter=adapter,
            head_dtype=head_dtype,
        )
        stack.enter_context(child)

        def look() -> None:
            if child.returncode is not None:
                raise RunFailed(
                    f"vLLM ended with status {child.returncode}. The end of {child.log}:\n"
                    f"{last_lines(child.log)}"
                )

        socket, timeout = run_folder.vllm_socket, server.startup_timeout
        wait_until_healthy(socket, timeout, look)
        routes = VLLMRoutes(socket, timeout=timeout, limit="inference.startup_timeout")
        try:
            yield stack.enter_context(routes)
        except Exception:
            time.sleep(_ENDING_S)
            look()  # where it has ended, that is the reason and the rest its consequence
            raise
        look()  # a few failed requests cost no more than their rollouts, so nobody may have said so
