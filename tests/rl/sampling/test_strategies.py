"""How strategies make a group: which attempts form it, and turns that begin with given tokens.

The reference scores the tokens of the policy after a prompt that holds a hint.
"""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.episode import Example, StopReason
from envs.messages import user
from envs.protocol import Pool
from losses.aggregation import token_mean
from rl.dry_call.rewards import made_up_rollout
from rl.records import Credit, Group, MicroBatch, Rollout
from rl.rollouts import __main__ as main
from rl.rollouts.plan import plan, weighted_rows
from rl.sampling.branch import Branch
from rl.sampling.prefix import prefix_of, turns_of
from rl.sampling.renderer_chat import render
from rl.sampling.strategies import AdaptiveSize, Extremes, HintWhenAllFail
from rl.sampling.strategy import Independent, StartedGroup, Strategy, play_strategy
from tests.rl.sampling.test_player import holding
from tests.support import scripted
from tests.support.rollouts import row
from tests.support.scripted import (
    HI,
    IM_END,
    PREFIX,
    SAMPLER,
    ScriptedClient,
    ScriptedEnv,
    text,
    tiny_renderer,
    trained,
)

GROUP = StartedGroup(0, Example(3, "made up", []))


def made(strategy, rewards, size):
    """Return the rewards of the group, and the seeds and hints of all attempts."""
    asked = []

    async def play_one(example, *, seed, prefix=None, prefix_trains=False, hint=None):
        asked.append((seed, hint))
        return made_up_rollout(rewards[seed], 1)

    rollouts = asyncio.run(play_strategy(strategy, GROUP, play_one, size))
    return [rollout.reward for rollout in rollouts], asked


EXTREMES, ADAPTIVE = Extremes(factor=2), AdaptiveSize(max_rounds=3)
HINT = HintWhenAllFail(num_hinted=2, failed_reward=0.0)


def test_which_attempts_form_the_group():
    for strategy, rewards, group, num_played, num_hinted in (
        # The best and the worst of twice as many attempts.
        (EXTREMES, [0, 3, 1, 2, 5, 4], [5, 4, 0], 6, 0),
        (EXTREMES, [None, 3, 1, 2], [3, 1], 4, 0),
        (EXTREMES, [None, 3, None, None], [3, None], 4, 0),
        (EXTREMES, [1, 2], [2], 2, 0),
        # Rounds of two attempts, until rewards differ.
        (ADAPTIVE, [0, 1, 9, 9, 9, 9], [0, 1], 2, 0),
        (ADAPTIVE, [1, None, None, 1, 1, 1], [1, None, None, 1, 1, 1], 6, 0),
        (ADAPTIVE, [None, None, 0, 1, 9, 9], [None, None, 0, 1], 4, 0),
        # Attempts with a hint replace the last ones, if all have failed.
        (HINT, [0, -1, None, 1, 0], [0, 1, 0], 3, 2),
        (HINT, [0, 0.5, 0, 9, 9], [0, 0.5, 0], 3, 0),  # one has not failed
        (HINT, [None, None, None, 9, 9], [None] * 3, 3, 0),  # none has failed
        (HINT, [0, 1], [1], 1, 1),  # more than the group has
    ):
        seeds = [(i, None if i < num_played else "") for i in range(num_played + num_hinted)]
        size = 2 if strategy is ADAPTIVE else len(group)
        assert made(strategy, rewards, size) == (group, seeds)


def play(strategy, client, env, size, seed=None):
    return scripted.play(env, client, size, strategy=strategy, seed=seed)


def texts(rollouts):
    return [[m["content"] for m in r.messages if m["role"] == "assistant"] for r in rollouts]


def branch(**options):
    return Branch(**{"branches": 2, "at": "token", "window": 1, "prefix_trains": True, **options})


