"""What sampling makes of scripted answers: all fields of the rollouts, and the requests."""

import re
from dataclasses import replace

from envs.episode import Example
from rl.sampling.player import Player
from tests.support import scripted
from tests.support.golden import golden
from tests.support.scripted import PREFIX, SAMPLER, ScriptedEnv, scoring
from tests.support.virtual_time import run_virtually

EXAMPLE = Example(3, "scripted", list(scripted.HI))


def failing(self, episode):
    raise KeyError("no\nline")


SCENES = {
    "one request": (ScriptedEnv(), ("good", "bad", "<think>\nhm\n</think>\n\ngood"), {"n": 3}),
    "own requests": (ScriptedEnv(), ("good", "bad"), {"n": 2, "rollout_timeout": 9.0}),
    "turns": (ScriptedEnv(("more?", "and?"), max_turns=4), ("a", "bb", "good"), {"n": 2}),
    "too many turns": (ScriptedEnv(("x",) * 5, max_turns=2), ("a", "b"), {"seed": 5}),
    "cut off": (ScriptedEnv(("x",), max_turns=2), ("y" * 40,), {"top_p": 0.5, "stop": ("</a>",)}),
    "context": (ScriptedEnv(), ("y" * 40,), {"max_seq_len": PREFIX + 5, "seed": 6, "n": 2}),
    "no room": (ScriptedEnv(), ("y",), {"max_seq_len": PREFIX}),
    "score fails": (scoring(failing), ("good",), {"max_retries": 1}),
    "no number": (scoring(lambda *_: {"good": float("nan")}), ("good",), {}),
    "turn rewards": (scoring(lambda *_: {"good": [0.5], "length": 2.0}), ("good",), {}),
}


def played(env, answers, *, n=1, max_seq_len=256, seed=None, **options):
    """Return rollouts of version 6, without their time, and what vLLM was asked."""
    client, sampler = scripted.ScriptedClient(*answers), replace(SAMPLER, **options)
    chat = scripted.chat_of(client, sampler, max_seq_len)
    rollouts = run_virtually(Player(sampler, env, chat, seed=seed).play_group_at(2, EXAMPLE, n, 6))
    asked = [[len(ids), *rest] for ids, *rest in client.requests]
    errors = [re.sub(r":\d+\)", ")", each.error) for each in rollouts]  # without line numbers
    plain = zip(rollouts, errors, strict=True)
    return [[replace(each, generation_time=0.0, error=error) for each, error in plain], asked]


def test_rollouts_and_requests_of_scripted_episodes():
    """All fields of the rollouts; length of prompt, parameters, n and version of each request."""
    found = {name: played(env, answers, **how) for name, (env, answers, how) in SCENES.items()}
    golden("sampling/rollouts", found)
