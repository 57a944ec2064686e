"""Load rows from JSON lines or with the library `datasets`. Unusable data raise ValueError."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from envs.episode import Example


def cache_folder() -> Path:
    """Return the cache folder: $OFFBYONE_CACHE, or ~/.cache/offbyone if unset."""
    return Path(os.environ.get("OFFBYONE_CACHE", "~/.cache/offbyone")).expanduser()


class LazyExamples(Sequence[Example]):
    """Base class of lazy sequences of examples. Subclasses define `__len__` and `example_at`."""

    def example_at(self, index: int) -> Example:
        """Build and return the example at `index`, where 0 <= index < len(self)."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.example_at(i) for i in range(*index.indices(len(self)))]
        return self.example_at(range(len(self))[index])  # range() raises IndexError out of bounds


def load_rows(source: str, path: str, **options: Any) -> Any:
    """Return `datasets.load_dataset(path, **options)`. Error messages name `source`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{source} needs the library `datasets`, which is not installed: run "
            "`pip install datasets`, or write JSON lines and use envs.datasets.JsonLines"
        ) from error
    if not {"data_files", "data_dir", "cache_dir"} & options.keys():
        require_reachable(path)
    try:
        return datasets.load_dataset(path, **options)
    except Exception as error:  # `datasets`, the hub and the network raise many error types.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{source} cannot be loaded ({reason}): check its name and splits, and the network"
        ) from error


def require_reachable(path: str) -> None:
    """Raise ValueError if a data set must come from the hub, and the hub does not answer."""
    if Path(path).expanduser().exists() or (problem := hub_problem()) is None:
        return
    from datasets.load import CachedDatasetModuleFactory

    try:
        CachedDatasetModuleFactory(path).get_module()
    except (FileNotFoundError, AssertionError) as error:
        # `get_module` raises AssertionError for a path with two slashes.
        raise ValueError(
            f"the data set {path} is neither a local folder nor in the cache, and cannot be "
            f"fetched ({problem}): use local files (docs/environments.md), run once with a "
            "network, or set HF_ENDPOINT to a mirror or HF_HOME to a cache that contains it "
            "(HF_HUB_OFFLINE=1 then prevents all requests to the hub)"
        ) from error


def hub_problem() -> str | None:
    """Return why the hub cannot be reached, or None if it answers, even with an HTTP error.

    This function sends a request of its own, because huggingface_hub retries for half a minute, and
    waits forever if a connection hangs.
    """
    import httpx  # imported here, because most runs need no hub
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{constants.ENDPOINT} does not answer: {str(error) or type(error).__name__}"
    return None


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number (from 1) and the JSON object of each non-empty line of a file."""
    if not path.is_file():
        where = f"relative paths start in {Path.cwd()}"
        raise ValueError(f"{path}: no such file ({where}): correct the path")
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                problem = f"line {number} is not JSON at character {error.colno} ({error.msg})"
                raise ValueError(f"{path}, {problem}: correct this line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object: correct this line")
            yield number, row
