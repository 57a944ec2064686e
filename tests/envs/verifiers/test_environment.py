"""Checks of a verifiers environment before an episode is played; no library is needed."""

import pytest

from envs.episode import Episode, StopReason
from envs.messages import user
from envs.verifiers.adapter import Outcome, Row
from envs.verifiers.environment import Verifiers

IMAGE = [{"type": "text", "text": "which?"}, {"type": "image_url", "image_url": {"url": "x"}}]


class Scripted:
    """An adapter of training rows, and perhaps eval rows. An episode gives its row's data."""

    max_concurrent = 8
    reward_weights = {"letters": 2.0}  # noqa: RUF012 as they write it

    def __init__(self, train, held_out=None):
        self._rows = {"train": train, "eval": held_out}

    def rows(self, split, limit):
        contents = self._rows[split]
        return contents and [Row([user(x)], x) for x in contents[:limit]]

    async def play(self, row, speak):
        rival = Outcome(4.5, {"letters": 2.0}, StopReason.MAX_TURNS)
        return {"": Outcome(2.0, {"letters": row.data == "y"}), "rival": rival}


def verifiers(*rows, **changes):
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": None, **changes}
    env = Verifiers(id="o/x-y@1", **options)
    env.__dict__["_adapter"] = Scripted(*rows)  # in place of the library's
    return env


@pytest.mark.parametrize(
    ("held_out", "num_train", "num_eval", "expected"),
    [
        (None, None, 3, ("abcdefg", "hij")),
        (None, 4, 3, ("abcd", "efg")),
        ("xyz", 4, 5, ("abcd", "xyz")),
    ],
)
def test_held_out_rows_are_those_of_the_library_or_the_last_ones(
    held_out, num_train, num_eval, expected
):
    env = verifiers("abcdefghij", held_out, num_train=num_train, num_eval=num_eval)
    splits = [env.examples(split) for split in ("train", "eval")]
    found = ["".join(one.messages[0]["content"] for one in examples) for examples in splits]
    assert tuple(found) == expected
    with pytest.raises(ValueError, match="has 10 training examples, and holding out 10 "):
        verifiers("abcdefghij", num_eval=10).examples("train")
    with pytest.raises(ValueError, match=r"y@1: the policy reads only text, not \['image_url'\]"):
        verifiers("a", [IMAGE], num_eval=1).examples("train")


async def test_each_role_of_an_episode_has_its_own_outcome():
    env = verifiers("a", "xyz", num_eval=2)
    episode = Episode(env.examples("eval")[1], [], stop_reason=StopReason.STOP)
    await env.play(episode, None)
    assert await env.score(episode) == {"letters": 1.0, "unlisted": 0.0}
    assert (env.name, env.max_concurrent, episode.stop_reason) == ("x-y", 8, StopReason.STOP)
    limited = verifiers("a", max_concurrent=3)
    assert (len(limited.examples("train")), limited.max_concurrent) == (1, 3)
    episode.role = "rival"
    assert await env.score(episode) == {"letters": 2.0, "unlisted": 0.5}
    assert episode.stop_reason == StopReason.MAX_TURNS
    assert await env.score(Episode(episode.example, [])) == {"letters": 0.0, "unlisted": 0.0}
