"""Check that docs/compositions.md equals the answers of the check, and that compositions train."""

import json
import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from random import Random

import pytest

from benchmarks._choices import Compositions, page
from benchmarks._covering import Conflict, Covering, form_of

REPO = Path(__file__).parents[1]
TEXT = (REPO / "docs" / "compositions.md").read_text()


def read_page(text: str) -> dict[Conflict, str]:
    """Return the conflicts that a page lists, each with the message of its row."""
    refused = text.split("## Refused")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", refused, re.MULTILINE)
    return {
        frozenset(zip(groups, choices, strict=True)): message
        for names, message in rows
        for groups, lists in [zip(*re.findall(r"`([\w.]+)=([^`]+)`", names), strict=True)]
        for choices in product(*(names.split(",") for names in lists))
    }


CONFLICTS = read_page(TEXT)
EVERY = 24  # python -m benchmarks.compositions trains all of them


@pytest.fixture(scope="module")
def compositions() -> Compositions:
    return Compositions()


@pytest.fixture(scope="module")
def messages(compositions: Compositions) -> dict[Conflict, str]:
    """Return the message of the check for each conflict of the page, with random other choices."""
    rng = Random(0)
    firsts = {message: dict(c) for c, message in reversed(CONFLICTS.items())}
    found = {}
    for conflict, message in CONFLICTS.items():
        for _ in range(3):
            others = {group: rng.choice(list(c)) for group, c in compositions.groups.items()}
            row = {**others, **dict(conflict)}
            problems = {form_of(problem, row): problem for problem in compositions.problems(row)}
            form = form_of(message, firsts[message])
            assert form in problems, f"{sorted(conflict)} is not refused with: {message}"
            found[conflict] = problems[form]
    return found


def test_the_check_gives_every_message_of_the_page_whatever_else_is_chosen(
    messages: dict[Conflict, str],
) -> None:
    assert len(CONFLICTS) > 100
    assert set(CONFLICTS.values()) <= set(messages.values())


def test_every_pair_that_the_page_does_not_refuse_occurs_in_an_allowed_run(
    compositions: Compositions, messages: dict[Conflict, str]
) -> None:
    covering = Covering(compositions.groups, compositions.problems, {**messages}).fill()
    assert set(covering.conflicts) == set(messages), "python -m benchmarks.compositions --page"
    assert page(covering) == TEXT
    held = {pair for row in covering.rows for pair in combinations(sorted(row.items()), 2)}
    assert held == set(covering.pairs()) - set(covering.refused()) - covering.impossible
    assert not any(compositions.problems(row) for row in covering.rows)


@pytest.mark.timeout(900)
def test_a_sample_of_the_compositions_trains() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.compositions", "--every", str(EVERY)],
        cwd=REPO,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not [line for line in lines if "failed" in line]
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(lines) >= 4
