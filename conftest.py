"""Order of the whole suite: fast tests first, then those that start the real vLLM."""

import gc

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)  # stable


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    # Hypothesis is imported at the end where no test did. Python 3.11.7 gives up compiling it, with
    # a SystemError, if garbage with a finalizer (a task that never ended) is collected meanwhile.
    gc.collect()
