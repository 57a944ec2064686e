"""Order of the whole suite: fast tests first, then those that start the real vLLM."""

import gc
import os
import shutil
import tempfile
from functools import cache
from typing import Any

import pytest

# What stands in files that one process does all of: sandboxes are counted, ranks are started once.
_TOGETHER = {
    "sandboxes": ("sandbox", "envs.maths", "math-python", "math_python"),
    "ranks": ("support.ranks",),
}


def pytest_configure(config: pytest.Config) -> None:
    """Runs that a test kills leave their sockets in the temporary folder, so it is one of ours."""
    if hasattr(config, "workerinput"):
        return  # it has the folder of whoever started it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays there
    ours = tempfile.mkdtemp(prefix="ob-")  # short: the path of a socket has an end
    config.add_cleanup(lambda: shutil.rmtree(ours, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = ours


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real = {item.path for item in items if _is_real(item)}
    items.sort(key=lambda item: (item.path in real, _is_real(item)))  # stable


def _is_real(item: pytest.Item) -> bool:
    return item.get_closest_marker("server") is not None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What one process does when there are several (`make test`).

    A file stays together, for its fixtures are expensive; so do some files.
    """
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def scope(path: str) -> str:
        text = (config.rootpath / path).read_text()
        named = (name for name, signs in _TOGETHER.items() if any(sign in text for sign in signs))
        return next(named, path)

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    # Hypothesis is imported at the end where no test did. Python 3.11.7 gives up compiling it, with
    # a SystemError, if garbage with a finalizer (a task that never ended) is collected meanwhile.
    gc.collect()
