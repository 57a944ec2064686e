"""Connect the ranks, which are the processes that train together."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import deepspeed
import torch
import torch.distributed as dist

from rl.learner.collectives import create_store, gather_bytes
from rl.runtime.failure import RunFailed
from rl.runtime.folder import RunFolder

_SCHEME = "listening"


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @staticmethod
    def join(rendezvous: Path | None, timeout: float) -> "Ranks":
        """Connect to the other ranks, and return this rank.

        Ranks of one host connect through the file `rendezvous`, because another run could occupy
        their port. If `rendezvous` is None, ranks connect through MASTER_ADDR and MASTER_PORT.
        """
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # The supervisor sets DS_ACCELERATOR to cuda or cpu.
        default = "cuda" if torch.cuda.is_available() else "cpu"
        cuda = os.environ.get("DS_ACCELERATOR", default) == "cuda"
        if cuda:
            _use_gpu(int(os.environ["LOCAL_RANK"]))
        # Keep DeepSpeed from compiling this op at the first start, because training never uses it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        file = rendezvous and f"file://{rendezvous.resolve()}"
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            init_method=file or init_method(rank),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            auto_mpi_discovery=False,
            verbose=False,
        )
        return Ranks(rank, world, torch.device("cuda" if cuda else "cpu"))

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank. Collective."""
        return self.sum(float(flag)) > 0

    def from_first(self, text: str) -> str:
        """Return rank 0's `text` on every rank. Collective."""
        return self.gather(text)[0]

    def gather(self, text: str) -> list[str]:
        """Return the `text` of every rank, in the order of the ranks. Collective."""
        if self.world == 1:
            return [text]
        return [each.decode() for each in gather_bytes(text.encode())]

    def sum(self, value: float) -> float:
        """Return the sum of `value` over all ranks. Collective."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    @property
    def first(self) -> bool:
        """Whether this is rank 0. Only rank 0 calls vLLM and writes metrics and exported models."""
        return self.rank == 0


def num_resumed_steps(run_folder: RunFolder, ranks: Ranks) -> int:
    """Return on all ranks the number of steps of rank 0's newest checkpoint, or 0. Collective."""
    return int(ranks.from_first(str(run_folder.num_saved_steps())))


def _use_gpu(number: int) -> None:
    try:
        torch.cuda.init()
        torch.cuda.set_device(number)
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise RunFailed(
            f"this rank cannot use GPU {number} of CUDA_VISIBLE_DEVICES={visible}: "
            f"{str(error).strip().splitlines()[0]}. PyTorch {torch.__version__} is built for "
            f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPUs only'}; compare with "
            "the version in `nvidia-smi`, or train on the CPU by setting CUDA_VISIBLE_DEVICES=''"
        ) from error


def init_method(rank: int) -> str:
    """Return PyTorch's `init_method` to connect the ranks through MASTER_ADDR and MASTER_PORT.

    If MASTER_ADDR is an IP address, rank 0 listens only at this address. If it is a host name, rank
    0 listens on all addresses, because on rank 0's host the name may resolve to loopback.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    with suppress(ValueError):
        ip_address(address)
        if rank == 0:
            host = f"[{address}]" if ":" in address else address
            return f"{_SCHEME}://{host}:{port}"
    return "env://"


def _listen(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield (store, rank, world size). Unlike PyTorch's, the store listens only at `url`'s host."""
    parsed = urlparse(url)
    query = parse_qs(parsed.query)
    rank, world = int(query["rank"][0]), int(query["world_size"][0])
    yield create_store(str(parsed.hostname), int(parsed.port or 0), world, timeout), rank, world


dist.register_rendezvous_handler(_SCHEME, _listen)
