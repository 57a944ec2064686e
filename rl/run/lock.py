"""One process at a time in the folder of a run: a lock of the kernel's, which ends with its holder.

The file stays behind, for removing it would let two processes lock two files of one name; what it
says (the holder's process id) means something only while it is locked.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rl.run.folder import RunFolder
from rl.run.whole_files import remove

# What a full disk answers, a user's full share, a limit for one file (ulimit -f).
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE_S = 0.5  # whoever asks `ensure_free` has the lock for a moment
_TICK_S = 0.02


class FolderUnusable(RuntimeError):
    """Nothing can run in this folder; the message is for the user."""


class FolderInUse(FolderUnusable):
    """Another process runs in this folder."""

    def __init__(self, run_folder: RunFolder, pid: str) -> None:
        super().__init__(
            f"{run_folder} is running (pid {pid}): wait for its end, stop it (kill {pid}), or "
            "choose another run_name"
        )


def ensure_free(run_folder: RunFolder, patience_s: float = _PATIENCE_S) -> None:
    """Raise FolderInUse if another process runs in this folder; touches nothing."""
    with suppress(OSError), run_folder.lock.open("rb") as file:
        # Shared: two who only ask do not see each other.
        _take(run_folder, file, fcntl.LOCK_SH, patience_s)


@contextmanager
def locked(run_folder: RunFolder, undone_by: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Have the folder to ourselves for as long as the block lasts; it is made if need be.

    Args:
        run_folder: of the run.
        undone_by: the error that means that nothing was started: a folder that we made then goes
            again, with what is in it.

    Raises:
        FolderUnusable: another process has it, or nothing can be written there.

    """
    above = run_folder.path.parents
    made = [path for path in (run_folder.path, *above) if not path.exists()]
    try:
        run_folder.path.mkdir(parents=True, exist_ok=True)
        # "w" would empty what its holder has written; a buffer would write once more at the end.
        file = run_folder.lock.open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable(run_folder, error) from error
    with file:
        _take(run_folder, file, fcntl.LOCK_EX, _PATIENCE_S)
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        except OSError as error:
            raise _unwritable(run_folder, error) from error
        try:
            yield
        except undone_by:
            _remove(made)
            raise


def _remove(made: list[Path]) -> None:
    """Remove a folder of ours, and those above it that nobody else has put anything into."""
    if made:
        remove(made[0])
        with suppress(OSError):
            for path in made[1:]:
                path.rmdir()


def _unwritable(run_folder: RunFolder, error: OSError) -> FolderUnusable:
    remedy = "make room, or " if error.errno in FULL else ""
    return FolderUnusable(
        f"{run_folder} cannot be written ({error.strerror}): {remedy}choose another output_dir"
    )


def _take(run_folder: RunFolder, file: IO[bytes], kind: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while True:
        # flock and not lockf, which this process would lose by closing any other descriptor of the
        # file. Children do not keep it alive: Python closes descriptors on exec.
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.seek(0)
                pid = file.read(32).decode(errors="replace").strip()
                raise FolderInUse(run_folder, pid or "unknown") from None
            time.sleep(_TICK_S)
        except OSError:  # a file system without locks: nothing can be known
            return
        else:
            return
