"""Copy the user's source files into the run folder, and find files that changed later.

    <run>/code/step_000000/losses/cispo.py    at the start of the run
    <run>/code/step_000050/losses/cispo.py    at a resume after step 50 with changed or new code

The copied files are those that the dry call (rl/dry_call) imported, except libraries and rl/. The
commit in overrides.yaml gives the version of rl/. The path of a copy is relative to this checkout
or the working folder (else to /), so that a run can be resumed after these folders have moved.
"""

import filecmp
import hashlib
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from envs.user_code import ROOT
from rl.runtime.files import remove
from rl.runtime.folder import RunFolder
from rl.runtime.given_files import regular_file
from rl.runtime.text import printable


def copy_code(run_folder: RunFolder, files: Iterable[str]) -> None:
    """Copy the user's files into the run folder; at a resume, only if a file is new or changed."""
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


def changed_code(run_folder: RunFolder) -> list[str]:
    """Return the names of the copied files that were deleted or changed since the newest copy."""
    newest = sorted(run_folder.code.glob("step_*"))[-1:]
    copies = (copy for folder in newest for copy in _copies(folder))
    return [
        printable(name)
        for name, copy in copies
        if not ((file := _find_file(name)) and filecmp.cmp(file, copy, shallow=False))
    ]


def code_versions(run_folder: RunFolder) -> dict[str, tuple[str, ...]]:
    """Return {file name: hashes of its copies, oldest first}. Successive hashes differ."""
    versions: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for folder in sorted(run_folder.code.glob("step_*")):
        for name, copy in _copies(folder):
            with copy.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if versions[name := printable(name)][-1:] != (digest,):
                versions[name] += (digest,)
    return dict(versions)


def _copies(folder: Path) -> Iterator[tuple[str, Path]]:
    for copy in sorted(folder.rglob("*")):
        with suppress(FileNotFoundError):  # skip folders, and links to files outside `folder`
            yield str(copy.relative_to(folder)), regular_file(copy, folder)


def _relative_name(file: Path) -> Path:
    """Return the path of a file relative to one of the folders in which `_find_file` searches."""
    names = (file.relative_to(base) for base in _base_folders() if file.is_relative_to(base))
    return next(name for name in names if _find_file(name) == file)


def _find_file(name: str | Path) -> Path | None:
    return next((path for base in _base_folders() if (path := base / name).is_file()), None)


def _base_folders() -> tuple[Path, ...]:
    return ROOT, Path.cwd(), Path("/")
