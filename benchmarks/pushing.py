"""What a push of all weights costs on one machine, part by part, beside a plain copy of the bytes.

    python -m benchmarks.pushing [--hidden 1024] [--layers 28] [--repeats 5] [--vllm] [--folder ...]

A Qwen3 of 440 million bfloat16 parameters is made on the spot. One JSON line a part:

    {"part": "write and hash", "seconds": ..., "GB_per_s": ..., "of_copy": ...}

`of_copy` is its time as a part of a plain copy of the same bytes into memory that is there already.
Rounds take turns, and medians count. `gloo to 2` is a push by that way until two processes, which
stand for replicas, have checked what came; neither vLLM's routes nor its loading are in it. disk
writes into --folder. `adapter in a request` is base64 and JSON, there and back.

With --vllm a real one is started with the same model and gets as many pushes: `start`, `load` (our
reading and checking are in it), `repack and prove`, and `whole push` from the first byte written to
the last answer.
"""

import argparse
import json
import statistics
import tempfile
import time
from base64 import b64decode, b64encode
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load, save

from benchmarks._composing import compose
from benchmarks._timing import seconds
from rl.config.build import build
from rl.inference.replica import Replica
from rl.inference.server import has_gpu, serving
from rl.model.loading import load_model
from rl.placement.settings import settled_inference
from rl.run.address import Address
from rl.run.folder import RunFolder
from rl.weights.fingerprint import fingerprint
from rl.weights.gloo import GlooReader
from rl.weights.memory_file import MemoryFile, checked, read_weights
from rl.weights.pusher import WeightPusher, WeightSync
from rl.weights.shm import FileReader

Weights = dict[str, torch.Tensor]
Parts = dict[str, list[float]]


def model_node(hidden: int, layers: int) -> dict[str, Any]:
    """The tiny model's configuration, not tiny."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": 16, "num_kv_heads": 8}
    overrides = [f"model.{key}={value}" for key, value in (sizes | {"head_dim": 128}).items()]
    return compose([*overrides, "model.warm_start=null"])["model"]


def weights_of(folder: Path) -> Weights:
    """The tied weights of the model in a folder under Hugging Face names."""
    model = load_model(folder, torch.bfloat16, 0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def our_parts(weights: Weights, repeats: int) -> Parts:
    """What is done on our side, and a plain copy."""
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    def three_passes() -> None:
        """The plain way, a pass each: hashed, then serialised, then copied."""
        fingerprint(weights)
        bytearray(save(weights))

    parts: Parts = {}
    with MemoryFile() as file:
        for _ in range(repeats + 1):
            parts.setdefault("copy", []).append(seconds(copy))
            parts.setdefault("hash, serialise, copy", []).append(seconds(three_passes))
            began = time.perf_counter()
            written = file.write(weights)
            parts.setdefault("write and hash", []).append(time.perf_counter() - began)
            read = partial(read_weights, written.path, written.fingerprint)
            parts.setdefault("map and check", []).append(seconds(read))
    return parts


class Policy:
    """What a push needs of one."""

    def __init__(self, weights: Weights) -> None:
        self.ranks = SimpleNamespace(first=True)
        self._weights = weights

    def weights(self) -> Weights:
        """As they are."""
        return self._weights


class PipedVLLM:
    """The routes that a push asks, answered by a process that only reads and checks."""

    def __init__(self, replica: Replica, calls: Connection) -> None:
        self.replica, self._calls = replica, calls

    def __getattr__(self, route: str) -> Any:
        """pause, resume, start_update, finish_update: nothing to do."""
        return lambda *_: None

    def together(self) -> nullcontext[None]:
        """No deadline."""
        return nullcontext()

    def num_workers(self) -> int:
        """One, as without tensor parallelism."""
        return 1

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Open the other end."""
        self._ask((info["transport"], info["facts"]))

    def update(self, info: dict[str, Any]) -> None:
        """Read."""
        self._ask((info["fingerprint"], info["where"]))

    def _ask(self, call: tuple[str, dict[str, Any]]) -> None:
        self._calls.send(call)
        self._calls.recv()


