"""Processes with stubborn children, for tests of how everything ends."""

import time
from pathlib import Path

# A child that ends when told to, and a grandchild in its group that does not.
FAMILY = (
    "(trap '' TERM HUP INT; exec sleep 30) & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


class Family:
    """`command` starts a child with a stubborn grandchild; calling it gives both process ids."""

    def __init__(self, pids: Path) -> None:
        self.pids, self.command = pids, ["sh", "-c", FAMILY.format(pids=pids)]

    def __call__(self) -> list[int]:
        assert wait_until(self.pids.exists)
        return [int(pid) for pid in self.pids.read_text().split()]
