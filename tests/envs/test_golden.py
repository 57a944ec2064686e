"""What environments ask, demonstrate, read and answer, as stored files.

This file names the sandbox and math-python, so that it runs beside the tests that count sandboxes.
"""

import asyncio
import hashlib
import json
import math
import re
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from envs import http_client
from envs.chat_endpoint import ChatEndpoint, is_context_full
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.http_client import HttpError
from envs.messages import assistant, clean_json, opening_of, text_of, to_api_format, tool_call, user
from envs.mixture import Mixture
from envs.policy_endpoint import _stream_chunks, completion
from envs.protocol import Environment, PolicyTurn
from envs.sandbox.confinement import MACHINES, _seccomp_program
from envs.sandbox.interpreter import CappedOutput
from envs.trials import Trials
from envs.verifiers.adapter import Outcome
from envs.verifiers.environment import Verifiers, module_of
from envs.wiki.environment import expert_conversation
from envs.wiki.facts import invent_name, made_up_corpus, shipped_corpus
from envs.wiki.index import WikiIndex, share_found
from rl.config.build import build
from tests.envs.verifiers.test_environment import Scripted
from tests.support.composing import REPO, changed, chosen
from tests.support.golden import golden
from tests.support.outcomes import outcome
from tests.support.sandboxes import make, said

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


def episode(text, **info):
    return Episode(Example(4, "e", [user("?")], info), [user("?"), assistant(text)])


def test_messages_requests_and_turns_in_every_form():
    """Forms of messages, rewards of scores, remedies of HTTP errors, hints, verifiers' rewards."""
    call = tool_call("find", "c1", "so", query="ö", k=[1, None])
    messages = [{"role": "system", "content": "s"}, user("a"), "bare", {"role": "tool"}, call,
                user("after"), {**assistant("t"), "reasoning_content": "r", "tool_calls": []},
                {"role": "user", "content": [{"type": "text", "text": "p"}]}, 7]  # fmt: skip
    own = [one for one in messages if isinstance(one, dict)]
    deep, values = 1, [None, True, 3, 10**309, 1.5, math.inf, "a\ud800", {1: ["\udfff"]}, {2}]
    for _ in range(64):
        deep = [deep]
    scored = [({"a": 1, "b": [1, 0.5]}, 2), ({"a": [0.1] * 10}, 10), ({"a": [1]}, 2),
              ({"a": [1, math.inf]}, 2), ({"a": "0.5", "b": math.nan}, 1)]  # fmt: skip
    cut_off = ((call, False), (call, True), (user(""), False))
    turns = [PolicyTurn(message, is_cut, 3, 4) for message, is_cut in cut_off]
    kind = type("Kind", (ChatEndpoint,), {"option": "judge.url", "raises": RuntimeError})
    given = {"url": "http://h/v1", "model": "m", "max_retries": 2}
    endpoints = [kind(**given, api_key_variable=key) for key in ("KEY", None)]
    failed = ((0,), (401, "t", "3"), (403, "", "x"), (404, ""), (429, "", "1.5"), (500,))
    errors = [HttpError("answered", *one) for one in failed]
    errors[-1].attempts = 3
    http_client._RANDOM.seed(0)
    client = endpoints[0].client(max_concurrent=3, timeout=9.0)
    waits = [client._seconds_before_retry(after, attempt)
             for after in (math.nan, -1.0, 3.0, 99.0) for attempt in (0, 1, 3, 12)]  # fmt: skip
    texts = ("maximum context length", "context_length_exceeded", "Context Window full", "other")
    hints = ({}, {"hint": " h "}, {"hint": ""}, {"hint": 3})
    hinted = [episode("", **info).example for info in hints]
    env = Verifiers(id="o/x-y@1", args=None, num_train=None, num_eval=1, max_concurrent=None)
    env.__dict__["_adapter"] = Scripted("b")
    splits = [env.examples(split) for split in ("train", "eval")]
    weights, env.reward_weights = env.reward_weights, {"letters": 2.0, "length": 0.5}
    played = [episode("x") for _ in range(3)]
    played[0].memory["outcomes"] = {"": Outcome(3.0, {"letters": 1.0, "extra": 9.0})}
    played[1].memory["outcomes"] = {"": Outcome(2.0, {"letters": 1.0})}
    golden("envs/messages", {
        "api": [to_api_format(one, "reasoning_content") for one in own],
        "json": [outcome(clean_json, value) for value in values],
        "depth": [isinstance(outcome(clean_json, one), str) for one in (deep, [deep], [[deep]])],
        "opening": opening_of(messages), "texts": [*map(text_of, messages)],
        "text of calls": text_of({"tool_calls": ["y"]}),
        "rewards": [outcome(rewards_by_name, *one) for one in scored],
        "truncated": {reason: reason.truncated for reason in StopReason},
        "text": [episode("last").text, Episode(hinted[0], [user("x")]).text],
        "turns": [completion(turn) | {"id": 0, "created": 0} for turn in turns],
        "stream": [json.loads(line[6:])["choices"] for line in
                   _stream_chunks(turns[0]).decode().split("\n\n")[:2]],
        "waits": waits, "excerpts": [http_client._excerpt(x) for x in ("a\n b\x00", " y " * 150)],
        "errors": [[str(e._exception_for(error)) for e in endpoints] for error in errors],
        "after": [error.retry_after for error in errors],
        "full": [is_context_full(status, text) for status in (400, 404) for text in texts],
        "hints": [outcome(Environment().teacher_messages, one, some) for one in hinted
                  for some in ([messages[0], user("q"), assistant("x")], [user("q")])],
        "verifiers": [env.name, splits, weights, [outcome(env.score, one) for one in played]],
        "modules": [module_of(one) for one in ("owner/a-b@2", "a", "o/p/c")],
    })  # fmt: skip


