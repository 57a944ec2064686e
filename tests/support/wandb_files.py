"""Read the records of wandb's offline file, which has LevelDB's log format."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4


def records(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the kind and content of every record of the offline runs in a run's folder."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _chunks(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            yield kind, getattr(record, kind)


def _chunks(content: bytes) -> Iterator[bytes]:
    position, parts = _HEADER, b""  # the file header has the length of a record header
    while position + _HEADER <= len(content):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:  # padding to the end of a block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""
