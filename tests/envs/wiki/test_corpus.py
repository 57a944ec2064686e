"""Pages of the corpus."""

import pytest

from envs.wiki.corpus import INTRODUCTION, _sections_of, page_of


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("# A title", "A title"),
        ("######\tA # title ##", "A # title"),
        ("## C#", "C"),
        ("## ##", "##"),
        ("## A ## ", "A ##"),
        ("####### seven", INTRODUCTION),
        ("#no space", INTRODUCTION),
        ("#", INTRODUCTION),
        # Hours with a pattern whose time is quadratic.
        ("# a" + " " * 2_000_000 + "x", "a" + " " * 2_000_000 + "x"),
        ("# " + "# " * 1_000_000 + "x", "# " * 1_000_000 + "x"),
        ("#" + " " * 2_000_000, INTRODUCTION),
    ],
    ids=range(11),
)
def test_a_heading_ends_before_its_closing_marks(line, heading):
    (found,) = _sections_of(f"{line}\ntext")
    assert found[0] == heading


def test_sections_with_the_same_heading_become_one():
    content = "# Owl\n## Food\nMice.\n# Cat\n## Food\nFish."
    assert page_of({"title": "Pets", "content": content}, "x").sections == {"Food": "Mice.\nFish."}


@pytest.mark.parametrize(
    "code",
    ["```sh\n# first\n```", "~~~~\n# a\n~~~\n``` b\n# c\n~~~~~", "  ````\n# a\n```\n# b\n````"],
)
def test_a_comment_in_a_code_block_is_no_heading(code):
    found = list(_sections_of(f"# Use\n{code}\n# Next\ntext"))
    assert found == [("Use", code.strip()), ("Next", "text")]


def test_code_within_a_line_begins_no_code_block():
    assert list(_sections_of("```a```\n# Next\ntext"))[1] == ("Next", "text")
    assert len(list(_sections_of("`" * 2_000_000 + "a`\n# Next\ntext"))) == 2


def test_a_code_block_that_is_never_closed_hides_no_heading():
    text = "# Use\n~~~\n# closed\n~~~\n```sh\nls\n# Next\ntext\n~~~~\n# Last\n~~~\n# no\n~~~\nend"
    assert [heading for heading, _ in _sections_of(text)] == ["Use", "Next", "Last"]
