"""The reference scores the tokens of the policy after a prompt that holds a hint."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.messages import user
from envs.protocol import Pool
from losses.aggregation import token_mean
from rl.records import Credit, Group, MicroBatch, Rollout
from rl.rollouts import __main__ as main
from rl.rollouts.plan import plan, weighted_rows
from rl.sampling.renderer_chat import render
from rl.sampling.strategies import HintWhenAllFail
from rl.sampling.strategy import Independent
from tests.rl.sampling.test_player import holding
from tests.support.scripted import (
    HI,
    IM_END,
    ScriptedClient,
    ScriptedEnv,
    play,
    tiny_renderer,
    trained,
)

HINTED = (user("hi\n\nSay good."),)
EXAMPLE = Example(id=3, env="scripted", messages=list(HI), info={"hint": "Say good."})


def played(env, *answers: str, size: int = 1, hinted: bool = True, **options):
    """Return rollouts of EXAMPLE."""
    options |= {"hinted": hinted, "info": EXAMPLE.info}
    return play(env, ScriptedClient(*answers), size, **options)


def rendered(*messages) -> list[int]:
    return render(tiny_renderer(), list(messages))


def prompts(rollout: Rollout) -> list[list[int]]:
    """Return the hinted prompt of each row."""
    return [row.hinted_prompt.tolist() for row in rollout.rows]


def micro_batch(*rollouts: Rollout, envs: tuple[str, ...] = ("scripted",)) -> MicroBatch:
    groups = [
        Group(i, replace(EXAMPLE, env=env), 0, (rollout,), (Credit(1.0, (1.0,)),))
        for i, (rollout, env) in enumerate(zip(rollouts, envs, strict=True))
    ]
    rows = weighted_rows(groups, token_mean)
    (share,) = plan(rows, step=0, ranks=1, tokens_per_micro_batch=10_000, metrics={})
    (micro,) = share.micro_batches
    if micro.hinted_mask is not None:  # the hinted prompts are followed by the same tokens
        chosen = micro.token_ids[micro.completion_mask].tolist()
        assert micro.hinted_token_ids[micro.hinted_mask].tolist() == chosen
    return micro


def test_a_group_shares_one_hinted_prompt_and_the_same_turns_and_replies_follow_it():
    rollouts = played(ScriptedEnv(), "good", "bad", size=2)
    assert [prompts(rollout) for rollout in rollouts] == [[rendered(*HINTED)]] * 2
    (rollout,) = played(ScriptedEnv(("more", "again"), 5), "one", "two", "good")
    (row,) = rollout.rows
    assert row.hinted_prompt.dtype == np.int32
    assert row.token_ids.tolist()[: len(rendered(*HI))] == rendered(*HI)  # without a hint
    after = row.token_ids.tolist()[len(rendered(*HI)) :]
    assert micro_batch(rollout).hinted_token_ids[0].tolist() == [*rendered(*HINTED), *after]
    assert trained(row) == [*b"one", IM_END, *b"two", IM_END, *b"good", IM_END]


class Rewriting(ScriptedEnv):
    """Reply with an assistant message, so that the whole conversation is rendered again."""

    async def reply(self, episode, message):
        return [{"role": "assistant", "content": "x"}, user("go")] if episode.turns == 1 else None


def test_a_fork_begins_with_a_hinted_prompt():
    thought = "<think>\nhm\n</think>\n\nyes"  # the format drops it from history
    (rollout,) = played(Rewriting(max_turns=3), thought, "good")
    history = rollout.messages[1:4]  # the policy's turn and the reply
    assert prompts(rollout) == [rendered(*HINTED), rendered(*HINTED, *history)]
    first, second = rollout.rows
    assert trained(first) == [*thought.encode(), IM_END]
    assert second.token_ids.tolist() == [*rendered(*HI, *history), *b"good", IM_END]
    assert micro_batch(rollout).hinted_token_ids is not None


def test_the_teacher_of_an_environment_that_holds_the_conversation_reads_the_hint():
    async def hold(self, episode, speak):
        spoken = await speak(list(HI), None)
        await speak([*HI, spoken.message, user("more")], None)

    (rollout,) = played(holding(hold), "one", "good")
    assert prompts(rollout) == [rendered(*HINTED)]


def telling(hint) -> ScriptedEnv:
    """Return an environment with this `teacher_messages`."""
    return type("Mine", (ScriptedEnv,), {"teacher_messages": hint})()


class Sharing(ScriptedEnv):
    """The teacher sees a sibling's success, or what was wrong with the answer (SDPO)."""

    def teacher_messages(self, example, messages, episode=None, group=()):
        siblings = [e.text for e in group if e is not episode and e.reward == 2.0]
        hint = f"Right: {siblings[0]}" if siblings else f"Not {episode.text}: {episode.reward}"
        return [*messages, user(hint)]


