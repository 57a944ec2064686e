"""Check that the refused compositions are the stored ones, and that the others train."""

import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest

from benchmarks._choices import NO_SERVER, NOT_TRAINED, Compositions, table
from benchmarks._covering import Conflict, Covering, form_of
from benchmarks.compositions import train_all

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
NUM_TRAINED = 5  # python -m benchmarks.compositions trains a covering of all pairs


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


@pytest.fixture(scope="module")
def covering(compositions, messages):
    return Covering(compositions.groups, compositions.problems, {**messages}).fill()


def test_the_check_gives_every_message_of_the_table_whatever_else_is_chosen(messages):
    assert len(CONFLICTS) > 100
    assert set(CONFLICTS.values()) <= set(messages.values())


@pytest.mark.slow
def test_every_pair_that_the_table_does_not_refuse_occurs_in_an_allowed_run(
    compositions, messages, covering
):
    advice = "python -m benchmarks.compositions --refused > tests/compositions.txt"
    assert set(covering.conflicts) == set(messages), advice
    assert table(covering) == TEXT, advice
    counts = (re.findall(r"\d[\d,]*\d", text) for text in (TEXT.partition("\n")[0], README))
    assert set(next(counts)) <= set(next(counts)), "README.md, Groups and choices"
    held = {pair for row in covering.rows for pair in combinations(sorted(row.items()), 2)}
    assert held == set(covering.pairs()) - set(covering.refused()) - covering.impossible
    assert not any(compositions.problems(row) for row in covering.rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sample_of_the_compositions_trains(compositions, covering, capfd):
    rows = [
        {group: choice for group, choice in row.items() if group not in NOT_TRAINED}
        for row in covering.rows
        if not any(row[group] in choices for group, choices in NO_SERVER.items())
    ]
    rows = [row for row in rows if not compositions.problems(row)]  # with the defaults, too
    sample = rows[:: len(rows) // NUM_TRAINED][:NUM_TRAINED]
    failed = train_all(compositions, sample)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert (failed, len(lines)) == (0, NUM_TRAINED), lines
