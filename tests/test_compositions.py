"""docs/compositions.md is what the rules say today, and what it says trains does train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
EVERY = 10  # all of them: python -m benchmarks.compositions


@pytest.mark.timeout(900)
def test_the_page_of_compositions_holds_and_some_of_its_runs_train():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compositions", "--check", str(EVERY)],
        cwd=REPO,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "failed" in line]
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(lines) >= 8
