import pytest

from tests.support.launching import Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory) -> Launcher:
    cache, output = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("runs")
    environment = {"OFFBYONE_CACHE": str(cache), "PYTHONPATH": str(output)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "compiled")}
    return Launcher(output, environment)
