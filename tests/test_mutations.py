"""Check that the mistakes of `python -m tests.mutations` still apply to the code."""

import ast

import pytest

from tests.mutations.__main__ import MUTATIONS, REPO


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_applies_and_names_tests_that_exist(mutation):
    ast.parse(mutation.applied(REPO))
    for test in mutation.tests:
        file, _, function = test.partition("::")
        assert f"def {function}" in (REPO / file).read_text(), test
