"""Copy the user's source files into the run folder, and find source and data files that changed.

    <run>/code/step_000000/losses/cispo.py    at the start of the run
    <run>/code/step_000050/losses/cispo.py    at a resume after step 50 with changed or new code
    <run>/code/data.json                      hashes of local data files, patterns of their paths

The copied files are those that the dry call (rl/dry_call) imported, except libraries and rl/. The
commit in overrides.yaml gives the version of rl/. The path of a copy is relative to this checkout
or the working folder (else to /), so that a run can be resumed after these folders have moved.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from glob import glob
from pathlib import Path

from envs.user_code import ROOT
from rl.runtime.files import remove, write_atomically
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import load_json, regular_file
from rl.runtime.text import printable

_DATA, _HASHED_BYTES = "data.json", 10_000_000


def copy_code(run_folder: RunFolder, files: Iterable[str], patterns: Iterable[str] = ()) -> None:
    """Copy source files and hash data files (`patterns`). A resume does so only after a change."""
    step, paths = run_folder.num_saved_steps(), [Path(file) for file in files]
    own = {_relative_name(path): path for path in paths if not path.is_relative_to(ROOT / "rl")}
    newest = max(run_folder.code.glob("step_*"), default=run_folder.code)
    all_copied = all((newest / name).is_file() for name in own)
    if step and all_copied and not changed_code(run_folder):
        return
    folder = run_folder.code / f"step_{step:06d}"
    remove(folder if step else run_folder.code)
    for name, file in own.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
    matched = [pattern for pattern in patterns if _data_files([pattern])]
    prints = {str(_relative_name(file)): _fingerprint(file) for file in _data_files(matched)}
    run_folder.code.mkdir(parents=True, exist_ok=True)
    write_atomically(run_folder.code / _DATA, json.dumps([prints, matched]))


def changed_code(run_folder: RunFolder) -> list[str]:
    """Return the names of source and data files that changed since `copy_code`, and of new data."""
    newest = sorted(run_folder.code.glob("step_*"))[-1:]
    copied = {name: _fingerprint(copy) for folder in newest for name, copy in _copies(folder)}
    with suppress(OSError, TypeError, ValueError):  # _DATA is missing or damaged
        prints, matched = load_json(run_folder.read(run_folder.code / _DATA))
        known = {_find_file(name) for name in prints}
        copied |= prints | {str(f): "" for f in _data_files(matched) if f not in known}
    return [
        printable(name)
        for name, before in copied.items()
        if not ((file := _find_file(name)) and _fingerprint(file) == before)
    ]


def _data_files(patterns: Iterable[str]) -> list[Path]:
    paths = (Path(path).absolute() for pattern in patterns for path in sorted(glob(pattern)))
    return [path for path in paths if path.is_file()]


def code_versions(run_folder: RunFolder) -> dict[str, tuple[str, ...]]:
    """Return {file name: hashes of its copies, oldest first}. Successive hashes differ."""
    versions: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for folder in sorted(run_folder.code.glob("step_*")):
        for name, copy in _copies(folder):
            digest = _fingerprint(copy)
            if versions[name := printable(name)][-1:] != (digest,):
                versions[name] += (digest,)
    return dict(versions)


def _fingerprint(file: Path) -> str:
    """Return the hash of a file. For a large file, hash only its size and its first 10 MB."""
    with file.open("rb") as content:
        start, size = content.read(_HASHED_BYTES), file.stat().st_size
    suffix = b"" if size == len(start) else b"%d" % size
    return hashlib.sha256(start + suffix).hexdigest()


def _copies(folder: Path) -> Iterator[tuple[str, Path]]:
    for copy in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # skip folders, and links to files outside `folder`
            yield str(copy.relative_to(folder)), regular_file(copy, folder)


def _relative_name(file: Path) -> Path:
    """Return the path of a file relative to one of the folders in which `_find_file` searches."""
    names = (file.relative_to(base) for base in _base_folders() if file.is_relative_to(base))
    return next((name for name in names if _find_file(name) == file), file)


def _find_file(name: str | Path) -> Path | None:
    return next((path for base in _base_folders() if (path := base / name).is_file()), None)


def _base_folders() -> tuple[Path, ...]:
    return ROOT, Path.cwd(), Path("/")
