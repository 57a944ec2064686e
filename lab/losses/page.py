"""Write the HTML page of a comparison. The colour of a token shows its gradient."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from pandas import DataFrame
from torch import Tensor

from lab.losses.arms import RECORDED, Arm

MAX_ROWS = 5  # maximum number of token rows shown per loss


def write_page(
    path: Path, arms: Sequence[Arm], tokens: DataFrame, grads: Sequence[Tensor], **shown: Any
) -> None:
    """Write page.html, filled with `shown`, to `path`. `grads`: per arm, one gradient per token."""
    shown["arms"] = [
        {
            "name": arm.name,
            "changes": arm.changed_keys,
            "ignored": arm.ignored,
            "rollouts": _differing_rows(
                tokens.assign(**{RECORDED: grads[0].double(), arm.name: own.double()}),
                [RECORDED, arm.name],
            ),
        }
        for arm, own in zip(arms[1:], grads[1:], strict=True)
    ]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("lab.losses").joinpath("page.html").read_text())
    path.write_text(template.render(**shown), errors="replace")


def _differing_rows(tokens: DataFrame, names: list[str]) -> list[dict[str, Any]]:
    """Return up to MAX_ROWS rows whose two gradients (the columns `names`) differ most."""
    gaps = (tokens[names[1]] - tokens[names[0]]).abs()
    rows = tokens.assign(gap=gaps).groupby(["step", "update", "row"])
    differing = rows.gap.sum().loc[lambda gaps: gaps > 0].nlargest(MAX_ROWS)
    shown = []
    for key in differing.index:
        row: Any = rows.get_group(key)
        largest = row[names].abs().to_numpy().max()
        about = {"names": names, "advantage": row.advantage.mean(), "largest": largest}
        shown.append({**about, "tokens": row.to_dict("records")})
    return shown
