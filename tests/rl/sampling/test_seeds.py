"""Every request of a seeded run has its own seed, which does not depend on time."""

from dataclasses import replace

from envs.episode import Example
from rl.inference.live_version import LiveVersion
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from tests.rl.sampling.test_roles import Talking
from tests.support.scripted import HI, SAMPLER, ScriptedClient, ScriptedEnv, scoring, tiny_renderer
from tests.support.virtual_time import run_virtually


def seeds(env, *, seed=5, group=0, size=3, sampler=SAMPLER) -> list:
    """Return the seeds of the requests of a group, in order."""
    client = ScriptedClient("x")
    chat = RendererChat(sampler, tiny_renderer(), client, 256, LiveVersion(7))
    player = Player(sampler, env, chat, seed=seed)
    run_virtually(player.play_group(group, Example(3, env.name, list(HI)), size))
    return [sampling.get("seed") for _, sampling, _, _ in client.requests]


def turns(count: int) -> ScriptedEnv:
    return ScriptedEnv(replies=("again",) * (count - 1), max_turns=count)


def test_every_turn_has_its_own_seed_and_the_same_run_repeats_it():
    given = [
        s for run in (5, 6) for group in (0, 1) for s in seeds(turns(3), seed=run, group=group)
    ]
    assert len(given) == len(set(given)) == 2 * 2 * 3 * 3
    assert given[-9:] == seeds(turns(3), seed=6, group=1)
    given = seeds(Talking(), size=2)  # two roles with two turns each
    assert len(given) == len(set(given)) == 2 * 2 * 2


def test_the_request_of_a_group_has_one_seed_from_which_vllm_counts_up():
    (seed,) = seeds(turns(1))
    assert 0 <= seed < 2**56


def test_a_retry_has_another_seed():
    def score(self, episode):
        raise RuntimeError("broken")

    first, second = seeds(scoring(score), size=1, sampler=replace(SAMPLER, max_retries=1))
    assert first != second


def test_requests_have_no_seed_without_sampler_seeded():
    assert seeds(turns(2), seed=None) == [None] * 6
