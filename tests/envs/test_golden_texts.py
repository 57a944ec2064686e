"""Tables of the functions that read texts, messages and answers of sandboxes, as stored files.

This file names the sandbox, so that it runs beside the tests that count sandboxes.
"""

import asyncio
import hashlib
import json
import math
import re
from pathlib import Path

from envs import http_client
from envs.chat_endpoint import ChatEndpoint, is_context_full
from envs.episode import Episode, Example, StopReason, rewards_by_name
from envs.http_client import HttpError
from envs.messages import assistant, clean_json, opening_of, text_of, to_api_format, tool_call, user
from envs.policy_endpoint import _stream_chunks, completion
from envs.protocol import Environment, PolicyTurn
from envs.sandbox.confinement import MACHINES, _seccomp_program
from envs.sandbox.interpreter import CappedOutput
from envs.verifiers.adapter import Outcome
from envs.verifiers.environment import Verifiers, module_of
from tests.envs.verifiers.test_environment import Scripted
from tests.support.golden import golden
from tests.support.outcomes import outcome
from tests.support.sandboxes import make, said


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
    turns = [
        PolicyTurn(m, cut, 3, 4) for m, cut in ((call, False), (call, True), (user(""), False))
    ]
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
    hinted = [
        episode("", **info).example for info in ({}, {"hint": " h "}, {"hint": ""}, {"hint": 3})
    ]
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
    *(
        "x = 3",
        "x",
        "print('a'); x + 1; None",
        "1 / 0",
        "x = ",
        "f = lambda: g()\ng = lambda: f()\nf()",
    ),
    *("print('ab' * 700)", "raise SystemExit(3)", "open('/etc/passwd')", "bytearray(10**10)"),
    *("import socket; socket.socket()", "import os; os.fork()", "import os; os.getcwd(), input()"),
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
