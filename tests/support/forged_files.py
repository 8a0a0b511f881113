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


def files_in(fields, columns):
    """Return the files of a manifest as lists, of the form in which the field `files` has them."""
    if "files" in fields:
        return fields["files"]
    names = ("file_patterns", "file_numbers", "file_bytes", "file_header_bytes", "file_checksums")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    files = []
    for pattern, numbers, *others in rows:
        pieces = fields["file_patterns"][pattern]
        texts = [
            f"{numbers[i]:0{width}d}" + pieces[2 * i + 2] for i, width in enumerate(pieces[1::2])
        ]
        files.append(["".join([pieces[0], *texts]), *others])
    return files


def put_files(fields, columns, files):
    """Give a manifest other files; in columns each name is a pattern of its own."""
    if "files" in fields:
        fields["files"] = files
        return
    fields["file_patterns"] = [[name] for name, *_ in files]
    columns["file_patterns"] = np.arange(len(files))
    columns["file_numbers"] = np.zeros((len(files), 0), np.int64)
    columns["file_bytes"] = np.array([file[1] for file in files], np.int64)
    columns["file_header_bytes"] = np.array([file[2] for file in files], np.int64)
    columns["file_checksums"] = np.array([file[3] for file in files], np.uint64)


def forge_files(path, change):
    """Change the list of the files of a checkpoint in its place."""

    def change_all(fields, columns):
        files = files_in(fields, columns)
        change(files)
        put_files(fields, columns, files)

    forge(path, change_all)


def widened(column):
    """Return a copy of a column that takes any number."""
    is_narrow = column.dtype.kind in "iu" and column.dtype != np.uint64
    return column.astype(np.int64) if is_narrow else column.copy()


def with_object(path, blob):
    """Save a checkpoint again, its object encoded as `blob`."""
    shutil.rmtree(path)
    encode = codec.encode

    def forged(obj, **options):
        return blob if obj == "hostile" else encode(obj, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "encode", forged)
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
