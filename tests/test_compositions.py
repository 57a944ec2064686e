"""Check that the refused compositions are the stored ones; the others train in benchmarks/."""

import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest

from benchmarks._choices import Compositions, table
from benchmarks._covering import Conflict, Covering, form_of

README = (Path(__file__).parents[1] / "README.md").read_text()
TEXT = (Path(__file__).parent / "compositions.txt").read_text()


def read_table(text: str) -> dict[Conflict, str]:
    """Return the conflicts that a table lists, each with the message of its row."""
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", text, re.MULTILINE)
    return {
        frozenset(zip(groups, choices, strict=True)): message
        for names, message in rows
        for groups, lists in [zip(*re.findall(r"`([\w.]+)=([^`]+)`", names), strict=True)]
        for choices in product(*(names.split(",") for names in lists))
    }


CONFLICTS = read_table(TEXT)


@pytest.fixture(scope="module")
def compositions():
    return Compositions()


@pytest.fixture(scope="module")
def messages(compositions):
    """Return the message of the check for each conflict of the table, with random other choices."""
    rng = Random(0)
    firsts = {message: dict(c) for c, message in reversed(CONFLICTS.items())}
    counts, found = Counter(CONFLICTS.values()), {}
    for conflict, message in CONFLICTS.items():
        for _ in range(2 if counts[message] == 1 else 1):
            others = {group: rng.choice(list(c)) for group, c in compositions.groups.items()}
            row = {**others, **dict(conflict)}
            problems = {form_of(problem, row): problem for problem in compositions.problems(row)}
            form = form_of(message, firsts[message])
            assert form in problems, f"{sorted(conflict)} is not refused with: {message}"
            found[conflict] = problems[form]
    return found


def test_the_check_gives_every_message_of_the_table_whatever_else_is_chosen(messages):
    assert len(CONFLICTS) > 100
    assert set(CONFLICTS.values()) <= set(messages.values())


@pytest.mark.slow
def test_every_pair_that_the_table_does_not_refuse_occurs_in_an_allowed_run(compositions, messages):
    covering = Covering(compositions.groups, compositions.problems, {**messages}).fill()
    advice = "python -m benchmarks.compositions --refused > tests/compositions.txt"
    assert set(covering.conflicts) == set(messages), advice
    assert table(covering) == TEXT, advice
    counts = (re.findall(r"\d[\d,]*\d", text) for text in (TEXT.partition("\n")[0], README))
    assert set(next(counts)) <= set(next(counts)), "README.md, Groups and choices"
    held = {pair for row in covering.rows for pair in combinations(sorted(row.items()), 2)}
    assert held == set(covering.pairs()) - set(covering.refused()) - covering.impossible
    assert not any(compositions.problems(row) for row in covering.rows)
