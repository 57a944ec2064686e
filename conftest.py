"""Order of the whole suite: fast tests first, then those that start the real vLLM."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)  # stable
