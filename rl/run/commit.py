"""Which code a run is of: the commit of this checkout, and whether anything is not in it."""

import subprocess
from pathlib import Path

REPO = Path(__file__).parents[2]
UNCOMMITTED = "+uncommitted"


def commit_of(folder: Path = REPO) -> str:
    """The commit that is checked out in a folder, "" where there is none or no git."""
    head = _git(folder, "rev-parse", "HEAD")
    return f"{head}{UNCOMMITTED}" if head and _git(folder, "status", "--porcelain") else head


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
