"""Check that the mistakes of `python -m tests.mutations` still apply to the code."""

import ast
from collections import Counter

import pytest

from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import REPO
from tests.test_architecture import MAY_IMPORT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_applies_and_names_tests_that_exist(mutation):
    text = mutation.applied(REPO)
    assert text != (REPO / mutation.file).read_text()
    if mutation.file.endswith(".py"):
        ast.parse(text)
    assert mutation.tests or mutation.server
    for test in filter(None, (*mutation.tests, mutation.server)):
        file, _, function = test.partition("::")
        assert f"def {function}" in (REPO / file).read_text(), test


def test_every_package_has_mutations_and_no_mutation_occurs_twice():
    assert len(MUTATIONS) >= 60
    assert max(Counter(m.name for m in MUTATIONS).values()) == 1
    assert len({(m.file, m.old, m.new) for m in MUTATIONS}) == len(MUTATIONS)
    files = {m.file.replace("/", ".") for m in MUTATIONS}
    trains = {package for package in MAY_IMPORT if not package.startswith(("lab", "rl.terminal"))}
    assert {p for p in trains if not any(f.startswith(f"{p}.") for f in files)} == set()