class Ranking(Sharing):
    """The reward is known when the group is complete."""

    async def score(self, episode):
        return {}

    async def score_group(self, episodes):
        return [{"good": float(episode.text == "good")} for episode in episodes]


def hints_of(rollouts: tuple[Rollout, ...], *hints: str) -> None:
    """Assert the hint of each rollout's row."""
    assert [prompts(rollout) for rollout in rollouts] == [
        [rendered(*HI, user(hint))] for hint in hints
    ]


def test_a_hint_may_be_made_of_the_finished_episode_and_its_siblings():
    rollouts = played(Sharing(), "bad", "good", "worse", "good", size=4)
    hints_of(rollouts, *["Right: good"] * 4)
    rollouts = played(Sharing(), "bad", "worse", size=2)
    hints_of(rollouts, "Not bad: 0.0", "Not worse: 0.0")
    rollouts = played(Ranking(), "bad", "good", size=2)
    hints_of(rollouts, "Right: good", "Not good: 2.0")


TOLD = [*HINTED]  # the same list for every attempt


@pytest.mark.parametrize("env", [ScriptedEnv(), telling(lambda *_: TOLD)])
def test_the_teacher_of_an_attempt_with_a_hint_reads_the_hint_once(env):
    strategy = HintWhenAllFail(num_hinted=2, failed_reward=0.0)
    plain, *hinted = played(env, "bad", size=3, strategy=strategy)
    micro = micro_batch(plain, *hinted, envs=(env.name,) * 3)
    for rollout in hinted:
        assert [m["content"] for m in rollout.messages] == ["hi\n\nSay good.", "bad"]
        assert rollout.rows[0].token_ids.tolist()[: len(rendered(*HINTED))] == rendered(*HINTED)
    assert micro.hinted_token_ids.tolist() == [micro.hinted_token_ids[0].tolist()] * 3


def test_a_hint_that_fails_costs_only_its_rollout():
    def unhelpful(self, example, messages, episode, *_):
        return [*messages, user({"good": "yes"}[episode.text])]

    bad, good = played(telling(unhelpful), "bad", "good", size=2)
    assert (bad.rows, bad.reward, bad.stop_reason) == ((), None, StopReason.ENV_ERROR)
    assert "teacher_messages raised KeyError: 'bad'" in bad.error
    assert good.reward == 2.0
    hints_of((good,), "yes")


def test_rows_without_hints_keep_their_prompt_in_a_mixed_micro_batch():
    (rollout,) = played(ScriptedEnv(), "good", hinted=False)
    assert rollout.rows[0].hinted_prompt is None
    micro = micro_batch(rollout)
    assert (micro.hinted_token_ids, micro.hinted_mask) == (None, None)
    (hinted,) = played(ScriptedEnv(), "good")
    (plain,) = played(ScriptedEnv(), "longer than that", hinted=False)
    micro = micro_batch(hinted, plain, envs=("words", "maths"))
    assert micro.envs == ("maths", "words")  # the longest first
    ids = plain.rows[0].token_ids.tolist()
    assert micro.hinted_token_ids[0, : len(ids)].tolist() == ids


def test_an_example_without_a_hint_is_refused_before_the_first_rollout(monkeypatch):
    monkeypatch.setattr(main, "sees_hint", lambda config, name: name == "scripted")
    without = replace(EXAMPLE, id=4, info={"hint": " "})
    other = replace(without, env="other")  # whose reference does not see hints

    def hinted_envs(strategy, *examples):
        run: Any = SimpleNamespace(plain=dict)
        return main._hinted_envs(run, ScriptedEnv(), [Pool(1.0, examples)], strategy)

    shown = HintWhenAllFail(num_hinted=1, failed_reward=0.0)
    assert hinted_envs(Independent(), other) == frozenset()
    assert hinted_envs(shown, EXAMPLE) == {"scripted"}
    for strategy, examples in ((Independent(), (EXAMPLE, without)), (shown, (other,))):
        with pytest.raises(ValueError, match="example 4 of env 'scripted' has no hint"):
            hinted_envs(strategy, *examples)
