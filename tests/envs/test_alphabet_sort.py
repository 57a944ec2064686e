"""AlphabetSort: rewards of whole conversations and of single turns."""

import math
from itertools import islice
from random import Random

import pytest

from envs.alphabet_sort import AlphabetSort
from envs.episode import Episode, Example
from envs.messages import assistant
from tests.envs.test_procedural import make

NAMES = [["dob", "an", "kit"], ["fe"]]  # an dob kit, then an dob fe kit


async def play(env, example, answers):
    """The conversation in which the policy says `answers`, as the player would lead it."""
    episode = Episode(example, list(example.messages))
    for answer in answers:
        episode.messages.append(assistant(answer))
        episode.turns += 1
        reply = await env.reply(episode, episode.messages[-1])
        if reply is None:
            break
        episode.messages += reply
    return episode, await env.score(episode)


@pytest.mark.parametrize(
    ("answers", "exact", "similarity"),
    [
        (["an dob kit", "an dob fe kit"], 1, 1),
        ([" an\ndob  kit\n", "<think>fe?</think>an dob fe kit"], 1, 1),
        (["an dob kit", "fe an dob kit"], 1 / 2, (1 + (6 / 8) ** 2) / 2),  # 3 of 4 in order
        (["an dob kit", "an dob kit"], 1 / 2, (1 + (6 / 7) ** 2) / 2),  # fe forgotten
        (["an dob kit"], 1 / 2, 1 / 2),  # cut off: the turn that was not played scores 0
        (["kit dob an", "an dob fe kit"], 1 / 2, ((2 / 6) ** 2 + 1) / 2),
        (["an dob kit an", "an dob fe kit"], 1 / 2, ((6 / 7) ** 2 + 1) / 2),  # one too many
        (["an,dob,kit", "AN DOB FE KIT"], 0, 0),
        (["", "\ufffd"], 0, 0),
        ([], 0, 0),
    ],
)
async def test_rewards_of_a_conversation(answers, exact, similarity):
    opening = [{"role": "user", "content": "sort: dob an kit"}]
    example = Example(0, "alphabet-sort", opening, {"names": NAMES})
    _, scores = await play(make(AlphabetSort), example, answers)
    whole = {name: sum(part) for name, part in scores.items()}
    assert whole == pytest.approx({"exact": exact, "similarity": similarity})
    assert {len(part) for part in scores.values()} == {min(len(answers), 2)}


async def test_every_answer_gets_the_next_names_until_the_last_turn():
    example = Example(0, "alphabet-sort", [{"role": "user", "content": "?"}], {"names": NAMES})
    episode, _ = await play(make(AlphabetSort), example, ["nonsense", "more", "never asked for"])
    assert [m["content"] for m in episode.messages] == ["?", "nonsense", "add: fe", "more"]


async def test_the_expert_scores_one_in_the_environments_own_conversations():
    env = make(AlphabetSort, names_per_turn=2, max_turns=4)
    turns = set()
    for shown in islice(env.demonstrations(Random(0)), 100):
        lists = [message["content"].split()[1:] for message in shown[::2]]
        example = Example(0, env.name, shown[:1], {"names": lists})
        episode, scores = await play(env, example, [m["content"] for m in shown[1::2]])
        assert episode.messages == shown
        assert {n: math.fsum(part) for n, part in scores.items()} == {"exact": 1, "similarity": 1}
        assert [len(names) for names in lists] == [3] + [2] * (len(lists) - 1)
        turns.add(len(lists))
    assert turns == {2, 3, 4}


def test_all_names_of_a_list_differ():
    length, turns = {"min_length": 2, "max_length": 2}, {"min_turns": 1, "max_turns": 1}
    make(AlphabetSort, **length, **turns, num_names=169)  # 26 ** 2 = 4 * 169 names are enough
    examples = make(AlphabetSort).examples("train")
    for example in examples:
        names = [name for turn in example.info["names"] for name in turn]
        assert len(set(names)) == len(names) in (4, 5)
        assert {len(name) for name in names} <= {2, 3, 4}


async def test_each_turn_is_scored_by_itself():
    example = Example(0, "alphabet-sort", [{"role": "user", "content": "?"}], {"names": NAMES})
    _, scores = await play(make(AlphabetSort), example, ["dob an kit", "an dob fe kit"])
    assert scores == {"exact": [0.0, 0.5], "similarity": [pytest.approx((4 / 6) ** 2 / 2), 0.5]}
