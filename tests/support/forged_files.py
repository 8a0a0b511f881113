"""Files of checkpoints that say what a test likes, with lengths and checksums that agree."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import safetensors.numpy
import xxhash

import distckpt
from distckpt import ShardedObject, ShardedTensor
from distckpt._format import codec, safetensors_file
from distckpt.megatron.core import write_marker
from tests.fuzz.targets import WEIGHT


def marker_of(path):
    return json.loads((path / "metadata.json").read_text())


def forge(path, change):
    """Change the manifest, and the marker with it so that they agree."""
    file = path / "manifest.safetensors"
    columns = safetensors.numpy.load(file.read_bytes())
    fields = json.loads(columns.pop("json").tobytes())
    columns = {name: widened(column) for name, column in columns.items()}
    change(fields, columns)
    columns["json"] = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    data = safetensors.numpy.save(
        {name: np.ascontiguousarray(column) for name, column in columns.items()}
    )
    file.write_bytes(data)
    marker = marker_of(path)
    marker["manifest"].update(bytes=len(data), checksum=f"{xxhash.xxh3_64_intdigest(data):016x}")
    write_marker(path, marker)


def widened(column):
    """Return a copy of a column that takes any number."""
    return column.copy() if column.dtype == np.uint64 else column.astype(np.int64)


def with_object(path, blob):
    """Save a checkpoint again, its object encoded as `blob`."""
    shutil.rmtree(path)
    encode = codec.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode", lambda obj: blob if obj == "hostile" else encode(obj))
        state = {
            "w": ShardedTensor.from_rank_offsets("w", WEIGHT),
            "o": ShardedObject("o", "hostile", (1,), (0,)),
        }
        distckpt.save(state, path)


def object_of(tree, entries=(), **metadata):
    text = tree if isinstance(tree, str) else json.dumps(tree)
    named = {f"{i:08}": raw for i, raw in enumerate(entries)}
    return safetensors_file.join_file(named, {"codec_version": "1", "tree": text, **metadata})


def file_of(header, body=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length % 2**64) + text + body


def entry(shape, first, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
