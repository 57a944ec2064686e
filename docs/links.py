"""A hook of mkdocs that turns each mention of a page, such as docs/losses.md, into a link."""

import re

_PAGE = re.compile(r"(?<![\w/`\[])docs/([\w-]+)\.md(?![\w`])")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with links. Indented lines are code and stay unchanged."""
    lines = markdown.splitlines()
    return "\n".join(x if x[:4] == "    " else _PAGE.sub(r"[\1](\1.md)", x) for x in lines)
