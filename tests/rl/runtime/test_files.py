"""Any record becomes a line of JSON, and every run records its commit."""

import json
import subprocess

import pytest

from rl.runtime.commit import commit_of
from rl.runtime.files import json_line


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("no")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ({"a": [1, 2.5, None, True, "ü"]}, {"a": [1, 2.5, None, True, "ü"]}),
        (float("nan"), None),
        ([float("inf"), 1.0], [None, 1.0]),
        ({1, 2}, "{1, 2}"),
        (b"\xff", "b'\\xff'"),
        ({("a", 1): object}, {"('a', 1)": "<class 'object'>"}),
        ("\ud800", "\ud800"),
        (WithoutRepr(), "(WithoutRepr, which cannot be shown: RuntimeError)"),
        ([10**5000], ["(int, which cannot be shown: ValueError)"]),
    ],
)
def test_an_object_that_json_does_not_know_becomes_text(value, read):
    line = json_line({"message": value})
    assert line.endswith("}\n")
    assert line.isascii()
    assert json.loads(line) == {"message": read}


def test_deep_and_circular_values_are_cut():
    circle: list = []
    circle.append(circle)
    for value in (nested(100_000), circle):
        assert json.loads(json_line({"a": 1, "message": value}))["a"] == 1


def test_the_commit_of_a_checkout_shows_uncommitted_changes(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    assert commit_of(tmp_path) == ""
    git("init", "-q")
    assert commit_of(tmp_path) == ""
    git("commit", "-q", "--allow-empty", "-m", "x")
    clean = commit_of(tmp_path)
    assert len(clean) == 40
    (tmp_path / "new.py").write_text("")
    assert commit_of(tmp_path) == f"{clean}+uncommitted"
