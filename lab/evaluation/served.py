"""Check settings, lock the folder and start vLLM, for programs that sample but do not train."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from envs.protocol import Environment
from lab.evaluation.settings import P, PolicySettings
from rl.config.build import build, construct
from rl.config.nodes import InferenceNode
from rl.config.positions import ADAPTER
from rl.config.resume_rules import run_folder_problems
from rl.config.schema import ConfigError, as_config_error
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import SERVED_AS, ServedPolicy, adapter_limits, only_replica, run_vllm
from rl.placement.settings import with_device_flags
from rl.runtime.devices import raise_file_limit, visible_gpus
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.lock import ensure_free, locked
from rl.runtime.stop_request import stopped_by_signals
from rl.sampling.chat import ChatSettings

_VERSION = 0  # policy version of all tokens, because the weights never change
_GROUPS = ("model", "env", "sampler", "client", "inference", "reflection")


def prepare_settings(config: Mapping[str, Any], check: Callable[[Mapping[str, Any]], P]) -> P:
    """Return checked settings with this machine's vLLM flags; raise ConfigError or FolderInUse."""
    folder = Path(str(config.get("output_dir")), str(config.get("run_name")))
    ensure_free(RunFolder(folder))  # checked first, because the other checks take longer
    settings = check(config)
    if settings.inference is not None:
        inference = with_device_flags(settings.inference, settings.sampler, bool(visible_gpus()))
        settings = replace(settings, inference=InferenceNode.of(inference))
    construct(settings, [group for group in _GROUPS if hasattr(settings, group)])
    raise_file_limit()  # each concurrent rollout opens a connection, which counts as a file
    return settings


@contextmanager
def lock_run_folder(settings: PolicySettings) -> Iterator[RunFolder]:
    """Lock the run folder while the block runs. Raise ConfigError if it contains another run."""
    run_folder = RunFolder(settings.folder)
    with stopped_by_signals(), locked(run_folder, delete_on=ConfigError):
        # Check the folder again, because another run may have used it since the first check.
        if problems := list(run_folder_problems(settings.plain())):
            raise ConfigError(problems)
        yield run_folder


def record_start(run_folder: RunFolder, settings: PolicySettings, **record: Any) -> None:
    settings.save(run_folder.config)
    run_folder.overrides.write_text(yaml.safe_dump(record, sort_keys=False))


@contextmanager
def as_run_failures() -> Iterator[None]:
    """Raise RunFailed if the block raises a ValueError, but do not change a ConfigError."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        # asyncio.TaskGroup wraps the errors of concurrent rollouts in an ExceptionGroup.
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, RunFailed | ValueError) and not isinstance(error, ConfigError):
            raise RunFailed(str(cause)) from cause
        raise


@contextmanager
def serving_policy(
    policy: PolicySettings, run_folder: RunFolder, console: Console
) -> Iterator[None]:
    """Serve the policy with vLLM while the block runs. With client=messages, start no vLLM."""
    if policy.model is None:
        yield
        return
    with as_config_error():
        run_folder.set_model(build(policy.model)().prepare(run_folder.built_model))
    console.print("starting vLLM (logs/inference.log)", highlight=False)
    server = build(policy.inference or {})()
    adapter, limits = None, None
    if policy.adapter_path is not None:
        adapter = Path(policy.adapter_path).expanduser().absolute()
        described = json.loads((adapter / ADAPTER).read_text())
        limits = adapter_limits(
            described["r"], described["target_modules"], run_folder.initial_model()
        )
    served = ServedPolicy(
        dtype=policy.model.dtype,
        max_seq_len=policy.max_seq_len,
        seed=policy.seed,
        adapter=limits,
        head_dtype=policy.model.head_dtype,
    )
    with run_vllm(server, run_folder, served) as vllm:
        if adapter is not None:
            vllm.load_adapter(SERVED_AS[True], adapter)
        vllm.set_version(_VERSION)  # in training, the first push sets the version
        yield


def chat_settings(policy: PolicySettings, run_folder: RunFolder, env: Environment) -> ChatSettings:
    model = build(policy.model)() if policy.model else None
    return ChatSettings(
        sampler=build(policy.sampler)().for_evaluation(),
        max_seq_len=policy.max_seq_len,
        is_multi_turn=env.is_multi_turn,
        num_seqs=((policy.inference and policy.inference.args) or {}).get("max_num_seqs"),
        version=LiveVersion(_VERSION),
        router=Router.with_replicas(only_replica(run_folder)),
        served_as=SERVED_AS[policy.adapter_path is not None],
        model=run_folder.initial_model() if policy.model else Path(),
        renderer=model.renderer if model else "auto",
        renderer_options=model.renderer_options if model else None,
    )
