"""An environment that remembers: its pool grows while it is played, and a resumed run continues."""

import asyncio
import json
from dataclasses import asdict, replace
from random import Random
from typing import Any

import msgspec
import pytest

from envs.mixture import Mixture
from envs.protocol import Environment
from rl.inference.live_version import LiveVersion
from rl.rollouts.buffer import FifoBuffer
from rl.rollouts.difficulty_order import DifficultyOrder
from rl.rollouts.dispatcher import Dispatcher, DispatcherState
from rl.rollouts.example_order import SequentialOrder, ShuffledOrder
from rl.sampling.player import Player
from tests.support.orders import begun
from tests.support.remembering import GrowingReversal
from tests.support.rollouts import group_credit
from tests.support.scripted import SAMPLER, ScriptedClient, chat_of
from tests.support.virtual_time import run_virtually

GROUPS, SIZE = 2, 2


def growing() -> GrowingReversal:
    """Return an environment that makes examples of what the policy says."""
    sizes = {"min_length": 3, "max_length": 5, "num_train": 3, "num_eval": 1}
    return GrowingReversal(**sizes, reward_weights={"exact": 1.0})


class Hashed(ScriptedClient):
    """Answers with a text that depends only on the prompt and on the place in the request."""

    def _next(self, prompt, max_tokens, version):
        rng = Random(f"{prompt}:{self.given % SIZE}")
        self.answers = ["x" * rng.randrange(1, 20)]
        return super()._next(prompt, max_tokens, version)


async def _train(env, order, first, last, state):
    """Return what each step trained, the begun versions and the last step's checkpoint."""
    versions = []
    version = LiveVersion(listeners=[env.begin_version, versions.append])
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
        batches.append([(g.index, g.example.messages[0]["content"], g.rewards) for g in groups])
        saved = asdict(dispatcher.checkpoint())
        await dispatcher.publish(step + 1)
    running.cancel()
    return batches, versions, msgspec.convert(json.loads(json.dumps(saved)), DispatcherState)


def train(env, order, first, last, state=None):
    return run_virtually(_train(env, order, first, last, state))


@pytest.mark.parametrize("order", [SequentialOrder, ShuffledOrder])
def test_a_resumed_run_plays_what_the_uninterrupted_run_plays(order):
    whole, resumed = growing(), growing()
    batches, versions, _ = train(whole, order(), 0, 12)
    before, *_, state = train(growing(), order(), 0, 5)
    assert before == batches[:5]
    after, resumed_versions, _ = train(resumed, order(), 5, 12, state)
    assert after == batches[5:]
    assert resumed.state() == whole.state()
    assert len(whole.examples("train")) > 6
    played = {text for batch in batches for _, text, _ in batch}
    first = {example.messages[0]["content"] for example in growing().examples("train")}
    assert len(played - first) > 2  # examples that the play itself has added
    assert (versions, resumed_versions) == (list(range(13)), list(range(5, 13)))


def test_an_order_with_statistics_sees_the_grown_pool_when_it_resumes():
    def order():
        weights = {"easy_weight": 1.0, "normal_weight": 1.0, "hard_weight": 1.0}
        return DifficultyOrder(easy_threshold=0.9, hard_threshold=0.1, **weights)

    *_, state = train(growing(), order(), 0, 5)
    assert state.order["sizes"] != [3]
    batches, *_ = train(growing(), order(), 5, 8, state)
    assert len(batches) == 3


def test_a_mixture_remembers_for_each_of_its_environments_and_a_state_needs_load():
    first, second = ({"a": growing(), "b": growing()} for _ in range(2))
    mixture = Mixture(envs=first, weights={"a": 1.0, "b": 1.0})
    first["a"]._said.add("new")
    first["b"]._said.add("other")
    mixture.begin_version(3)
    Mixture(envs=second, weights={"a": 1.0, "b": 1.0}).load(mixture.state())
    assert [env.state() for env in second.values()] == [env.state() for env in first.values()]
    assert [env.state()["added"] for env in second.values()] == [["new"], ["other"]]
    forgetful = type("Forgetful", (Environment,), {"state": lambda _: {"a": 1}})()
    with pytest.raises(ValueError, match=r"Forgetful has state\(\) but no load\(\): define load"):
        forgetful.load(forgetful.state())
