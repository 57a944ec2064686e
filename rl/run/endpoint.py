"""Where each part of a run listens, and since which of its starts: one small file per part.

Whoever finds a part of no use leaves another file beside it, for the supervisor alone starts parts.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from rl.run.address import Address
from rl.run.folder import RunFolder
from rl.run.whole_files import write_whole


@dataclass(frozen=True)
class Endpoint:
    """One start of a part that listens.

    Attributes:
        incarnation: 0, and one more each time the part was started again.
        pid: of whoever listens, or of the process that started it.

    """

    address: Address
    incarnation: int = 0
    pid: int = 0

    def write(self, run_folder: RunFolder, part: str) -> None:
        """Say so to the other parts."""
        path = run_folder.endpoint_of(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "address": str(self.address),
            "incarnation": self.incarnation,
            "pid": self.pid or os.getpid(),
        }
        write_whole(path, json.dumps(content))

    @classmethod
    def read(cls, run_folder: RunFolder, part: str) -> Self | None:
        """Return the newest start of a part; None where it does not listen yet."""
        try:
            content = json.loads(run_folder.endpoint_of(part).read_text())
        except FileNotFoundError:
            return None
        return cls(
            Address.parse(content["address"]), int(content["incarnation"]), int(content["pid"])
        )


def request_restart(run_folder: RunFolder, part: str, incarnation: int, why: str) -> None:
    """Have a part started again: this start of it is of no use any more."""
    path = run_folder.restart_request_of(part)
    write_whole(path, json.dumps({"incarnation": incarnation, "why": why}))


def restart_request(run_folder: RunFolder, part: str, incarnation: int) -> str | None:
    """Return why somebody wants this start of a part to be its last; None where nobody does."""
    with suppress(FileNotFoundError):
        content = json.loads(run_folder.restart_request_of(part).read_text())
        if content["incarnation"] == incarnation:
            return str(content["why"])
    return None
