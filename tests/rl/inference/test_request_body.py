"""The JSON of a request, in pieces."""

import json
from base64 import b64encode

import pytest

from rl.inference.request_body import _PIECE_BYTES, JSONBody


@pytest.mark.parametrize("size", [0, 1, 3, _PIECE_BYTES, 2 * _PIECE_BYTES + 1])
def test_bytes_become_base64_text_and_everything_else_is_json(size):
    value = bytes(range(251)) * (size // 251 + 1)
    content = {"a": [1, "ü"], "b": {"in": value[:size]}, "c": b"x", "d": None}
    body = JSONBody(content)
    joined = b"".join(body)
    assert len(joined) == body.num_bytes
    encoded = {"b": {"in": b64encode(value[:size]).decode()}, "c": b64encode(b"x").decode()}
    assert json.loads(joined) == content | encoded
    assert b"".join(body) == joined  # a redirected request is sent again
