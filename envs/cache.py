"""Where things that take long to make are kept between runs."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return OFFBYONE_CACHE, or ~/.cache/offbyone."""
    return Path(os.environ.get("OFFBYONE_CACHE", "~/.cache/offbyone")).expanduser()
