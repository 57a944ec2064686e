"""The JSON body of a request, made in pieces to save memory in a push to many replicas."""

import json
from base64 import b64encode
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

_GAP = uuid4().hex  # stands for a bytes value in the JSON; random, so no other text contains it
_PIECE_BYTES = 3 << 18  # a multiple of 3, so that the base64 texts of the pieces can be joined


class JSONBody:
    """The JSON of `content`. Iteration encodes bytes values as base64 text and yields pieces."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._binary: list[Any] = []  # bytes-like values, in their order in the JSON
        self._around = json.dumps(content, default=self._cut_bytes).encode().split(_GAP.encode())
        encoded = sum(4 * -(-len(value) // 3) for value in self._binary)
        self.num_bytes = sum(map(len, self._around)) + encoded

    def _cut_bytes(self, value: Any) -> str:
        self._binary.append(value)
        return _GAP

    def __iter__(self) -> Iterator[bytes]:
        first, *rest = self._around
        yield first
        for value, after in zip(self._binary, rest, strict=True):
            for start in range(0, len(value), _PIECE_BYTES):
                yield b64encode(value[start : start + _PIECE_BYTES])
            yield after
