"""Read files and commands from a page of the documentation; a comment names each file.

    # conf/loss/mine.yaml                    python train.py loss=mine \
    _target_: mine.mine                          max_steps=3
"""

import re
from pathlib import Path

_FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))(?:,|$)")
_COMMANDS = ("python", "mkdir")


def _blocks(page: Path) -> list[str]:
    """Return the indented blocks without their indentation."""
    blocks = re.findall(r"(?:^    .*\n|^\n)+", page.read_text(), re.MULTILINE)
    return ["".join(line[4:] or "\n" for line in block.splitlines(True)) for block in blocks]


def files(page: Path) -> dict[str, str]:
    """Return the text of each file by name."""
    found: dict[str, list[str]] = {}
    for block in _blocks(page):
        name = ""
        for line in block.splitlines():
            if match := _FILE.match(line):
                name = match[1]
                assert name not in found, f"{page.name} prints {name} twice"
                found[name] = []
            elif name:
                found[name].append(line)
    return {name: "\n".join(lines).strip() + "\n" for name, lines in found.items()}


def commands(page: Path) -> list[str]:
    """Return the commands, each as one line."""
    lines = [line for block in _blocks(page) for line in block.replace("\\\n", "").splitlines()]
    return [re.sub(" +", " ", line) for line in lines if line.startswith(_COMMANDS)]


def write(page: Path, folder: Path) -> None:
    """Write all files of a page into a folder."""
    for name, text in files(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
