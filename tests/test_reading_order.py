"""The reading order of docs/architecture.md: its size, and that it introduces before it uses."""

import re

from tests.test_architecture import MODULES, REPO, own_imports

CORE = [
    "rl/records.py",
    "rl/sampling/row_builder.py",
    "rl/rollouts/buffer.py",
    "rl/rollouts/dispatcher.py",
    "rl/rollouts/plan.py",
    "rl/learner/objective.py",
    "rl/trainer/loop.py",
]
LONGEST_CORE = 1200  # lines


PATH = r"`([\w/.]+/[\w/.]+)`"


def items() -> list[str]:
    """Return the numbered items of the section `Reading order`."""
    page = (REPO / "docs" / "architecture.md").read_text()
    section = page.partition("\n## Reading order\n")[2].partition("\n## ")[0]
    return re.split(r"^\d+\. ", section, flags=re.MULTILINE)


def reading_order() -> list[str]:
    """Return the files to read: those that an item names before its colon."""
    return [path for item in items()[1:] for path in re.findall(PATH, item.partition(": ")[0])]


def num_lines(paths: list[str]) -> int:
    return sum(len((REPO / path).read_text().splitlines()) for path in paths)


def test_the_core_comes_first_and_is_short():
    order = reading_order()
    assert [path for path in order if path in CORE] == CORE
    # Among them stands what users write a loss against.
    assert set(order[: len(CORE) + 1]) == {*CORE, "losses/tokens.py"}
    assert num_lines(CORE) <= LONGEST_CORE


def test_the_page_says_how_many_lines_the_core_and_the_whole_list_have():
    said = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", items()[0])]
    for count, paths in zip(said, (CORE, reading_order()), strict=True):
        assert abs(count - num_lines(paths)) <= 50, num_lines(paths)


def test_a_file_imports_nothing_of_the_list_that_the_list_has_not_named_yet():
    module_at = {str(path.relative_to(REPO)): name for name, path in MODULES.items()}
    listed, named = {module_at.get(path) for path in reading_order()}, set()
    for item in items()[1:]:
        named |= {module_at.get(path) for path in re.findall(PATH, item)}
        for path in re.findall(PATH, item.partition(": ")[0]):
            imported = own_imports(module_at[path]) if path in module_at else set()
            assert not (imported & listed) - named, path
