"""The corpus, the questions, the searches and the files of wiki-search, as stored files."""

import hashlib
import json
from random import Random

from envs.messages import tool_call
from envs.wiki.environment import expert_conversation
from envs.wiki.facts import invent_name, made_up_corpus, shipped_corpus
from envs.wiki.index import WikiIndex, share_found
from tests.support.golden import golden
from tests.support.outcomes import outcome

MARKDOWN = "before\n# One\ntext\n## Two ##\n```\n# no\n```\nmore\n\n# One\nagain\n# Empty\n"
QUERIES = (
    "capital",
    "Paris",
    "France_Europe",
    "the capital of Norway",
    "zzz",
    "",
    "noble gas",
    "Fe",
)


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def test_the_pages_the_questions_and_the_tools():
    """The shipped corpus (some of it, and a digest of all), a made-up one, searches, rewards."""
    found = {}
    for name, corpus in (("shipped", shipped_corpus()), ("made up", made_up_corpus(Random(3)))):
        pages, questions = ([vars(one) for one in some] for some in corpus)
        found[name] = [len(pages), digest(pages), len(questions), digest(questions)]
        found[name] += [pages[:3], questions[:9], questions[-4:]]
        index = WikiIndex(corpus[0], 3)
        found[name].append([expert_conversation(one, index) for one in corpus[1][:3]])
    known, index = (
        tuple(page.title for page in shipped_corpus()[0]),
        WikiIndex(shipped_corpus()[0], 4),
    )
    found["names"] = [invent_name(known, Random(seed)) for seed in range(9)]
    found["searches"] = [outcome(index.search_pages, query) for query in QUERIES]
    found["sections"] = [outcome(index.view_sections, page) for page in ("France", "france", "x y")]
    found["texts"] = [
        outcome(index.read_section, x) for x in ("France:Economy", "Oslo:Overvieu", "x")
    ]
    talk = [{"role": "system", "content": "x"}]
    for query, answer in (("a", "x\ny"), ("b", "y\nz"), ("c", "z\nx"), ("d", "w"), ("e", "v")):
        name = "view_sections" if query == "e" else "search_pages"
        talk += [tool_call(name, query=query), {"role": "tool", "content": answer}]
    wanted = ([], ["x"], ["x", "z"], ["x", "v", "none"])
    found["found"] = [share_found([*talk, tool_call("search_pages")], names) for names in wanted]
    golden("wiki/corpus", found)
