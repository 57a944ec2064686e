"""wiki-search: pages from facts or files, the three tools, the expert, the rewards."""

import asyncio
import json
from itertools import islice
from random import Random

import numpy as np
import pytest

from envs.episode import Episode, Example
from envs.messages import assistant, tool_call
from envs.wiki.corpus import INTRODUCTION, _sections_of, page_of, read_pages
from envs.wiki.environment import WikiSearch, expert_conversation
from envs.wiki.facts import made_up_corpus, shipped_corpus
from envs.wiki.index import WikiIndex, share_found

OPTIONS = {"corpus": None, "questions": None, "corpus_split": "train", "questions_split": "train"}
OPTIONS |= {"columns": {}, "giving_up": 0.0, "levels": [1, 2, 3], "num_eval": 200, "judge": None}
OPTIONS |= {"num_results": 5, "max_turns": 8, "describe_tools": True}
OPTIONS |= {"reward_weights": {"exact": 1.0}}


def wiki(**options) -> WikiSearch:
    return WikiSearch(**{**OPTIONS, **options})


def test_the_expert_answers_every_question_whose_page_the_search_finds():
    pages, questions = shipped_corpus()
    index = WikiIndex(pages, 5)
    solved = [(q, expert_conversation(q, index)) for q in questions]

    missing = [q.text for q, conversation in solved if conversation is None]
    assert len(missing) <= 0.02 * len(questions), missing
    env = wiki()
    for question, conversation in solved:
        if conversation:
            pages = [title.replace(" ", "_") for title, _ in question.path]
            info = {"answer": question.answer, "pages": pages}
            episode = Episode(Example(0, "e", conversation[:1], info), conversation)
            scores = asyncio.run(env.score(episode))
            assert (scores["exact"], scores["f1"]) == (1.0, 1.0)
            # The first turn searches. The second of two pages may be found in a later turn.
            first, *later, last = np.atleast_1d(scores["found"])
            assert (first >= 1 / len(pages), last) == (True, 0.0)
            assert sum(later) <= 1 - first


def reply(env, name, **arguments):
    episode = Episode(env.examples("train")[0], [])
    (answer,) = asyncio.run(env.reply(episode, tool_call(name, **arguments)))
    return answer["content"]


def test_right_and_wrong_calls_get_a_useful_answer():
    env = wiki(num_results=2)
    assert reply(env, "search_pages", query="capital Oslo") == "Oslo\nNorway"
    told = reply(env, "view_sections", page_id="oslo")
    assert told == "Error: there is no page 'oslo'; did you mean 'Oslo'?"
    told = reply(env, "read_section", section_id="Norway:Economics")
    assert told.endswith("no section 'Norway:Economics'; did you mean 'Norway:Economy'?")


def test_the_last_message_without_reasoning_is_compared_with_the_answer():
    env = wiki()
    example = next(e for e in env.examples("train") if e.info["answer"] == "transition metal")
    for last, exact, f1 in (("<think>hm</think> transition metal", 1, 1), ("metal", 0, 2 / 3)):
        episode = Episode(example, [*example.messages, assistant(last)])
        expected = {"exact": exact, "f1": pytest.approx(f1), "found": [0.0]}
        assert asyncio.run(env.score(episode)) == expected


def test_the_held_out_questions_are_about_other_pages():
    pages = {question.text: question.path[-1][0] for question in shipped_corpus()[1]}
    train, held_out = (wiki().examples(split) for split in ("train", "eval"))
    assert len(held_out) == 200
    about = [{pages[e.messages[-1]["content"]] for e in split} for split in (train, held_out)]
    assert not about[0] & about[1]


def test_demonstrations_are_about_entities_that_do_not_exist_and_are_different_every_time():
    titles = {page.title for page in shipped_corpus()[0]}
    told, again = (list(islice(wiki().demonstrations(Random(0)), 200)) for _ in range(2))
    assert told == again
    pages, _ = made_up_corpus(Random(7))
    assert len({page.id for page in pages}) == len(pages)
    assert len({messages[0]["content"] for messages in told}) > 190
    searched = [messages[1]["tool_calls"][0]["function"]["arguments"]["query"] for messages in told]
    assert not set(searched) & titles
    assert all(messages[-1]["role"] == "assistant" for messages in told)
    for seed in range(300):  # every question has one answer
        questions = {(q.text, q.answer) for q in made_up_corpus(Random(seed))[1]}
        assert len(questions) == len({text for text, _ in questions})


