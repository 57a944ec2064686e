"""docs/compositions.md is what the check says today, and what it says trains does train."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from benchmarks._choices import Compositions, page, read_page
from benchmarks._covering import Conflict, Covering, form_of

REPO = Path(__file__).parents[1]
TEXT = (REPO / "docs" / "compositions.md").read_text()
CONFLICTS = read_page(TEXT)
EVERY = 24  # all of them: python -m benchmarks.compositions


@pytest.fixture(scope="module")
def compositions() -> Compositions:
    return Compositions()


@pytest.fixture(scope="module")
def sentences(compositions: Compositions) -> dict[Conflict, str]:
    """What the check says to each conflict of the page, whatever else is chosen."""
    rng = Random(0)
    firsts = {sentence: dict(c) for c, sentence in reversed(CONFLICTS.items())}
    found = {}
    for conflict, sentence in CONFLICTS.items():
        for _ in range(3):
            others = {group: rng.choice(list(c)) for group, c in compositions.groups.items()}
            row = {**others, **dict(conflict)}
            said = {form_of(problem, row): problem for problem in compositions.problems(row)}
            form = form_of(sentence, firsts[sentence])
            assert form in said, f"{sorted(conflict)} is not refused with: {sentence}"
            found[conflict] = said[form]
    return found


def test_every_sentence_of_the_page_is_what_the_check_says_whatever_else_is_chosen(
    sentences: dict[Conflict, str],
) -> None:
    assert len(CONFLICTS) > 100
    assert set(CONFLICTS.values()) <= set(sentences.values())


def test_every_pair_that_the_page_does_not_refuse_occurs_in_a_run_that_the_check_lets_pass(
    compositions: Compositions, sentences: dict[Conflict, str]
) -> None:
    covering = Covering(compositions.groups, compositions.problems, {**sentences}).fill()
    assert set(covering.conflicts) == set(sentences), "python -m benchmarks.compositions --page"
    assert page(covering) == TEXT
    held = {pair for row in covering.rows for pair in combinations(sorted(row.items()), 2)}
    assert held == set(covering.pairs()) - set(covering.refused()) - covering.impossible
    assert not any(compositions.problems(row) for row in covering.rows)


@pytest.mark.parametrize(
    "pair",
    [
        ("adapter=lora", "sync=adapter"),
        ("adapter=lora", "loss=rloo"),
        ("adapter=none", "advantage=rloo"),
        ("loss=sft", "adapter=lora"),
        ("env=arithmetic", "sync=adapter"),
    ],
)
def test_what_the_page_once_refused_by_mistake_is_no_conflict(pair: tuple[str, str]) -> None:
    choices = {tuple(choice.split("=")) for choice in pair}
    assert not any(conflict <= choices for conflict in CONFLICTS)


@pytest.mark.timeout(900)
def test_some_of_the_runs_of_the_page_train() -> None:
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
