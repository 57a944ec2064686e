"""Export the viewer's page with some rollouts as one HTML file, which opens from disk.

The file contains the page's JavaScript modules as one script, and the rollouts as compressed text.
The content security policy allows only that script, by its hash, and forbids network requests.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lab.viewer import answers
from lab.viewer.index import RunIndex
from lab.viewer.rollout_lines import Row
from rl.runtime.folder import RunFolder

STATIC = Path(__file__).parent / "static"
MOST_ROLLOUTS = 8000  # about 25 MB if all tokens are recorded, a size that mail servers accept
_MODULE = re.compile(r"^import .*\n|^export ", re.MULTILINE)


def page(chosen: Sequence[tuple[RunIndex, str, Sequence[int]]], note: str = "") -> str:
    """Return the exported file as HTML. Raise ValueError for too many rollouts, or for none.

    `chosen`: each run's index and name, and the row numbers of its rollouts to export. Groups are
    exported whole, so that rollouts can be compared. `note`: a text about the rollouts, or "".
    """
    numbers = []
    for index, _, wanted in chosen:
        groups = {_group_of(index.rows[n]) for n in wanted}
        numbers.append([n for n, row in enumerate(index.rows) if _group_of(row) in groups])
    total = sum(map(len, numbers))
    if not total:
        raise ValueError("no rollout is selected: change step, source or env, or wait for rollouts")
    if total > MOST_ROLLOUTS:
        first = chosen[0][0].rows[0]
        raise ValueError(
            f"{total:,} rollouts exceed the limit of one file ({MOST_ROLLOUTS:,}): choose "
            f"some, such as source={first.source} step={first.step}"
        )
    runs = [_embedded_run(*one[:2], which) for one, which in zip(chosen, numbers, strict=True)]
    content = msgspec.json.encode({"runs": runs, "note": note or f"{total:,} rollouts, exported"})
    packed = base64.b64encode(gzip.compress(content, mtime=0)).decode()
    # All modules become one script, so their top-level names must differ. main.js runs last.
    paths = sorted(STATIC.glob("*.js"), key=lambda path: (path.stem == "main", path.name))
    script = "\n".join(_MODULE.sub("", path.read_text(encoding="utf-8")) for path in paths)
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


def write_page(run_folder: RunFolder, path: Path, note: str) -> None:
    """Write a page with the first groups of a run, up to MOST_ROLLOUTS rollouts, if one fits."""
    index = RunIndex(run_folder)
    index.refresh()
    numbers = list(range(len(index.rows)))
    if len(numbers) > MOST_ROLLOUTS:
        cut = _group_of(index.rows[MOST_ROLLOUTS])
        numbers = [n for n in numbers[:MOST_ROLLOUTS] if _group_of(index.rows[n]) != cut]
        note += f" (the first {len(numbers):,} rollouts)"
    if numbers:
        path.write_text(page([(index, run_folder.name, numbers)], note), encoding="utf-8")


def _group_of(row: Row) -> tuple[str, int, int]:
    return row.source, row.step, row.group_id


def _embedded_run(index: RunIndex, name: str, numbers: list[int]) -> dict[str, Any]:
    table = answers.table(index)
    table["columns"] = {
        column: [values[n] for n in numbers] for column, values in table["columns"].items()
    }
    questions = {str(question) for question in table["columns"]["question"]}
    steps = {str(step) for step in table["columns"]["step"]}
    table["titles"] = {key: text for key, text in table["titles"].items() if key in questions}
    table["scales"] = {key: value for key, value in table["scales"].items() if key in steps}
    # Remove local paths and problems, because other people may receive the file.
    table |= {"name": name, "path": "", "going": False, "problems": []}
    return {
        "table": table,
        "rollouts": answers.rollouts(index, numbers),
        "tokens": answers.tokens(index, numbers),
    }
