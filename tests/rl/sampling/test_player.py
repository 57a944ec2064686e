"""Playing episodes with a scripted engine, scripted environments and Qwen3's real renderer."""

from dataclasses import replace

import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.messages import user
from envs.mixture import Mixture
from losses.advantages import none
from rl.records import Group
from rl.rollouts import __main__ as main
from rl.rollouts.batch_metrics import batch_metrics
from rl.sampling.demonstrations import DemonstrationSampler
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.rl.sampling.test_speaker import Talking
from tests.support.orders import examples, shuffled
from tests.support.rollouts import group_credit
from tests.support.scripted import (
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    chat_of,
    play,
    scoring,
    text,
    tiny_renderer,
    trained,
)
from tests.support.virtual_time import run_virtually


def test_a_single_turn_group_shares_one_request():
    client = ScriptedClient("good", "bad", "good")
    rollouts = play(ScriptedEnv(), client, 3)
    ((prompt, sampling, n, version),) = client.requests
    assert (n, version, sampling["max_tokens"], sampling["temperature"]) == (3, 7, 32, 0.5)
    assert IM_END in sampling["stop_token_ids"]
    assert "seed" not in sampling
    assert [rollout.reward for rollout in rollouts] == [2.0, 0.0, 2.0]
    for rollout, said in zip(rollouts, ["good", "bad", "good"], strict=True):
        (row,) = rollout.rows
        assert row.token_ids.tolist() == [*prompt, *said.encode(), IM_END]
        assert trained(row) == [*said.encode(), IM_END]
        assert row.rollout_logprobs[-1] == -IM_END / 8
        assert set(row.token_versions[row.completion_mask].tolist()) == {7}
        assert rollout.messages[-1] == {"role": "assistant", "content": said}
        assert (rollout.stop_reason, rollout.turn_limit) == (StopReason.STOP, SAMPLER.max_tokens)
    own = ScriptedEnv()
    own.sampling = {"max_tokens": 6}  # an environment may have its own limit of turns
    assert play(own, client)[0].turn_limit == client.requests[1][1]["max_tokens"] == 6


@pytest.mark.parametrize(
    ("reason", "env", "answer", "max_seq_len", "sampled"),
    [
        (StopReason.STOP, ScriptedEnv(), "good", 256, 5),
        (StopReason.MAX_TOKENS, ScriptedEnv(), "x" * 99, 256, 32),
        (StopReason.CONTEXT, ScriptedEnv(), "x" * 99, PREFIX + 10, 10),
        (StopReason.CONTEXT, ScriptedEnv(), "x", PREFIX, 0),
        (StopReason.CONTEXT, ScriptedEnv(("r" * 99,), 9), "x", PREFIX + 50, 2),
        (StopReason.MAX_TURNS, ScriptedEnv(("more",) * 9, 3), "x", 256, 6),
        (StopReason.MAX_TURNS, ScriptedEnv(("more",)), "x", 256, 2),
    ],
    ids=["stop", "one long turn", "row full", "no room", "reply fills it", "turns", "one turn"],
)
def test_an_episode_says_why_it_ended(reason, env, answer, max_seq_len, sampled):
    (rollout,) = play(env, ScriptedClient(answer), max_seq_len=max_seq_len)
    assert (rollout.stop_reason, rollout.error) == (reason, "")
    assert rollout.reward is not None
    assert sum(row.num_completion for row in rollout.rows) == sampled
    assert all(len(row.token_ids) <= max_seq_len for row in rollout.rows)


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_group_renders_its_opening_once_and_a_turn_is_parsed_once(max_turns):
    class Counting(RendererChat):
        opened, parsed = 0, 0

        async def first_prompt(self, messages, tools):
            Counting.opened += 1
            return await super().first_prompt(messages, tools)

        def message(self, prompt, completion):
            Counting.parsed += 1
            return super().message(prompt, completion)

    env = ScriptedEnv(("b?", "c?")[: max_turns - 1], max_turns)
    rollouts = play(env, ScriptedClient("good"), 4, kind=Counting)
    assert [rollout.turns for rollout in rollouts] == [max_turns] * 4
    assert (Counting.opened, Counting.parsed) == (1, 4 * max_turns)