CODE = (
    *("x = 3", "x", "print('a'); x + 1; None", "1 / 0", "x = "),
    *("f = lambda: g()\ng = lambda: f()\nf()", "print('ab' * 700)", "raise SystemExit(3)"),
    *("open('/etc/passwd')", "bytearray(10**10)", "import socket; socket.socket()"),
    *("import os; os.fork()", "import os; os.getcwd(), input()"),
    "import sys; len([n for n in sys.modules if n.startswith('envs')])",
    *("import os; sorted(os.environ.items())", "import os; os._exit(0)", "x"),
)


def test_what_a_sandbox_answers():
    """Output, values, tracebacks and limits of code in one sandbox, and its seccomp program."""
    box = make(memory_mb=300)

    def brief(text):
        """Return a traceback without the lines in which Python's versions differ."""
        last = text.rstrip("\n").rpartition("\n")[2]
        return [text.count('File "<python>"'), last] if "Error" in text else text

    async def run():
        await box.run("")
        lines = Path(f"/proc/{box._process.pid}/limits").read_text().splitlines()
        limits = [re.split("  +", line)[:3] for line in lines]
        return limits, [brief(await said(box, code)) for code in CODE]

    (limits, answers), capped = asyncio.run(run()), {}
    box.close()
    names = ("Max address space", "Max open files", "Max core file size", "Max file size")
    limits = [line for line in limits if line[0] in (*names, "Max processes")]
    for limit in (2, 3, 8):
        output = CappedOutput(limit)
        for text in ("", "ab", "cdefg", "h" * 9, "ij"):
            output.write(text)
            capped[f"{limit} {text}"] = output.text()
    programs = [hashlib.sha256(_seccomp_program(machine)).hexdigest() for machine in MACHINES]
    golden("envs/sandbox", [limits, answers, capped, programs])


def test_the_pages_the_questions_and_the_tools():
    """The shipped corpus (some of it, and a digest of all), a made-up one, searches, rewards."""
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
    talk = [{"role": "system", "content": "x"}]
    for query, answer in (("a", "x\ny"), ("b", "y\nz"), ("c", "z\nx"), ("d", "w"), ("e", "v")):
        name = "view_sections" if query == "e" else "search_pages"
        talk += [tool_call(name, query=query), {"role": "tool", "content": answer}]
    wanted = ([], ["x"], ["x", "z"], ["x", "v", "none"])
    found["found"] = [share_found([*talk, tool_call("search_pages")], names) for names in wanted]
    golden("wiki/corpus", found)
