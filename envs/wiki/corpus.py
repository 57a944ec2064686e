"""Pages with sections, the questions about them, and the files that both come from.

    {"title": "Paris", "sections": {"Overview": "Paris is the capital of France."}}      a page
    {"question": "...", "answer": "..."}                                                 a question

A page may have `content` instead of `sections`: Markdown, one section per heading. Pages and
questions come from JSON lines, or from a source that the library `datasets` loads: a data set of
the Hugging Face hub, or a folder.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.loading import json_lines, load_rows

INTRODUCTION = "Introduction"  # the section before the first heading of Markdown
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$")


@dataclass(frozen=True)
class Page:
    """One page."""

    title: str
    sections: dict[str, str]  # heading -> text, in order

    @property
    def id(self) -> str:
        """The title with underscores instead of spaces."""
        return self.title.replace(" ", "_")

    @property
    def section_ids(self) -> list[str]:
        """`Page_title:Heading` of each section."""
        return [f"{self.id}:{name.replace(' ', '_')}" for name in self.sections]

    @property
    def text(self) -> str:
        """The whole page as one text, for the index."""
        return "\n".join([self.title, *(f"{name}\n{text}" for name, text in self.sections.items())])


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        level: 1: the question names the page. 2: the page must be found by its content. 3: the
            answer takes two pages. 0: unknown.
        path: (title, heading) of each section that an expert reads, in order; empty: unknown.
        query: the expert's first search; empty: the first title.
    """

    text: str
    answer: str
    level: int = 0
    path: tuple[tuple[str, str], ...] = field(default=())
    query: str = ""


def read_pages(source: str, split: str, columns: Mapping[str, str]) -> list[Page]:
    """Return the pages of a .jsonl file, or of a split of a data set that `datasets` loads.

    `columns` maps the names used here to those of the source. Raise ValueError if the source cannot
    be read, a row is no page, or two pages have the same title.
    """
    pages: dict[str, Page] = {}
    for where, record in _records(source, split, columns):
        page = page_of(record, where)
        if page.id in pages:
            raise ValueError(f"{where}: there is a page {page.title!r} already")
        pages[page.id] = page
    return list(pages.values())


def page_of(record: dict[str, Any], where: str) -> Page:
    """Return a record as a page. Raise ValueError, which names `where`, if it is no page."""
    title, sections, content = (record.get(key) for key in ("title", "sections", "content"))
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"{where}: a page needs a `title`{_has(record)}")
    if isinstance(content, str):
        sections = dict(_split(content))
    if not isinstance(sections, dict) or not sections:
        raise ValueError(
            f"{where}: page {title!r} needs `sections` (a mapping) or `content`{_has(record)}"
        )
    return Page(title, {str(name): str(text) for name, text in sections.items()})


def _split(markdown: str) -> Iterator[tuple[str, str]]:
    heading, lines = INTRODUCTION, list[str]()
    for line in [*markdown.splitlines(), "# end"]:
        if match := HEADING.match(line):
            if text := "\n".join(lines).strip():
                yield heading, text
            heading, lines = match[1], []
        else:
            lines.append(line)


def read_questions(source: str, split: str, columns: Mapping[str, str]) -> list[Question]:
    """Return the questions of a source (`question`, `answer`, optional `level`), as `read_pages`.

    Raise ValueError if the source cannot be read, or a row lacks question or answer.
    """
    questions = []
    for where, record in _records(source, split, columns):
        if not {"question", "answer"} <= record.keys():
            raise ValueError(f"{where}: a question needs `question` and `answer`{_has(record)}")
        level = int(record.get("level") or 0)
        questions.append(Question(str(record["question"]), str(record["answer"]), level))
    return questions


def _records(
    source: str, split: str, columns: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its columns renamed, after its file and line for error messages."""
    if source.endswith(".jsonl"):
        rows = ((f"{source}, line {n}", row) for n, row in json_lines(Path(source).expanduser()))
    else:
        loaded = load_rows(source, source, split=split)
        rows = ((f"{source}, row {n}", dict(row)) for n, row in enumerate(loaded))
    for where, row in rows:
        yield where, row | {name: row[column] for name, column in columns.items() if column in row}


def _has(record: dict[str, Any]) -> str:
    return f", and this row has {', '.join(map(repr, record))}: env.columns says which is which"
