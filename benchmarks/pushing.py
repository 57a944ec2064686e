"""Compare each stage of a push of all weights on one machine with a plain copy.

    python -m benchmarks.pushing [--hidden 1024] [--layers 28] [--repeats 5] [--vllm]

The model is a Qwen3 with 440 million bfloat16 parameters. `of_copy` divides the median time by that
of a copy of the same bytes into allocated memory. One JSON line a stage:

    {"part": "write and hash", "seconds": ..., "GB_per_s": ..., "of_copy": ...}

`gloo to 2` pushes to two processes that only read and check. --vllm also pushes to a real vLLM:
`whole push` lasts from the first byte written to the last answer.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import closing, nullcontext, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks._composing import compose, seconds
from rl.config.build import build
from rl.inference.replica import Replica
from rl.inference.server import ServedPolicy, run_vllm
from rl.model.loading import load_model
from rl.placement.settings import with_device_flags
from rl.runtime.devices import visible_gpus
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.weights.gloo import GlooSender
from rl.weights.memory_file import MemoryFile, read_weights
from rl.weights.pusher import WeightPusher
from rl.weights.shm import ShmSender
from rl.weights.transport import open_reader

Weights = dict[str, torch.Tensor]
Stages = dict[str, list[float]]


def model_node(hidden: int, layers: int) -> dict[str, Any]:
    """Return the configuration of the tiny model with larger sizes."""
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": 16, "num_kv_heads": 8}
    overrides = [f"model.{key}={value}" for key, value in (sizes | {"head_dim": 128}).items()]
    return compose([*overrides, "model.warm_start=null"])["model"]


def weights_of(folder: Path) -> Weights:
    """Return the weights of the model in a folder, by their Hugging Face names."""
    model = load_model(folder, torch.bfloat16, 0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def our_stages(weights: Weights, repeats: int) -> Stages:
    """Time a plain copy and the stages of a push outside vLLM."""
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}

    def copy() -> None:
        for name, tensor in weights.items():
            target[name].copy_(tensor)

    stages: Stages = {}
    with closing(MemoryFile()) as file:
        for _ in range(repeats + 1):
            stages.setdefault("copy", []).append(seconds(copy))
            began = time.perf_counter()
            written = file.write(weights)
            stages.setdefault("write and hash", []).append(time.perf_counter() - began)
            read = partial(read_weights, file.path, written)
            stages.setdefault("map and check", []).append(seconds(read))
    return stages


class Policy:
    """Provide what a push reads from a policy."""

    def __init__(self, weights: Weights) -> None:
        self.ranks = SimpleNamespace(first=True)
        self._weights = weights

    def weights(self) -> Weights:
        """Return the weights."""
        return self._weights


class PipedVLLM:
    """Answer the routes of a push with a process that only reads and checks."""

    def __init__(self, replica: Replica, calls: Connection) -> None:
        self.replica, self._calls = replica, calls

    def __getattr__(self, route: str) -> Any:
        """Return a function that does nothing: pause, resume, start_update, finish_update."""
        return lambda *_: None

    def together(self) -> nullcontext[None]:
        """Set no deadline."""
        return nullcontext()

    def num_workers(self) -> int:
        """Return 1, as without tensor parallelism."""
        return 1

    def init_transfer(self, info: dict[str, Any]) -> None:
        """Open the other end."""
        self._ask((info["reader"], info["facts"]))

    def update(self, info: dict[str, Any]) -> None:
        """Read."""
        self._ask((info["fingerprint"], info["source"]))

    def _ask(self, call: tuple[str, dict[str, Any]]) -> None:
        self._calls.send(call)
        self._calls.recv()


def replica(calls: Connection) -> None:
    """Read every push until the pipe is closed."""
    torch.set_num_threads(1)
    reader: Any = None
    with suppress(EOFError):
        while True:
            name, arguments = calls.recv()
            if "." in name:  # the target of a reader, else a fingerprint
                reader = open_reader(name, 0, arguments)
            else:
                reader.read(name, **arguments)
            calls.send("done")


def transports(weights: Weights, repeats: int, stages: Stages) -> None:
    """Push to one and to two processes by each transport that takes all weights."""
    spawn = get_context("spawn")
    policy: Any = Policy(weights)
    every: list[Any] = []
    for name in ("inference0", "inference1"):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=replica, args=(theirs,), daemon=True).start()
        every.append(PipedVLLM(Replica(name, Address(Path("vllm.sock"))), ours))
    options = {"probe_every": 0, "probe_rows": 1, "max_mismatch": 1.0}
    for name, kind in (("shm", ShmSender), ("gloo", GlooSender)):
        for number in (1, 2):
            sender = kind(**options)
            sender.open(600.0)
            pusher = WeightPusher(sender, every[:number])
            for version in range(repeats + 1):
                push = partial(pusher.push, policy, version, must_differ=False)
                stages.setdefault(f"{name} to {number}", []).append(seconds(push))


def real_pushes(run_folder: RunFolder, weights: Weights, repeats: int, stages: Stages) -> None:
    """Push weights that change to a real vLLM, in the way of rl/weights/pusher.py."""
    config = compose([])
    server = build(
        with_device_flags(config["inference"], config["sampler"], bool(visible_gpus()))
    )()
    served = ServedPolicy(dtype="bfloat16", max_seq_len=256, seed=0)
    with run_vllm(server, run_folder, served) as vllm, closing(MemoryFile()) as file:
        vllm.init_transfer({"reader": "rl.weights.shm.FileReader", "facts": {}})
        for version in range(1, repeats + 2):
            for tensor in weights.values():
                tensor.mul_(1.01)
            began = time.perf_counter()
            written = file.write(weights)
            update = {"fingerprint": written, "source": {"path": file.path}}
            for part, work in {
                "pause": vllm.pause,
                "start": vllm.start_update,
                "load": partial(vllm.update, update),
                "repack and prove": partial(vllm.finish_update, version),
                "resume": vllm.resume,
            }.items():
                stages.setdefault(part, []).append(seconds(work))
            stages.setdefault("whole push", []).append(time.perf_counter() - began)


def main() -> None:
    """Measure all rounds, then print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vllm", action="store_true")
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
        stages = our_stages(weights, arguments.repeats)
        transports(weights, arguments.repeats, stages)
        if arguments.vllm:
            real_pushes(run_folder, weights, arguments.repeats, stages)
    medians = {part: statistics.median(times[1:]) for part, times in stages.items()}
    for part, median in medians.items():
        line = {
            "part": part,
            "seconds": round(median, 3),
            "GB_per_s": round(size / median / 1e9, 2),
            "of_copy": round(median / medians["copy"], 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
