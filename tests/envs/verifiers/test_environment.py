"""Checks of a verifiers environment before an episode is played; no library is needed."""

import pytest

from envs.messages import user
from envs.verifiers.adapter import Row, check_text
from envs.verifiers.environment import Verifiers

IMAGE = [{"type": "text", "text": "which?"}, {"type": "image_url", "image_url": {"url": "x"}}]


class Scripted:
    """An adapter of two rows."""

    max_concurrent = 8
    reward_weights = {"letters": 1.0}  # noqa: RUF012 as they write it

    def __init__(self, content):
        self._rows = [Row([user("a")], None), Row([user(content)], None)]

    def rows(self, split, limit):
        return None if split == "eval" else self._rows


def verifiers(content, max_concurrent=None):
    env = Verifiers(id="o/x", args=None, num_train=None, num_eval=0, max_concurrent=max_concurrent)
    env.__dict__["_adapter"] = Scripted(content)  # in place of the library's
    return env


def test_an_environment_with_images_is_refused_before_an_episode_is_played():
    with pytest.raises(ValueError, match=r"o/x: the policy reads only text, not \['image_url'\]"):
        verifiers(IMAGE).examples("train")
    check_text("o/x", [Row([user("a")], None), Row([user(IMAGE[:1])], None)])


@pytest.mark.parametrize(("asked", "bound"), [(None, 8), (100, 100)])
def test_episodes_that_are_processes_have_a_default_limit(asked, bound):
    env = verifiers("b", asked)
    assert len(env.examples("train")) == 2
    assert env.max_concurrent == bound


def test_a_limit_of_no_episode_is_refused():
    with pytest.raises(ValueError, match="max_concurrent=0: set it to at least 1"):
        verifiers("b", 0)
