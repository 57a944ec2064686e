"""Turns that begin with given tokens: what a row says of each token."""

from dataclasses import replace

import numpy as np
import pytest

from envs.episode import StopReason
from envs.messages import user
from envs.protocol import Environment
from rl.sampling.prefix import prefix_of, turns_of
from rl.sampling.strategy import Strategy
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    play,
    scoring,
    text,
    trained,
)

AT_1 = replace(SAMPLER, temperature=1.0)


class ScoringClient(ScriptedClient):
    """Give the last tokens of a prompt the logprobs -1, -2, ... and the version 5."""

    async def score(self, token_ids, count, *, version):
        assert version == 7
        return [float(-i - 1) for i in range(count)], 5


class Asking(Strategy):
    """Return the rollouts of `ask(group, play_one)`."""

    fixed_size = False

    def __init__(self, ask, first):
        self.ask, self.first = ask, first

    def num_first(self, size):
        return self.first

    async def play(self, group, play_one, size):
        return await self.ask(group, play_one)


def played(ask, client, env=None, sampler=AT_1, hinted=False, first=0, **info):
    strategy = Asking(ask, first)
    how = {"sampler": sampler, "strategy": strategy, "hinted": hinted, "info": info}
    return play(env or ScriptedEnv(), client, **how)


def once(**given):
    async def ask(group, play_one):
        return [await play_one(group.example, seed=0, **given)]

    return ask


def continued(turn, count, **given):
    """Play an attempt, and another one that begins with its first `count` tokens of a turn."""

    async def ask(group, play_one):
        root = await play_one(group.example, seed=0)
        prefix = prefix_of(root, turn, count)
        return [root, await play_one(group.example, seed=1, prefix=prefix, **given)]

    return ask


def columns(row):
    """Return text, mask, logprob, version and turn of each token after the first prompt."""
    names = ("completion_mask", "rollout_logprobs", "token_versions", "turns")
    characters = [chr(token) if token < 256 else int(token) for token in row.token_ids]
    values = (getattr(row, name).tolist() for name in names)
    return list(zip(characters, *values, strict=True))[PREFIX:]


def sampled(text, turn=0):
    """Return the columns of a sampled text and its end."""
    ids = [*text.encode(), IM_END]
    return [(chr(i) if i < 256 else i, True, -i / 8, 7, turn) for i in ids]


@pytest.mark.parametrize("given", ["go", list(b"go")])
def test_masked_tokens_are_context_and_trained_ones_have_the_policys_logprobs(given):
    table = {
        False: [("g", False, 0.0, -1, 0), ("o", False, 0.0, -1, 0)],
        True: [("g", True, -1.0, 5, 0), ("o", True, -2.0, 5, 0)],
    }
    for trains, expected in table.items():
        client = ScoringClient("od")
        (rollout,) = played(once(prefix=given, prefix_trains=trains), client)
        assert columns(rollout.rows[0]) == expected + sampled("od")
        assert (rollout.rewards["good"], rollout.messages[-1]["content"]) == (1.0, "good")
        assert rollout.num_completion == (5 if trains else 3)
        ((prompt, sampling, n, _),) = client.requests  # given tokens cost the turn's limit
        assert (prompt[PREFIX:], sampling["max_tokens"], n) == ([*b"go"], 30, 1)


def test_a_turn_that_an_environment_begins_is_told_from_the_sampled_rest():
    class Driving(Environment):
        name, holds_conversation, reward_weights = "driving", True, {"one": 1.0}

        async def play(self, episode, speak):
            turn = await speak(list(HI), None, prefix="a")
            messages = [*HI, turn.message, user("more")]
            await speak(messages, None, prefix=[*b"b"], prefix_trains=True)

        async def score(self, episode):
            return {"one": float([m["content"] for m in episode.messages[1::2]] == ["ax", "bx"])}

    # The second turn is sampled again, with the same begin.
    root, again = played(continued(1, 0, prefix_trains=True), ScoringClient("x"), Driving())
    assert root.reward == again.reward == 1.0
    assert columns(root.rows[0])[:3] == [("a", False, 0.0, -1, 0), *sampled("x")]
    last = [("b", True, -1.0, 5, 1), *sampled("x", 1)]
    assert columns(root.rows[0])[-3:] == columns(again.rows[0])[-3:] == last
    # The branch trains its given tokens, so the one that had no version gets the policy's logprob.
    assert columns(again.rows[0])[:3] == [("a", True, -1.0, 5, 0), *sampled("x")]


@pytest.mark.parametrize("trains", [True, False])
def test_a_branch_keeps_logprobs_and_versions_of_the_attempt_that_sampled_them(trains):
    async def ask(group, play_one):
        root = await play_one(group.example, seed=0)
        row = root.rows[0]  # as if a push had come before the third token of the second turn
        versions = np.where(np.arange(row.length) > row.length - 3, 8, row.token_versions)
        root = replace(root, rows=(replace(row, token_versions=versions.astype(np.int32)),))
        given = prefix_of(root, 1, 3)
        return [root, await play_one(group.example, seed=1, prefix=given, prefix_trains=trains)]

    client = ScoringClient("one", "good", "!")
    root, branch = played(ask, client, ScriptedEnv(replies=("more",), max_turns=2))
    ours, theirs = columns(branch.rows[0]), columns(root.rows[0])
    kept = len(theirs) - 2  # all but "d" and the end of the turn
    assert (theirs[kept - 1][3], theirs[kept][3]) == (7, 8)
    if trains:
        assert ours[:kept] == theirs[:kept]
    else:
        assert [c[0] for c in ours[:kept]] == [c[0] for c in theirs[:kept]]
        assert not any(mask or version != -1 for _, mask, _, version, _ in ours[:kept])
    assert ours[kept:] == sampled("!", 1)
    assert [m["content"] for m in branch.messages] == ["hi", "one", "more", "goo!"]
    assert (branch.turns, branch.turn_lengths) == (2, [4, 5] if trains else [0, 2])
    assert len(client.requests) == 3  # complete turns are not sampled


