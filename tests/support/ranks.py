"""Starts the ranks of a worker once a session, and reads what they measured."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[2]


def measurements(world: int, module: str = "tests.support.policy_worker") -> dict[str, Any]:
    """What `world` ranks measured; they are started at the first call, and never again."""
    measured, log = _run(world, module)
    assert measured is not None, f"the ranks failed:\n{log}"
    return measured


@functools.cache
def _run(world: int, module: str) -> tuple[dict[str, Any] | None, str]:
    """What was measured, None if the ranks failed, and the end of what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        common = {
            "WORLD_SIZE": str(world),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPO),
        }
        with log.open("w") as output:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-m", module, folder],
                    cwd=REPO,
                    env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(world)
            ]
            try:
                for process in ranks:
                    process.wait(timeout=1200)  # they share the cores with whoever else is at work
            except subprocess.TimeoutExpired:
                pass  # the missing result says it
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
        result = Path(folder) / "measured.json"
        measured = json.loads(result.read_text()) if result.exists() else None
        return measured, log.read_text()[-8000:]
