"""Which turn found a page, worked out by hand."""

import pytest

from envs.messages import assistant, tool_call
from envs.wiki.finding import pages_found


def told(*lines):
    return {"role": "tool", "tool_call_id": "call_0", "content": "\n".join(lines)}


SEARCH = tool_call("search_pages", query="x")
TWO_SEARCHES = {**SEARCH, "tool_calls": SEARCH["tool_calls"] * 2}


@pytest.mark.parametrize(
    ("messages", "wanted", "expected"),
    [
        ([SEARCH, told("Oslo", "Bergen"), assistant("x")], ["Oslo"], [1.0, 0.0]),
        ([SEARCH, told("Bergen"), SEARCH, told("Oslo"), assistant("x")], ["Oslo"], [0.0, 1.0, 0.0]),
        # Found again is not found.
        ([SEARCH, told("Oslo"), SEARCH, told("Oslo")], ["Oslo"], [1.0, 0.0]),
        # Two pages by two turns, and by two calls of one.
        ([SEARCH, told("Oslo"), SEARCH, told("Rome")], ["Oslo", "Rome"], [0.5, 0.5]),
        ([TWO_SEARCHES, told("Oslo"), told("Rome")], ["Oslo", "Rome"], [1.0]),
        # Part of a name, a section, an error: not the page.
        ([SEARCH, told("Oslo_(film)"), assistant("x")], ["Oslo"], [0.0, 0.0]),
        ([tool_call("view_sections", page_id="Oslo"), told("Oslo")], ["Oslo"], [0.0]),
        ([SEARCH, told("Error: there is no Oslo")], ["Oslo"], [0.0]),
        # Cut off before an answer came; nothing to be found; nothing said.
        ([SEARCH], ["Oslo"], [0.0]),
        ([SEARCH, told("Oslo"), assistant("x")], [], [0.0, 0.0]),
        ([], ["Oslo"], []),
    ],
)
def test_a_page_counts_for_the_first_turn_whose_search_listed_it(messages, wanted, expected):
    assert pages_found(messages, wanted) == expected
