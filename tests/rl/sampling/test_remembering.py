"""An environment that remembers: its pool grows while it is played, and a resumed run continues."""

import asyncio
import json
from dataclasses import asdict, replace
from random import Random
from typing import Any

import msgspec
import pytest

from envs.episode import Example
from envs.messages import user
from envs.mixture import Mixture
from envs.protocol import Environment
from rl.inference.live_version import LiveVersion
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.dispatcher import Dispatcher, DispatcherState
from rl.rollouts.example_order import SequentialOrder, ShuffledOrder
from rl.sampling.player import Player
from tests.support.orders import begun
from tests.support.rollouts import group_credit
from tests.support.scripted import SAMPLER, ScriptedClient, chat_of
from tests.support.virtual_time import run_virtually

GROUPS, SIZE = 2, 2


class Growing(Environment):
    """What the policy says becomes a question with the next version, in sorted order."""

    name = "growing"
    reward_weights = {"odd": 1.0}  # noqa: RUF012 as environments write it

    def __init__(self):
        self.pool, self.said, self.versions = [], set(), []
        self.add(["one", "two", "three"])

    def add(self, texts):
        for text in texts:
            if text not in [example.info["text"] for example in self.pool]:
                messages, info = [user(text)], {"text": text}
                self.pool.append(Example(len(self.pool), self.name, messages, info))

    def examples(self, split):
        return self.pool

    async def score(self, episode):
        self.said.add(episode.text)
        return {"odd": float(len(episode.text) % 2)}

    def begin_version(self, version):
        self.versions.append(version)
        self.add(sorted(self.said))
        self.said.clear()

    def state(self):
        return {"pool": [e.info["text"] for e in self.pool], "said": sorted(self.said)}

    def load(self, state):
        if state:
            self.add(state["pool"])
            self.said = set(state["said"])


class Hashed(ScriptedClient):
    """Answers with a text that depends only on the prompt and on the place in the request."""

    def _next(self, prompt, max_tokens, version):
        rng = Random(f"{prompt}:{self.given % SIZE}")
        self.answers = ["x" * rng.randrange(1, 20)]
        return super()._next(prompt, max_tokens, version)


async def _train(env, order, first, last, state):
    """Return what each step trained, and the checkpoint after the last step."""
    version = LiveVersion(listeners=[env.begin_version])
    chat = replace(chat_of(Hashed("", seconds=1.0)), version=version)
    credit = group_credit(weights=env.reward_weights)
    dispatcher = Dispatcher(
        Player(SAMPLER, env, chat).play_group_at,
        begun(order, env.pools("train"), 0),
        lambda example, rollouts, version: credit(example, rollouts),
        FifoBuffer(),
        **{"group_size": SIZE, "groups_per_step": GROUPS, "max_staleness": 0},
        **{"max_concurrent": 64, "step": first, "version": version, "stateful": {"env": env}},
        state=state or DispatcherState(),
    )
    running = asyncio.ensure_future(dispatcher.run())
    batches = []
    await dispatcher.publish(first)
    saved: Any = None
    for step in range(first, last):
        groups = await dispatcher.take_batch(step)
        batches.append([(g.index, g.example.info["text"], g.rewards) for g in groups])
        saved = asdict(dispatcher.checkpoint())
        await dispatcher.publish(step + 1)
    running.cancel()
    return batches, msgspec.convert(json.loads(json.dumps(saved)), DispatcherState)


def train(env, order, first, last, state=None):
    return run_virtually(_train(env, order, first, last, state))


@pytest.mark.parametrize("order", [SequentialOrder, ShuffledOrder])
def test_a_resumed_run_plays_what_the_uninterrupted_run_plays(order):
    whole, resumed = Growing(), Growing()
    batches, _ = train(whole, order(), 0, 12)
    before, state = train(Growing(), order(), 0, 5)
    assert before == batches[:5]
    after, _ = train(resumed, order(), 5, 12, state)
    assert after == batches[5:]
    assert resumed.state() == whole.state()
    assert len(whole.pool) > 6
    played = {text for batch in batches for _, text, _ in batch}
    assert len(played - {"one", "two", "three"}) > 2  # examples that the play itself has added
    assert whole.versions == list(range(13))
    assert resumed.versions == list(range(5, 13))


def test_an_order_with_statistics_sees_the_grown_pool_when_it_resumes():
    def order():
        weights = {"easy_weight": 1.0, "normal_weight": 1.0, "hard_weight": 1.0}
        return DifficultyOrder(easy_threshold=0.9, hard_threshold=0.1, **weights)

    _, state = train(Growing(), order(), 0, 5)
    assert state.order["sizes"] != [3]
    batches, _ = train(Growing(), order(), 5, 8, state)
    assert len(batches) == 3


def test_a_mixture_remembers_for_each_of_its_environments():
    first, second = ({"a": Growing(), "b": Growing()} for _ in range(2))
    mixture = Mixture(envs=first, weights={"a": 1.0, "b": 1.0})
    first["a"].said.add("new")
    mixture.begin_version(3)
    assert [env.versions for env in first.values()] == [[3], [3]]
    Mixture(envs=second, weights={"a": 1.0, "b": 1.0}).load(mixture.state())
    assert [len(env.pool) for env in second.values()] == [4, 3]


def test_a_state_without_load_is_refused_at_the_resume():
    forgetful = type("Forgetful", (Environment,), {"state": lambda _: {"a": 1}})()
    with pytest.raises(ValueError, match=r"Forgetful has state\(\) but no load\(\): define load"):
        forgetful.load(forgetful.state())