def test_branches_begin_at_the_least_likely_token_or_turn():
    # ScriptedClient gives a token the logprob -id/8, so the least likely of "azb" is the end, and
    # with a window of two "b" and the end.
    for window, kept in {1: "azb", 2: "az", 3: "a"}.items():
        rollouts = play(branch(window=window), ScriptedClient("azb", "!"), ScriptedEnv(), 3)
        assert texts(rollouts) == [["azb"], [f"{kept}!"], [f"{kept}!"]]
        assert [rollout.num_completion for rollout in rollouts] == [4, *[len(kept) + 2] * 2]
    masked = play(branch(prefix_trains=False), ScriptedClient("azb", "!"), ScriptedEnv(), 3)
    assert [rollout.num_completion for rollout in masked] == [4, 2, 2]  # only their own tokens
    client = ScriptedClient("one", "ab", "xy", "!", "!", "!", "!")
    env = ScriptedEnv(replies=("r1", "r2"), max_turns=3)
    rollouts = play(branch(at="turn"), client, env, 3)
    # The first token of "xy" is less likely than that of "ab", and the first turn does not count.
    assert texts(rollouts) == [["one", "ab", "xy"], *[["one", "ab", "!"]] * 2]
    alone = play(branch(at="turn"), ScriptedClient("a", "b"), ScriptedEnv(), 3)
    assert texts(alone) == [["a"], ["b"], ["b"]]  # one turn only: the rest begin at the start


def test_the_uncertainty_is_the_mean_of_a_window_that_ends_with_its_turn():
    logprobs = -np.array([0, 9, 4, 1, 1, 0, 3], np.float32)  # the first token is not branched
    played = replace(row(-1, 0, 0, 0, 0, -1, 1), rollout_logprobs=logprobs)
    rollout = replace(made_up_rollout(1.0, 2), rows=(played,))
    # With a window of two: (4 + 1) / 2 and (1 + 1) / 2 in the first turn, and 3 in the second.
    assert branch(window=2).position(rollout) == (1, 0)
    assert branch(window=1).position(rollout) == (0, 1)
    assert branch(window=1, at="turn").position(rollout) == (1, 0)

    # A turn that begins with given tokens is not branched.
    async def given(self, group, play_one, size):
        return [await play_one(group.example, seed=i, prefix="zz") for i in range(size)]

    for rollout in play(own(given), ScriptedClient("azb"), ScriptedEnv(), 2):
        assert branch().position(rollout) is None


def test_branches_are_shared_among_the_roots_that_can_have_them():
    for size, roots in ((1, 1), (3, 1), (4, 2), (7, 3)):
        client = ScriptedClient(*(f"{i}" for i in range(20)))
        rollouts = play(branch(), client, ScriptedEnv(), size)
        begins = [said[0] for (said,) in texts(rollouts)]
        assert begins == [str(i if i < roots else i % roots) for i in range(size)]
    # A root that failed or has one token gets no branch.
    failed = play(branch(), ScriptedClient(TimeoutError()), ScriptedEnv(), 3)
    assert [r.stop_reason for r in failed] == [StopReason.TIMEOUT] * 3
    # The first root has no token after its first one, so all branches begin in the second root.
    rollouts = play(branch(), ScriptedClient("", "azb", "!"), ScriptedEnv(), 6)
    assert texts(rollouts) == [[""], ["azb"], *[["azb!"]] * 4]


def test_all_requests_of_a_seeded_group_have_different_seeds_and_attempts_share_them():
    client, again = ScriptedClient("a"), ScriptedClient("a")
    assert len(play(Independent(), client, ScriptedEnv(), 4, seed=1)) == 4
    play(Extremes(factor=2), again, ScriptedEnv(), 2, seed=1)
    for requests in (client.requests, again.requests):
        assert [(s["seed"], n) for _, s, n, _ in requests] == [(client.requests[0][1]["seed"], 4)]
    client = ScriptedClient("a", "b")
    play(branch(), client, ScriptedEnv(("more",), 2), 6, seed=1)
    play(AdaptiveSize(max_rounds=3), client, ScriptedEnv(("more",), 2), 2, seed=2)
    given = [sampling["seed"] for _, sampling, _, _ in client.requests]
    assert len(given) == len(set(given))


