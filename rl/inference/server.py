"""The vLLM server: stock vLLM in a process of its own, behind a Unix socket in the run folder.

A socket needs no port, cannot collide with another run, and the folder's permissions guard it.
Behind a TCP port every route asks for the run's key (key_guard.py), for vLLM's own API keys do not
cover those that load weights.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl.config.transport import VLLM_RANKS, Node, Transport
from rl.inference.key_guard import GUARD, KEY_FILE
from rl.inference.replica import Replica
from rl.inference.routes import VLLMRoutes, wait_until_healthy
from rl.model.folder import holds_weights, linear_layers
from rl.model.shape import shape_of
from rl.run.address import Address
from rl.run.child import Child, Reaper, ending, last_lines
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
        replicas: how many of it; None: as many as rl/placement finds room for.
        listen: behind a Unix socket, or a port of the loopback interface.
        startup_timeout: seconds until it must answer.
        devices: GPUs that it may use; rl/placement shares them out.
        tensor_parallel_size: GPUs, or processes on CPU, of one vLLM.
        cpu_kv_cache_gib: GiB for the key-value cache on CPU; on a GPU vLLM takes its share itself.
        args: further vLLM flags, passed through: `{max_num_seqs: 64}` is `--max-num-seqs 64`.

    """

    starts_vllm: ClassVar[bool] = True  # so `args` are vLLM's flags

    replicas: int | None
    listen: Literal["unix", "tcp"]
    startup_timeout: float
    devices: list[int | str] | None
    tensor_parallel_size: int
    cpu_kv_cache_gib: int | None
    args: dict[str, Any]

    def command(
        self,
        model: Path,
        address: Address,
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
            **_listening(address),
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

    def environment(
        self, *, adapter: AdapterRoom | None, key_file: Path | None = None
    ) -> dict[str, str]:
        """Return what vLLM reads from the environment; `adapter` as in `command`.

        `key_file` holds what its routes ask for where it listens on a port.
        """
        return {
            **({KEY_FILE: str(key_file)} if key_file else {}),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, load and resume
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if adapter else "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib or 1),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # the model folder is local by now
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "offbyone"),
        }


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether there is a GPU for us."""
    return bool(visible_gpus(devices))


def _all_cores() -> dict[str, str]:
    """CPU threads for vLLM: as many as it would bind, one a core and one core less than there are.

    Whoever sets OMP_NUM_THREADS wins. A GPU needs none.
    """
    if has_gpu() or os.environ.get("OMP_NUM_THREADS"):
        return {}
    num_cores = len({core_of(cpu) for cpu in visible_cores()})
    return {"OMP_NUM_THREADS": str(max(num_cores - 1, 1))}


def _listening(address: Address) -> dict[str, Any]:
    """The flags that say where to listen, and on a port that a key is asked for."""
    if address.path:
        return {"uds": address.path}
    return {"host": address.host, "port": address.port, "middleware": GUARD}


def vllm_process(
    server: VLLMServer,
    run_folder: RunFolder,
    replica: Replica,
    *,
    dtype: str,
    max_seq_len: int,
    seed: int,
    adapter: AdapterRoom | None,
    head_dtype: str | None = None,
    place: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a vLLM for the model of a run folder, and its environment.

    `replica` says where it listens, `place` what its environment is there, if it is not to have
    all of this machine; `dtype` and so on as in `VLLMServer.command`.
    """
    model = run_folder.model()
    if server.cpu_kv_cache_gib is None and (sizes := shape_of(model)):
        server = replace(server, cpu_kv_cache_gib=sizes.cache_gib(max_seq_len, dtype))
    command = server.command(
        model,
        replica.address,
        dtype=dtype,
        max_seq_len=max_seq_len,
        seed=seed,
        adapter=adapter,
        head_dtype=head_dtype,
    )
    key_file = None if replica.address.path else run_folder.private.key
    ours = server.environment(adapter=adapter, key_file=key_file)
    return command, {**run_folder.private.environment(), **ours, **(place or _all_cores())}


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
    """Serve the model of a run folder, on its socket, for as long as the block lasts.

    Yields its routes.

    Raises:
        RunFailed: it did not start, or it ended during the block; quotes the end of its log.

    """
    run_folder.private.make()
    replica = only_replica(run_folder)
    with ExitStack() as stack:
        stack.callback(run_folder.private.clear)
        command, env = vllm_process(
            server,
            run_folder,
            replica,
            dtype=dtype,
            max_seq_len=max_seq_len,
            seed=seed,
            adapter=adapter,
            head_dtype=head_dtype,
        )
        reaper, log = stack.enter_context(Reaper()), run_folder.log_of(replica.name)
        child = Child(replica.name, command, log=log, reaper=reaper, env=env)
        stack.enter_context(child)

        def look() -> None:
            if child.returncode is not None:
                raise RunFailed(
                    f"vLLM {ending(child.returncode)}. The end of {child.log}:\n"
                    f"{last_lines(child.log)}"
                )

        timeout = server.startup_timeout
        wait_until_healthy(replica, timeout, look)
        routes = VLLMRoutes(replica, timeout=timeout, limit="inference.startup_timeout")
        try:
            yield stack.enter_context(routes)
        except Exception:
            time.sleep(_ENDING_S)
            look()  # where it has ended, that is the reason and the rest its consequence
            raise
        look()  # a few failed requests cost no more than their rollouts, so nobody may have said so


def only_replica(run_folder: RunFolder) -> Replica:
    """Return the vLLM of a folder that has one, on its Unix socket."""
    return Replica("inference", Address(path=run_folder.private.vllm_socket))
