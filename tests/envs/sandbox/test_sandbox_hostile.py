"""Hostile code in the sandbox is stopped and changes nothing outside."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs.sandbox.sandbox import PROJECT
from tests.support.hostile import LATE, SNIPPETS
from tests.support.sandboxes import interpreters, make, said, settled


@pytest.fixture(scope="module")
def bystander():
    """Yield the sandbox of another episode, which is used meanwhile."""
    made = make()
    assert asyncio.run(made.run("kept = 7")) == ""
    yield made
    made.close()
    assert settled(set())


@pytest.fixture
def outside(tmp_path):
    file = tmp_path / "outside"
    file.write_text("untouched")
    return file


@pytest.mark.parametrize("name", SNIPPETS)
def test_hostile_code_is_stopped_and_affects_nothing_else(
    name, bystander, outside, monkeypatch, request
):
    monkeypatch.setenv("SECRET", "hunter2")
    before = interpreters()
    code, expected = SNIPPETS[name]
    box = make(memory_mb=128, call_timeout=1.0 if expected == LATE else 60.0)
    request.addfinalizer(box.close)
    answer = asyncio.run(said(box, code.format(outside=outside, parent=os.getpid())))
    assert re.search(expected, answer.strip()), answer
    assert "hunter2" not in answer
    assert len(answer) < 1200
    assert asyncio.run(bystander.run("kept")) == "7\n"
    # The sandbox still works: unchanged, or with a new process at the second call at the latest.
    assert "2\n" in (asyncio.run(said(box, "1 + 1")) for _ in range(2))
    assert len(interpreters() - before) == 1
    box.close()
    assert settled(before)
    assert [p.name for p in outside.parent.iterdir()] == ["outside"]
    assert outside.read_text() == "untouched"
    assert outside.stat().st_mode & 0o777 == 0o644
    assert not Path("/dev/shm/full").exists()


ORPHAN = """
import asyncio
from envs.sandbox.sandbox import Limits, Sandbox
box = Sandbox(Limits(call_timeout=60, cpu_seconds=60, memory_mb=256, max_output_chars=9,
    site_packages=False, allow_without_landlock=False))
async def main():
    await box.run("1")
    print("ready", flush=True)
    await box.run("while True: pass")
asyncio.run(main())
"""


def test_no_sandbox_outlives_a_killed_parent():
    before = interpreters()
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, cwd=PROJECT)
    try:
        assert parent.stdout.readline() == b"ready\n"
        assert len(interpreters() - before) == 1
    finally:
        parent.kill()
        parent.communicate()
    assert settled(before)
