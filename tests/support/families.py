"""Processes with stubborn children, for tests of how everything ends."""

from pathlib import Path

import psutil

from tests.support.launching import wait_for

# A child that ends when told to, and a grandchild in its group that does not.
FAMILY = (
    "(trap '' TERM HUP INT; exec sleep 30) & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 5.0) -> bool:
    return wait_for(condition, seconds, every=0.02)


class Family:
    """`command` starts a child with a stubborn grandchild; calling it gives both process ids."""

    def __init__(self, pids: Path) -> None:
        self.pids, self.command = pids, ["sh", "-c", FAMILY.format(pids=pids)]

    def __call__(self) -> list[int]:
        assert wait_until(self.pids.exists)
        return [int(pid) for pid in self.pids.read_text().split()]
