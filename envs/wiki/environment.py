"""Multi-turn environment: the policy answers questions by searching a small encyclopedia.

    question -> search_pages(query) -> view_sections(page_id) -> read_section(section_id) -> answer

The corpus that we ship has about 400 pages made from tables of facts (envs/wiki/facts.py). Your own
pages and questions may be JSON lines files or data sets (envs/wiki/corpus.py). In the corpus that
we ship, training questions and held-out questions are about different pages.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from envs.episode import Episode, Example, Split
from envs.judge import Judge
from envs.messages import Message, assistant, tool_call, user
from envs.options import PositiveInt, Probability
from envs.protocol import Environment, check_weights
from envs.rewards import exact, f1, final_text
from envs.wiki.corpus import Page, Question, read_pages, read_questions
from envs.wiki.facts import made_up_corpus, shipped_corpus
from envs.wiki.index import WikiIndex, share_found

REWARDS = ("exact", "f1", "found", "judge")
COLUMNS = ("title", "content", "sections", "question", "answer", "level")
GIVEN_UP = "I do not know."


@dataclass(kw_only=True, eq=False)
class WikiSearch(Environment):
    """The environment wiki-search. conf/env/wiki-search.yaml explains the options."""

    name = "wiki-search"

    corpus: str | None
    questions: str | None
    corpus_split: str
    questions_split: str
    columns: Mapping[str, str]
    levels: Sequence[int]
    num_eval: PositiveInt
    num_results: PositiveInt
    max_turns: PositiveInt = field()
    describe_tools: bool = field()
    giving_up: Probability
    judge: Judge | None
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        corpus, questions, levels = self.corpus, self.questions, self.levels
        if (corpus is None) != (questions is None):
            raise ValueError(
                f"corpus={corpus}, questions={questions}: set both for a corpus of your own, or "
                "set both to null for the corpus that we ship"
            )
        if unknown := set(self.columns) - set(COLUMNS):
            raise ValueError(
                f"columns contains {sorted(unknown)}: use only the keys {', '.join(COLUMNS)}, with "
                "the names of your columns as values"
            )
        if not levels or set(levels) - {0, 1, 2, 3}:
            raise ValueError(f"levels={list(levels)}: list one or more of 1, 2, 3, 0 (unknown)")
        check_weights(self.reward_weights, REWARDS if self.judge else REWARDS[:-1])

    def examples(self, split: Split) -> list[Example]:
        _ = self._index  # reads the pages now, so that their errors come before the first episode
        return [
            Example(
                id=number,
                env=self.name,
                messages=[user(question.text)],
                info={
                    "answer": question.answer,
                    "level": question.level,
                    "pages": [title.replace(" ", "_") for title, _ in question.path],
                },
            )
            for number, question in enumerate(self._questions_by_split[split])
        ]

    @property  # loads the corpus at the first use, not in the constructor
    def tools(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> list[Callable[..., Any]]:
        return _tools_of(self._index)

    async def score(self, episode: Episode) -> dict[str, float | list[float]]:
        """Return exact (0 or 1), f1, found (`share_found`) and, if there is a judge, its score."""
        text, answer = final_text(episode), [episode.example.info["answer"]]
        opening = len(episode.example.messages)
        pages = episode.example.info.get("pages", [])
        rewards = {
            "exact": exact(text, answer),
            "f1": f1(text, answer),
            "found": share_found(episode.messages[opening:], pages),
        }
        return rewards | ({"judge": await self.judge(episode)} if self.judge else {})

    def demonstrations(self, rng: Random) -> Iterator[list[Message]]:
        """Yield conversations in which a scripted expert answers questions about made-up pages."""
        if set(self.levels) == {0}:  # no made-up question has this level
            yield from super().demonstrations(rng)
        while True:
            pages, questions = made_up_corpus(rng)
            index = WikiIndex(pages, self.num_results)
            asked_for = [q for q in questions if q.level in self.levels]
            for question in rng.sample(asked_for, min(3, len(asked_for))):
                conversation = expert_conversation(question, index)
                if conversation is None:
                    continue
                if self.giving_up and rng.random() < self.giving_up:
                    # The first three messages are the question, the search and its result.
                    conversation = [*conversation[:3], assistant(GIVEN_UP)]
                yield conversation

    @cached_property
    def _pages_and_questions(self) -> tuple[list[Page], list[Question]]:
        if self.corpus is None or self.questions is None:
            return shipped_corpus()
        return (
            read_pages(self.corpus, self.corpus_split, self.columns),
            read_questions(self.questions, self.questions_split, self.columns),
        )

    @cached_property
    def _index(self) -> WikiIndex:
        return WikiIndex(self._pages_and_questions[0], self.num_results)

    @cached_property
    def _questions_by_split(self) -> dict[Split, list[Question]]:
        """Return the questions by split. All shipped questions about a page are in one split."""
        by_page: dict[str, list[Question]] = {}
        for question in self._pages_and_questions[1]:
            if question.level in self.levels:
                page = question.path[-1][0] if question.path else question.text
                by_page.setdefault(page, []).append(question)
        held_out: list[Question] = []
        train: list[Question] = []
        # A checksum gives every process the same random order, but hash() would not.
        for page in sorted(by_page, key=lambda title: (zlib.crc32(title.encode()), title)):
            (held_out if len(held_out) < self.num_eval else train).extend(by_page[page])
        if not train:
            raise ValueError(
                f"num_eval={self.num_eval} and levels={sorted(self.levels)} leave no question for "
                "training: lower num_eval or add a level"
            )
        return {"train": train, "eval": held_out[: self.num_eval]}


def expert_conversation(question: Question, index: WikiIndex) -> list[Message] | None:
    """Return the scripted expert's conversation; None if its search misses the first page."""
    titles = [title for title, _ in question.path]
    turns = [("search_pages", "query", question.query or titles[0])]
    if question.level != 2:  # at level 2 the answer is the page's title, so no section is read
        for title, heading in question.path:
            page = title.replace(" ", "_")
            turns.append(("view_sections", "page_id", page))
            turns.append(("read_section", "section_id", f"{page}:{heading.replace(' ', '_')}"))
    tools = {tool.__name__: tool for tool in _tools_of(index)}
    messages = [user(question.text)]
    for name, parameter, argument in turns:
        answer = tools[name](argument)
        if name == "search_pages" and titles[0].replace(" ", "_") not in answer.split("\n"):
            return None
        messages.append(tool_call(name, **{parameter: argument}))
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": answer})
    return [*messages, assistant(question.answer)]


def _tools_of(index: WikiIndex) -> list[Callable[..., Any]]:
    return [index.search_pages, index.view_sections, index.read_section]
