"""Checks of a verifiers environment before an episode is played; no library is needed."""

import sys
from types import SimpleNamespace

import pytest

from envs.episode import Episode, StopReason
from envs.messages import user
from envs.verifiers.adapter import Outcome, Row, check_text
from envs.verifiers.environment import Verifiers, load_adapter

IMAGE = [{"type": "text", "text": "which?"}, {"type": "image_url", "image_url": {"url": "x"}}]


class Scripted:
    """An adapter of two rows."""

    max_concurrent = 8
    reward_weights = {"letters": 1.0}  # noqa: RUF012 as they write it

    def __init__(self, content):
        self._rows = [Row([user("a")], None), Row([user(content)], None)]

    def rows(self, split, limit):
        return None if split == "eval" else self._rows


class Many(Scripted):
    """An adapter of ten training rows, and perhaps eval rows. An episode gives its row's data."""

    def __init__(self, held_out):
        self._rows = {"train": "abcdefghij", "eval": held_out}

    def rows(self, split, limit):
        contents = self._rows[split]
        return contents and [Row([user(x)], x) for x in contents[:limit]]

    async def play(self, row, speak):
        rival = Outcome(2.0, {"letters": 2.0}, StopReason.MAX_TURNS)
        return {"": Outcome(1.0, {"letters": row.data == "y"}), "rival": rival}


def verifiers(adapter, max_concurrent=None, **changes):
    options = {"args": None, "num_train": None, "num_eval": 0, "max_concurrent": max_concurrent}
    env = Verifiers(id="o/x", **{**options, **changes})
    adapter = Scripted(adapter) if isinstance(adapter, str | list) else adapter
    env.__dict__["_adapter"] = adapter  # in place of the library's
    return env


@pytest.mark.parametrize(
    ("held_out", "num_train", "num_eval", "expected"),
    [
        (None, None, 3, ("abcdefg", "hij")),
        (None, 4, 3, ("abcd", "efg")),
        (None, None, 9, ("a", "bcdefghij")),
        ("xyz", None, 2, ("abcdefghij", "xy")),
        ("xyz", 4, 5, ("abcd", "xyz")),
    ],
)
def test_held_out_rows_are_those_of_the_library_or_the_last_ones(
    held_out, num_train, num_eval, expected
):
    env = verifiers(Many(held_out), num_train=num_train, num_eval=num_eval)
    splits = [env.examples(split) for split in ("train", "eval")]
    found = ["".join(one.messages[0]["content"] for one in examples) for examples in splits]
    assert tuple(found) == expected
    with pytest.raises(ValueError, match="has 10 training examples, and holding out 10 "):
        verifiers(Many(None), num_eval=10).examples("train")
    with pytest.raises(ValueError, match="the policy reads only text"):
        verifiers(Many([IMAGE]), num_eval=1).examples("train")


async def test_each_role_of_an_episode_has_its_own_outcome():
    env = verifiers(Many("xyz"), num_eval=2)
    episode = Episode(env.examples("eval")[1], [], stop_reason=StopReason.STOP)
    await env.play(episode, None)
    assert await env.score(episode) == {"letters": 1.0, "unlisted": 0.0}
    assert episode.stop_reason == StopReason.STOP
    episode.role = "rival"
    assert await env.score(episode) == {"letters": 2.0, "unlisted": 0.0}
    assert episode.stop_reason == StopReason.MAX_TURNS
    assert await env.score(Episode(episode.example, [])) == {"letters": 0.0, "unlisted": 0.0}


@pytest.mark.parametrize(
    ("api", "env_id", "expected"),
    [
        ("envs", "o/letter-game@2", ("classic", "letter_game", {"n": 1})),
        ("v1", "letter-tasks", ("v1", "letter_tasks", {"n": 1})),
        ("v1", "own", ("v1", "own", {"n": 1})),  # among the library's own
        ("envs", "letter-tasks", "the tasksets of verifiers>=0.4, but verifiers 7 .*verifiers-v1"),
        ("v1", "o/letter-game", "classic API, verifiers==0.1.14, but .* 7 .*verifiers-classic"),
        ("envs", "own", "the module own is not installed"),
        ("v1", "none", "the module none is not installed"),
    ],
)
def test_the_installed_library_plays_the_environments_of_its_api(
    api, env_id, expected, tmp_path, monkeypatch
):
    files = {"letter_game.py": "def load_environment(): ...", "letter_tasks.py": "__all__ = []"}
    files |= {f"verifiers/{api}/__init__.py": "", "verifiers/__init__.py": ""}
    files |= {f"verifiers/{api}/tasksets/{name}.py": "__all__ = []" for name in ("own", "__init__")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("envs.verifiers.environment.version", lambda name: "7")
    for name, adapter in (("classic", "ClassicAdapter"), ("v1", "TasksetAdapter")):
        made = SimpleNamespace(**{adapter: lambda *given, name=name: (name, *given)})
        monkeypatch.setitem(sys.modules, f"envs.verifiers.{name}", made)
    try:
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                load_adapter(env_id, {"n": 1})
        else:
            assert load_adapter(env_id, {"n": 1}) == expected
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
            del sys.modules[name]


def test_an_environment_with_images_is_refused_before_an_episode_is_played():
    with pytest.raises(ValueError, match=r"o/x: the policy reads only text, not \['image_url'\]"):
        verifiers(IMAGE).examples("train")
    check_text("o/x", [Row([user("a")], None), Row([user(IMAGE[:1])], None)])


def test_episodes_that_are_processes_have_a_default_limit():
    for asked, bound in ((None, 8), (100, 100)):
        env = verifiers("b", asked)
        assert len(env.examples("train")) == 2
        assert env.max_concurrent == bound
