"""Start a vLLM that no run pushes weights to on a loopback port."""

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from rl.inference.server import STARTED_BY_RUN
from rl.runtime.child import Child, Reaper, Start, last_lines
from tests.support.launching import wait_for


@contextmanager
def serving(model: Path, log: Path, **further: str) -> Iterator[str]:
    """Start vLLM with these further flags; yield the URL of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"model": model, "served-model-name": "them", "host": "127.0.0.1", "port": port}
    flags |= {"max-model-len": 256, "dtype": "bfloat16", **further}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {STARTED_BY_RUN: "1", "OMP_NUM_THREADS": "1"}  # it starts in half of the time

    def healthy() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.HTTPError:
            return False

    with Reaper() as reaper, Child(Start("them", command, log, env), reaper):
        assert wait_for(healthy, 300), last_lines(log)
        yield f"http://127.0.0.1:{port}/v1"