def own(play, **attributes):
    return type("Mine", (Strategy,), {"play": play, **attributes})()


async def _repeats(self, group, play_one, size):
    return [await play_one(group.example, seed=0) for _ in range(size)]


async def _too_many(self, group, play_one, size):
    return [await play_one(group.example, seed=i) for i in range(size + 1)]


def test_repeated_seeds_and_wrong_sizes_end_the_run():
    repeated = "plays two attempts with seed=0: use another seed"
    size = "returned 3 rollouts for group_size=2: return 2 or none"
    for attempts, message in ((_repeats, repeated), (_too_many, size)):
        with pytest.raises(ValueError, match=f"Mine {message}"):
            play(own(attempts), ScriptedClient("a"), ScriptedEnv(), 2)
    of_any_size = own(_too_many, fixed_size=False)
    assert len(play(of_any_size, ScriptedClient("a"), ScriptedEnv(), 2)) == 3


class Ranked(ScriptedEnv):
    async def score_group(self, episodes):
        return [{"good": float(rank)} for rank, _ in enumerate(episodes)]


def test_groups_are_scored_after_a_strategy_that_reads_no_rewards():
    rollouts = play(branch(branches=1), ScriptedClient("a"), Ranked(), 4)
    assert [rollout.rewards["good"] for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0]
    for reading in (EXTREMES, ADAPTIVE, HINT):
        said = f"{type(reading).__name__} reads the rewards of attempts, but score_group"
        with pytest.raises(ValueError, match=said):
            play(reading, ScriptedClient("a"), Ranked(), 4)


AT_1 = replace(SAMPLER, temperature=1.0)


class ScoringClient(ScriptedClient):
    """Give the last tokens of a prompt the logprobs -1, -2, ... and the version 5."""

    async def score(self, token_ids, count, *, version):
        assert version == 7
        return [float(-i - 1) for i in range(count)], 5


def played(ask, client, env=None, sampler=AT_1, hinted=False, first=0, **info):
    """Return the rollouts of a strategy that plays `ask(group, play_one)`."""
    attributes = {"fixed_size": False, "num_first": lambda *_: first}
    strategy = own(lambda _, group, play_one, size: ask(group, play_one), **attributes)
    how = {"sampler": sampler, "strategy": strategy, "hinted": hinted, "info": info}
    return scripted.play(env or ScriptedEnv(), client, **how)


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


def test_masked_tokens_are_context_and_trained_ones_have_the_policys_logprobs():
    table = {
        False: [("g", False, 0.0, -1, 0), ("o", False, 0.0, -1, 0)],
        True: [("g", True, -1.0, 5, 0), ("o", True, -2.0, 5, 0)],
    }
    for trains, expected in table.items():
        given = [*b"go"] if trains else "go"
        client = ScoringClient("od")
        (rollout,) = played(once(prefix=given, prefix_trains=trains), client)
        assert columns(rollout.rows[0]) == expected + sampled("od")
        assert (rollout.rewards["good"], rollout.messages[-1]["content"]) == (1.0, "good")
        assert rollout.num_completion == (5 if trains else 3)
        ((prompt, sampling, n, _),) = client.requests  # given tokens cost the turn's limit
        assert (prompt[PREFIX:], sampling["max_tokens"], n) == ([*b"go"], 30, 1)


def test_a_turn_that_an_environment_begins_is_told_from_the_sampled_rest():
    async def play(self, episode, speak):
        turn = await speak(list(HI), None, prefix="a")
        await speak([*HI, turn.message, user("more")], None, prefix=[*b"b"], prefix_trains=True)

    # The second turn is sampled again, with the same begin.
    root, again = played(continued(1, 0, prefix_trains=True), ScoringClient("x"), holding(play))
    assert texts([root, again]) == [["ax", "bx"]] * 2
    assert columns(root.rows[0])[:3] == [("a", False, 0.0, -1, 0), *sampled("x")]
    last = [("b", True, -1.0, 5, 1), *sampled("x", 1)]
    assert columns(root.rows[0])[-3:] == columns(again.rows[0])[-3:] == last
    # The branch trains its given tokens, so the one that had no version gets the policy's logprob.
    assert columns(again.rows[0])[:3] == [("a", True, -1.0, 5, 0), *sampled("x")]


