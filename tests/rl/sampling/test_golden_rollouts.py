"""What sampling makes of scripted answers: rollouts, requests, demonstrations."""

import logging
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from envs.episode import Example, StopReason
from envs.messages import assistant, user
from envs.reverse_text import ReverseText
from rl.inference.live_version import LiveVersion
from rl.sampling.chat import checked_call
from rl.sampling.demonstrations import DemonstrationSampler, completion_ids, tokenize
from rl.sampling.player import Player
from rl.sampling.prefix import prefix_of, turns_of
from rl.sampling.renderer_chat import RendererChat
from rl.sampling.rewarding import with_rewards
from rl.sampling.sampler import RequestSeeds
from tests.rl.sampling.test_messages_chat import Tooled
from tests.rl.sampling.test_roles import Talking
from tests.support import scripted
from tests.support.golden import golden
from tests.support.rich_groups import rollout, row
from tests.support.scripted import PREFIX, SAMPLER, ScriptedEnv, scoring, tiny_renderer
from tests.support.virtual_time import run_virtually

CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "hi"}}\n</tool_call>'
EXAMPLE = Example(3, "scripted", list(scripted.HI))


class Prefixed(ScriptedEnv):
    """Speak twice with a given beginning, the second time untrained, and score a text."""

    holds_conversation = True

    async def play(self, episode, speak):
        messages = list(episode.messages)
        for trains in (True, False):
            turn = await speak(messages, None, prefix="so ", prefix_trains=trains)
            messages += [turn.message, user("go on")]
        episode.memory["logprobs"] = await speak.logprobs(messages, "ab", after="c")

    async def score(self, episode):
        return {"good": sum(episode.memory["logprobs"]), "length": float(episode.turns)}


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
    "tools": (Tooled((), 4), (CALL, CALL[:30], "good"), {"max_tokens": 99, "max_seq_len": 900}),
    "roles": (Talking(), ("a", "b", "c", "d"), {}),
    "prefixes": (Prefixed(), ("good", "b"), {"temperature": 1.0}),
    "score fails": (scoring(failing), ("good",), {"max_retries": 1}),
    "no number": (scoring(lambda *_: {"good": float("nan")}), ("good",), {}),
    "turn rewards": (scoring(lambda *_: {"good": [0.5], "length": 2.0}), ("good",), {}),
}


def played(env, answers, *, n=1, max_seq_len=256, seed=None, **options):
    """Return rollouts of version 6, without their time, and what vLLM was asked."""
    client, sampler = scripted.ScriptedClient(*answers), replace(SAMPLER, **options)
    chat = RendererChat(sampler, tiny_renderer(), client, max_seq_len, LiveVersion(7))
    rollouts = run_virtually(Player(sampler, env, chat, seed=seed).play_group_at(2, EXAMPLE, n, 6))
    asked = [[len(ids), *rest] for ids, *rest in [*client.requests, *client.scored]]
    return [[replace(each, generation_time=0.0) for each in rollouts], asked]


def test_rollouts_and_requests_of_scripted_episodes():
    """All fields of the rollouts; length of prompt, parameters, n and version of each request."""
    found = {name: played(env, answers, **how) for name, (env, answers, how) in SCENES.items()}
    golden("sampling/rollouts", found)


class Shown(ScriptedEnv):
    """Yield three demonstrations, of which the second is too long."""

    def demonstrations(self, rng):
        for text in ("abc", "x" * 300, "aab"):
            yield [user(f"say {text}"), assistant(text)]


def test_demonstrations_seeds_calls_and_rewards(caplog):
    """Rows of a conversation, swapped letters, seeds, checked calls, rewards and their errors."""
    renderer, env, one = tiny_renderer(), ScriptedEnv(), rollout(None)
    thought = {**assistant("5"), "reasoning_content": "Add."}
    talk = [user("How much?"), thought, user("Twice?"), {**assistant("ten"), "cut_off": True}]
    found = {"rows": tokenize(renderer, talk, 256)}
    texts = ("hi", "<think>a</think>b", "")
    found["completions"] = [completion_ids(renderer, assistant(text)) for text in texts]
    sizes = {"min_length": 3, "max_length": 6, "num_train": 9, "num_eval": 3}
    reverse = ReverseText(**sizes, reward_weights={"exact": 1.0})
    sampler = DemonstrationSampler(max_staleness=1, corruption_rate=0.5)
    found["swapped"] = [m[-1] for m in islice(sampler.conversations(reverse, Random(3)), 12)]
    found["group"] = sampler.group(Shown(), renderer, Random(0), 2, 100)
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="ended") as ended:
        sampler.group(Shown(), renderer, Random(0), 3, 100)
    found["ended"] = [str(ended.value), *(each.getMessage() for each in caplog.records)]
    seeds = RequestSeeds(5, 1, 2, 3)
    found["seeds"] = [seeds.next(), seeds.next(), RequestSeeds(None).next()]
    calls = (("id", "f", {"x": 1}), (None, "f", {}), ("id", "", {}), ("i" * 300, "f" * 200, {}),
             ("id", "f" * 201, {}), ("id", "f", {"x": float("nan")}), ("id", 3, {}))  # fmt: skip
    found["calls"] = [checked_call(*call, "raw") for call in calls]
    given = ({"good": 0.5, "length": 3.0}, {"length": 1.0}, {"good": float("inf")}, {"good": 1e308})
    found["rewards"] = [with_rewards(env, one, each, {"scripted "}) for each in (*given, {})]
    forked = rollout(1.0, row("pp0000r11r222", 1), row("ppp33333", 5))
    found["turns"] = [*turns_of(forked), *prefix_of(forked, 2, 2).turns]
    found["reasons"] = {reason.value: reason.truncated for reason in StopReason}
    golden("sampling/parts", found)
