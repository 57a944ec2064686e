"""Length-prefixed msgpack messages between the rollouts process and the trainer ranks.

A numpy array is sent as (dtype, shape, raw bytes), never as a pickle. rl/rollouts/service.py
implements the asyncio side, rl/trainer/rollouts_link.py the blocking side.
"""

import struct
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")
HEADER = struct.Struct("<Q")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request from a trainer rank to the rollouts process."""

    # next_batch or record_all (with `step`), publish or evaluation (with `version`), or state
    what: str
    rank: int = 0
    step: int = 0
    shares_prefixes: bool = False  # next_batch: whether the trainer computes equal prefixes once
    version: int = 0
    replicas: dict[str, int] = {}  # publish: updated replica -> number of its restarts


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the rollouts process to a `Call`."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # the requested record as msgpack
    over: str = ""  # why the rollouts process delivers no more batches; "" if it still does
    stopped: bool = False  # whether the ranks then end with status 0 instead of an error


class NoMoreBatches(Exception):
    """The error raised if no further batch exists; the message gives the reason."""

    def __init__(self, message: str, *, stopped: bool = False) -> None:
        super().__init__(message)
        self.stopped = stopped  # whether the rank then ends with status 0 instead of an error


def _encode_numpy(value: object) -> object:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data)
    if isinstance(value, np.generic):  # user code may compute rewards and advantages with numpy
        return value.item()
    raise NotImplementedError(f"msgpack cannot encode a {type(value).__name__}: send a numpy array")


def _decode_array(kind: type, value: Any) -> Any:  # noqa: ARG001 msgspec's signature
    dtype, shape, data = value
    return np.frombuffer(data, dtype=dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_numpy)


def pack(value: object) -> bytes:
    return _ENCODER.encode(value)


def unpack(data: bytes | memoryview | msgspec.Raw, kind: type[T]) -> T:
    """Decode a record of the type `kind`. Raise msgspec.DecodeError if `data` is invalid."""
    try:
        return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)
    except (UnicodeDecodeError, SyntaxError) as error:  # an invalid string or dtype
        raise msgspec.DecodeError(f"the message is damaged: {error}") from error