class Limited(ScoringClient):
    """Keep each sampled token and the one above it, as top_k=2 may."""

    def _next(self, prompt, max_tokens, version):
        found = super()._next(prompt, max_tokens, version)
        return replace(found, kept=[[token, token + 1] for token in found.token_ids])


def assert_kept(rollout):
    (row,) = rollout.rows
    assert row.kept.tolist() == [[token, token + 1] for token in trained(row)]


def test_given_tokens_that_are_not_trained_have_no_kept_tokens():
    async def ask(group, play_one):
        given = await play_one(group.example, seed=0, prefix="ab")
        assert turns_of(given)[0].kept[:3] == [(), (), [ord("!"), ord("!") + 1]]
        return [given, await play_one(group.example, seed=1, prefix=prefix_of(given, 0, 3))]

    for rollout in played(ask, Limited("!")):
        assert_kept(rollout)


@pytest.mark.parametrize("trains", [True, False])
def test_a_branch_keeps_logprobs_versions_and_kept_tokens_of_the_attempt(trains):
    async def ask(group, play_one):
        root = await play_one(group.example, seed=0)
        row = root.rows[0]  # as if a push had come before the third token of the second turn
        versions = np.where(np.arange(row.length) > row.length - 3, 8, row.token_versions)
        root = replace(root, rows=(replace(row, token_versions=versions.astype(np.int32)),))
        given = prefix_of(root, 1, 3)
        return [root, await play_one(group.example, seed=1, prefix=given, prefix_trains=trains)]

    client = Limited("one", "good", "!")
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
    assert_kept(root)
    assert_kept(branch)


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
    async def play(self, episode, speak):
        for asked in ("hi", "ho"):
            await speak([user(asked)], None)

    client = ScoringClient("one", "two", "x")
    root, branch = played(continued(1, 1, prefix_trains=True), client, holding(play))
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
    read = [text(r.rows[0].token_ids).decode() for r in rollouts]
    assert read == [f"user\n{said}\nassistant\ngood" for said in shown]
    assert [n for _, _, n, _ in client.requests] == [3, 1, 1]  # a hint needs its own request
    # The hinted prompt of the reference keeps masked tokens.
    (rollout,) = played(once(prefix="go"), ScoringClient("od"), hinted=True, hint="Say good.")
    hinted = rollout.rows[0].hinted_prompt
    assert hinted[-2:].tolist() == [*b"go"]
    assert len(hinted) == PREFIX + 2 + len("\n\nSay good.")


def test_samplers_and_prefixes_with_which_logprobs_or_prompts_would_be_wrong_are_refused():
    with pytest.raises(ValueError, match=r"set sampler\.stop="):
        played(once(prefix="a"), ScoringClient("x"), sampler=replace(AT_1, stop=("x",)))
    trains = once(prefix="a", prefix_trains=True)
    for sampler in (SAMPLER, replace(AT_1, top_p=0.9)):
        with pytest.raises(ValueError, match="at temperature 1 only, but the sampler has"):
            played(trains, ScoringClient("x"), sampler=sampler)
    # The attempt of this prefix saw another hint.
    with pytest.raises(ValueError, match="was sampled after a first prompt that differs"):
        played(continued(0, 2, hint=""), ScoringClient("good"), hint="Say good.")


def test_a_prefix_that_leaves_no_token_costs_its_rollout():
    (rollout,) = played(once(prefix="a" * 32), ScoringClient("x"))
    assert (rollout.reward, rollout.stop_reason) == (None, StopReason.ENGINE_ERROR)
    assert "a prefix of 32 tokens leaves no tokens" in rollout.error
    assert rollout.rows == ()


