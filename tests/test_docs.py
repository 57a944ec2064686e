"""What the documentation must not forget."""

import re
from pathlib import Path

import pytest

from benchmarks.page import page, programs

REPO = Path(__file__).parents[1]
CONF, DOCS = REPO / "conf", REPO / "docs"
LOSSES = (DOCS / "losses.md").read_text()
# Files of losses/ that hold no formula of their own.
NOT_FORMULAS = {"__init__", "tokens"}
DESCRIBED = ("loss", "advantage", "aggregation", "kl", "correction", "truncation")


def choices(*groups: str) -> list[str]:
    """group=choice of those groups that exist."""
    return [f"{g}={path.stem}" for g in groups for path in sorted((CONF / g).glob("*.yaml"))]


def section(group: str) -> str:
    """The part of losses.md that is about a group."""
    if group == "loss":
        return LOSSES.split("## Algorithms\n")[1].split("\n## ")[0]
    return next(part for part in LOSSES.split("\n## ") if f"(conf/{group}" in part.split("\n")[0])


@pytest.mark.parametrize("choice", choices(*DESCRIBED))
def test_every_choice_is_described_where_its_group_is(choice: str) -> None:
    group, _, name = choice.partition("=")
    assert re.search(rf"(?<![\w.]){name}(?!\w)", section(group)), f"docs/losses.md omits {choice}"


@pytest.mark.parametrize("path", sorted((REPO / "losses").glob("*.py")), ids=lambda path: path.stem)
def test_every_formula_file_is_named(path: Path) -> None:
    if path.stem not in NOT_FORMULAS:
        assert f"losses/{path.name}" in LOSSES


def test_every_algorithm_has_a_row_in_the_table_and_a_heading_below_it() -> None:
    rows = re.findall(r"^\| (\w+)(?: \(default\))? \| losses/", LOSSES, re.MULTILINE)
    headings = re.findall(r"^### (.+)$", section("loss"), re.MULTILINE)
    assert sorted(rows) == sorted(name for line in headings for name in line.split(", "))
    assert {name.partition("=")[2] for name in choices("loss")} <= set(rows)


def test_the_page_of_benchmarks_is_what_was_measured() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    assert text == page(), "python -m benchmarks.page"
    assert all(f"## {program}\n" in text for program in programs())
