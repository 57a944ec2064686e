"""Some damaged inputs for each reader; `python -m tests.fuzz` reads more."""

import pytest

from tests.fuzz.cases import Limits, findings
from tests.fuzz.readers import READERS

CASES = {"config": 200, "tools": 500, "tokens": 300, "checkpoint": 500, "wire": 1000}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_is_read_or_refused_by_the_documented_error(name, tmp_path):
    reader = READERS[name](tmp_path)
    with Limits() as limits:
        assert list(findings(reader, name, 0, range(CASES[name]), limits)) == []
