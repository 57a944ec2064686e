"""A policy that is played and not trained: its vLLM, and what a client must know. No torch."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from envs.protocol import Environment
from rl.config.build import build
from rl.config.evaluation import PlayedPolicy
from rl.config.schema import ConfigError, refused
from rl.config.transport import Transport
from rl.inference.live_version import LiveVersion
from rl.inference.router import Router
from rl.inference.server import SERVED_AS, adapter_room, only_replica, serving
from rl.run.failure import RunFailed
from rl.run.folder import RunFolder
from rl.sampling.chat import ChatSetting

_VERSION = 0  # of the weights; nobody pushes others


@contextmanager
def failing() -> Iterator[None]:
    """Errors with a message for the user end the evaluation with that message alone."""
    try:
        yield
    except ConfigError:  # nothing was started: a configuration's status
        raise
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):  # of the tasks that played
            cause = cause.exceptions[0]
        if isinstance(cause, RunFailed | ValueError):
            raise RunFailed(str(cause)) from cause
        raise


def prepare_model(policy: PlayedPolicy, run_folder: RunFolder) -> None:
    """Have the model in a local folder, and note where. ConfigError if it cannot be had."""
    assert policy.model is not None
    with refused():
        run_folder.set_model(build(policy.model)().prepare(run_folder.built_model))


@contextmanager
def serving_policy(policy: PlayedPolicy, run_folder: RunFolder) -> Iterator[None]:
    """Serve the model, once it is prepared, for as long as the block lasts."""
    assert policy.model is not None
    server = build(policy.inference or {})()
    described = _adapter(policy.adapter_path)
    room = None
    if described:
        room = adapter_room("adapter", {**described, "rank": described["r"]}, run_folder.model())
    with serving(
        server,
        run_folder,
        dtype=policy.model["dtype"],
        max_seq_len=policy.max_seq_len,
        seed=policy.seed,
        adapter=room,
        head_dtype=policy.model["head_dtype"],
    ) as vllm:
        if policy.adapter_path is not None:
            folder = Path(policy.adapter_path).expanduser().absolute()
            vllm.load_adapter(SERVED_AS["adapter"], folder)
        vllm.set_version(_VERSION)  # as a push would
        yield


def _adapter(path: str | None) -> dict[str, Any] | None:
    """What peft wrote about the adapter in a folder."""
    if path is None:
        return None
    return json.loads((Path(path).expanduser() / "adapter_config.json").read_text())


def chat_setting(policy: PlayedPolicy, run_folder: RunFolder, env: Environment) -> ChatSetting:
    """What a client needs to know of the policy that it is to ask."""
    sampler = build(policy.sampler)()
    transport: Transport = "shm" if policy.adapter_path is None else "adapter"
    serves_model = policy.model is not None
    return ChatSetting(
        sampler=sampler,
        max_seq_len=policy.max_seq_len,
        has_turns=env.has_turns,
        num_seqs=(policy.inference or {}).get("args", {}).get("max_num_seqs"),
        version=LiveVersion(_VERSION),
        router=Router.to(only_replica(run_folder)),
        served_as=SERVED_AS[transport],
        model=run_folder.model() if serves_model else Path(),
        renderer=build(policy.model)().renderer if policy.model else "auto",
    )