def replica(calls: Connection) -> None:
    """Read whatever comes, until the other end is closed."""
    torch.set_num_threads(1)
    readers = {"shm": FileReader, "disk": FileReader, "gloo": GlooReader}
    reader: Any = None
    with suppress(EOFError):
        while True:
            name, facts = calls.recv()
            if name in readers:
                reader = readers[name](0, **facts)
            else:
                reader.read(name, **facts)
            calls.send("done")


def ways(weights: Weights, repeats: int, parts: Parts, folder: Path) -> None:
    """Push to one and to two processes by each way that can take all weights."""
    spawn = get_context("spawn")
    policy: Any = Policy(weights)
    every: list[Any] = []
    for name in ("inference0", "inference1"):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=replica, args=(theirs,), daemon=True).start()
        every.append(PipedVLLM(Replica(name, Address(folder / "vllm.sock")), ours))
    knobs = {"folder": None, "probe_every": 0, "probe_rows": 1, "max_mismatch": 1.0}
    for way in ("shm", "disk", "gloo"):
        for number in (1, 2):
            sync = WeightSync(transport=way, **knobs)
            pusher = WeightPusher(sync, way, every[:number], folder=folder, timeout=600.0)
            for version in range(repeats + 1):
                push = partial(pusher.push, policy, version, must_differ=False)
                parts.setdefault(f"{way} to {number}", []).append(seconds(push))


def in_a_request(weights: Weights) -> None:
    """What an adapter of this size would cost on its way through vLLM's routes, but for HTTP."""
    with MemoryFile() as file:
        mark = file.write(weights).fingerprint
        body = json.dumps({"content": b64encode(file.content).decode()})
    checked(load(b64decode(json.loads(body)["content"])), mark)


def real_pushes(run_folder: RunFolder, weights: Weights, repeats: int, parts: Parts) -> None:
    """Push weights that change to a real vLLM, in the way of rl/weights/pusher.py."""
    config = compose([])
    server = build(settled_inference(config["inference"], config["sampler"], has_gpu()))()
    how = {"dtype": "bfloat16", "max_seq_len": 256, "seed": 0, "adapter": None}
    with serving(server, run_folder, **how) as vllm, MemoryFile() as file:
        vllm.init_transfer({"transport": "shm", "facts": {}})
        for version in range(1, repeats + 2):
            for tensor in weights.values():
                tensor.mul_(1.01)
            began = time.perf_counter()
            written = file.write(weights)
            update = {"fingerprint": written.fingerprint, "where": {"path": written.path}}
            for part, work in {
                "pause": vllm.pause,
                "start": vllm.start_update,
                "load": partial(vllm.update, update),
                "repack and prove": partial(vllm.finish_update, version),
                "resume": vllm.resume,
            }.items():
                parts.setdefault(part, []).append(seconds(work))
            parts.setdefault("whole push", []).append(time.perf_counter() - began)


def main() -> None:
    """Measure, and print at the end of all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        run_folder = RunFolder(Path(name))
        folder = build(model_node(arguments.hidden, arguments.layers))().prepare(
            run_folder.built_model
        )
        run_folder.set_model(folder)
        weights = weights_of(folder)
        size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
        parts = our_parts(weights, arguments.repeats)
        ways(weights, arguments.repeats, parts, arguments.folder or Path(name) / "weights")
        for _ in range(arguments.repeats + 1):
            request = partial(in_a_request, weights)
            parts.setdefault("adapter in a request", []).append(seconds(request))
        if arguments.vllm:
            real_pushes(run_folder, weights, arguments.repeats, parts)
    medians = {part: statistics.median(times[1:]) for part, times in parts.items()}
    for part, median in medians.items():
        line = {
            "part": part,
            "seconds": round(median, 3),
            "GB_per_s": round(size / median / 1e9, 2),
            "of_copy": round(median / medians["copy"], 2),
        }
        print(json.dumps({**line, "GB": round(size / 1e9, 3)}), flush=True)


if __name__ == "__main__":
    main()