def test_a_prefix_is_continued_by_every_retry():
    client = ScoringClient("od")

    async def broken(self, episode):
        if client.given < 2:
            raise RuntimeError("broken")
        return {"good": 1.0}

    sampler = replace(AT_1, max_retries=1)
    (rollout,) = played(once(prefix="go"), client, scripted.scoring(broken), sampler)
    assert (rollout.retries, rollout.messages[-1]["content"]) == (1, "good")


HINTED = (user("hi\n\nSay good."),)
EXAMPLE = Example(id=3, env="scripted", messages=list(HI), info={"hint": "Say good."})


def answered(env, *answers: str, size: int = 1, hinted: bool = True, **options):
    """Return rollouts of EXAMPLE."""
    options |= {"hinted": hinted, "info": EXAMPLE.info}
    return scripted.play(env, ScriptedClient(*answers), size, **options)


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
    rollouts = answered(ScriptedEnv(), "good", "bad", size=2)
    assert [prompts(rollout) for rollout in rollouts] == [[rendered(*HINTED)]] * 2
    (rollout,) = answered(ScriptedEnv(("more", "again"), 5), "one", "two", "good")
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
    (rollout,) = answered(Rewriting(max_turns=3), thought, "good")
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

    (rollout,) = answered(holding(hold), "one", "good")
    assert prompts(rollout) == [rendered(*HINTED)]


def telling(hint) -> ScriptedEnv:
    """Return an environment with this `teacher_messages`."""
    return type("Mine", (ScriptedEnv,), {"teacher_messages": hint})()


class Sharing(ScriptedEnv):
    """The hint is a good answer of the same group, or the answer itself and its reward (SDPO)."""

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
    rollouts = answered(Sharing(), "bad", "good", "worse", "good", size=4)
    hints_of(rollouts, *["Right: good"] * 4)
    rollouts = answered(Sharing(), "bad", "worse", size=2)
    hints_of(rollouts, "Not bad: 0.0", "Not worse: 0.0")
    rollouts = answered(Ranking(), "bad", "good", size=2)
    hints_of(rollouts, "Right: good", "Not good: 2.0")


TOLD = [*HINTED]  # the same list for every attempt


@pytest.mark.parametrize("env", [ScriptedEnv(), telling(lambda *_: TOLD)])
def test_the_teacher_of_an_attempt_with_a_hint_reads_the_hint_once(env):
    strategy = HintWhenAllFail(num_hinted=2, failed_reward=0.0)
    plain, *hinted = answered(env, "bad", size=3, strategy=strategy)
    micro = micro_batch(plain, *hinted, envs=(env.name,) * 3)
    for rollout in hinted:
        assert [m["content"] for m in rollout.messages] == ["hi\n\nSay good.", "bad"]
        assert rollout.rows[0].token_ids.tolist()[: len(rendered(*HINTED))] == rendered(*HINTED)
    assert micro.hinted_token_ids.tolist() == [micro.hinted_token_ids[0].tolist()] * 3


def test_a_hint_that_fails_costs_only_its_rollout():
    def unhelpful(self, example, messages, episode, *_):
        return [*messages, user({"good": "yes"}[episode.text])]

    bad, good = answered(telling(unhelpful), "bad", "good", size=2)
    assert (bad.rows, bad.reward, bad.stop_reason) == ((), None, StopReason.ENV_ERROR)
    assert "teacher_messages raised KeyError: 'bad'" in bad.error
    assert good.reward == 2.0
    hints_of((good,), "yes")


def test_rows_without_hints_keep_their_prompt_in_a_mixed_micro_batch():
    (rollout,) = answered(ScriptedEnv(), "good", hinted=False)
    assert rollout.rows[0].hinted_prompt is None
    micro = micro_batch(rollout)
    assert (micro.hinted_token_ids, micro.hinted_mask) == (None, None)
    (hinted,) = answered(ScriptedEnv(), "good")
    (plain,) = answered(ScriptedEnv(), "longer than that", hinted=False)
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
