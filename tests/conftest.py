"""Order the whole suite: fast tests first, then the tests that start the real vLLM."""

import gc
import os
import shutil
import tempfile
from functools import cache
from typing import Any

import pytest

from tests.support import golden

# A test file that contains one of these texts runs in the process of its group: tests of sandboxes
# count all sandboxes of the machine, the worker ranks are started once per process, and each
# choice of conf/ is composed once per process.
_TOGETHER = {
    "sandboxes": ("sandbox", "envs.maths", "math-python", "math_python"),
    "ranks": ("support.ranks",),
    "choices": ("COMPANIONS",),
}
# The first of the files that start vLLM: at the end, one process would wait for it.
_LONGEST = "test_training.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the files of tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Use a temporary folder of our own, because killed runs leave their sockets in it."""
    golden.write = config.getoption("write_golden")
    if hasattr(config, "workerinput"):
        return  # a worker inherits the folder
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # for tmp_path
    folder = tempfile.mkdtemp(prefix="ob-")  # short, because socket paths are limited
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def is_real(item: pytest.Item) -> bool:
        return item.get_closest_marker("server") is not None

    real = {item.path for item in items if is_real(item)}
    items.sort(key=lambda i: (i.path in real, i.path.name != _LONGEST, is_real(i)))
    if on_gpus := [item for item in items if item.get_closest_marker("gpu")]:
        import torch  # seconds: only if a test needs it

        no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch uses no GPU")
        for item in on_gpus:
            item.add_marker(no_gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule each file, and each group of files in _TOGETHER, in one process.

    Fixtures are expensive, so a file is never split (`make test` uses several processes).
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
    # If no test imported Hypothesis, its plugin imports it now. Python 3.11.7 then fails with a
    # SystemError if it collects an object with a finalizer while it compiles the module.
    gc.collect()
