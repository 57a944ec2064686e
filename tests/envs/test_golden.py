"""What environments ask, demonstrate and read, as stored files."""

import hashlib
import json
from itertools import islice
from random import Random

import pytest

from envs.mixture import Mixture
from envs.trials import Trials
from envs.wiki.environment import expert_conversation
from envs.wiki.facts import invent_name, made_up_corpus, shipped_corpus
from envs.wiki.index import WikiIndex
from rl.config.build import build
from tests.support.composing import REPO, changed, chosen
from tests.support.golden import golden, outcome

FILE = REPO / "tests" / "support" / "data.jsonl"
TRIALS = {"turns": 2, "copied": 0.5, "uneven": 0.4, "copy_tasks": 0.5, "min_length": 2}
TRIALS |= {"max_length": 4, "num_train": 40, "num_eval": 8, "reward_weights": {"exact": 1}}
COMPOSED = {"dataset.path": str(FILE), "dataset.num_eval": 1, "max_concurrent": 3}
QUESTIONS = {"questions.num_train": 60, "questions.num_eval": 6}
CHOICES = {
    "reverse-text": {"num_train": 60, "num_eval": 8, "max_length": 15},
    "arithmetic": {"num_train": 2000, "num_eval": 9, "system_prompt": "Sum."},
    "alphabet-sort": {"num_train": 60, "num_eval": 9, "names_per_turn": 2},
    "word-problems": QUESTIONS,
    "math-python": {**QUESTIONS, "max_turns": 3, "sandbox.allow_without_landlock": False},
    "math-file": {"questions.dataset.path": str(FILE), "questions.dataset.num_eval": 1},
    "wiki-search": {"num_eval": 30, "levels": [1, 2, 3], "giving_up": 0.3, "describe_tools": True},
    "composed": COMPOSED,
    "agent": {**COMPOSED, "command": ["sh", "{prompt}"]},
    "mixture": {},
    "trials": {},
}


def made(choice):
    """Return an environment with the values of conf/env and a few others."""
    if choice == "trials":
        return Trials(**TRIALS)
    if choice == "mixture":
        envs = {name: made(name) for name in ("reverse-text", "arithmetic")}
        return Mixture(envs=envs, weights={"reverse-text": 1.0, "arithmetic": 3.0})
    return build(changed(chosen("env", choice), CHOICES[choice]))()


def digest(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


@pytest.mark.parametrize("choice", [*CHOICES])
def test_what_an_environment_asks_and_demonstrates(choice):
    """Name, limits, weights, tools, some examples (and a digest of all), an expert's turns."""
    env = made(choice)
    names = ("name", "max_turns", "is_multi_turn", "holds_conversation", "max_concurrent")
    names += ("tool_timeout", "describe_tools", "system_prompt", "scores_groups", "tool_specs")
    found = {name: getattr(env, name) for name in names}
    for split in ("train", "eval"):
        examples = [vars(example) for example in env.examples(split)]
        pools = [[pool.weight, len(pool.examples)] for pool in env.pools(split)]
        found[split] = [len(examples), digest(examples), pools, *examples[:2], *examples[-1:]]
    shown = outcome(lambda: list(islice(env.demonstrations(Random(5)), 60)))
    found["shown"] = shown if isinstance(shown, str) else [digest(shown), *shown[:2]]
    first = env.examples("eval")[0]
    found["opening"] = env.environment_of(first).add_system_prompt(first.messages)
    found["weights"] = None if isinstance(env, Mixture) else dict(env.reward_weights)
    golden(f"envs/{choice}", found)


def test_the_pages_the_questions_and_the_tools():
    """The shipped corpus (some of it, and a digest of all), a made-up one, and searches."""
    found = {}
    for name, corpus in (("shipped", shipped_corpus()), ("made up", made_up_corpus(Random(3)))):
        pages, questions = ([vars(one) for one in some] for some in corpus)
        found[name] = [len(pages), digest(pages), len(questions), digest(questions)]
        found[name] += [pages[:3], questions[:9], questions[-4:]]
        index = WikiIndex(corpus[0], 3)
        found[name].append([expert_conversation(one, index) for one in corpus[1][:3]])
    pages = shipped_corpus()[0]
    known, index = tuple(page.title for page in pages), WikiIndex(pages, 4)
    queries = ("capital", "Paris", "France_Europe", "the capital of Norway", "zzz", "", "noble gas")
    found["names"] = [invent_name(known, Random(seed)) for seed in range(9)]
    found["searches"] = [outcome(index.search_pages, query) for query in (*queries, "Fe")]
    found["sections"] = [outcome(index.view_sections, page) for page in ("France", "france", "x y")]
    texts = ("France:Economy", "Oslo:Overvieu", "x")
    found["texts"] = [outcome(index.read_section, text) for text in texts]
    golden("wiki/corpus", found)
