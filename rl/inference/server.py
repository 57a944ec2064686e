"""The vLLM server: unmodified vLLM in its own process, on a Unix socket or a TCP port.

A Unix socket needs no port, so two runs cannot choose the same port. The permissions of the
socket's folder protect the socket. On a TCP port every route requires the run's key (key_guard.py),
because vLLM's own API keys do not protect the routes that load weights.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl.config.build import build
from rl.config.limits import num_returned_tokens
from rl.config.ranges import PositiveFloat, PositiveInt
from rl.config.schema import Run
from rl.config.transport import VLLM_RANKS
from rl.inference.key_guard import GUARD, KEY_FILE
from rl.inference.replica import Replica
from rl.inference.routes import VLLMRoutes, wait_until_healthy
from rl.model.folder import holds_weights, linear_layers
from rl.model.shape import read_sizes
from rl.runtime.child import Child, Reaper, Start, describe_exit, last_lines, python_module
from rl.runtime.devices import core_of, visible_cpus, visible_gpus
from rl.runtime.failure import RunFailed, with_remedies
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address

_EXIT_DELAY_S = 0.2  # a failing vLLM closes its connections up to 0.2 s before it ends
# Requests name the model SERVED_AS[True] if the trainer pushes only a LoRA adapter, else
# SERVED_AS[False]. vLLM needs different names for the adapter and its base model.
SERVED_AS = {False: "policy", True: "policy-adapter"}
# These boolean options of vLLM 0.32 have no --no- flag. vLLM's default for each of them is false.
_ONLY_TRUE = {
    *("disable_log_stats", "aggregate_engine_logging", "data_parallel_multi_port_external_lb"),
    *("headless", "grpc"),
}

# We set this environment variable for vLLM. Our plugin changes vLLM's start only if it is set.
STARTED_BY_RUN = "OFFBYONE_VLLM"


@dataclass(frozen=True)
class AdapterLimits:
    """The largest LoRA adapter that vLLM can load. vLLM reserves memory for it at the start."""

    rank: int
    layers: list[str]  # layers that may have an adapter, such as q_proj


def adapter_limits(rank: int, targets: str | Sequence[str], model: Path) -> AdapterLimits:
    """Return the smallest limits with which vLLM loads an adapter of this rank on these modules.

    Each layer that may have an adapter costs time at every token. The output head must not have
    one, because vLLM would then return no prompt logprobs (vllm-project/vllm#51594).
    """
    names = linear_layers(model) if targets == "all-linear" else targets
    allowed = next(allowed for allowed in VLLM_RANKS if allowed >= rank)
    return AdapterLimits(allowed, sorted({name.rpartition(".")[2] for name in names}))


@dataclass(frozen=True, kw_only=True)
class ServedPolicy:
    dtype: str
    max_seq_len: int  # number of tokens of the longest row that vLLM must accept
    seed: int  # vLLM's seed; replicas with equal seeds would sample the same tokens
    adapter: AdapterLimits | None = None  # None if the trainer pushes all weights
    head_dtype: str | None = None  # dtype of the output head, if it differs from `dtype`
    num_returned_tokens: int = 0  # number of most likely tokens that vLLM returns per position


@dataclass(frozen=True, kw_only=True)
class VLLMServer:
    """The options of conf/inference/vllm.yaml."""

    replicas: PositiveInt | None
    listen: Literal["unix", "tcp"]
    startup_timeout: PositiveFloat
    devices: list[int | str] | None
    tensor_parallel_size: PositiveInt
    cpu_kv_cache_gib: PositiveInt | None
    args: dict[str, Any]

    def command(self, model: Path, address: Address, policy: ServedPolicy) -> list[str]:
        """Return the command that starts vLLM as a module. CPU builds of vLLM lack `vllm serve`."""
        adapter, head = policy.adapter, policy.head_dtype
        options: dict[str, Any] = {
            "model": model,
            "served_model_name": SERVED_AS[False],
            "uds": address.path,
            "dtype": policy.dtype,
            "hf_overrides": {"head_dtype": head} if head else None,
            "max_model_len": policy.max_seq_len,
            "seed": policy.seed,
            "tensor_parallel_size": self.tensor_parallel_size,
            "logprobs_mode": "processed_logprobs",  # return logprobs after temperature and top_k
            "max_logprobs": policy.num_returned_tokens or None,  # vLLM's default is 20
            "enable_scale_out": True,  # add the route that accepts and returns token ids
            "weight_transfer_config": {"backend": "adapter" if adapter else "whole"},
            "enable_lora": adapter is not None,
            "max_lora_rank": adapter and adapter.rank,
            "lora_target_modules": adapter and adapter.layers,
            "disable_uvicorn_access_log": True,
        }
        if not address.path:
            options |= {"host": address.host, "port": address.port, "middleware": GUARD}
        if not holds_weights(model):
            # vLLM starts with random weights. The trainer pushes its weights before vLLM samples.
            options["load_format"] = "dummy"
        given = {**options, **self.args}
        flags = [flag for key, value in given.items() for flag in _flag(key, value)]
        return python_module("vllm.entrypoints.openai.api_server", *flags)

    def environment(
        self, *, adapter: AdapterLimits | None, key_file: Path | None = None
    ) -> dict[str, str]:
        """Return vLLM's environment variables. `key_file`: file with the key for TCP."""
        return {
            **({KEY_FILE: str(key_file)} if key_file else {}),
            STARTED_BY_RUN: "1",
            # Prevent files in the working folder from replacing libraries in vLLM's processes.
            "PYTHONSAFEPATH": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # add the routes for pausing and for loading weights
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if adapter else "0",
            "VLLM_CPU_KVCACHE_SPACE": str(self.cpu_kv_cache_gib or 1),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # the model is already in a local folder
            "VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", "offbyone"),
        }


