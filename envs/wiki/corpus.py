"""Load the pages of a corpus and the questions about them.

    {"title": "Paris", "sections": {"Overview": "Paris is the capital of France."}}      a page
    {"question": "...", "answer": "..."}                                                 a question

A page may have `content` instead of `sections`: Markdown with one section per heading. Pages and
questions come from a JSON lines file, a data set of the Hugging Face hub, or a folder that the
library `datasets` loads.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.loading import load_rows, read_json_lines

INTRODUCTION = "Introduction"  # heading of the text before the first Markdown heading
HEADING = re.compile(r"^#{1,6}\s+(\S.*)$")
FENCE = re.compile(r"^ {0,3}(`{3,}+(?!.*`)|~{3,})")  # the first or the last line of a code block


@dataclass(frozen=True)
class Page:
    title: str
    sections: dict[str, str]  # text of each section by heading, in the order of the page

    @property
    def id(self) -> str:
        return self.title.replace(" ", "_")

    @property
    def section_ids(self) -> list[str]:
        return [f"{self.id}:{name.replace(' ', '_')}" for name in self.sections]

    @property
    def text(self) -> str:
        return "\n".join([self.title, *(f"{name}\n{text}" for name, text in self.sections.items())])


@dataclass(frozen=True)
class Question:
    """A question about the corpus, with its answer. conf/env/wiki-search.yaml explains `level`."""

    text: str
    answer: str
    level: int = 0  # 0: unknown
    # (title, heading) of each section that leads to the answer, in order; empty: unknown
    path: tuple[tuple[str, str], ...] = ()
    query: str = ""  # search query of the scripted expert; empty: the first title of `path`


def read_pages(source: str, split: str, columns: Mapping[str, str]) -> list[Page]:
    """Return the pages of a source. `columns` maps our field names to those of the source."""
    pages: dict[str, Page] = {}
    for where, record in _read_records(source, split, columns):
        page = page_of(record, where)
        if page.id in pages:
            raise ValueError(
                f"{where}: an earlier page has the title {page.title!r} (_ counts as a space): "
                "rename one of the pages"
            )
        pages[page.id] = page
    return list(pages.values())


def page_of(record: dict[str, Any], where: str) -> Page:
    """Convert a record to a page. Error messages begin with `where`: file and line (or row)."""
    title, sections, content = (record.get(key) for key in ("title", "sections", "content"))
    if not isinstance(title, str) or not title.strip():
        raise ValueError(f"{where}: the page has no `title`{_row_hint(record)}")
    if isinstance(content, str):
        sections = {}
        for name, text in _sections_of(content):
            sections[name] = f"{sections[name]}\n{text}" if name in sections else text
    if not isinstance(sections, dict) or not sections:
        raise ValueError(
            f"{where}: page {title!r} has no `sections` (mapping) or `content`{_row_hint(record)}"
        )
    return Page(title, {str(name): str(text) for name, text in sections.items()})


def _sections_of(markdown: str) -> Iterator[tuple[str, str]]:
    heading, lines, every = INTRODUCTION, list[str](), markdown.splitlines()
    fences = {number: match[1] for number, line in enumerate(every) if (match := FENCE.match(line))}
    closing = [number for number, mark in fences.items() if every[number].strip() == mark]
    end = -1  # number of the line that closes the newest code block
    for number, line in enumerate(every):
        if number > end and (mark := fences.get(number)):
            # Without a closing line, the fence does not begin a code block.
            ends = (n for n in closing if n > number and fences[n].startswith(mark))
            end = next(ends, number)
        if number > end and (match := HEADING.match(line)):
            if text := "\n".join(lines).strip():
                yield heading, text
            # Strip the closing # signs here, because a regex for them would take quadratic time.
            heading, lines = match[1].rstrip("#").rstrip() or match[1], []
        else:
            lines.append(line)
    if text := "\n".join(lines).strip():
        yield heading, text


def read_questions(source: str, split: str, columns: Mapping[str, str]) -> list[Question]:
    """Return the questions of a source. `columns` maps our field names to those of the source."""
    questions = []
    for where, record in _read_records(source, split, columns):
        if not {"question", "answer"} <= record.keys():
            raise ValueError(f"{where} has no `question` or no `answer`{_row_hint(record)}")
        level = int(record.get("level") or 0)
        questions.append(Question(str(record["question"]), str(record["answer"]), level))
    return questions


def _read_records(
    source: str, split: str, columns: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row's file and number (for messages), and the row with our field names added."""
    if source.endswith(".jsonl"):
        lines = read_json_lines(Path(source).expanduser())
        rows = ((f"{source}, line {n}", row) for n, row in lines)
    else:
        loaded = load_rows(source, source, split=split)
        rows = ((f"{source}, row {n}", dict(row)) for n, row in enumerate(loaded))
    for where, row in rows:
        yield where, row | {name: row[column] for name, column in columns.items() if column in row}


def _row_hint(record: dict[str, Any]) -> str:
    return f", but this row has {', '.join(map(repr, record))}: rename columns with env.columns"
