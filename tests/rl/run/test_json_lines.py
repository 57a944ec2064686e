"""A line of JSON comes of whatever an environment or a server puts into a message."""

import json

import pytest

from rl.run.json_lines import json_line


class Silent:
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
        (Silent(), "(Silent, which cannot be shown: RuntimeError)"),
        ([10**5000], ["(int, which cannot be shown: ValueError)"]),
    ],
)
def test_what_json_cannot_hold_is_shown_as_text(value, read):
    line = json_line({"message": value})
    assert line.endswith("}\n")
    assert line.isascii()
    assert json.loads(line) == {"message": read}


def test_depth_and_circles_have_an_end():
    circle: list = []
    circle.append(circle)
    for value in (nested(100_000), circle):
        assert json.loads(json_line({"a": 1, "message": value}))["a"] == 1
