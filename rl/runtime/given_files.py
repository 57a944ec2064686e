"""Read the files of a run folder safely, because another person may have made them.

These functions refuse YAML that would fill a reader's memory, and paths that would block the reader
for ever or lead out of the folder. A resumed run also writes to the folder, so it first checks
every path. docs/scaling.md (run folders of other people) describes what is safe.
"""

import errno
import json
import os
import stat
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster
_MAX_DEPTH = 100  # maximum nesting of YAML; the C loader crashes the process at about 50,000 levels
_MAX_NODES = 1_000_000  # maximum number of YAML values; an alias counts as a copy of its target


def regular_file(path: Path, folder: Path) -> Path:
    """Return `path` if it is a regular file inside `folder`. Otherwise raise FileNotFoundError."""
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise FileNotFoundError(errno.ENOENT, f"not a regular file inside {folder}", str(path))
    return path


def load_json(content: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if it is invalid or nested too deep."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deep for Python") from None


def load_yaml(content: bytes) -> Any:
    """Parse YAML. Raise yaml.YAMLError if it is invalid, nested too deep or too large."""
    anchors, sizes_by_anchor = list[str | None](), dict[str | None, int]()
    sizes = [0]  # number of values so far in each open collection
    for event in yaml.parse(content, Loader=YAML_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            sizes.append(0)
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            size = sizes_by_anchor[anchors.pop()] = sizes.pop() + 1
            sizes[-1] += size
        elif isinstance(event, yaml.AliasEvent):
            sizes[-1] += sizes_by_anchor.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
        if len(sizes) > _MAX_DEPTH or sizes[-1] > _MAX_NODES:
            raise yaml.YAMLError(f"YAML has more than {_MAX_DEPTH} levels or {_MAX_NODES:,} values")
        if isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise yaml.YAMLError("a YAML alias refers to a value that contains this alias")
    try:
        return yaml.load(content, Loader=YAML_LOADER)
    except yaml.YAMLError:
        raise
    except Exception as error:  # the library raises various errors if a value does not fit its tag
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from error


def why_unsafe_to_write(folder: Path) -> str:
    """Return why a run must not write into `folder`, or "" if there is no reason.

    Each path in `folder` must belong to the user or root, because a run writes and deletes files.
    Each path must be a file, folder or socket, because a run that opens a FIFO would block. A link
    must lead into `folder`, except wandb's links to its own logs and the link `sockets`, whose
    target PrivateFolder checks. Return "" for a read-only folder, which the caller refuses.
    """
    import tempfile

    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return ""
    # On a network file system another user may own new files of this process. Accept this owner.
    with tempfile.TemporaryFile(dir=folder) as new:
        owners = {0, os.geteuid(), os.fstat(new.fileno()).st_uid}
    top = folder.resolve()
    if os.geteuid() == 0:  # root, such as in a container, may resume the run of any user
        owners.add(top.stat().st_uid)
    paths = [Path(above, name) for above, *below in os.walk(top) for name in chain(*below)]
    for path in [top, *paths]:
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process uses the folder and has deleted this path
            continue
        if status.st_uid not in owners:
            return f"{path} belongs to another user (id {status.st_uid}): use a copy of the folder"
        if stat.S_ISLNK(status.st_mode):
            is_exempt = path.name == "sockets" or top / "wandb" in path.parents
            if not is_exempt and not path.resolve().is_relative_to(top):
                return f"{path} is a link that leads out of {folder}: replace it by its target"
        elif not any(test(status.st_mode) for test in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISSOCK)):
            return f"{path} is neither a file nor a folder: delete it"
    return ""
