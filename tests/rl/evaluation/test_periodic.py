"""An evaluation plays one version while the next batch is sampled, and delays the next push."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from envs.episode import Example
from rl.config.schedules import Schedules
from rl.config.schema import Run
from rl.evaluation.periodic import Evaluator, NoEvaluation, PeriodicEvaluation, evaluator_of
from rl.inference.live_version import LiveVersion
from rl.runtime.folder import RunFolder
from rl.sampling.player import Player
from rl.sampling.renderer_chat import RendererChat
from rl.sampling.strategies import Extremes
from tests.support.composing import composed
from tests.support.scripted import SAMPLER, ScriptedClient, ScriptedEnv, tiny_renderer
from tests.support.virtual_time import run_virtually

KNOBS = {"num_examples": 3, "rollouts_per_example": 2, "temperature": 0.25, "pass_threshold": 2.0}
HI = {"role": "user", "content": "hi"}
HELD_OUT = [Example(id=i, env="scripted", messages=[HI]) for i in range(3)]


class Trainer:
    """Call the evaluator as the trainer and its service do; an update takes `update_s`."""

    def __init__(self, folder, client, *, every: int, last: int, env=None) -> None:
        self.version, self.last, self.times = LiveVersion(), last, {}
        chat = RendererChat(SAMPLER, tiny_renderer(), client, 256, self.version)
        self.player = Player(SAMPLER, env or ScriptedEnv(), chat)
        settings = PeriodicEvaluation(every=every, **KNOBS)
        self.evaluator = Evaluator(settings, self.player, HELD_OUT, RunFolder(folder), last=last)

    async def train(self, update_s: float) -> dict[int, dict[str, float]]:
        found, loop = {}, asyncio.get_running_loop()
        task = asyncio.ensure_future(self.evaluator.run())
        for step in range(self.last):
            self._publish(step)
            await asyncio.sleep(update_s)
            found[step] = await self.evaluator.wait_for_metrics(step)
            self.times[step] = loop.time()
        self._publish(self.last)
        found[self.last] = await self.evaluator.wait_for_metrics(self.last)
        task.cancel()
        return found

    def _publish(self, version: int) -> None:
        self.version.publish(version)
        self.evaluator.start(version)


def test_training_and_evaluation_follow_their_schedules_at_the_version(tmp_path):
    client, versions = ScriptedClient("good", "bad"), []

    async def score(self, episode):
        versions.append(episode.policy_version)
        return {"good": 1.0}

    env = type("Noting", (ScriptedEnv,), {"score": score})()
    trainer = Trainer(tmp_path, client, every=2, last=4, env=env)
    schedules = {
        "sampler.temperature": lambda step: 1.0 - 0.1 * step,
        "evaluation.temperature": lambda step: 0.5 + step,
        "env.max_turns": lambda step: 1 + step,
    }
    player = replace(trainer.player, schedules=Schedules(schedules))
    trainer.evaluator.player = player
    run_virtually(player.play_group_at(0, HELD_OUT[0], 1, 3))
    assert [sampling["temperature"] for _, sampling, *_ in client.requests] == [0.7]
    assert player.env.max_turns == 4
    client.requests.clear()
    run_virtually(trainer.evaluator._evaluation_player(2).play_group(0, HELD_OUT[0], 1))
    assert [sampling["temperature"] for _, sampling, *_ in client.requests] == [2.5]
    assert versions == [3, 2]


def test_an_evaluation_during_training_has_the_rewards_by_turn(tmp_path):
    async def score(self, episode):
        return {"good": [float(m["content"] == "good") for m in episode.messages[1::2]]}

    env = type("ByTurn", (ScriptedEnv,), {"score": score})(("again",), max_turns=2)
    trainer = Trainer(tmp_path, ScriptedClient("good", "bad"), every=1, last=1, env=env)
    found = run_virtually(trainer.train(1.0))[0]
    assert found["eval/reward/good"] == found["eval/reward/good/turn_0"] == pytest.approx(1 / 6)
    assert found["eval/reward/good/turn_1"] == 0.0


def test_the_first_the_last_and_every_other_version_are_evaluated(tmp_path):
    client = ScriptedClient("good", "bad")
    trainer = Trainer(tmp_path, client, every=2, last=5)
    found = run_virtually(trainer.train(1.0))
    assert [version for version, metrics in found.items() if metrics] == [0, 2, 4, 5]
    assert found[0]["eval/reward"] == pytest.approx(2 / 6)  # one "good" of six, worth 2
    assert found[0]["eval/pass@1"] == pytest.approx(1 / 6)
    files = sorted(path.name for path in (tmp_path / "evaluations").iterdir())
    assert files == [f"version_00000{version}.jsonl" for version in (0, 2, 4, 5)]
    lines = (tmp_path / "evaluations" / files[0]).read_text().splitlines()
    assert len(lines) == 6
    assert json.loads(lines[0])["messages"][-1] == {"role": "assistant", "content": "good"}
    # Requests are salted by the version and have the temperature of the evaluation.
    assert [version for *_, version in client.requests] == [0] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    assert {sampling["temperature"] for _, sampling, *_ in client.requests} == {0.25}
    assert trainer.player.sampler.temperature == SAMPLER.temperature


@pytest.mark.parametrize(
    ("seconds", "every", "times"), [(3.0, 1, {0: 10.0, 1: 20.0}), (25.0, 2, {0: 25.0, 1: 35.0})]
)
def test_the_push_waits_only_for_an_evaluation_that_is_slower(seconds, every, times, tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient("good", seconds=seconds), every=every, last=2)
    run_virtually(trainer.train(10.0))
    assert trainer.times == times


def test_every_rank_waits_for_the_same_evaluation_and_gets_the_same(tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient("good", seconds=25.0), every=2, last=2)

    async def rank(version: int, late: float) -> tuple[dict[str, float], float]:
        await asyncio.sleep(late)
        metrics = await trainer.evaluator.wait_for_metrics(version)
        return metrics, asyncio.get_running_loop().time()

    async def main():
        task = asyncio.ensure_future(trainer.evaluator.run())
        trainer._publish(0)
        answers = await asyncio.gather(rank(0, 1.0), rank(0, 2.0), rank(0, 40.0), rank(1, 3.0))
        task.cancel()
        return answers

    first, second, slow, other = run_virtually(main())
    assert first[1] == second[1] == 25.0
    assert first[0] == second[0] == slow[0] != {}
    assert (slow[1], other) == (40.0, ({}, 3.0))  # version 1 is not due


def test_an_evaluation_asks_for_no_kept_tokens_and_shares_max_concurrent(tmp_path):
    client, env = ScriptedClient("good"), ScriptedEnv()
    env.max_concurrent = 1
    trainer = Trainer(tmp_path, client, every=2, last=4, env=env)
    pinned = trainer.evaluator._evaluation_player(0)
    assert pinned._env_slot(env) is trainer.player._env_slot(env)  # that of training
    player = trainer.evaluator.player
    limited = replace(SAMPLER, top_k=15)
    chat = replace(player.chat, sampler=limited)
    trainer.evaluator.player = replace(player, sampler=limited, chat=chat)
    run_virtually(trainer.evaluator.player.play_group(0, HELD_OUT[0], 1))
    run_virtually(trainer.evaluator._evaluation_player(0).play_group(0, HELD_OUT[0], 1))
    assert [sampling.get("logprobs") for _, sampling, *_ in client.requests] == [30, None]
    assert [sampling["top_k"] for _, sampling, *_ in client.requests] == [15, 15]


def test_tokens_of_another_version_end_the_run(tmp_path):
    class Pushed(ScriptedClient):
        """New weights arrive while a completion is sampled."""

        async def generate(self, prompt_ids, sampling, *, n, version):
            whole = await super().generate(prompt_ids, sampling, n=n, version=version)
            return [replace(c, versions=[*c.versions[:-1], version + 1]) for c in whole]

    trainer = Trainer(tmp_path, Pushed("good"), every=1, last=1)

    async def main():
        trainer.evaluator.start(0)
        await asyncio.wait_for(trainer.evaluator.run(), 10)

    with pytest.raises(AssertionError, match=r"version 0 has tokens of \{0, 1\}"):
        run_virtually(main())


def test_the_ranks_get_no_metrics_of_a_failed_evaluation(tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient(RuntimeError("gone")), every=1, last=2)

    async def main():
        task = asyncio.ensure_future(trainer.evaluator.run())
        trainer.evaluator.start(0)
        ranks = await asyncio.gather(*(trainer.evaluator.wait_for_metrics(0) for _ in range(2)))
        trainer.evaluator.start(1)  # of the update that was running
        assert [*ranks, await trainer.evaluator.wait_for_metrics(1)] == [{}, {}, {}]
        with pytest.raises(ExceptionGroup) as caught:
            await task
        assert "gone" in str(caught.value.exceptions[0])

    run_virtually(main())


def test_no_rank_waits_for_a_cancelled_evaluation(tmp_path):
    trainer = Trainer(tmp_path, ScriptedClient("good", seconds=25.0), every=1, last=2)

    async def main():
        task = asyncio.ensure_future(trainer.evaluator.run())
        trainer.evaluator.start(0)
        rank = asyncio.ensure_future(trainer.evaluator.wait_for_metrics(0))
        await asyncio.sleep(1.0)
        task.cancel()  # as a task group does after sampling has failed
        assert await asyncio.wait_for(rank, 60) == {}
        trainer.evaluator.start(1)
        assert await asyncio.wait_for(trainer.evaluator.wait_for_metrics(1), 60) == {}

    run_virtually(main())


def test_a_run_evaluates_examples_of_the_eval_split_up_to_its_last_version(tmp_path):
    class Splits(ScriptedEnv):
        def examples(self, split):
            return [Example(id=i, env=split, messages=[]) for i in range(4)]

    def made(*overrides):
        run = Run.of(composed("max_steps=7", *overrides))
        return evaluator_of(run, RunFolder(tmp_path), Splits(), player)

    player = Trainer(tmp_path, ScriptedClient("good"), every=1, last=1).player
    chosen = made("evaluation=default", "evaluation.num_examples=3")
    assert [example.env for example in chosen.examples] == ["eval"] * 3
    assert (chosen.last, chosen.player) == (7, player)
    assert made("evaluation=none") is None
    assert not any(NoEvaluation().is_due(version, 10) for version in range(11))


def test_the_rollouts_of_an_evaluation_have_rows_and_versions(tmp_path):
    client = ScriptedClient("good")
    trainer = Trainer(tmp_path, client, every=1, last=1)
    trainer.evaluator.player.strategy = Extremes(factor=3)  # evaluations ignore the run's strategy
    trainer.evaluator.player.hinted_envs = frozenset({"scripted"})  # and need no hints
    player = trainer.evaluator._evaluation_player(3)
    (rollout,) = run_virtually(player.play_group(0, HELD_OUT[0], 1))
    (row,) = rollout.rows
    assert row.hinted_prompt is None
    assert np.array_equal(np.unique(row.token_versions), [-1, 3])
    ((_, _, n, _),) = client.requests
    assert n == 1
