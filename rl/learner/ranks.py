"""The processes that train together, and how they meet."""

import fcntl
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from rl.learner.meeting import meeting_of


@dataclass(frozen=True)
class Ranks:
    """This process among those that train."""

    rank: int
    world: int
    device: torch.device

    @staticmethod
    def join(rendezvous: Path | None, timeout: float) -> "Ranks":
        """Meet the other ranks; RANK and WORLD_SIZE come from the environment.

        Through a file where they share a host: a port could be taken by another run. Without one
        where MASTER_ADDR and MASTER_PORT say.
        """
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            compile_cpu_op()
        file = rendezvous and f"file://{rendezvous.resolve()}"
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            init_method=file or meeting_of(rank),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
            auto_mpi_discovery=False,
            verbose=False,
        )
        return Ranks(rank, world, torch.device("cuda" if cuda else "cpu"))

    def any(self, flag: bool) -> bool:
        """True if the flag is true on any rank. Collective."""
        if self.world == 1:
            return flag
        flags = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)

    def told(self, word: str) -> str:
        """What the first rank says. Collective."""
        if self.world == 1:
            return word
        words = [word]
        dist.broadcast_object_list(words, src=0)
        return words[0]

    def sum(self, value: float) -> float:
        """The sum of what each rank has. Collective."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    @property
    def first(self) -> bool:
        """True on the rank that talks to the outside."""
        return self.rank == 0


def compile_cpu_op() -> None:
    """Compile DeepSpeed's shared-memory op, or find it compiled (in the environment's folder).

    PyTorch marks a compilation by a lock file, which a process killed meanwhile leaves behind: all
    later ones would wait for ever. A lock of the kernel's ends with its holder, and whoever holds
    it knows that any such file is a leftover.
    """
    default = str(Path(sys.prefix) / "torch_extensions")
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", default))
    folder.mkdir(parents=True, exist_ok=True)
    # Another ninja compiles it all again (minutes), so ours comes first wherever we are started.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")]
    )
    with (folder / "compiling").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for leftover in folder.glob("*/lock"):
            leftover.unlink()
        accelerator: Any = get_accelerator()
        accelerator.create_op_builder("ShareMemCommBuilder").load()
