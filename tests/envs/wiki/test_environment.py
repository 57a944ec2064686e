"""wiki-search: pages from facts or files, the three tools, the expert, the rewards."""

import asyncio
import json

import pytest

from envs.episode import Episode
from envs.messages import assistant, tool_call
from envs.wiki.corpus import INTRODUCTION, page_of
from envs.wiki.environment import WikiSearch
from envs.wiki.index import share_found

OPTIONS = {"corpus": None, "questions": None, "corpus_split": "train", "questions_split": "train"}
OPTIONS |= {"columns": {}, "giving_up": 0.0, "levels": [1, 2, 3], "num_eval": 200, "judge": None}
OPTIONS |= {"num_results": 5, "max_turns": 8, "describe_tools": True}
OPTIONS |= {"reward_weights": {"exact": 1.0}}


def wiki(**options) -> WikiSearch:
    return WikiSearch(**{**OPTIONS, **options})


def reply(env, name, **arguments):
    episode = Episode(env.examples("train")[0], [])
    (answer,) = asyncio.run(env.reply(episode, tool_call(name, **arguments)))
    return answer["content"]


def test_the_last_message_without_reasoning_is_compared_with_the_answer_and_judged():
    async def judge(episode):
        return 0.25 if episode.text == "metal" else 1.0

    env = wiki(judge=judge, reward_weights={"judge": 1.0})
    example = next(e for e in env.examples("train") if e.info["answer"] == "transition metal")
    right = "<think>hm</think> transition metal"
    for last, exact, f1, judged in ((right, 1, 1, 1.0), ("metal", 0, 2 / 3, 0.25)):
        episode = Episode(example, [*example.messages, assistant(last)])
        expected = {"exact": exact, "f1": pytest.approx(f1), "found": [0.0], "judge": judged}
        assert asyncio.run(env.score(episode)) == expected


def test_your_own_corpus_and_questions_come_from_files_with_your_own_columns(tmp_path, monkeypatch):
    def written(path, rows):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setenv("HOME", str(tmp_path))
    content = "A bird.\n\n# Food\nIt eats mice.\n## At night\nIt hunts."
    mouse = {"name": "Mouse", "sections": {"Size": "Mice are small."}}
    written(tmp_path / "pages.jsonl", [{"name": "The Owl", "content": content}, mouse])
    asked = [{"q": f"What eats mice {i}?", "a": "the owl"} for i in range(4)]
    written(tmp_path / "questions.jsonl", [*asked, {**asked[0], "level": 3}])
    files = {"corpus": "~/pages.jsonl", "questions": "~/questions.jsonl", "levels": [0]}
    columns = {"title": "name", "question": "q", "answer": "a"}
    env = wiki(**files, num_eval=1, columns=columns)
    assert (len(env.examples("train")), len(env.examples("eval"))) == (3, 1)
    sections = reply(env, "view_sections", page_id="The_Owl").split("\n")
    assert sections == ["The_Owl:Introduction", "The_Owl:Food", "The_Owl:At_night"]
    assert reply(env, "read_section", section_id="The_Owl:Food") == "It eats mice."
    # The error comes before the first episode, although no question needs the pages.
    with pytest.raises(ValueError, match=r"line 1: the page has no `title`, but .*'name'.*columns"):
        wiki(**files, columns=columns | {"title": "titel"}).examples("train")
    written(tmp_path / "pages.jsonl", [mouse, mouse])
    with pytest.raises(ValueError, match="line 2: an earlier page has the title 'Mouse'"):
        wiki(**files, columns=columns).examples("train")


SEARCH = tool_call("search_pages", query="x")
TWO_SEARCHES = {**SEARCH, "tool_calls": SEARCH["tool_calls"] * 2}


def listed(*lines):
    return {"role": "tool", "tool_call_id": "call_0", "content": "\n".join(lines)}


OSLO, ROME = listed("Oslo"), listed("Rome")
END = assistant("x")


def test_a_page_counts_for_the_first_turn_whose_search_listed_it():
    for messages, wanted, expected in (
        ([SEARCH, listed("Oslo", "Bergen"), END], ["Oslo"], [1.0, 0.0]),
        ([SEARCH, OSLO, SEARCH, OSLO], ["Oslo"], [1.0, 0.0]),  # a page counts once
        # Two pages by two turns, and by two calls of one turn.
        ([SEARCH, OSLO, SEARCH, ROME], ["Oslo", "Rome"], [0.5, 0.5]),
        ([TWO_SEARCHES, OSLO, ROME], ["Oslo", "Rome"], [1.0]),
        # A part of a name, a section and an error do not count.
        ([SEARCH, listed("Oslo_(film)"), END], ["Oslo"], [0.0, 0.0]),
        ([tool_call("view_sections", page_id="Oslo"), OSLO], ["Oslo"], [0.0]),
        # The episode ended before the answer; no page is wanted; no message.
        *(([SEARCH], ["Oslo"], [0.0]), ([SEARCH, OSLO, END], [], [0.0, 0.0]), ([], ["Oslo"], [])),
    ):
        assert share_found(messages, wanted) == expected


def test_sections_begin_with_a_heading_that_is_no_comment_in_a_code_block():
    for line, heading in (
        *(("######\tA # title ##", "A # title"), ("## C#", "C"), ("#no space", INTRODUCTION)),
        # Hours with a pattern whose time is quadratic.
        ("# a" + " " * 2_000_000 + "x", "a" + " " * 2_000_000 + "x"),
    ):
        code = "~~~~\n# a\n~~~\n``` b\n# c\n~~~~~"
        content = f"{line}\n{code}\n# Next\ntext\n```sh\n# Last\nnot closed\n# Next\nmore"
        sections = page_of({"title": "Pets", "content": content}, "x").sections
        assert list(sections) == [heading, "Next", "Last"]
        assert sections[heading].endswith(code)
        assert sections["Next"] == "text\n```sh\nmore"  # two with the same heading become one
