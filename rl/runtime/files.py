"""Write files atomically or for this user only, delete paths, and read and write JSON lines."""

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from rl.runtime.given_files import regular_file

_MAX_DEPTH = 64  # maximum nesting of JSON values; `to_json` writes deeper values as text
_MAX_DIGITS = 4300  # maximum digits of an integer; Python does not convert longer integers to text


class Inside:
    """A descriptor. A class with `log = Inside("log")` has the property log = self.path / "log"."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, _: type) -> Path:
        return owner.path / self.name


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file and rename it, so that readers never see an incomplete file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def write_private(path: Path, text: str) -> None:
    """Write a new file that only the user can read. Raise FileExistsError if `path` exists."""
    # Set the mode on creation, because other users could open the file before a later chmod.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def make_private_folder(path: Path) -> Path:
    """Make `path` a private folder. Raise PermissionError for a link or another user's folder."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, "not a folder of this user: delete it, or set another TMPDIR", str(path)
        )
    path.chmod(0o700)
    return path


def remove(path: Path) -> None:
    """Delete a folder, a file or a link, but never the target of a link."""
    import shutil

    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)  # rmtree does not follow links


def json_line(record: dict[str, Any]) -> str:
    """Return the record as one line of JSON. `to_json` converts values that JSON does not allow."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError):
        return json.dumps(to_json(record)) + "\n"


def append_line(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Append a record to a file of JSON lines. Return the record as a reader parses it."""
    line = json_line(record)
    with path.open("a", encoding="utf-8") as file:
        file.write(line)
    return json.loads(line)


class LineTail:
    """Reader of the lines added to a file. A path that is not a regular file has no lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # position after the last complete line that was read

    def read(self, max_bytes: int | None = None) -> list[bytes]:
        """Return the complete lines added since the last call, or all lines if the file shrank.

        If `max_bytes` is given, read only the last bytes, which may begin in the middle of a line.
        """
        try:
            with regular_file(self._path, self._path.parent).open("rb") as file:
                if (size := os.fstat(file.fileno()).st_size) < self._offset:
                    self._offset = 0
                if max_bytes is not None:
                    self._offset = max(self._offset, size - max_bytes)
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()


def to_json(value: Any, depth: int = 0) -> Any:
    """Convert to JSON types: NaN and infinity to None, and objects without a JSON type to text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) < 10**_MAX_DIGITS:
        return value
    if isinstance(value, dict | list | tuple) and depth < _MAX_DEPTH:
        if isinstance(value, dict):
            return {_text_of(key): to_json(item, depth + 1) for key, item in value.items()}
        return [to_json(item, depth + 1) for item in value]
    return _text_of(value)


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 a user's __repr__ may raise anything
        return f"({type(value).__name__}, which cannot be shown: {type(error).__name__})"
