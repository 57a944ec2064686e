"""The kernel lock that reserves a run folder for one process; the lock ends with the process.

The lock file remains after the run. If it were deleted, two processes could lock two files with the
same name. The process id in the file is valid only while the file is locked.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, Any

from rl.runtime.files import remove
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import regular_file, why_unsafe_to_write
from rl.runtime.text import say

# These error numbers mean a full disk, an exhausted quota, or a file size limit (ulimit -f).
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATIENCE_S = 0.5  # seconds to wait for the lock, because `ensure_free` may hold the lock briefly
_TICK_S = 0.02
_say_once = cache(say)


class FolderUnusable(RuntimeError):
    """The error raised if a run cannot use its folder. The message is for the user."""


class FolderInUse(FolderUnusable):
    def __init__(self, run_folder: RunFolder, pid: str) -> None:
        user, end = f"process {pid}", f"stop it with kill {pid}, "
        super().__init__(
            f"{run_folder} is used by {user if pid else 'another process'}: wait until it ends, "
            f"{end if pid else ''}or choose another run_name (a sweep: another hydra.sweep.dir)"
        )


def ensure_free(run_folder: RunFolder, patience_s: float = _PATIENCE_S) -> None:
    """Raise FolderInUse if another process is using the run folder. Change no file."""
    with suppress(OSError), regular_file(run_folder.lock, run_folder.path).open("rb") as file:
        # Use a shared lock, so that two callers of this function do not block each other.
        _acquire(run_folder, file, fcntl.LOCK_SH, patience_s)


@contextmanager
def locked(run_folder: RunFolder, delete_on: type[Exception] = FolderUnusable) -> Iterator[None]:
    """Lock the run folder while the block runs. Create the folder if it does not exist.

    If the block raises an error of the type `delete_on`, or if the disk is full, delete the folders
    that this call created. Raise FolderUnusable if another process holds the lock, or if a run
    cannot or must not write into the folder.
    """
    made = [path for path in (run_folder.path, *run_folder.path.parents) if not path.exists()]
    try:
        run_folder.path.mkdir(parents=True, exist_ok=True)
        if problem := why_unsafe_to_write(run_folder.path):
            raise FolderUnusable(problem)
        # Mode "w" would erase the process id of the lock's holder. A buffer would delay our write.
        file = run_folder.lock.open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable_error(run_folder, error) from error
    with file:
        _acquire(run_folder, file, fcntl.LOCK_EX, _PATIENCE_S)
        try:
            try:
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
            except OSError as error:
                raise _unwritable_error(run_folder, error) from error
            yield
        except (delete_on, FolderUnusable):
            if made:
                remove(made[0])
            with suppress(OSError):
                for path in made[1:]:
                    path.rmdir()
            raise


def _unwritable_error(run_folder: RunFolder, error: OSError) -> FolderUnusable:
    remedy = "free disk space" if error.errno in FULL else "make the folder writable"
    return FolderUnusable(
        f"{run_folder} cannot be written ({error.strerror}): {remedy}, or choose another output_dir"
    )


def _acquire(run_folder: RunFolder, file: IO[bytes], kind: int, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not try_lock(file, kind):
        if time.monotonic() >= deadline:
            file.seek(0)
            raise FolderInUse(run_folder, file.read(32).decode(errors="replace").strip())
        time.sleep(_TICK_S)


def try_lock(file: IO[Any], kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed. Return False if another process has locked it."""
    # Use flock, because a lock by lockf ends when the process closes any descriptor of the file.
    # Children do not inherit the lock, because Python closes descriptors on exec.
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _say_once(
            f"warning: this file system supports no locks ({error.strerror}): use another one, or "
            "let no two programs use the same folder at the same time"
        )
    return True
