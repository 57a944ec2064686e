"""The address of each server of a run, and which start of the process it belongs to.

Each server has one small file. Only the supervisor starts processes, so a process that finds a
server broken asks for a restart by a second file.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from rl.runtime.files import write_whole
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address


@dataclass(frozen=True)
class Endpoint:
    """One start of a server.

    Attributes:
        incarnation: the number of restarts before this start.
        pid: of the server, or of the process that started it.

    """

    address: Address
    incarnation: int = 0
    pid: int = 0

    def write(self, run_folder: RunFolder, process: str) -> None:
        """Publish this start for the other processes."""
        path = run_folder.endpoint_of(process)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"address": str(self.address), "incarnation": self.incarnation}
        write_whole(path, json.dumps(content | {"pid": self.pid or os.getpid()}))

    @classmethod
    def read(cls, run_folder: RunFolder, process: str) -> Self | None:
        """Return the newest start of a server, None if it does not listen yet."""
        try:
            content = json.loads(run_folder.endpoint_of(process).read_text())
        except FileNotFoundError:
            return None
        return cls(
            Address.parse(content["address"]), int(content["incarnation"]), int(content["pid"])
        )


def request_restart(run_folder: RunFolder, process: str, incarnation: int, why: str) -> None:
    """Ask the supervisor to replace this start of a process."""
    path = run_folder.restart_request_of(process)
    write_whole(path, json.dumps({"incarnation": incarnation, "why": why}))


def restart_request(run_folder: RunFolder, process: str, incarnation: int) -> str | None:
    """Return why a process asked to replace this start, None if there is no such request."""
    with suppress(FileNotFoundError):
        content = json.loads(run_folder.restart_request_of(process).read_text())
        if content["incarnation"] == incarnation:
            return str(content["why"])
    return None
