"""The JSON body of a request, made in pieces to save memory in a push to many replicas."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

_PLACEHOLDER = uuid4().hex  # replaces a bytes value in the JSON; random, so no text contains it
_PIECE_BYTES = 3 << 18  # a multiple of 3, so that the base64 texts of the pieces can be joined


class JSONBody:
    """The JSON of `content`. Iteration encodes bytes values as base64 text and yields pieces."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._binary: list[Any] = []  # bytes-like values, in their order in the JSON
        text = json.dumps(content, default=self._store_bytes).encode()
        self._around = text.split(_PLACEHOLDER.encode())
        self.num_bytes = sum(map(len, self._around)) + sum(
            4 * -(-len(v) // 3) for v in self._binary
        )

    def _store_bytes(self, value: Any) -> str:
        self._binary.append(value)
        return _PLACEHOLDER

    def __iter__(self) -> Iterator[bytes]:
        first, *rest = self._around
        yield first
        for value, after in zip(self._binary, rest, strict=True):
            for start in range(0, len(value), _PIECE_BYTES):
                yield b64encode(value[start : start + _PIECE_BYTES])
            yield after
