"""Execute the cells of a notebook: python -m tests.support.notebooks <file> [old=>new ...]

As in Jupyter, an event loop runs meanwhile, and the last expression of a cell is displayed. Each
old=>new replaces text of the notebook.
"""

import ast
import asyncio
import json
import sys
from pathlib import Path


def cells(path: Path, changes: list[str]) -> list[str]:
    """Return the code of each cell."""
    text = path.read_text()
    for change in changes:
        old, new = (json.dumps(part)[1:-1] for part in change.split("=>"))
        assert old in text, old
        text = text.replace(old, new)
    return ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]


async def execute(code: list[str]) -> None:
    """Execute the cells, and print the kinds of pictures that they display."""
    known: dict = {"__name__": "__main__"}
    for cell in code:
        *before, last = ast.parse(cell).body
        if not isinstance(last, ast.Expr):
            before, last = [*before, last], ast.Expr(ast.Constant(None))
        exec(compile(ast.Module(before, []), "cell", "exec"), known)
        expression = ast.fix_missing_locations(ast.Expression(last.value))
        shown = eval(compile(expression, "cell", "eval"), known)
        shows = hasattr(shown, "_repr_mimebundle_")
        bundle = shown._repr_mimebundle_(include=None, exclude=None) if shows else {}
        kinds = bundle[0] if isinstance(bundle, tuple) else bundle
        print("displayed", *kinds, repr(shown)[:200])  # noqa: T201


if __name__ == "__main__":
    asyncio.run(execute(cells(Path(sys.argv[1]), sys.argv[2:])))
