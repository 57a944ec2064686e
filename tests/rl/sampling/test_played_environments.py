"""The player plays shipped environments: mixtures, several turns, demonstrations."""

from itertools import islice
from random import Random

import numpy as np
import pytest

from envs.alphabet_sort import AlphabetSort
from envs.episode import Example, StopReason
from envs.messages import user
from envs.mixture import Mixture
from losses.advantages import none
from rl.inference.live_version import LiveVersion
from rl.records import Group
from rl.rollouts.batch_metrics import batch_metrics
from rl.rollouts.credit import GroupCredit, RewardShaping
from rl.rollouts.truncation import keep
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.support.orders import examples, shuffled
from tests.support.scripted import SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer
from tests.support.virtual_time import run_virtually


class Named(ScriptedEnv):
    """Score 1 for the question as the answer."""

    def examples(self, split):
        return [Example(i, self.name, [user(f"{self.name} {i}")]) for i in range(5)]

    async def score(self, episode):
        return {"good": float(episode.text == episode.messages[0]["content"])}


class EchoClient(ScriptedClient):
    """Answer with the first user message."""

    async def generate(self, prompt_ids, sampling, *, n, version):
        text = bytes(token for token in prompt_ids if token < 256).decode()
        self.answers = [text.split("\n")[1]]
        return await super().generate(prompt_ids, sampling, n=n, version=version)


def player(env, client):
    chat = RendererChat(SAMPLER, tiny_renderer(), client, 256, LiveVersion(0))
    return Player(SAMPLER, env, chat)


def mixture():
    one, two = Named(), Named(replies=("go on",), max_turns=2)
    two.reward_weights = {"good": 5.0}
    return Mixture(envs={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0})


def test_the_environment_of_a_group_decides_its_turns_and_rewards():
    env = mixture()
    order, play = shuffled(env.pools("train"), 0), player(env, EchoClient("")).play_group
    credit = GroupCredit(
        keep, RewardShaping(normalise_each=False, length_penalty=0.0), none, lambda _: {}
    )
    groups = []
    for index, example in enumerate(examples(order, 8)):
        rollouts = run_virtually(play(index, example, 2))
        groups.append(Group(index, example, 0, rollouts, credit(example, rollouts)))
    for group in groups:
        name = group.example.env
        assert {r.messages[0]["content"].split()[0] for r in group.rollouts} == {name}
        assert {r.turns for r in group.rollouts} == {1 if name == "one" else 2}
        assert {r.reward for r in group.rollouts} == {2.0 if name == "one" else 5.0}
    metrics = batch_metrics(groups, 0)
    ones = sum(group.example.env == "one" for group in groups)
    assert 0 < ones < 8
    assert metrics["env/one/reward"] == 2.0
    assert metrics["env/two/reward"] == 5.0
    assert metrics["env/one/share"] == ones / 8
    assert metrics["env/two/errors"] == 0.0


def test_a_batch_without_a_score_has_metrics():
    env = mixture()
    for own in (env.environment_of(pool.examples[0]) for pool in env.pools("train")):
        own.score = None  # raises TypeError
    groups = []
    for pool in env.pools("train"):
        rollouts = run_virtually(player(env, EchoClient("")).play_group(0, pool.examples[0], 2))
        groups.append(Group(0, pool.examples[0], 0, rollouts, ()))
    metrics = batch_metrics(groups, 0)
    assert (metrics["env/one/share"], metrics["env/one/errors"]) == (0.5, 1.0)
    assert np.isnan(metrics["env/two/reward"])


def test_the_expert_of_alphabet_sort_plays_a_whole_episode():
    knobs = {"min_turns": 3, "max_turns": 3, "num_names": 2, "names_per_turn": 1}
    sizes = {"min_length": 2, "max_length": 3, "num_train": 5, "num_eval": 2}
    weights = {"exact": 1.0, "similarity": 1.0}
    env = AlphabetSort(**knobs, **sizes, similarity_power=1.0, reward_weights=weights)
    (shown,) = islice(env.demonstrations(Random(0)), 1)
    names = [message["content"].split()[1:] for message in shown[::2]]
    example = Example(0, env.name, shown[:1], {"names": names})
    client = ScriptedClient(*(message["content"] for message in shown[1::2]))
    (rollout,) = run_virtually(player(env, client).play_group(0, example, 1))
    assert (rollout.reward, rollout.turns, rollout.stop_reason) == (2.0, 3, StopReason.STOP)
    assert rollout.messages == shown
    assert len(rollout.rows) == 1


@pytest.mark.parametrize("index", range(4))
def test_a_demonstration_has_the_tools_of_its_environment(index):
    def find(word: str) -> str:
        """Find."""
        return word

    class Expert(Named):
        def demonstrations(self, rng):
            while True:
                yield [user(self.name), {"role": "assistant", "content": self.name}]

    plain, tooled = Expert(), Expert()
    tooled.tools = [find]
    env = Mixture(envs={"one": plain, "two": tooled}, weights={"one": 1.0, "two": 1.0})
    example = examples(shuffled(env.pools("train"), 0), 4)[index]
    (rollout,) = imitated(env, example)
    assert rollout.messages[0]["content"] == example.env
    text = bytes(int(t) for t in rollout.rows[0].token_ids if t < 256).decode()
    assert ("Find." in text) is (example.env == "two")


def imitated(env, example):
    """Return the group of demonstrations that the rollouts process builds."""
    from rl.rollouts import __main__ as main
    from rl.sampling.demonstrations import DemonstrationSampler

    class Run:
        seed, max_seq_len, group_size = 0, 4096, 1

    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)
    return main._demonstrator(Run, sampler, env, tiny_renderer())("0", example)
