"""One HTML file with some rollouts and all that shows them: it opens from disk, can be mailed.

The modules of the page become one script, the rollouts a compressed block of text. The file's
policy names that script by its hash: nothing else is run, and nothing is loaded.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl.viewer import answers
from rl.viewer.index import RunIndex

STATIC = Path(__file__).parent / "static"
MOST_ROLLOUTS = 8000  # of a file: with all of their tokens some 25 MB, which mail still takes
_IMPORT = re.compile(r'^import .*? from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:const|class|function) (\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Chosen:
    """Rollouts of a run, by number."""

    index: RunIndex
    name: str
    numbers: Sequence[int]


def page(chosen: Sequence[Chosen], note: str = "") -> str:
    """Return the whole file. Groups are taken whole, so that every rollout stands beside its own.

    Raises:
        ValueError: there are none, or too many for a file.

    """
    numbers = [whole_groups(one.index, one.numbers) for one in chosen]
    total = sum(map(len, numbers))
    if not total:
        raise ValueError("no rollout meets this condition, so there is nothing to export")
    if total > MOST_ROLLOUTS:
        raise ValueError(
            f"{total:,} rollouts are too many for one file (at most {MOST_ROLLOUTS:,}): choose "
            f'some, such as where="step = {_last_step(chosen)}"'
        )
    runs = [_run(one, which) for one, which in zip(chosen, numbers, strict=True)]
    content = msgspec.json.encode({"runs": runs, "note": note or f"{total:,} rollouts, exported"})
    packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    script = bundle("main")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; "
        "style-src 'unsafe-inline'; img-src data:"
    )
    charset = '<meta charset="utf-8">'
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    replacements = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="static/style.css">': f"<style>\n{style}</style>",
        '<script type="module" src="static/main.js"></script>': (
            f'<script type="text/plain" id="embedded">{packed}</script>\n'
            f'<script type="module">{script}</script>'
        ),
    }
    html = (STATIC / "index.html").read_text(encoding="utf-8")
    for old, new in replacements.items():
        assert old in html
        html = html.replace(old, new)
    return html


def _last_step(chosen: Sequence[Chosen]) -> int:
    """The last step that each of the runs has, of training if it is there."""
    query = """
    SELECT coalesce(max(step) FILTER (WHERE source = 'training'), max(step)) FROM viewed
    WHERE list_contains(?, n)
    """
    return min(one.index.rows(query, [list(one.numbers)])[0][0] for one in chosen if one.numbers)


def whole_groups(index: RunIndex, numbers: Sequence[int]) -> list[int]:
    """Return these rollouts and the others of their groups, in order."""
    query = """
    SELECT v.n FROM viewed v SEMI JOIN
        (SELECT source, step, group_id FROM viewed WHERE list_contains(?, n)) c
    ON (v.source, v.step, v.group_id) = (c.source, c.step, c.group_id) ORDER BY v.n
    """
    return [n for (n,) in index.rows(query, [list(numbers)])]


def _run(chosen: Chosen, numbers: list[int]) -> dict[str, Any]:
    """What a page would ask for, rollouts numbered anew from 0."""
    table = answers.table(chosen.index)
    table["columns"] = {
        name: [values[n] for n in numbers] for name, values in table["columns"].items()
    }
    asked = {str(question) for question in table["columns"]["question"]}
    steps = {str(step) for step in table["columns"]["step"]}
    table["titles"] = {key: text for key, text in table["titles"].items() if key in asked}
    table["scales"] = {key: value for key, value in table["scales"].items() if key in steps}
    # Where it lies on this machine, and whether it goes on, is nothing for whoever gets the file.
    table |= {"name": chosen.name, "path": "", "going": False, "problems": []}
    return {
        "table": table,
        "rollouts": answers.rollouts(chosen.index, numbers),
        "tokens": [answers.tokens(chosen.index, n) for n in numbers],
    }


def bundle(name: str) -> str:
    """Return a module and all that it imports as one script."""
    parts: dict[str, str] = {}

    def add(module: str) -> None:
        if module not in parts:
            text = (STATIC / f"{module}.js").read_text(encoding="utf-8")
            for needed in _IMPORT.findall(text):
                add(needed)
            parts[module] = _enclosed(_IMPORT.sub("", text))

    add(name)
    return "\n".join(parts.values())


def _enclosed(module: str) -> str:
    """A module without imports whose own names stay inside, but for those that it exports."""
    names = ", ".join(_EXPORT.findall(module))
    inside = _EXPORT.sub(lambda match: match[0].removeprefix("export "), module)
    return (
        f"const {{ {names} }} = (() => {{\n{inside}return {{ {names} }};\n}})();"
        if names
        else inside
    )
