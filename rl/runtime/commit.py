"""Find the git commit of this code, which every run records."""

import subprocess
from pathlib import Path

from envs.user_code import ROOT


def commit_of(folder: Path = ROOT) -> str:
    """Return a folder's git commit, plus "+uncommitted" if files have changed; "" if unknown."""
    head = _git(folder, "rev-parse", "HEAD")
    return f"{head}+uncommitted" if head and _git(folder, "status", "--porcelain") else head


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
