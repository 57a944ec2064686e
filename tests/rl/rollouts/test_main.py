"""What the rollouts process makes of the configuration before it samples."""

from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from envs.episode import Example
from envs.reverse_text import ReverseText
from rl.config.schema import Run
from rl.inference.live_version import LiveVersion
from rl.rollouts import __main__ as main
from rl.runtime.folder import RunFolder
from rl.sampling.demonstrations import DemonstrationSampler
from rl.sampling.renderer_chat import RendererChat
from tests.support.composing import composed, learned
from tests.support.rollouts import rollout
from tests.support.scripted import SAMPLER, ScriptedClient, tiny_renderer

TWO = ("inference.replicas=2", "inference.args.max_num_seqs=8")


class Begun(Exception):
    """Raised with the arguments of the service, so that `main` ends before it listens."""

    @classmethod
    def begin(cls, *given):
        raise cls(*given)


class Connecting:
    """A client that notes the settings with which a chat is opened."""

    settings: Any = None

    @asynccontextmanager
    async def connect(self, setting):
        Connecting.settings = setting
        yield RendererChat(SAMPLER, tiny_renderer(), ScriptedClient(), 256, LiveVersion(0))


async def begun(folder, monkeypatch, *overrides):
    """Return the settings of the chat, and the dispatcher of a run with these overrides."""
    monkeypatch.setattr(main, "RolloutService", Begun.begin)
    config = composed("env=reverse-text", "group_size=4", "seed=5", *overrides)
    config |= {"client": {"_target_": f"{__name__}.Connecting"}, "output_dir": str(folder)}
    config["learned"] = learned()
    run = Run.of(config)
    run_folder = RunFolder(run.folder)
    run_folder.path.mkdir(parents=True)
    run_folder.set_model(folder)
    run.save(run_folder.config)
    with pytest.raises(Begun) as caught:
        await main.main(run_folder)
    return Connecting.settings, caught.value.args[2]


@pytest.mark.parametrize(
    ("overrides", "num_seqs", "max_concurrent", "seed"),
    [
        ((), None, 100, None),
        ((*TWO, "sampler.seeded=true"), 16, 100, 5),  # both replicas together
        (("strategy=extremes", "strategy.factor=3"), None, 33, None),  # 12 attempts per 4 rollouts
        (("strategy=branch", "strategy.branches=3"), None, 100, None),  # 1 attempt at first
    ],
)
async def test_the_limits_of_sampling_count_replicas_and_attempts(
    overrides, num_seqs, max_concurrent, seed, tmp_path, monkeypatch
):
    limits = ("sampler.max_concurrent=100", "sampler.max_prompt_len=200")
    setting, dispatcher = await begun(tmp_path, monkeypatch, *limits, *overrides)
    assert (setting.num_seqs, dispatcher.max_concurrent) == (num_seqs, max_concurrent)
    assert dispatcher.play_group.__self__.seed == seed
    assert dispatcher.order.pools[0].examples._limit == 201
    assert dispatcher.stateful.keys() == {"advantage", "env"}
    assert [told.__name__ for told in dispatcher.version.listeners] == ["begin_version"]


async def test_credits_follow_the_schedules_at_the_version_of_their_group(tmp_path, monkeypatch):
    rise = "{_target_: rl.schedule.linear, start: 0.0, end: 1.0, steps: 4}"
    limit = ("truncation=penalty", "truncation.limit=2", "truncation.start=0.0")
    changes = (f"reward.length_penalty={rise}", f"truncation.weight={rise}")
    _, dispatcher = await begun(tmp_path, monkeypatch, *limit, *changes)
    example = Example(0, "reverse-text", [])
    found = [dispatcher.credit(example, [rollout(9.0, lengths=(2,))], v) for v in (0, 4)]
    # Version 4: 1 for each of two tokens, and the whole weight of 1 at the limit of two.
    assert [credit.reward for (credit,) in found] == [9.0, 9.0 - 2 - 1]


def test_demonstrations_depend_on_the_seed_of_the_run_and_on_the_group():
    sizes = {"min_length": 8, "max_length": 8, "num_train": 5, "num_eval": 5}
    env = ReverseText(**sizes, reward_weights={"exact": 1.0})
    sampler = DemonstrationSampler(max_staleness=0, corruption_rate=0.0)

    def texts(seed, group, *size):
        run: Any = SimpleNamespace(seed=seed, group_size=2, max_seq_len=256)
        demonstrate = main._demonstrator(run, sampler, env, tiny_renderer())
        rollouts = demonstrate(group, Example(0, env.name, []), *size)
        return tuple(rollout.messages[0]["content"] for rollout in rollouts)

    assert len({texts(0, "0"), texts(1, "0"), texts(0, "1")}) == 3
    assert texts(0, "0") == texts(0, "0", 3)[:2]
