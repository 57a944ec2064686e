"""The five readers: how a case is drawn, how it is read, and which errors are documented."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet
from safetensors import SafetensorError

from envs.episode import Episode, Example
from envs.tools import Toolbox, ToolError
from rl.config.check import check
from rl.config.schedules import split_schedules
from rl.config.schema import ConfigError, Run
from rl.inference.completion import Completion
from rl.inference.live_version import LiveVersion
from rl.records import RankBatch
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder
from rl.runtime.token_files import Lines, read_rows, write_lines
from rl.sampling.chat import Prompt
from rl.sampling.renderer_chat import RendererChat
from rl.wire import HEADER, Answer, Call, NoMoreBatches, pack, unpack
from tests.fuzz.cases import Reader
from tests.fuzz.damage import changed_tree, damaged
from tests.support.fuzz import texts, tokens
from tests.support.scripted import HI, SAMPLER, tiny_renderer

COOLER = "sampler.temperature={_target_:rl.schedule.linear,start:1.0,end:0.5,steps:5}"
COMPOSITIONS = (
    "run_name=fuzz",
    "loss=ppo env=wiki-search evaluation=default",
    "loss=gspo adapter=lora deepspeed=zero3_offload updates_per_batch=2 correction=mis",
    "loss=sft sampler=demonstrations env=mixture logger=several",
    "kl=adaptive reference=initial order=difficulty buffer=replay strategy=branch",
    "env=composed env.dataset.path=data.jsonl model=hf model.path=/models/m",
    "loss=distill reference=model reference.path=/models/teacher cluster=ray",
    f"{COOLER} inference=external env=math-file env.questions.dataset.path=q.jsonl "
    "stop_when='train/reward>0.9' max_time=3h",
)


def config(folder: Path) -> Reader:
    """Return the check of a configuration, and its typed nodes."""
    from tests.support.composing import composed

    bases = [composed(f"output_dir={folder}", *names.split()) for names in COMPOSITIONS]

    def read(made: dict[str, Any]) -> None:
        check(made)
        Run.of(split_schedules(made))

    return Reader(lambda rng: changed_tree(rng.choice(bases), rng), read, (ConfigError,))


async def look(word: str, how: Literal["fast", "slow"] = "fast") -> str:
    """Look a word up."""
    return f"{word} {how}"


async def count(
    times: int,
    parts: list[float] | None = None,
    by: dict[str, int] | None = None,
    *,
    episode: Episode,
) -> dict[str, Any]:
    """Count."""
    if times > 10**6:
        raise ToolError(f"{times} is too many")
    return {"times": float(times), "parts": parts, "by": by, "before": episode.tool_calls}


def tools(folder: Path) -> Reader:
    """Return the parser of a turn and its tool calls; no error is documented."""
    renderer, toolbox = tiny_renderer(), Toolbox((look, count), timeout=60.0)
    chat = RendererChat(SAMPLER, renderer, None, 10**7, LiveVersion(0))
    prompt, loop = Prompt(list(HI), toolbox.specs, [1, 2, 3]), asyncio.new_event_loop()
    call = {"id": "1", "type": "function", "function": {"name": "count", "arguments": {"times": 3}}}

    def make(rng: Random) -> Any:
        if rng.random() < 0.3:  # a call as a remote endpoint or an environment passes it
            other = {"name": "look", "arguments": '{"word": 1}'}
            made = changed_tree(rng.choice((call["function"], other)), rng)
            known = made if isinstance(made, dict) else {}
            names = {"name": known.get("name"), "arguments": known.get("arguments")}
            return {**call, "function": names}
        return tokens(next(texts(rng)), rng)

    def read(made: Any) -> None:
        message = {"tool_calls": [made]}
        if isinstance(made, list):
            message = chat.message(prompt, Completion(made, [], [], cut_off=False))
            json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        episode = Episode(Example(0, "fuzz", list(HI)), [])
        for each in message.get("tool_calls") or []:
            answer = loop.run_until_complete(toolbox.answer(each, episode))
            json.dumps(answer, ensure_ascii=False, allow_nan=False).encode()

    return Reader(make, read)


def token_files(folder: Path) -> Reader:
    """Return the reader of the token record."""
    run_folder, rng = RunFolder(folder / "run"), np.random.default_rng(0)
    lengths = [3, 5, 2]
    sampled = {"token_ids": rng.integers(0, 99, 10, np.int32), "mask": np.array([False, True] * 5)}
    sampled |= {"mu": rng.standard_normal(10, np.float32)}
    sampled |= {name: np.zeros(10, np.int32) for name in ("version", "turns")}
    rollouts = run_folder.tokens_of(5, "rollouts")
    ids, rows = ["000000.0", "000000.1", "000000.1"], [0, 0, 1]
    write_lines(rollouts, Lines(ids, rows, lengths, sampled))
    trained = {name: rng.standard_normal(5, np.float32) for name in ("pi", "grad", "loss")}
    trainer = run_folder.tokens_of(5, "trainer.rank0")
    write_lines(trainer, Lines(ids, rows, [1, 3, 1], trained, [0, 0, 0]))
    whole = {path: path.read_bytes() for path in (rollouts, trainer)}

    def make(rng: Random) -> tuple[Path, bytes]:
        path = rng.choice((rollouts, trainer))
        if rng.random() < 0.6:
            return path, damaged(whole[path], rng)
        columns = pa.table(parquet.read_table(pa.BufferReader(whole[path]))).to_pydict()
        while True:  # until pyarrow can write the table
            try:
                sink = pa.BufferOutputStream()
                parquet.write_table(pa.table(changed_tree(columns, rng, deep=False)), sink)
                return path, sink.getvalue().to_pybytes()
            except (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError):
                continue

    def read(made: tuple[Path, bytes]) -> None:
        path, content = made
        path.write_bytes(content)
        try:
            read_rows(run_folder, 5)
            read_rows(run_folder, 5, "000000.1")
        finally:
            path.write_bytes(whole[path])

    read_rows(run_folder, 5)
    return Reader(make, read, (ValueError,))


def checkpoint(folder: Path) -> Reader:
    """Return the readers of the files of a checkpoint."""
    # Imported here, because the import takes many seconds.
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from safetensors.torch import save_file

    from rl.learner.deepspeed_engine import SafeCheckpointEngine
    from rl.learner.learner import Learner
    from rl.model.folder import shapes_of
    from rl.rollouts.__main__ import dispatcher_state

    run_folder = RunFolder(folder / "run")
    place = run_folder.checkpoint(4)
    (place / "hf").mkdir(parents=True)
    (place / "deepspeed").mkdir()
    state = {"next_index": 9, "pending": [7, 8], "places": [[0, 3], [0, 4]], "buffer": {}}
    state |= {"order": {"pass": 1}, "stateful": {"env": {}, "advantage": {}}}
    run_folder.state_of(place).write_text(json.dumps({"step": 4, "rollouts": state}))
    (place / "learner.json").write_text('{"beta": 0.05}')
    weights = {"a.weight": torch.arange(12.0).reshape(3, 4), "b.bias": torch.ones(4).bfloat16()}
    adam = {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, 4)}}
    engine = {"module": weights, "global_steps": 4, "ds_version": "0.19"}
    engine |= {"optimizer": {"loss_scaler": LossScaler(1.0), "state": adam, "overflow": False}}
    torch.save(engine, place / "deepspeed" / "mp_rank_00_model_states.pt")
    save_file(weights, place / "hf" / "model.safetensors")
    whole = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    files = SafeCheckpointEngine(None)
    without_parts: Any = SimpleNamespace(policy=None, _critic=None, _reference=None)
    readers: dict[str, Callable[[Path], object]] = {
        "state.json": lambda _: dispatcher_state(run_folder.resume_point()),
        "learner.json": lambda path: Learner.load(without_parts, path.parent),
        "mp_rank_00_model_states.pt": lambda path: files.load(str(path), "cpu"),
        "model.safetensors": lambda path: shapes_of(path),
    }

    def make(rng: Random) -> tuple[Path, bytes]:
        path = rng.choice(list(whole))
        if path.suffix == ".json" and rng.random() < 0.6:
            tree = changed_tree(json.loads(whole[path]), rng)
            try:
                return path, json.dumps(tree).encode()
            except (ValueError, RecursionError):
                return path, b'{"step":' * 3000
        return path, damaged(whole[path], rng)

    def read(made: tuple[Path, bytes]) -> None:
        path, content = made
        path.write_bytes(content)
        try:
            readers[path.name](path)
        finally:
            path.write_bytes(whole[path])

    for path, content in whole.items():
        read((path, content))
    return Reader(make, read, (ValueError, SafetensorError))


def wire(folder: Path) -> Reader:
    """Return the decoder of messages, and the trainer's end of the connection."""
    from rl.trainer import rollouts_link
    from tests.rl.test_wire import batch

    rollouts_link._REPORT_DELAY_S = 0.0  # otherwise each closed connection takes a second
    answer = Answer(value=msgspec.Raw(pack({"a": 1.0})))
    kinds: list[tuple[object, Any]] = [(batch(), RankBatch), (answer, Answer)]
    kinds += [(Call(what="publish", version=3, replicas={"inference": 1}), Call)]
    whole = [(pack(value), kind) for value, kind in kinds]
    link = rollouts_link.RolloutsLink(RunFolder(folder), 0)

    def make(rng: Random) -> tuple[bytes, Any]:
        data, kind = rng.choice(whole)
        if rng.random() < 0.2:  # a whole frame for the trainer's end
            return damaged(HEADER.pack(len(whole[1][0])) + whole[1][0], rng), None
        if rng.random() < 0.5:
            return damaged(data, rng), kind
        while True:
            try:
                tree = changed_tree(msgspec.msgpack.decode(data), rng)
                return msgspec.msgpack.encode(tree), kind
            except (ValueError, OverflowError, RecursionError, TypeError):
                continue

    def read(made: tuple[bytes, Any]) -> None:
        data, kind = made
        if kind is not None:
            unpack(data, kind)
            return
        link._socket, other = socket.socketpair()
        with link._socket, other:
            link._socket.settimeout(5.0)
            other.sendall(data)
            other.shutdown(socket.SHUT_WR)
            link.state()

    return Reader(make, read, (msgspec.DecodeError, RunFailed, NoMoreBatches))


READERS: dict[str, Callable[[Path], Reader]] = {"config": config, "tools": tools}
READERS |= {"tokens": token_files, "checkpoint": checkpoint, "wire": wire}