def seeds(env, *, seed=5, group=0, size=3, sampler=SAMPLER) -> list:
    """Return the seeds of the requests of a group, in order."""
    client = ScriptedClient("x")
    play(env, client, size, sampler=sampler, seed=seed, index=group)
    return [sampling.get("seed") for _, sampling, _, _ in client.requests]


def test_every_request_of_a_seeded_run_has_its_own_seed_and_the_same_run_repeats_it():
    env = ScriptedEnv(replies=("again",) * 2, max_turns=3)
    given = [s for run in (5, 6) for group in (0, 1) for s in seeds(env, seed=run, group=group)]
    assert len(given) == len(set(given)) == 2 * 2 * 3 * 3
    assert given[-9:] == seeds(env, seed=6, group=1)
    assert seeds(env, seed=None) == [None] * 9  # without sampler.seeded
    given = seeds(Talking(), size=2)  # two roles with two turns each
    assert len(given) == len(set(given)) == 2 * 2 * 2
    (seed,) = seeds(ScriptedEnv())  # from which vLLM counts up
    assert 0 <= seed < 2**56

    def failing(self, episode):
        raise RuntimeError("broken")

    first, second = seeds(scoring(failing), size=1, sampler=replace(SAMPLER, max_retries=1))
    assert first != second


class Named(ScriptedEnv):
    """Score 1 for the question as the answer."""

    def examples(self, split):
        return [Example(i, self.name, [user(f"{self.name} {i}")]) for i in range(5)]

    async def score(self, episode):
        return {"good": float(episode.text == episode.messages[0]["content"])}

    def demonstrations(self, rng):
        while True:
            yield [user(self.name), {"role": "assistant", "content": self.name}]


class EchoClient(ScriptedClient):
    """Answer with the first user message."""

    async def generate(self, prompt_ids, sampling, *, n, version):
        self.answers = [text(prompt_ids).decode().split("\n")[1]]
        return await super().generate(prompt_ids, sampling, n=n, version=version)


def mixture():
    one, two = Named(), Named(replies=("go on",), max_turns=2)
    two.reward_weights = {"good": 5.0}
    return Mixture(envs={"one": one, "two": two}, weights={"one": 1.0, "two": 1.0})


def group_of(env, index, example) -> Group:
    player = Player(SAMPLER, env, chat_of(EchoClient("")))
    rollouts = run_virtually(player.play_group(index, example, 2))
    return Group(index, example, 0, rollouts, group_credit(none)(example, rollouts))


def test_the_environment_of_a_group_decides_its_turns_and_rewards():
    env = mixture()
    order = shuffled(env.pools("train"), 0)
    groups = [group_of(env, i, example) for i, example in enumerate(examples(order, 8))]
    for group in groups:
        name = group.example.env
        assert {r.messages[0]["content"].split()[0] for r in group.rollouts} == {name}
        assert {r.turns for r in group.rollouts} == {1 if name == "one" else 2}
        assert {r.reward for r in group.rollouts} == {2.0 if name == "one" else 5.0}
    metrics = batch_metrics(groups, 0)
    ones = sum(group.example.env == "one" for group in groups)
    assert 0 < ones < 8
    assert (metrics["env/one/reward"], metrics["env/two/reward"]) == (2.0, 5.0)
    assert (metrics["env/one/share"], metrics["env/two/errors"]) == (ones / 8, 0.0)
    for own in (env.environment_of(pool.examples[0]) for pool in env.pools("train")):
        own.score = None  # raises TypeError
    failed = [group_of(env, 0, pool.examples[0]) for pool in env.pools("train")]
    metrics = batch_metrics(failed, 0)
    assert (metrics["env/one/share"], metrics["env/one/errors"]) == (0.5, 1.0)
    assert np.isnan(metrics["env/two/reward"])


@pytest.mark.parametrize("index", range(4))
def test_a_demonstration_has_the_tools_of_its_environment(index):
    def find(word: str) -> str:
        """Find."""
        return word

    class Run:
        seed, max_seq_len, group_size = 0, 4096, 1

    env = mixture()
    env.environment_of(Example(0, "two", [])).tools = [find]
    example = examples(shuffled(env.pools("train"), 0), 4)[index]
    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)
    (rollout,) = main._demonstrator(Run, sampler, env, tiny_renderer())("0", example)
    assert rollout.messages[0]["content"] == example.env
    assert (b"Find." in text(rollout.rows[0].token_ids)) is (example.env == "two")
