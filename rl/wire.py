"""Length-prefixed messages between the rollouts process and the trainer ranks.

A message is msgpack. A numpy array is sent as (dtype, shape, raw bytes), never as a pickle. The
asyncio side is in `rl/rollouts/service.py`, the blocking side in `rl/trainer/rollouts_link.py`.
"""

import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
HEADER = struct.Struct("<Q")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a trainer rank to the rollouts process."""

    what: str  # next_batch(step) | publish(version) | evaluation(version) | state
    rank: int = 0
    step: int = 0
    version: int = 0
    replicas: dict[str, int] = {}  # of publish: the incarnation of each vLLM that has the version


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the rollouts process to a call."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # the requested record, packed
    over: str = ""  # if not empty: why there is no further batch
    stopped: bool = False  # if over: whether the run was told to stop


class NoMoreBatches(Exception):
    """There is no further batch; the message says why.

    Attributes:
        stopped: True if the run was told to stop; False if the policy learns nothing any more.

    """

    def __init__(self, message: str, *, stopped: bool = False) -> None:
        super().__init__(message)
        self.stopped = stopped


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
