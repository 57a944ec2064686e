"""An extension of griffe, so that docs/api.md shows the comments of fields, too."""

from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Add public fields and their comments to class docstrings that list no attributes."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        public = [a for name, a in cls.attributes.items() if name[0] != "_" and not a.docstring]
        if public and cls.docstring and "Attributes:" not in cls.docstring.value:
            fields = [f"    {a.name}: {_comment(a) or '-'}" for a in public]
            cls.docstring.value += "\n".join(["\n\nAttributes:", *fields])


def _comment(attribute: griffe.Attribute) -> str:
    """Return the comment on the line of a field, else the comment lines above the field."""
    lines = attribute.lines_collection[attribute.filepath]
    above = list[str]()
    for line in reversed(lines[: (attribute.lineno or 1) - 1]):
        if not line.lstrip().startswith("# "):
            break
        above.insert(0, line.strip().removeprefix("# "))
    trailing = lines[(attribute.endlineno or 1) - 1].partition("  # ")[2]
    return trailing or " ".join(above).removesuffix(":")