def test_a_share_of_the_demonstrations_gives_up_after_the_search():
    told = list(islice(wiki(giving_up=0.25).demonstrations(Random(0)), 400))
    given_up = [messages for messages in told if messages[-1]["content"] == "I do not know."]
    assert next(wiki(giving_up=1.0).demonstrations(Random(0)))[-1] == given_up[0][-1]
    assert 0.18 < len(given_up) / len(told) < 0.32
    roles = {tuple(message["role"] for message in messages) for messages in given_up}
    assert roles == {("user", "assistant", "tool", "assistant")}


def written(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_your_own_corpus_comes_from_two_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    content = "A bird.\n\n# Food\nIt eats mice.\n## At night\nIt hunts."
    mouse = {"title": "Mouse", "sections": {"Size": "Mice are small."}}
    written(tmp_path / "pages.jsonl", [{"title": "The Owl", "content": content}, mouse])
    asked = [{"question": f"What eats mice {i}?", "answer": "the owl"} for i in range(4)]
    written(tmp_path / "questions.jsonl", [*asked, {**asked[0], "level": 3}])
    env = wiki(corpus="~/pages.jsonl", questions="~/questions.jsonl", levels=[0], num_eval=1)
    assert (len(env.examples("train")), len(env.examples("eval"))) == (3, 1)
    sections = reply(env, "view_sections", page_id="The_Owl").split("\n")
    assert sections == ["The_Owl:Introduction", "The_Owl:Food", "The_Owl:At_night"]
    assert reply(env, "read_section", section_id="The_Owl:Food") == "It eats mice."


def test_your_own_corpus_comes_from_data_sets_in_the_form_of_the_hub(tmp_path):
    pytest.importorskip("datasets")
    pages = [{"id": i, "name": f"Owl {i}", "text": f"# Food\nIt eats {i} mice."} for i in range(3)]
    written(tmp_path / "pages" / "articles.jsonl", pages)
    asked = [{"q": f"What does owl {i} eat?", "a": f"{i} mice"} for i in range(3)]
    written(tmp_path / "questions" / "train.jsonl", asked[:1])
    written(tmp_path / "questions" / "test.jsonl", asked)
    options = {"corpus": str(tmp_path / "pages"), "questions": str(tmp_path / "questions")}
    options |= {"questions_split": "test", "levels": [0], "num_eval": 1}
    columns = {"title": "name", "content": "text", "question": "q", "answer": "a"}
    env = wiki(columns=columns, **options)
    assert (len(env.examples("train")), len(env.examples("eval"))) == (2, 1)
    assert reply(env, "read_section", section_id="Owl_2:Food") == "It eats 2 mice."
    # The error comes before the first episode, although no question needs the pages.
    with pytest.raises(ValueError, match=r"row 0: the page has no `title`, but .*'name'.*columns"):
        wiki(columns={}, **options).examples("train")


@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        ([{}], "line 1: the page has no `title`"),
        ([{"title": "A", "sections": []}], "line 1: page 'A' has no `sections`"),
        ([{"title": "A", "content": "x"}] * 2, "line 2: an earlier page has the title 'A'"),
    ],
)
def test_a_file_without_pages_is_refused(pages, problem, tmp_path):
    written(tmp_path / "pages.jsonl", pages)
    with pytest.raises(ValueError, match=problem):
        read_pages(str(tmp_path / "pages.jsonl"), "train", {})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"levels": []}, "list one or more of 1, 2, 3"),
        ({"levels": [4]}, "list one or more of 1, 2, 3"),
        ({"questions": "q.jsonl"}, "set both for a corpus of your own"),
        ({"columns": {"titel": "name"}}, r"\['titel'\]: use only the keys title, content"),
        ({"num_eval": 10**6}, "leave no question for training: lower num_eval or add a level"),
        ({"reward_weights": {"judge": 1.0}}, r"\['judge'\], which this environment does not score"),
    ],
)
def test_impossible_options_are_refused_with_a_remedy(options, problem):
    with pytest.raises(ValueError, match=problem):
        wiki(**options).examples("train")


