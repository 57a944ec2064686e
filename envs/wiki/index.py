"""The tools of wiki-search, which search (with BM25) and read pages, and the reward `found`."""

import re
from collections.abc import Sequence
from difflib import get_close_matches

import bm25s
import numpy as np

from envs.messages import Message
from envs.tools import ToolError
from envs.wiki.corpus import Page

_WORD = re.compile(r"\w+")


class WikiIndex:
    """An index to search and read pages. Its public methods are the policy's tools."""

    def __init__(self, pages: list[Page], num_results: int) -> None:
        """Build the index. Page ids must differ. A search lists at most `num_results` pages."""
        self._pages = {page.id: page for page in pages}
        self._ids = list(self._pages)
        self._sections = {
            section: text
            for page in pages
            for section, text in zip(page.section_ids, page.sections.values(), strict=True)
        }
        self._num_results = num_results
        # `page.text` begins with the title. Repeat the title, so that matches in titles count more.
        texts = [_split_words(f"{page.title}\n{page.text}") for page in pages]
        self._bm25 = bm25s.BM25()
        self._bm25.index(texts, show_progress=False)

    def search_pages(self, query: str) -> str:
        """Search for pages; returns the ids of those that fit best, best first.

        Args:
            query: words to look for.
        """
        words = [word for word in _split_words(query) if word in self._bm25.vocab_dict]
        if not words:
            return "No page found."
        scores = self._bm25.get_scores(words)
        best = np.argsort(-scores, kind="stable")[: self._num_results]
        return "\n".join(self._ids[i] for i in best if scores[i] > 0) or "No page found."

    def view_sections(self, page_id: str) -> str:
        """List the section ids of a page.

        Args:
            page_id: a page id, as search_pages returns it.
        """
        if page_id not in self._pages:
            raise ToolError(f"there is no page {page_id!r}{_suggestion(page_id, self._ids)}")
        return "\n".join(self._pages[page_id].section_ids)

    def read_section(self, section_id: str) -> str:
        """Read a section.

        Args:
            section_id: a section id, as view_sections returns it.
        """
        if section_id not in self._sections:
            hint = _suggestion(section_id, list(self._sections))
            raise ToolError(f"there is no section {section_id!r}{hint}")
        return self._sections[section_id]


def _split_words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text.replace("_", " "))]


def _suggestion(word: str, ids: list[str]) -> str:
    close = get_close_matches(word, ids, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; use an id that a tool returned"


def share_found(messages: Sequence[Message], wanted: Sequence[str]) -> list[float]:
    """Return, for each turn of the policy, the share of the wanted pages that the turn found.

    A page counts only in the first turn whose search listed it. So all turns together get at most
    1, and a repeated search gets 0. Every turn gets 0 if `wanted` is empty.
    """
    found: list[float] = []
    missing = set(wanted)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        num_before = len(missing)
        calls = message.get("tool_calls") or []
        # The last calls have no answer if the episode ended before they ran.
        for call, answer in zip(calls, messages[i + 1 :], strict=False):
            if call["function"]["name"] == "search_pages" and answer["role"] == "tool":
                missing -= set(str(answer["content"]).split("\n"))
        found.append((num_before - len(missing)) / len(wanted) if wanted else 0.0)
    return found
