"""What the rollouts process makes of the configuration, and which vLLMs it uses after a restart."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from envs.episode import Example
from envs.reverse_text import ReverseText
from rl.config.schema import Run
from rl.inference.live_version import LiveVersion
from rl.inference.router import Route
from rl.rollouts import __main__ as main
from rl.rollouts import serving_replicas
from rl.rollouts.serving_replicas import ServingReplicas
from rl.runtime.endpoint import Endpoint, read_restart_request
from rl.runtime.folder import RunFolder
from rl.runtime.network import Address
from rl.sampling.demonstrations import DemonstrationSampler
from rl.sampling.renderer_chat import RendererChat
from tests.support.composing import composed, learned
from tests.support.replicas import inference
from tests.support.rollouts import rollout
from tests.support.scripted import SAMPLER, ScriptedClient, tiny_renderer


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


async def test_the_limits_of_sampling_count_replicas_and_attempts(tmp_path, monkeypatch):
    limits = ("sampler.max_concurrent=100", "sampler.max_prompt_len=200")
    two = ("inference.replicas=2", "inference.args.max_num_seqs=8", "sampler.seeded=true")
    setting, dispatcher = await begun(tmp_path / "two", monkeypatch, *limits, *two)
    assert (setting.num_seqs, dispatcher.max_concurrent) == (16, 100)  # both replicas together
    assert dispatcher.play_group.__self__.seed == 5
    assert dispatcher.order.pools[0].examples._limit == 201
    assert dispatcher.stateful.keys() == {"advantage", "env", "strategy"}
    assert [told.__name__ for told in dispatcher.version.listeners] == ["begin_version"]
    attempts = ("strategy=extremes", "strategy.factor=3")  # 12 per 4 rollouts
    setting, dispatcher = await begun(tmp_path / "attempts", monkeypatch, *limits, *attempts)
    assert (setting.num_seqs, dispatcher.max_concurrent) == (None, 33)
    assert dispatcher.play_group.__self__.seed is None


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


def started(folder: RunFolder, name: str, incarnation: int) -> None:
    Endpoint(Address(path=folder.path / name), incarnation).write(folder, name)


def serving(folder: RunFolder, *incarnations: int) -> ServingReplicas:
    """Return replicas that were restarted so often, each with the newest weights."""
    names = [f"inference{i}" for i in range(len(incarnations))]
    for name, incarnation in zip(names, incarnations, strict=True):
        started(folder, name, incarnation)
    replicas = ServingReplicas(folder, inference(len(names)))
    replicas.publish(dict(zip(names, incarnations, strict=True)))
    return replicas


async def test_metrics_count_since_the_last_batch_and_a_single_replica_has_none(
    tmp_path, monkeypatch
):
    counts = {"inference0": [(10.0, 5.0), (30.0, 20.0)], "inference1": [None, (0.0, 0.0)]}
    monkeypatch.setattr(
        serving_replicas, "prefix_cache_counts", lambda replica: counts[replica.name].pop(0)
    )
    replicas = serving(RunFolder(tmp_path), 1, 2)
    for i, route in enumerate(replicas.router.routes):
        route.num_groups, route.num_completions, route.num_tokens = 1, 2 + i, 30 + i
    whole = {"inference/replicas_alive": 2, "inference/restarts": 3}
    whole |= {"inference0/groups": 1, "inference1/groups": 1}
    first = {"inference0/completions": 2, "inference1/completions": 3}
    first |= {"inference0/tokens": 30, "inference1/tokens": 31}
    hits = {"inference0/prefix_hits": 0.5}  # the other one was unreachable
    assert await replicas.metrics() == whole | first | hits
    hits = {"inference0/prefix_hits": 15 / 20, "inference1/prefix_hits": 0.0}
    assert await replicas.metrics() == whole | dict.fromkeys(first, 0) | hits
    started(RunFolder(tmp_path), "inference", 0)
    replicas = ServingReplicas(RunFolder(tmp_path), inference(1))
    replicas.publish({"inference": 0})
    assert len(replicas.router.routes) == 1
    assert await replicas.metrics() == {}


async def test_a_replica_that_the_supervisor_has_restarted_gets_no_more_requests(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(serving_replicas, "_CHECK_INTERVAL_S", 0.01)
    folder = RunFolder(tmp_path)
    replicas = serving(folder, 0, 1)
    first: Route = replicas.router.routes[0]
    watching = asyncio.ensure_future(replicas.watch())
    await asyncio.sleep(0.1)
    assert not first.lost
    started(folder, "inference0", 1)
    async with asyncio.timeout(10):
        while not first.lost:
            await asyncio.sleep(0.01)
    watching.cancel()
    replicas.publish({"inference0": 0, "inference1": 1})  # the new process has no pushed weights
    assert [route.replica.name for route in replicas.router.routes] == ["inference1"]
    why = "the supervisor has restarted it"
    assert read_restart_request(folder, "inference0", 0) == why
    assert read_restart_request(folder, "inference1", 1) is None
