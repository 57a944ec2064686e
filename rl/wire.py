"""Length-prefixed messages between the rollouts process and the trainer ranks.

A message is msgpack; numpy arrays travel as (dtype, shape, raw bytes), never as pickles. The
asyncio side lives in `rl/rollouts/service.py`, the blocking side in `rl/trainer/rollouts_link.py`.
"""

import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
HEADER = struct.Struct("<Q")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer rank asks the rollouts process for something."""

    what: str  # next_batch(step) | publish(version) | evaluation(version) | state
    rank: int = 0
    step: int = 0
    version: int = 0
    last: bool = False  # of evaluation: it is due, for no version comes after it
    replicas: dict[str, int] = {}  # of publish: the incarnation of each that has the version


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the rollouts process says to a call."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # the record that was asked for, packed
    over: str = ""  # else: why no further batch will come
    solved: bool = False  # and whether that is good news


class NoMoreBatches(Exception):
    """Nothing is left to train on; the message says why.

    Attributes:
        solved: the policy has learned all that there was, a good end; else it learns nothing.

    """

    def __init__(self, message: str, *, solved: bool) -> None:
        super().__init__(message)
        self.solved = solved


def _encode(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    raise NotImplementedError(f"cannot send a {type(value).__name__}")


def _decode(kind: type, value: Any) -> Any:  # noqa: ARG001 msgspec's signature
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode)


def pack(value: object) -> bytes:
    """Return the bytes of a record."""
    return _ENCODER.encode(value)


def unpack(data: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Return the record in `data`; `kind` must be the type that was packed."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode)
