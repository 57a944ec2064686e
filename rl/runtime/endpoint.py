"""Endpoint files: the address, number of restarts and process id of each server of a run.

Each server has one endpoint file. Only the supervisor restarts servers, so a process that finds a
broken server writes a second file, which asks the supervisor to restart the server.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from rl.runtime.files import write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address

WAIT_VARIABLE = "OFFBYONE_WAIT_FOR_VLLM"  # if set, a rank waits for vLLM before it loads the model


@dataclass(frozen=True)
class Endpoint:
    """The content of a server's endpoint file, which each start of the server replaces."""

    address: Address
    incarnation: int = 0  # number of times that the server was restarted
    pid: int = 0  # process id of the server; `write` replaces 0 with the id of the calling process

    def write(self, run_folder: RunFolder, process: str) -> None:
        path = run_folder.endpoint_of(process)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"address": str(self.address), "incarnation": self.incarnation}
        write_atomically(path, json.dumps(content | {"pid": self.pid or os.getpid()}))

    @classmethod
    def read(cls, run_folder: RunFolder, process: str) -> Self | None:
        try:
            content = json.loads(run_folder.endpoint_of(process).read_text())
        except FileNotFoundError:
            return None
        return cls(
            Address.parse(content["address"]), int(content["incarnation"]), int(content["pid"])
        )


def request_restart(run_folder: RunFolder, process: str, incarnation: int, why: str) -> None:
    """Write a restart request for one incarnation of a server. The supervisor reads the request."""
    path = run_folder.restart_request_of(process)
    write_atomically(path, json.dumps({"incarnation": incarnation, "why": why}))


def read_restart_request(run_folder: RunFolder, process: str, incarnation: int) -> str | None:
    """Return the reason in the restart request for this incarnation, or None."""
    with suppress(FileNotFoundError):
        content = json.loads(run_folder.restart_request_of(process).read_text())
        if content["incarnation"] == incarnation:
            return str(content["why"])
    return None