class Limited(ScoringClient):
    """Keep each sampled token and the one above it, as top_k=2 may."""

    def _next(self, prompt, max_tokens, version):
        found = super()._next(prompt, max_tokens, version)
        return replace(found, kept=[[token, token + 1] for token in found.token_ids])


@pytest.mark.parametrize("trains", [True, False])
def test_a_branch_keeps_the_tokens_from_which_its_own_were_sampled(trains):
    async def ask(group, play_one):
        root = await play_one(group.example, seed=0)
        given = prefix_of(root, 1, 3)
        branch = await play_one(group.example, seed=1, prefix=given, prefix_trains=trains)
        given = await play_one(group.example, seed=2, prefix="ab")
        begun = await play_one(group.example, seed=3, prefix=prefix_of(given, 0, 3))
        assert turns_of(given)[0].kept[:3] == [(), (), [ord("!"), ord("!") + 1]]
        return [root, branch, given, begun]

    env = ScriptedEnv(replies=("more",), max_turns=2)
    for rollout in played(ask, Limited("one", "good", "!"), env):
        (row,) = rollout.rows
        assert row.kept.tolist() == [[token, token + 1] for token in trained(row)]


def test_if_the_environment_answers_otherwise_later_turns_are_sampled():
    replies = iter(range(1, 9))

    class Fickle(ScriptedEnv):
        async def reply(self, episode, message):
            text = f"reply {next(replies)}"
            return [user(text)] if episode.turns == 1 else None

    client = ScoringClient("a", "bbb", "c")
    _, rollout = played(continued(1, 2), client, Fickle(max_turns=2))
    assert [m["content"] for m in rollout.messages] == ["hi", "a", "reply 3", "c"]
    assert rollout.turn_lengths == [0, 2]


def test_forked_rows_give_back_each_turn_with_its_own_prompt():
    class Changing(Environment):
        name, holds_conversation, reward_weights = "changing", True, {"one": 1.0}

        async def play(self, episode, speak):
            for asked in ("hi", "ho"):
                await speak([user(asked)], None)

        async def score(self, episode):
            return {"one": 1.0}

    client = ScoringClient("one", "two", "x")
    root, branch = played(continued(1, 1, prefix_trains=True), client, Changing())
    assert [bytes(t.token_ids[:-1]) for t in turns_of(root)] == [b"one", b"two"]
    assert [bytes(t.token_ids[:-1]) for t in turns_of(branch)] == [b"one", b"tx"]
    assert len(branch.rows) == len(root.rows) == 2
    assert columns(branch.rows[0]) == columns(root.rows[0])


def test_an_attempt_with_a_hint_trains_on_the_prompt_that_it_saw():
    async def ask(group, play_one):
        hints = (None, "", "Or else.")
        return [await play_one(group.example, seed=i, hint=hint) for i, hint in enumerate(hints)]

    client = ScoringClient("good")
    rollouts = played(ask, client, hint="Say good.", first=3)
    shown = ["hi", "hi\n\nSay good.", "hi\n\nOr else."]
    assert [rollout.messages[0]["content"] for rollout in rollouts] == shown
    texts = [text(r.rows[0].token_ids).decode() for r in rollouts]
    assert texts == [f"user\n{said}\nassistant\ngood" for said in shown]
    assert [n for _, _, n, _ in client.requests] == [3, 1, 1]  # a hint needs its own request
    # The hinted prompt of the reference keeps masked tokens.
    (rollout,) = played(once(prefix="go"), ScoringClient("od"), hinted=True, hint="Say good.")
    hinted = rollout.rows[0].hinted_prompt
    assert hinted[-2:].tolist() == [*b"go"]
    assert len(hinted) == PREFIX + 2 + len("\n\nSay good.")


@pytest.mark.parametrize(
    ("given", "sampler", "message"),
    [
        ({"prefix": "a"}, replace(AT_1, stop=("x",)), "set sampler.stop="),
        ({"prefix": "a", "prefix_trains": True}, SAMPLER, "at temperature 1 only"),
        ({"prefix": "a", "prefix_trains": True}, replace(AT_1, top_p=0.9), "'top_p': 0.9"),
    ],
)
def test_samplers_with_which_logprobs_or_stops_would_be_wrong_are_refused(given, sampler, message):
    with pytest.raises(ValueError, match=message):
        played(once(**given), ScoringClient("x"), sampler=sampler)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("length", [32, 300])
def test_a_prefix_that_leaves_no_token_costs_its_rollout(length, trains):
    given = once(prefix="a" * length, prefix_trains=trains)
    (rollout,) = played(given, ScoringClient("x"))
    assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENGINE_ERROR)
    assert f"a prefix of {length} tokens leaves no tokens" in rollout.error
    assert rollout.rows == ()


def test_a_prefix_is_continued_by_every_retry():
    client = ScoringClient("od")

    async def broken(self, episode):
        if client.given < 2:
            raise RuntimeError("broken")
        return {"good": 1.0}

    sampler = replace(AT_1, max_retries=1)
    (rollout,) = played(once(prefix="go"), client, scoring(broken), sampler)
    assert (rollout.retries, rollout.messages[-1]["content"]) == (1, "good")


def test_a_prefix_of_an_attempt_that_saw_another_hint_is_refused():
    with pytest.raises(ValueError, match="was sampled after a first prompt that differs"):
        played(continued(0, 2, hint=""), ScoringClient("good"), hint="Say good.")
