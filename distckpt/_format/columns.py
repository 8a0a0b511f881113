"""Tables as bytes, in messages and on disk.

They are named numpy columns and one JSON value in a safetensors blob.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

Column = npt.NDArray[Any]

_JSON = "json"
DELTAS = ".deltas"
COUNTS = ".counts"
_WORD_BYTES = 8
_MAX_RATIO = 1040
"""Maximum number of bytes that zlib makes of one."""


def pack(fields: Any, columns: Mapping[str, Column]) -> bytes:
    """Encode a value of JSON, and arrays; the inverse of `unpack`."""
    text = json.dumps(fields, separators=(",", ":")).encode()
    arrays = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save({_JSON: np.frombuffer(text, np.uint8), **arrays})


def compress(data: bytes) -> bytes:
    """Compress bytes for a message.

    Its numbers have 64 bits, and their high bytes are mostly zeros: bytes of equal weight are put
    next to each other.
    """
    words = np.frombuffer(data + bytes(-len(data) % _WORD_BYTES), np.uint8).reshape(-1, _WORD_BYTES)
    return len(data).to_bytes(_WORD_BYTES, "big") + zlib.compress(words.T.tobytes(), level=1)


def decompress(data: bytes) -> bytes:
    """Undo `compress`.

    The size that the bytes claim is not trusted.

    Raises:
        ValueError: `compress` did not make them.
    """
    num_bytes = int.from_bytes(data[:_WORD_BYTES], "big")
    padded = num_bytes + -num_bytes % _WORD_BYTES
    if padded > _MAX_RATIO * len(data):
        raise ValueError(f"not compressed: {len(data)} bytes cannot become {num_bytes}")
    stream = zlib.decompressobj()
    try:
        words = stream.decompress(data[_WORD_BYTES:], padded + 1)
    except zlib.error as error:
        raise ValueError(f"not compressed: {error}") from error
    if len(words) != padded or not stream.eof:
        raise ValueError(f"not compressed: {num_bytes} bytes were announced, and others came")
    return np.frombuffer(words, np.uint8).reshape(_WORD_BYTES, -1).T.tobytes()[:num_bytes]


def unpack(data: bytes) -> tuple[Any, dict[str, Column]]:
    """Decode a result of `pack`.

    Raises:
        ValueError: `pack` did not make it.
    """
    try:
        columns = safetensors.numpy.load(data)
        text = columns.pop(_JSON)
        return json.loads(text.tobytes()), columns
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a table of columns: {type(error).__name__}: {error}") from error


def pack_table(columns: Mapping[str, Column]) -> bytes:
    """Encode columns of integers with the same number of rows.

    Runs of equal differences are stored where these take less. `lazy_columns` reads them.
    """
    encoded: dict[str, Column] = {}
    for name, column in columns.items():
        deltas, counts = _runs_of(column)
        if deltas.nbytes + counts.nbytes < column.nbytes // 2:
            encoded |= {name + DELTAS: deltas, name + COUNTS: counts}
        else:
            encoded[name] = column
    num_rows = max(map(len, columns.values()), default=0)
    return pack({"rows": num_rows}, encoded)


def _runs_of(column: Column) -> tuple[Column, Column]:
    """Return a column's differences, axis by axis, and their counts.

    A count tells how many equal differences follow one another.
    """
    flat = column.astype(np.int64).T.ravel()
    deltas = np.diff(flat, prepend=0)
    starts = np.flatnonzero(np.append(True, deltas[1:] != deltas[:-1])[: len(deltas)])
    return deltas[starts], np.diff(starts, append=len(deltas))


def narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return signed integers in the fewest bytes that hold them.

    Other columns are returned as they are.
    """
    if column.dtype.kind != "i" or column.min(initial=0) < 0:
        return column
    largest = column.max(initial=0)
    for dtype in (np.uint8, np.uint16, np.uint32):
        if largest <= np.iinfo(dtype).max:
            return column.astype(dtype)
    return column.astype(np.int64)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message unless a condition holds."""
    if not condition:
        raise ValueError(message)