def _flag(key: str, value: Any) -> list[str]:
    """Return the arguments that set one option of vLLM, or [] if the value is None."""
    option, *inner = key.split(".")  # names after a dot are JSON keys, as in vLLM's own syntax
    name = ".".join([f"--{option.replace('_', '-')}", *inner])
    if inner and isinstance(value, bool | list | Mapping):
        return [name, json.dumps(value)]
    if value is False and key not in _ONLY_TRUE and not key.startswith("no_"):
        return [f"--no-{name.removeprefix('--')}"]
    if isinstance(value, bool | None):
        return [name] if value else []
    texts = [
        json.dumps(each) if isinstance(each, Mapping) else str(each)
        for each in (value if isinstance(value, list) else [value])
    ]
    return [name, *texts]


def _thread_limit() -> dict[str, str]:
    """Return {"OMP_NUM_THREADS": all cores but one}, or {} with GPUs or if the user set it."""
    if visible_gpus() or os.environ.get("OMP_NUM_THREADS"):
        return {}
    num_cores = len({core_of(cpu) for cpu in visible_cpus()})
    return {"OMP_NUM_THREADS": str(max(num_cores - 1, 1))}


def vllm_command(
    server: VLLMServer,
    run_folder: RunFolder,
    replica: Replica,
    policy: ServedPolicy,
    device_env: Mapping[str, str] | None = None,  # environment variables that set GPUs and threads
) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment variables of a vLLM that serves a run's model."""
    model = run_folder.initial_model()
    if server.cpu_kv_cache_gib is None and (sizes := read_sizes(model)):
        cache = sizes.cache_gib(policy.max_seq_len, policy.dtype)
        server = replace(server, cpu_kv_cache_gib=cache)
    command = server.command(model, replica.address, policy)
    key_file = None if replica.address.path else run_folder.private.key
    env = {
        **run_folder.private.environment(),
        **server.environment(adapter=policy.adapter, key_file=key_file),
        **(device_env or _thread_limit()),
    }
    return command, env


def served_policy(run: Run, run_folder: RunFolder, seed: int) -> ServedPolicy:
    limits = None
    if run.pushes_adapter:
        limits = adapter_limits(
            run.adapter.rank, run.adapter.target_modules, run_folder.initial_model()
        )
    return ServedPolicy(
        dtype=run.model.dtype,
        max_seq_len=run.max_seq_len,
        seed=seed,
        adapter=limits,
        head_dtype=run.model.head_dtype,
        num_returned_tokens=num_returned_tokens(run.sampler),
    )


def replica_command(
    run: Run, run_folder: RunFolder, replica: Replica, device_env: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    # Give each replica and each restart another seed, so that no two sample the same tokens.
    seed = run.seed + run.inference.names.index(replica.name) + 1000 * replica.incarnation
    policy = served_policy(run, run_folder, seed)
    return vllm_command(build(run.inference)(), run_folder, replica, policy, device_env)


@contextmanager
def run_vllm(
    server: VLLMServer, run_folder: RunFolder, policy: ServedPolicy
) -> Iterator[VLLMRoutes]:
    """Start vLLM for the model of a run folder, yield its control routes, and end vLLM."""
    run_folder.private.make()
    replica = only_replica(run_folder)
    with ExitStack() as stack:
        stack.callback(run_folder.private.clear)
        command, env = vllm_command(server, run_folder, replica, policy)
        reaper, log = stack.enter_context(Reaper()), run_folder.log_of(replica.name)
        child = Child(Start(replica.name, command, log, env), reaper)
        stack.enter_context(child)

        def check_child() -> None:
            if child.returncode is not None:
                what = f"vLLM {describe_exit(child.returncode)}. The end of {child.log}:"
                raise RunFailed(with_remedies(f"{what}\n{last_lines(child.log)}"))

        timeout = server.startup_timeout
        wait_until_healthy(replica, timeout, check_child)
        routes = VLLMRoutes(replica, timeout=timeout, limit="inference.startup_timeout")
        try:
            yield stack.enter_context(routes)
        finally:  # if vLLM has ended, raise its exit status, even if the block ignored the end
            time.sleep(_EXIT_DELAY_S)
            check_child()


def only_replica(run_folder: RunFolder) -> Replica:
    return Replica("inference", Address(path=run_folder.private.vllm_socket_of("inference")))
