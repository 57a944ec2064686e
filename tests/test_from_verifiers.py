"""Check that docs/from-verifiers.md has a row for every key of the seed documents.

seed_keys.txt lists the keys. Each row names existing keys of offbyone.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.rl.config.test_shipped import CHOICES, COMPANIONS, NOT_TRAINED
from tests.support.composing import CONF, REPO, composed

PAGE = (REPO / "docs" / "from-verifiers.md").read_text()
MAKEFILE = (REPO / "Makefile").read_text()
SEED_KEYS = (Path(__file__).parent / "seed_keys.txt").read_text().splitlines()

KEY = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*(=[\w.-]+)?")


def rows() -> dict[str, str]:
    """Return the column "here" by document.key."""
    found, document = {}, ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            document = line.removeprefix("## ").partition(":")[0]
        elif line.startswith("| `"):
            keys, there, ours = (cell.strip() for cell in line.strip("|").split(" | "))
            assert there
            for key in re.findall(r"`([^`]+)`", keys):
                name = f"{document}.{key}"
                assert name not in found, f"two rows for {name}"
                found[name] = ours
    return found


@cache
def known() -> frozenset[str]:
    """Return every dotted key of every composed choice."""

    def dotted(value: Any, path: str) -> Iterator[str]:
        yield path
        for key, item in value.items() if isinstance(value, dict) else ():
            yield from dotted(item, f"{path}.{key}".strip("."))

    found = [composed(c, *COMPANIONS.get(c, [])) for c in [*CHOICES, *NOT_TRAINED]]
    found += [composed(primary=primary) for primary in ("evaluate", "optimize_prompt")]
    return frozenset(key for config in found for key in dotted(config, ""))


def test_every_key_of_the_list_has_one_row_and_every_row_is_in_the_list() -> None:
    assert sorted(rows()) == sorted(SEED_KEYS)
    assert len(SEED_KEYS) == len(set(SEED_KEYS)) > 150


@pytest.mark.parametrize("seed_key", rows())
def test_a_row_names_keys_that_exist_or_a_command_or_a_reason(seed_key: str) -> None:
    ours = rows()[seed_key]
    named = re.findall(r"`([^`]+)`", ours) if not ours.startswith("planned: ") else []
    for text in named:
        name, _, choice = text.partition("=")
        if command := re.fullmatch(r"make (\w+)|python (\w+\.py)", text):
            target, program = command.groups()
            assert program or re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
            assert target or (REPO / program).is_file()
        elif KEY.fullmatch(text):
            is_choice = choice and (CONF / name).is_dir()
            exists = (CONF / name / f"{choice}.yaml").is_file() if is_choice else name in known()
            assert exists, f"{seed_key} -> {ours}"
    assert named or ours.startswith(("planned: ", "none, because ", "always", "the same name"))
