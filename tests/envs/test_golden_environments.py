"""Each environment of conf/env: examples, demonstrations, prompts, tools, scores, as stored files.

The text math-python lets tests/conftest.py run this file beside those that count sandboxes.
"""

import asyncio
import hashlib
import json
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode, Example
from envs.messages import assistant, tool_call
from envs.mixture import Mixture
from envs.trials import Trials
from rl.config.build import build
from tests.support.answers import Answers, completion
from tests.support.composing import REPO, changed, chosen
from tests.support.golden import golden
from tests.support.outcomes import outcome

FILE = REPO / "tests" / "support" / "data.jsonl"
TRIALS = {
    "turns": 2,
    "copied": 0.5,
    "uneven": 0.4,
    "copy_tasks": 0.5,
    "reward_weights": {"exact": 1},
}
TRIALS |= {"min_length": 2, "max_length": 4, "num_train": 40, "num_eval": 8}
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


async def played(env, example, said):
    """Return the replies, the rewards and the counts of an episode with these turns."""
    episode = Episode(example, [*example.messages], policy_version=3)
    replies = []
    for text in said:
        message = assistant(text) if isinstance(text, str) else text
        episode.messages.append(message)
        episode.turns += 1
        reply = await env.reply(episode, message)
        replies += [one["content"] for one in reply or [{"content": None}]]
        episode.messages += reply or []
    rewards = await env.score(episode)
    env.close(episode)
    return [replies, rewards, [episode.turns, episode.tool_calls, episode.tool_errors]]


def search(query):
    return tool_call("search_pages", query=query)


PYTHON = [
    tool_call("python", code="x = 6 * 7"),
    tool_call("python", code="x, 1 - 3"),
    r"\boxed{1/2}",
]
# environment -> what the policy says in each episode, with {answer} for the right answer
SAID = {
    "reverse-text": ["{answer}", "<think>x</think> {answer} ", "{answer}x", "x{answer}", "<think>"],
    "arithmetic": ["{answer}", " {answer}\n", "{answer}.0", "+{answer}", "<think>1</think>", "7"],
    "word-problems": [r"\boxed{{answer}}", "#### {answer}", "so {answer}", r"\boxed{{answer}.0} 7",
                      r"\boxed{x}", "<think>{answer}", r"\boxed{x+1+{answer}-x-1}"],
    "math-file": ["4", r"<think>\boxed{4}</think> \boxed{\frac{8}{2}}", r"\boxed{5}"],
    "composed": ["{answer}", "The {answer}.", "5"],
    "math-python": [PYTHON, [PYTHON[0], tool_call("python", x=1), "no"], [tool_call("run")]],
    "wiki-search": [
        [search("capital"), search("capital of France"), "{answer}"],
        [search("zzz"), tool_call("view_sections", page_id="France"),
         tool_call("read_section", section_id="France:Geograph"), "The {answer} or not"],
        [tool_call("view_sections", page_id="nowhere at all"), "<think>so</think> {answer}"],
        [search("the internet domain .fr"), {**search("a"), "content": "{answer}"}],
    ],
    "alphabet-sort": [["a b"], ["{first}", "{first} x"], ["<think>a</think>{first}"], [""] * 3],
    "trials": [["{first}", "x" * 40], ["x", "{answer}"], ["", ""], ["{first}"]],
}  # fmt: skip


def filled(said, example):
    info = example.info
    names = info.get("names") or info.get("words") or [[]]
    first = names[0][::-1] if isinstance(names[0], str) else " ".join(sorted(names[0]))
    for name, value in {"{answer}": str(info.get("answer", names[-1])), "{first}": first}.items():
        said = [one.replace(name, value) if isinstance(one, str) else one for one in said]
    return said


@pytest.mark.parametrize("choice", [*SAID])
def test_the_replies_and_rewards_of_an_environment(choice):
    """Replies, each reward, and the counts of turns, calls and errors of some episodes."""
    env = made(choice)
    examples = [*env.examples("eval")[:2], env.examples("train")[0]]
    said = [[one] if isinstance(one, str) else one for one in SAID[choice]]

    async def play():
        return [[await played(env, one, filled(words, one)) for words in said]
                for one in examples[: 1 if choice == "math-python" else 3]]  # fmt: skip

    try:
        golden(f"envs/{choice}-rewards", asyncio.run(play()))
    finally:
        if grader := getattr(env, "grader", None):
            grader.close()


async def test_the_question_and_the_scores_of_the_judge():
    """The request and the options of wiki-search-judged, and the score of many answers."""
    server = Answers((200, completion("Yes.")))
    said = ["Yes.", "no", "It is not. Yes", "yes\nNO, because", "<think>no</think>YES", "maybe",
            "8", "so 3 of 10\n-1", "score: .5", "\u22123", "11", "10.0", "7/10\nor"]  # fmt: skip
    with server.serving() as url:
        options = {"judge.url": url, "judge.model": "m", "describe_tools": True}
        judge = build(changed(chosen("env", "wiki-search-judged"), options))().judge
        asked = [assistant("before"), {"role": "user", "content": "last?"}]
        example = Example(0, "e", asked, {"answer": ["a", "b"]})
        score = await judge(Episode(example, [*asked, assistant("<think>x</think> c")]))
    client = {key: value for key, value in vars(judge._http).items() if key[0] != "_"}
    judges = (judge, replace(judge, max_score=10.0))
    scores = [[outcome(one._parse_score, x) for x in said] for one in judges]
    golden("envs/judge", [server.bodies, score, client, scores])
