"""Check that docs/from-verifiers.md has a row for every key of the seed documents.

Each row names existing keys. With OFFBYONE_SEEDS=<folder of the documents, *.txt> a test also
compares seed_keys.txt with their TOML; .ci/run sets it.
"""

import os
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


def keys_of(ours: str) -> list[str]:
    """Return the keys and choices of offbyone that a cell names in backticks."""
    return [text for text in re.findall(r"`([^`]+)`", ours) if KEY.fullmatch(text)]


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


def exists(key: str) -> bool:
    """Return whether a key, key=value or group=choice exists."""
    name, _, choice = key.partition("=")
    if choice and (CONF / name).is_dir():
        return (CONF / name / f"{choice}.yaml").is_file()
    return name in known()


def test_every_key_of_the_list_has_one_row_and_every_row_is_in_the_list() -> None:
    assert sorted(rows()) == sorted(SEED_KEYS)
    assert len(SEED_KEYS) == len(set(SEED_KEYS)) > 150


@pytest.mark.parametrize("seed_key", rows())
def test_a_row_names_keys_that_exist_or_a_command_or_a_reason(seed_key: str) -> None:
    ours = rows()[seed_key]
    keys = [] if ours.startswith("planned: ") else keys_of(ours)
    assert not [key for key in keys if not exists(key)], f"{seed_key} -> {ours}"
    targets = re.findall(r"`make (\w+)`", ours)
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets)
    programs = re.findall(r"`python (\w+\.py)`", ours)
    assert all((REPO / program).is_file() for program in programs)
    told = ("planned: ", "none, because ", "always", "the same name")
    assert keys or targets or programs or ours.startswith(told)


HEADER = re.compile(r"\[{1,2}([\w.-]+)\]{1,2}\s*(#.*)?")
SETTING = re.compile(r"""["']?([A-Za-z_][\w.]*)["']?\s*=\s*(\S.*)""")
NO_PROSE = re.compile(r"""\s*(#.*|["'\]].*|```.*)?""")


def toml_keys(text: str) -> set[str]:
    """Return the dotted keys of all TOML in a document; prose ends a table."""
    found, table = set(), ""
    for line in text.splitlines():
        header, setting = HEADER.fullmatch(line.strip()), SETTING.fullmatch(line.strip())
        if line.startswith("```"):
            table = ""
        elif header:
            table = f"{header[1]}."
            found.add(header[1])
        elif setting:
            found.add(f"{table}{setting[1]}")
            if setting[2].startswith("{"):
                inner = re.findall(r"""[{,]\s*["']?([\w.]+)["']?\s*=""", setting[2])
                found |= {f"{table}{setting[1]}.{key}" for key in inner}
        elif not NO_PROSE.fullmatch(line):
            table = ""
    return found


def test_every_toml_key_of_the_seed_documents_is_in_the_list() -> None:
    folder = os.environ.get("OFFBYONE_SEEDS")
    if not folder:
        pytest.skip("OFFBYONE_SEEDS names no folder of documents")
    texts = [path.read_text() for path in Path(folder).glob("*.txt")]
    assert texts
    keys = set().union(*map(toml_keys, texts))
    listed = {line.partition(".")[2] for line in SEED_KEYS}
    tables = {key[:i] for key in listed for i in range(len(key)) if key[i] == "."}
    alone = {key.rpartition(".")[2] for key in listed}  # prose names keys without their table
    assert not keys - listed - tables - alone
    assert len(keys) > 70
