"""Each environment of conf/env: examples, demonstrations, prompts, tools, scores, as stored files.

The text math-python lets tests/conftest.py run this file beside those that count sandboxes.
"""

import hashlib
import json
from itertools import islice
from random import Random

import pytest

from envs.mixture import Mixture
from envs.trials import Trials
from rl.config.build import build
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
