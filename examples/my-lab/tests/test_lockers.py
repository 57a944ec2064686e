"""Test the rewards of given transcripts, without a model."""

import asyncio
from itertools import islice
from random import Random

import pytest

from envs.episode import Episode, Example, Split
from envs.messages import Message, assistant, tool_call
from my_lab.lockers import Lockers, expert

KNOBS = {
    "max_hops": 3,
    "num_train": 500,
    "num_eval": 50,
    "max_turns": 5,
    "describe_tools": True,
    "reward_weights": {"correct": 1.0, "walked": 0.0},
}
EXAMPLE = Example(
    id=0,
    env="lockers",
    messages=[{"role": "user", "content": "start at locker 3"}],
    info={"trail": [3, 7], "notes": {3: "go to 7", 7: "word: kam"}, "word": "kam"},
)

THREE = tool_call("open_locker", number=3)


def make(**changes: object) -> Lockers:
    return Lockers(**{**KNOBS, **changes})


def play(example: Example, *turns: Message) -> tuple[Episode, dict[str, float]]:
    """Return the episode in which the policy takes these turns, and its rewards."""

    async def played() -> tuple[Episode, dict[str, float]]:
        env, episode = make(), Episode(example=example, messages=list(example.messages))
        for message in turns:
            episode.messages.append(message)
            episode.turns += 1
            episode.messages += await env.reply(episode, message) or []
        return episode, await env.score(episode)

    return asyncio.run(played())


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_expert_is_always_right_and_hears_what_it_says_it_heard(split: Split) -> None:
    for example in make().examples(split):
        conversation = expert(example)
        turns = [message for message in conversation if message["role"] == "assistant"]
        episode, rewards = play(example, *turns)
        assert rewards == {"correct": 1.0, "walked": 1.0}
        assert episode.messages == conversation
        assert len(turns) <= KNOBS["max_turns"]


@pytest.mark.parametrize(
    ("turns", "correct", "walked"),
    [
        ([assistant("")], 0, 0),
        ([assistant("\ufffd go to 7")], 0, 0),
        ([assistant("kam")], 1, 0),  # a lucky guess is right
        ([THREE, assistant("kam")], 1, 0.5),
        ([THREE, assistant("go to 7")], 0, 0.5),
        (
            [THREE, tool_call("open_locker", number=7)],
            0,
            1,
        ),  # no answer
        (
            [
                THREE,
                THREE,
                assistant("x"),
            ],
            0,
            0.5,
        ),
        ([tool_call("open_locker", number=5), assistant("empty")], 0, 0),
        ([assistant("the word is kam")], 0, 0),
        ([assistant("<think>go to 7?</think>\n\nkam")], 1, 0),
    ],
)
def test_rewards_of_a_transcript(turns: list[Message], correct: float, walked: float) -> None:
    assert play(EXAMPLE, *turns)[1] == {"correct": correct, "walked": walked}


@pytest.mark.parametrize(
    ("call", "heard"),
    [
        (THREE, "go to 7"),
        (tool_call("open_locker", number="7"), "word: kam"),  # a number as text is accepted
        (tool_call("open_locker", number=5), "empty"),
        (tool_call("open_locker", number=12), "Error: there is no locker 12"),
        (tool_call("open_locker", number="x"), "Error: Expected `int`, got `str` - at `$.number`."),
        (tool_call("open_door", number=3), "Error: there is no tool 'open_door'."),
    ],
)
def test_what_the_policy_hears_from_the_tool(call: Message, heard: str) -> None:
    episode, _ = play(EXAMPLE, call)
    assert episode.messages[-1]["content"].startswith(heard)
    assert episode.tool_errors == heard.startswith("Error")


def test_no_word_of_the_eval_split_occurs_in_training_or_demonstrations() -> None:
    env = make()
    held_out = {example.info["word"] for example in env.examples("eval")}
    shown = {messages[-1]["content"] for messages in islice(env.demonstrations(Random(0)), 2000)}
    assert held_out.isdisjoint(shown | {example.info["word"] for example in env.examples("train")})


def test_every_run_has_the_same_examples_and_trails_of_every_length() -> None:
    examples = make().examples("train")
    assert examples == make().examples("train")
    assert {len(example.info["trail"]) for example in examples} == {1, 2, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_hops": 0}, "1 to 10 lockers"),
        ({"max_turns": 3}, "raise max_turns to 4"),
        ({"num_eval": 980}, "below 980, the number of words"),
        ({"reward_weights": {"right": 1.0}}, "choose from correct, walked"),
    ],
)
def test_impossible_knobs_are_refused_with_a_remedy(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)
