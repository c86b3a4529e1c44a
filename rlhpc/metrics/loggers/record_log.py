"""Records of a LevelDB log, the format of W&B's and SwanLab's files of offline runs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 32768
#: The file's header, and each fragment's (checksum, length, kind), have the same length.
_HEADER = 7
_FULL, _FIRST, _LAST = 1, 2, 4


def records(path: Path) -> Iterator[bytes]:
    """The whole records of a file, up to where a killed process stopped."""
    raw = path.read_bytes()
    at, record = _HEADER, b""
    while at + _HEADER <= len(raw):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # padding
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", raw, at)
        at += _HEADER
        if not _FULL <= kind <= _LAST or at + length > len(raw):
            return
        fragment = raw[at : at + length]
        at += length
        record = fragment if kind in (_FULL, _FIRST) else record + fragment
        if kind in (_FULL, _LAST):
            yield record
