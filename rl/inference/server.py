"""The vLLM server: stock vLLM in a process of its own, behind a Unix socket in the run folder.

A socket needs no port, cannot collide with another run, and the folder's permissions protect it.
Behind a TCP port every route asks for the run's key (key_guard.py), because vLLM's own API keys do
not cover the routes that load weights.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl.config.build import build
from rl.config.ranges import PositiveFloat, PositiveInt
from rl.config.schema import Run
from rl.config.transport import VLLM_RANKS
from rl.inference.key_guard import GUARD, KEY_FILE
from rl.inference.replica import Replica
from rl.inference.routes import VLLMRoutes, wait_until_healthy
from rl.model.folder import holds_weights, linear_layers
from rl.model.shape import shape_of
from rl.runtime.child import Child, Reaper, ending, last_lines
from rl.runtime.devices import core_of, visible_cores, visible_gpus
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address

_ENDING_S = 0.2  # from the end of its connections to that of the process
# The model name in requests, by whether the trainer pushes the adapter alone: vLLM holds the base
# and the adapter under different names.
SERVED_AS = {False: "policy", True: "policy-adapter"}


@dataclass(frozen=True)
class AdapterLimits:
    """The largest adapter that vLLM can load; it reserves the memory when it starts."""

    rank: int
    layers: list[str]  # last names of the layers that may be adapted


def adapter_limits(rank: int, targets: str | Sequence[str], model: Path) -> AdapterLimits:
    """Return the smallest limits of vLLM that fit an adapter of the model in a folder.

    Only adapted layers get memory, which saves time at every token. An adapted head would also
    break the probe, because vLLM then returns no prompt logprobs (vllm-project/vllm#51594).
    """
    names = linear_layers(model) if targets == "all-linear" else targets
    allowed = next(allowed for allowed in VLLM_RANKS if allowed >= rank)
    return AdapterLimits(allowed, sorted({name.rpartition(".")[2] for name in names}))


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    """What vLLM must know of the policy."""

    dtype: str
    max_seq_len: int  # tokens of the longest row
    seed: int  # of the sampling; without one every vLLM draws the same tokens
    adapter: AdapterLimits | None = None  # of a pushed adapter; None for whole weights
    head_dtype: str | None = None  # of the output head, if it differs


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """How vLLM is started (conf/inference/vllm.yaml explains each key)."""

    replicas: PositiveInt | None
    listen: Literal["unix", "tcp"]
    startup_timeout: PositiveFloat
    devices: list[int | str] | None
    tensor_parallel_size: PositiveInt
    cpu_kv_cache_gib: PositiveInt | None
    args: dict[str, Any]

    def command(
        self,
        model: Path,
        address: Address,
        *,
        dtype: str,
        max_seq_len: int,
        seed: int,
        adapter: AdapterLimits | None,
        head_dtype: str | None = None,
    ) -> list[str]:
        """Return the command line for a model folder; the keywords are those of ServedPolicy.

        It does not use `vllm serve`, because the CPU build lacks that command.
        """
        options: dict[str, Any] = {
            "model": model,
            "served-model-name": SERVED_AS[False],
            **_listening(address),
            "dtype": dtype,
            "hf-overrides": head_dtype and json.dumps({"head_dtype": head_dtype}),
            "max-model-len": max_seq_len,
            "seed": seed,
            "tensor-parallel-size": self.tensor_parallel_size,
            "logprobs-mode": "processed_logprobs",  # after temperature, as the policy sampled
            "enable-scale-out": True,  # the route with token ids in both directions
            "weight-transfer-config": f'{{"backend": "{"adapter" if adapter else "whole"}"}}',
            "enable-lora": adapter is not None,
            "max-lora-rank": adapter and adapter.rank,
            "lora-target-modules": adapter and adapter.layers,
            "disable-uvicorn-access-log": True,
        }
        if not holds_weights(model):
            # The trainer initialises the weights, and pushes them before anything is sampled.
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
        self, *, adapter: AdapterLimits | None, key_file: Path | None = None
    ) -> dict[str, str]:
        """Return vLLM's environment; `key_file` holds the key of its routes behind a port."""
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


def _all_cores() -> dict[str, str]:
    """Return the CPU threads for a vLLM that has the machine to itself: one core stays free.

    OMP_NUM_THREADS from outside has priority. A GPU needs no limit.
    """
    if visible_gpus() or os.environ.get("OMP_NUM_THREADS"):
        return {}
    num_cores = len({core_of(cpu) for cpu in visible_cores()})
    return {"OMP_NUM_THREADS": str(max(num_cores - 1, 1))}


def _listening(address: Address) -> dict[str, Any]:
    """Return the flags for an address; behind a port the key guard is in front."""
    if address.path:
        return {"uds": address.path}
    return {"host": address.host, "port": address.port, "middleware": GUARD}


def vllm_process(
    server: VLLMServer,
    run_folder: RunFolder,
    replica: Replica,
    policy: ServedPolicy,
    place: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a vLLM for the model of a run folder.

    Args:
        server: how to start it.
        run_folder: knows the model, the key and the folder for temporary files.
        replica: where it listens.
        policy: what it must know of the policy.
        place: the environment of its place; None: it may use the whole machine.

    """
    model = run_folder.model()
    if server.cpu_kv_cache_gib is None and (sizes := shape_of(model)):
        cache = sizes.cache_gib(policy.max_seq_len, policy.dtype)
        server = replace(server, cpu_kv_cache_gib=cache)
    command = server.command(model, replica.address, **vars(policy))
    key_file = None if replica.address.path else run_folder.private.key
    env = {
        **run_folder.private.environment(),
        **server.environment(adapter=policy.adapter, key_file=key_file),
        **(place or _all_cores()),
    }
    return command, env


def served_policy(run: Run, run_folder: RunFolder, seed: int) -> ServedPolicy:
    """Return what vLLM must know of the policy of a run."""
    limits = None
    if run.pushes_adapter:
        limits = adapter_limits(run.adapter.rank, run.adapter.target_modules, run_folder.model())
    return ServedPolicy(
        dtype=run.model.dtype,
        max_seq_len=run.max_seq_len,
        seed=seed,
        adapter=limits,
        head_dtype=run.model.head_dtype,
    )


def replica_process(
    run: Run, run_folder: RunFolder, replica: Replica, place: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a replica; `place` is the environment of its place."""
    # Each replica samples with its own seed, and a restarted one with another seed than before.
    seed = run.seed + run.inference.names.index(replica.name) + 1000 * replica.incarnation
    policy = served_policy(run, run_folder, seed)
    return vllm_process(build(run.inference)(), run_folder, replica, policy, place)


@contextmanager
def serving(
    server: VLLMServer, run_folder: RunFolder, policy: ServedPolicy
) -> Iterator[VLLMRoutes]:
    """Serve the model of a run folder on its socket while the block runs; yield the routes.

    Raises:
        RunFailed: vLLM did not start, or ended during the block; quotes the end of its log.

    """
    run_folder.private.make()
    replica = only_replica(run_folder)
    with ExitStack() as stack:
        stack.callback(run_folder.private.clear)
        command, env = vllm_process(server, run_folder, replica, policy)
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
            look()  # if vLLM has ended, that is the cause of the block's error
            raise
        look()  # failed requests cost only their rollouts, so the block may not have failed


def only_replica(run_folder: RunFolder) -> Replica:
    """Return the vLLM of a folder that has a single one, on its Unix socket."""
    return Replica("inference", Address(path=run_folder.private.vllm_socket))