def test_a_judge_is_one_more_reward():
    class Scripted:
        async def __call__(self, episode):
            return 0.25 if episode.text == "nearly" else 0.0

    env = wiki(judge=Scripted(), reward_weights={"judge": 1.0})
    example = env.examples("train")[0]
    episode = Episode(example, [*example.messages, assistant("nearly")])
    assert asyncio.run(env.score(episode))["judge"] == 0.25


@pytest.mark.parametrize("option", ["corpus", "questions"])
def test_a_missing_file_is_named_before_anything_starts(option, tmp_path):
    row = {"title": "a", "content": "b", "question": "c", "answer": "d"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    files = {"corpus": str(tmp_path / "a.jsonl"), "questions": str(tmp_path / "a.jsonl")}
    with pytest.raises(ValueError, match=r"no/b\.jsonl: no such file "):
        wiki(**{**files, option: "no/b.jsonl"}).examples("train")


def test_options_are_set_without_loading_the_corpus():
    env = wiki()
    env.configure(system_prompt="Be brief.", tool_timeout=3.0)
    assert not {"_index", "_pages_and_questions"} & vars(env).keys()


def test_an_expert_refuses_to_answer_questions_of_unknown_level_alone():
    with pytest.raises(ValueError, match="'wiki-search' has no scripted expert"):
        next(wiki(levels=[0]).demonstrations(Random(0)))


SEARCH = tool_call("search_pages", query="x")
TWO_SEARCHES = {**SEARCH, "tool_calls": SEARCH["tool_calls"] * 2}
VIEW = tool_call("view_sections", page_id="Oslo")


def listed(*lines):
    return {"role": "tool", "tool_call_id": "call_0", "content": "\n".join(lines)}


OSLO, ROME, BERGEN = listed("Oslo"), listed("Rome"), listed("Bergen")
END = assistant("x")


@pytest.mark.parametrize(
    ("messages", "wanted", "expected"),
    [
        ([SEARCH, listed("Oslo", "Bergen"), END], ["Oslo"], [1.0, 0.0]),
        ([SEARCH, BERGEN, SEARCH, OSLO, END], ["Oslo"], [0.0, 1.0, 0.0]),
        ([SEARCH, OSLO, SEARCH, OSLO], ["Oslo"], [1.0, 0.0]),  # a page counts once
        # Two pages by two turns, and by two calls of one turn.
        ([SEARCH, OSLO, SEARCH, ROME], ["Oslo", "Rome"], [0.5, 0.5]),
        ([TWO_SEARCHES, OSLO, ROME], ["Oslo", "Rome"], [1.0]),
        # A part of a name, a section and an error do not count.
        ([SEARCH, listed("Oslo_(film)"), END], ["Oslo"], [0.0, 0.0]),
        ([VIEW, OSLO], ["Oslo"], [0.0]),
        ([SEARCH, listed("Error: there is no Oslo")], ["Oslo"], [0.0]),
        # The episode ended before the answer; no page is wanted; no message.
        *(([SEARCH], ["Oslo"], [0.0]), ([SEARCH, OSLO, END], [], [0.0, 0.0]), ([], ["Oslo"], [])),
    ],
)
def test_a_page_counts_for_the_first_turn_whose_search_listed_it(messages, wanted, expected):
    assert share_found(messages, wanted) == expected


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        *(("# A title", "A title"), ("######\tA # title ##", "A # title"), ("## C#", "C")),
        *(("## ##", "##"), ("## A ## ", "A ##")),
        *(("####### seven", INTRODUCTION), ("#no space", INTRODUCTION), ("#", INTRODUCTION)),
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


def test_code_within_a_line_and_a_code_block_that_is_never_closed_hide_no_heading():
    assert list(_sections_of("```a```\n# Next\ntext"))[1] == ("Next", "text")
    assert len(list(_sections_of("`" * 2_000_000 + "a`\n# Next\ntext"))) == 2
    text = "# Use\n~~~\n# closed\n~~~\n```sh\nls\n# Next\ntext\n~~~~\n# Last\n~~~\n# no\n~~~\nend"
    assert [heading for heading, _ in _sections_of(text)] == ["Use", "Next", "Last"]
