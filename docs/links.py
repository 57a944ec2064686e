"""A hook of mkdocs: the site shows docs/losses.md in a sentence as a link to that page."""

import re

_PAGE = re.compile(r"(?<![\w/`\[])docs/([\w-]+)\.md(?![\w`])")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its links; code, which is indented, stays as it is."""
    lines = markdown.splitlines()
    return "\n".join(x if x[:4] == "    " else _PAGE.sub(r"[\1](\1.md)", x) for x in lines)
