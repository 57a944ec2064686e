"""Order of the whole suite: fast tests first, then those that start the real vLLM."""

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_is_real)  # stable
    for item in items:
        # With several workers: a file stays together, for its fixtures are expensive, and real runs
        # never share the cores, for some of them have to end within seconds.
        item.add_marker(pytest.mark.xdist_group("real" if _is_real(item) else str(item.path)))


def _is_real(item: pytest.Item) -> bool:
    return item.get_closest_marker("server") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    # Hypothesis is imported at the end where no test did. Python 3.11.7 gives up compiling it, with
    # a SystemError, if garbage with a finalizer (a task that never ended) is collected meanwhile.
    gc.collect()
