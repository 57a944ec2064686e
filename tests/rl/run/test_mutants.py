"""What a run's folder shows to others, and what the reaper still believes to be ours."""

import subprocess
import tempfile
from pathlib import Path

from rl.run.child import Child, Reaper
from rl.run.folder import RunFolder


def test_nobody_else_can_reach_the_sockets():
    with tempfile.TemporaryDirectory() as short:
        folder = RunFolder(Path(short) / "run")
        folder.private.make()
        assert folder.private.vllm_socket.parent.stat().st_mode & 0o077 == 0
        folder.private.clear()


def test_a_group_that_has_ended_is_no_longer_the_reaper_s(tmp_path):
    """Its number may by then be somebody else's."""
    with Reaper() as reaper:
        child = Child("short", ["sleep", "30"], log=tmp_path / "log", reaper=reaper)
        child.start()
        group = child.group
        assert group in reaper._groups
        child.end()
        assert group not in reaper._groups


def test_a_reaper_that_ends_leaves_those_it_was_told_to_forget_alone():
    stranger = subprocess.Popen(["sleep", "30"], start_new_session=True)
    with Reaper() as reaper:
        reaper.watch(stranger.pid)
        reaper.forget(stranger.pid)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
