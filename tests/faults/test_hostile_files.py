"""Directories made by somebody who means harm: their code does not run, nothing outside is read,
memory and time last.

Every directory is read in a process of its own with little memory and time, by every verb, while an
audit hook notes what the interpreter does. Each verb must end by itself, with a result or with an
error that it documents. Where each of several files or fields becomes each of several things, the
default run takes a third of these pairs, the long form all.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pickle
import shutil
import socket
import struct
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from distckpt.megatron.core import write_marker
from tests.fuzz.contained import VERBS, serve
from tests.fuzz.targets import WEIGHT, save_dcp, save_example, torch_saved
from tests.support.forged_files import (
    entry,
    file_of,
    forge,
    marker_of,
    object_of,
    widened,
    with_object,
)
from tests.support.harness import fork_context
from tests.support.hostile_pickles import PICKLES, Call, array_calls, tuples, zip_of

HUGE = 5 << 40
"""Size of a file without content, which takes no space on the disk."""


@pytest.fixture(scope="module")
def reader():
    """Start the process whose forks read, and return what to call with a path."""
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()

    def read(path):
        ours.send(str(path))
        return {outcome["verb"]: outcome for outcome in ours.recv()}

    yield read
    ours.close()
    process.join(30)
    process.kill()
    process.join()


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    save_example(folder / "distckpt")
    save_dcp(folder / "dcp")
    (folder / "hf").mkdir()
    safetensors.torch.save_file(
        {"w": WEIGHT, "x": torch.ones(3)}, folder / "hf" / "model.safetensors"
    )
    (folder / "nothing").mkdir()
    return folder


CASES = {}
IN_LONG_FORM = set()
"""Names of cases that the default run leaves out."""
ONE_IN = 3
"""Of each two things that are combined, the default run takes one of so many pairs, and of many
arguments of one function one of so many.
"""
MANY = 6
"""As many arguments of one function are taken in any case."""


class Later(NamedTuple):
    """An argument that takes long to make, which only the test that needs it does."""

    make: Callable[[], Any]


def hostile(kind, refused=("load",), more=(), row=None):
    """Note a function that makes a directory hostile.

    Args:
        kind: what the directory is to begin with.
        refused: verbs that must raise.
        more: further arguments, one case for each.
        row: which of several functions with the same arguments this is; the default run takes each
            of the arguments with some of these functions. Without, it takes all arguments unless
            there are many.
    """

    def note(function):
        name = function.__name__.replace("_", " ")
        if isinstance(more, dict):
            for column, (label, argument) in enumerate(more.items()):
                CASES[f"{name}: {label}"] = (
                    kind,
                    lambda path, argument=argument: function(
                        path, argument.make() if isinstance(argument, Later) else argument
                    ),
                    refused,
                )
                stride = ONE_IN if row is not None or len(more) > MANY else 1
                if ((row or 0) + column) % stride:
                    IN_LONG_FORM.add(f"{name}: {label}")
        else:
            CASES[name] = (kind, function, refused)
        return function

    return note


@pytest.mark.parametrize("kind", ["distckpt", "hf", "dcp"])
def test_valid_directories_are_read_in_the_same_way(reader, templates, tmp_path, kind):
    shutil.copytree(templates / kind, tmp_path / "in" / "c")
    outcomes = reader(tmp_path / "in" / "c")
    assert set(outcomes) == set(VERBS)
    failed = {verb: outcome["text"] for verb, outcome in outcomes.items() if outcome["error"]}
    # What each kind is not: neither a folder of shards, nor a checkpoint that others wrote.
    assert set(failed) <= {"check", "consolidate_safetensors_files", "convert"}, failed
    assert all(not outcome["events"] for outcome in outcomes.values()), outcomes


# ---- things that are no files, and files without end


def to_pipe(file):
    os.mkfifo(file)


def to_endless_device(file):
    file.symlink_to("/dev/zero")


def to_terminal(file):
    file.symlink_to("/dev/tty")


def to_directory(file):
    file.mkdir()


def to_socket(file):
    # Socket names are short.
    here = os.getcwd()
    os.chdir(file.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    finally:
        os.chdir(here)


def to_link_to_itself(file):
    file.symlink_to(file.name)


def to_nothing_but_size(file):
    with open(file, "wb") as opened:
        opened.truncate(HUGE)


NO_FILES = {
    function.__name__: function
    for function in (
        to_pipe,
        to_endless_device,
        to_terminal,
        to_directory,
        to_socket,
        to_link_to_itself,
        to_nothing_but_size,
    )
}


def turned(path, file, turn):
    target = next(path.glob(file))
    target.unlink()
    turn(target)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=0)
def a_marker_turned(path, turn):
    turned(path, "metadata.json", turn)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=1)
def a_manifest_turned(path, turn):
    turned(path, "manifest.safetensors", turn)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=2)
def a_shard_file_turned(path, turn):
    turned(path, "tensors/*", turn)


@hostile("distckpt", ("load", "load_common_state_dict"), NO_FILES, row=3)
def an_object_file_turned(path, turn):
    turned(path, "objects/*", turn)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"))
def a_directory_turned_into_a_file(path):
    shutil.rmtree(path / "tensors")
    (path / "tensors").write_bytes(b"x")


@hostile("hf", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=4)
def a_hugging_face_file_turned(path, turn):
    turned(path, "model.safetensors", turn)


@hostile("hf", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=5)
def an_index_turned(path, turn):
    turn(path / "model.safetensors.index.json")


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=6)
def a_dcp_metadata_file_turned(path, turn):
    turned(path, ".metadata", turn)


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), NO_FILES, row=7)
def a_distcp_file_turned(path, turn):
    turned(path, "*.distcp", turn)


# ---- markers


MARKERS = {
    "nesting": lambda m: '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "nesting that can just be read": lambda m: (
        json.dumps(m)[:-1] + ',"a":' + "[" * 900 + "]" * 900 + "}"
    ),
    "long number": lambda m: json.dumps(m)[:-1] + ',"a":' + "9" * 100_000 + "}",
    "name twice": lambda m: '{"sharded_backend": "a",' + json.dumps(m)[1:],
    "other backend": lambda m: json.dumps({**m, "sharded_backend": "os.system"}),
    "backend with control characters": lambda m: json.dumps(
        {**m, "sharded_backend": "\x1b[2J\ud800"}
    ),
    "long backend": lambda m: json.dumps({**m, "sharded_backend": "x" * 10**6}),
    "no backend": lambda m: json.dumps({**m, "sharded_backend": ["safetensors"]}),
    "huge version": lambda m: json.dumps({**m, "sharded_backend_version": 10**4000}),
    "huge reader": lambda m: json.dumps({**m, "min_reader_version": 10**4000}),
    "list": lambda m: "[]",
    "not a number": lambda m: '{"sharded_backend": NaN}',
    "manifest elsewhere": lambda m: json.dumps(
        {**m, "manifest": {**m["manifest"], "name": "../beside/manifest.safetensors"}}
    ),
    "manifest as text": lambda m: json.dumps({**m, "manifest": "manifest.safetensors"}),
    "manifest of no size": lambda m: json.dumps(
        {**m, "manifest": {**m["manifest"], "bytes": None}}
    ),
    "manifest of negative size": lambda m: json.dumps(
        {**m, "manifest": {**m["manifest"], "bytes": -1}}
    ),
    "very many fields": lambda m: json.dumps({**m, **dict.fromkeys(map(str, range(10**5)))}),
}


@hostile("distckpt", (), MARKERS)
def a_marker_with(path, change):
    (path / "metadata.json").write_text(change({**marker_of(path), "checksum": None}))


# ---- manifests, with a marker that agrees


FILE_NAMES = {
    "above": "../beside/manifest.safetensors",
    "above within": "tensors/../../beside/manifest.safetensors",
    "absolute": "/etc/passwd",
    "home": "~/x",
    "URL": "file:///etc/passwd",
    "zero byte": "tensors/a\0b",
    "lone surrogate": "tensors/\ud800",
    "byte that is no text": "tensors/\udcff",
    "longer than any": "tensors/" + "n" * 300,
    "very long": "n" * 10**6,
    "dots": "tensors/..",
    "empty": "",
    "of Windows": "..\\..\\x",
}


@hostile("distckpt", ("load", "load_plain_tensors"), FILE_NAMES)
def a_file_name(path, name):
    forge(path, lambda fields, columns: [file.__setitem__(0, name) for file in fields["files"]])


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"))
def a_shard_file_that_lies_outside(path):
    def change(fields, columns):
        shutil.move(path / fields["files"][0][0], path.parent / "outside")
        fields["files"][0][0] = "../outside"

    forge(path, change)


NUMBERS = {str(n): n for n in (-1, 0, 1, 2**31, 2**40, 2**62, 2**63, 10**30, -(2**63))}


@hostile("distckpt", (), NUMBERS, row=0)
def a_file_size(path, number):
    forge(path, lambda fields, columns: [file.__setitem__(1, number) for file in fields["files"]])


@hostile("distckpt", (), NUMBERS, row=1)
def a_header_size(path, number):
    forge(path, lambda fields, columns: [file.__setitem__(2, number) for file in fields["files"]])


@hostile("distckpt", (), NUMBERS, row=2)
def a_block_size(path, number):
    forge(path, lambda fields, columns: fields.__setitem__("block_bytes", number))


COLUMNS = [
    "key_shapes",
    "key_ndims",
    "key_ids",
    "file_ids",
    "first_bytes",
    "num_bytes",
    "offsets",
    "shapes",
]


def with_column(function, column):
    """Fill in which column a function changes."""
    return functools.update_wrapper(
        lambda path, argument: function(path, column, argument), function
    )


def a_column(path, column, number):
    forge(path, lambda fields, columns: columns[column].fill(number))


def a_column_of_shape(path, column, shape):
    def change(fields, columns):
        columns[column] = np.zeros(shape if math.prod(shape) else (0,), columns[column].dtype)
        if not math.prod(shape):
            # numpy would not make it; only the header says so.
            columns[column] = SimpleNamespace(shape=shape, dtype=columns[column].dtype)

    forge_raw(path, change)


SHAPES = [(0,), (0, 2**40), (2**28, 0), (2**40, 0), (1, 10_000)]
for _row, _column in enumerate([*COLUMNS, "block_checksums"]):
    if _column in COLUMNS:
        _more = {f"{_column} {n}": n for n in (-1, 2**40, 2**63 - 1)}
        hostile("distckpt", (), _more, _row)(with_column(a_column, _column))
    _more = {f"{_column} {shape}": shape for shape in SHAPES}
    hostile("distckpt", (), _more, _row)(with_column(a_column_of_shape, _column))


def forge_raw(path, change):
    """As `forge`, with columns that may be nothing but a dtype and a shape without elements."""
    file = path / "manifest.safetensors"
    columns = safetensors.numpy.load(file.read_bytes())
    fields = json.loads(columns.pop("json").tobytes())
    columns = {name: widened(column) for name, column in columns.items()}
    change(fields, columns)
    columns["json"] = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    names = {"int64": "I64", "uint64": "U64", "uint8": "U8"}
    header, body = {}, b""
    for name, column in columns.items():
        raw = column.tobytes() if isinstance(column, np.ndarray) else b""
        place = [len(body), len(body) + len(raw)]
        header[name] = {
            "dtype": names[str(column.dtype)],
            "shape": list(column.shape),
            "data_offsets": place,
        }
        body += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text + body
    file.write_bytes(data)
    marker = marker_of(path)
    marker["manifest"].update(bytes=len(data), checksum=f"{xxhash.xxh3_64_intdigest(data):016x}")
    write_marker(path, marker)


def rows_of(fields, columns, key):
    return np.flatnonzero(columns["key_ids"] == fields["keys"].index(key))


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"))
def chunks_that_overlap_and_leave_as_much_out(path):
    # [0:4, 0:3] twice: as many elements as the tensor has, half of them never read.
    def change(fields, columns):
        first, second = rows_of(fields, columns, "w")
        for name in ("offsets", "file_ids", "first_bytes"):
            columns[name][second] = columns[name][first]
        columns["block_checksums"][second] = columns["block_checksums"][first]

    forge(path, change)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"))
def chunks_that_overlap_in_part(path):
    def change(fields, columns):
        _, second = rows_of(fields, columns, "w")
        columns["offsets"][second] = [0, 1]

    forge(path, change)


@hostile("distckpt", ("load", "load_plain_tensors", "consolidate"))
def a_hole(path):
    def change(fields, columns):
        _, second = rows_of(fields, columns, "w")
        for name in COLUMNS[2:]:
            columns[name] = np.delete(columns[name], second, 0)
        columns["block_checksums"] = np.delete(columns["block_checksums"], second)

    forge(path, change)


@hostile("distckpt", ("load",))
def a_hundred_thousand_chunks_of_the_same_bytes(path):
    # Files without content on the disk, read again and again.
    def change(fields, columns):
        row, count = int(rows_of(fields, columns, "w")[0]), 100_000
        name = fields["files"][int(columns["file_ids"][row])]
        os.truncate(path / name[0], 1 << 40)
        name[1] = 1 << 40
        fields.update(block_bytes=1 << 20, checksum=None)
        fields["keys"].append("bytes")
        fields["dtypes"].append("U8")
        columns["key_shapes"] = np.concatenate([columns["key_shapes"], [[2**22, 2**18]]])
        columns["key_ndims"] = np.append(columns["key_ndims"], 2)
        added = {
            "key_ids": len(fields["keys"]) - 1,
            "file_ids": columns["file_ids"][row],
            "first_bytes": name[2],
        }
        for column, value in {**added, "num_bytes": 2**39}.items():
            columns[column] = np.concatenate([columns[column], np.full(count, value)])
        columns["offsets"] = np.concatenate([columns["offsets"], np.zeros((count, 2), np.int64)])
        columns["shapes"] = np.concatenate([columns["shapes"], np.full((count, 2), [2**21, 2**18])])
        columns["block_checksums"] = columns["block_checksums"][:0]

    forge(path, change)


@hostile("distckpt", ("load",))
def no_checksums_and_tiny_blocks(path):
    def change(fields, columns):
        name = fields["files"][0]
        os.truncate(path / name[0], 1 << 40)
        name[1] = 1 << 40
        fields.update(block_bytes=16, checksum=None)
        columns["num_bytes"][columns["file_ids"] == 0] = 1 << 39
        columns["block_checksums"] = columns["block_checksums"][:0]
        fields["dtypes"] = ["OBJECT"] * len(fields["keys"])

    forge(path, change)


@hostile("distckpt", ())
def very_many_keys(path):
    def change(fields, columns):
        keys = [f"layers.{i}.{'x' * 20}" for i in range(20_000)]
        fields["dtypes"] += ["F32"] * len(keys)
        fields["keys"] += keys
        columns["key_shapes"] = np.concatenate(
            [columns["key_shapes"], np.ones((len(keys), 2), np.int64)]
        )
        columns["key_ndims"] = np.concatenate([columns["key_ndims"], np.full(len(keys), 2)])

    forge(path, change)


KEYS = {
    "control characters": "\x1b[2J\x1b]0;title\x07\r\n",
    "lone surrogate": "\ud800",
    "digits without end": "9" * 100_000,
    "braces": "{0}{a.b}%s%n",
    "markup": "[red]x[/red]",
    "path": "../../../etc/passwd",
    "name of common state": "distckpt.common_state",
}


@hostile("distckpt", (), KEYS)
def a_key_of(path, key):
    def change(fields, columns):
        fields["keys"][fields["keys"].index("w")] = key

    forge(path, change)


@hostile("distckpt", ())
def fields_that_nest(path):
    forge(
        path,
        lambda fields, columns: fields.__setitem__(
            "origin", json.loads('{"a":' + "[" * 900 + "]" * 900 + "}")
        ),
    )


# ---- encoded objects


def colliding(count):
    """Make different numbers whose hashes are equal."""
    return [{"$complex": [float(-1000003 * i), float(i)]} for i in range(count)]


OBJECTS = {
    "code": object_of({"$object": ["os.system", "touch harm"]}),
    "global": object_of({"$global": "os.system"}),
    "python tag": object_of(
        {"py/object": "os.system", "__reduce__": ["os.system", ["touch harm"]]}
    ),
    "nesting": object_of("[" * 50_000 + "]" * 50_000),
    "nesting of tags": object_of('{"$tuple":[' * 5_000 + "]}" * 5_000),
    "tensor larger than its bytes": object_of({"$tensor": ["float32", [2**40], 0]}, [b"1234"]),
    "tensor of no bytes and overflowing shape": object_of(
        {"$tensor": ["float32", [2**40, 0, 2**40], 0]}, [b""]
    ),
    "tensor of very many axes": Later(
        lambda: object_of({"$tensor": ["float32", [2**61] * 300_000 + [0], 0]}, [b""])
    ),
    "entry used often": object_of([{"$bytes": 0}] * 10_000, [bytes(10**6)]),
    "text of huge items": object_of({"$ndarray": ["<U1000000000", [0], 0]}, [b""]),
    "scalar of huge items": object_of({"$numpy": ["<U1000000000", {"$bytes": ""}]}),
    "range": object_of({"$tuple": [{"$range": [0, 10**18, 1]}]}),
    "set of equal hashes": Later(lambda: object_of({"$set": colliding(60_000)})),
    "dict of equal hashes": Later(
        lambda: object_of({"$dict": [x for key in colliding(60_000) for x in (key, 1)]})
    ),
    "device": object_of({"$torch.device": "cuda:999"}),
    "path": object_of({"$path": ["PosixPath", "/etc/passwd"]}),
    "defaultdict of eval": object_of({"$defaultdict": ["eval", {}]}),
    "hidden attribute": object_of({"$SimpleNamespace": {"__class__": 1, "__reduce_ex__": 2}}),
    "other version": object_of(None, codec_version="2"),
    "million empty lists": Later(lambda: object_of("[" + ",".join(["[]"] * 10**6) + "]")),
    "no table": b"\0" * 8,
    "header beyond the end": struct.pack("<Q", 2**63) + b"{}",
    "pickle": pickle.dumps({"a": 1}),
    "zip": b"PK\3\4" + bytes(100),
}


@hostile("distckpt", (), OBJECTS)
def an_object(path, blob):
    with_object(path, blob)


# ---- Hugging Face directories


def sharded(shape, offset, global_shape=None):
    """Return a file with one tensor that is a part of a larger one."""
    metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": offset}})}
    if global_shape is not None:
        metadata["distckpt_global_shapes"] = json.dumps({"w": global_shape})
    num_bytes = 4 * math.prod(shape)
    return file_of({"__metadata__": metadata, "w": entry(shape, 0, num_bytes)}, bytes(num_bytes))


HEADERS = {
    "length of 2**63": file_of({}, length=2**63),
    "negative length": file_of({}, length=-1),
    "length beyond the file": file_of({}, length=3),
    "length of 100 MB": file_of({}, length=10**8),
    "no length": b"1234",
    "bytes beyond the file": file_of({"w": entry([4, 6], 0, 96)}, bytes(95)),
    "bytes after the end": file_of({"w": entry([4, 6], 0, 96)}, bytes(97)),
    "overlap": file_of({"w": entry([4, 6], 0, 96), "x": entry([4], 80, 96)}, bytes(96)),
    "gap": file_of({"w": entry([4, 6], 0, 96), "x": entry([4], 100, 116)}, bytes(116)),
    "negative position": file_of({"w": entry([4, 6], -96, 0)}, bytes(96)),
    "position of 2**63": file_of({"w": entry([4, 6], 2**63, 2**63 + 96)}, bytes(96)),
    "positions that swap": file_of({"w": entry([4, 6], 96, 0)}, bytes(96)),
    "key twice": file_of(
        b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b'"x":1}', bytes(4)
    ),
    "shape whose product is 2**64": file_of({"w": entry([2**32, 2**32], 0, 0)}),
    "shape whose product is 2**64 and something": file_of(
        {"w": entry([2**32, 2**32 + 1], 0, 2**34)}
    ),
    "negative shape": file_of({"w": entry([-4, -6], 0, 96)}, bytes(96)),
    "shape of fractions": file_of({"w": entry([4.0, 6], 0, 96)}, bytes(96)),
    "very many axes": Later(lambda: file_of({"w": entry([2**61] * 300_000 + [0], 0, 0)})),
    "many axes": file_of({"w": entry([1] * 65, 0, 4)}, bytes(4)),
    "nesting": file_of(b'{"w":' + b"[" * 10**6 + b"]" * 10**6 + b"}"),
    "dtype of another": file_of({"w": entry([4, 6], 0, 96, "os.system")}, bytes(96)),
    "metadata of numbers": file_of(
        {"__metadata__": {"a": 1}, "w": entry([4, 6], 0, 96)}, bytes(96)
    ),
    "sharding that nests": file_of(
        {"__metadata__": {"DCP_SHARDING_INFO": "[" * 10**5}, "w": entry([4, 6], 0, 96)}, bytes(96)
    ),
    "offset of 2**61": sharded([4, 6], [2**61, 0]),
    "offset of 10**30": sharded([4, 6], [10**30, 0]),
    "negative offset": sharded([4, 6], [-1, 0]),
    "global shape of 10**30": sharded([4, 6], [0, 0], [10**30, 6]),
    "global shape of 2**61": sharded([4, 6], [0, 0], [2**61, 2**61]),
    "thirty divided axes": sharded([1] * 30, [1] * 30),
    "thirty divided axes of more": sharded([1] * 30, [0] * 30, [2] * 30),
    "sixty axes": sharded([1] * 60, [0] * 60, [2] * 60),
    "a hole": sharded([4, 6], [0, 0], [8, 6]),
    "text": b"#!/bin/sh\ntouch harm\n",
}


@hostile("hf", ("load", "load_plain_tensors", "consolidate"), HEADERS)
def a_header(path, data):
    (path / "model.safetensors").write_bytes(data)


@hostile("hf", ())
def very_many_entries(path):
    header = {f"layers.{i}.weight": entry([1], 4 * i, 4 * i + 4) for i in range(10_000)}
    (path / "model.safetensors").write_bytes(file_of(header, bytes(4 * 10_000)))


INDEX_NAMES = {
    name: file if file.endswith(".safetensors") else file + ".safetensors"
    for name, file in {
        **FILE_NAMES,
        "beside": "../beside/model.safetensors",
        "pipe": "/dev/fd/0",
    }.items()
    if name not in ("home", "byte that is no text")
}


@hostile("hf", ("load", "load_plain_tensors", "consolidate"), INDEX_NAMES)
def an_index_that_names(path, name):
    index = json.dumps({"weight_map": {"w": name, "x": "model.safetensors"}})
    (path / "model.safetensors.index.json").write_text(index)


@hostile("hf", ("load", "load_plain_tensors", "consolidate"))
def a_hugging_face_file_that_lies_outside(path):
    shutil.move(path / "model.safetensors", path.parent / "outside.safetensors")
    index = {"weight_map": {"w": "../outside.safetensors", "x": "../outside.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


INDICES = {
    "nesting": "[" * 10**6,
    "list": '{"weight_map": ["model.safetensors"]}',
    "numbers": '{"weight_map": {"w": 1}}',
    "objects": '{"weight_map": {"w": {"a": 1}}}',
    "nothing": "{}",
    "many keys": Later(
        lambda: json.dumps({"weight_map": {f"k{i}": "model.safetensors" for i in range(10**5)}})
    ),
    "bytes that are no text": "\xff\xfe",
}


@hostile("hf", ("load", "load_plain_tensors", "consolidate"), INDICES)
def an_index_of(path, text):
    (path / "model.safetensors.index.json").write_text(text, encoding="latin-1")


# ---- quantised tensors


def quantized(config=None, codes=("w", "I8", [4, 6]), scale=("w_scale", "F32", [4, 1]), others=()):
    """Return a header with codes of `w` and their scales, data of the right values, and a
    configuration.
    """
    header, body = {}, b""
    for name, dtype, shape in (codes, scale, *others):
        data = (
            bytes(range(24)) if dtype == "I8" else np.ones(math.prod(shape), np.float32).tobytes()
        )
        data = data if math.prod(shape) else b""
        header[name] = entry(shape, len(body), len(body) + len(data), dtype)
        body += data
    return {
        "model.safetensors": file_of(header, body),
        "config.json": json.dumps(config or {}).encode(),
    }


def settings(dtype="float32", **config):
    return {"dtype": dtype, "quantization_config": {"quant_method": "fp8", **config}}


QUANTIZED = {
    "a module as dtype": quantized(settings("onnx")),
    "a list as dtype": quantized(settings("__all__")),
    "a dtype of integers": quantized(settings("int8")),
    "blocks of 10**30": quantized(settings(group_size=10**30, weight_block_size=[10**30, 10**30])),
}


@hostile("hf", (), QUANTIZED)
def a_quantized_directory_with(path, files):
    for name, data in files.items():
        (path / name).write_bytes(data)


QUANTIZED_SHAPES = {
    "2**64 codes of no bytes": quantized(
        settings(), ("w_packed", "I32", [0, 2**61]), ("w_scale", "F32", [1, 1])
    ),
    "several global scales": quantized(settings(), others=[("w_scale_2", "F32", [5])]),
}


@hostile("hf", ("load",), QUANTIZED_SHAPES)
def quantized_tensors_with(path, files):
    a_quantized_directory_with(path, files)


# ---- checkpoints of PyTorch and Megatron Core


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), PICKLES)
def a_metadata_pickle(path, data):
    (path / ".metadata").write_bytes(data)


def change_metadata(path, change):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@hostile(
    "dcp",
    ("load", "load_plain_tensors", "consolidate"),
    {k: v for k, v in FILE_NAMES.items() if k != "home"},
)
def an_item_in(path, name):
    def change(metadata: Metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change_metadata(path, change)


@hostile(
    "dcp",
    ("load", "load_plain_tensors", "consolidate"),
    {str(n): n for n in (-1, 2**40, 2**62, 2**63, 10**30, 1.5)},
)
def an_item_at(path, number):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.offset = number

    change_metadata(path, change)


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"))
def a_distcp_file_that_lies_outside(path):
    shutil.move(path / "__0_0.distcp", path.parent / "outside")
    an_item_in(path, "../outside")


DAG = ()
for _ in range(60):
    DAG = (DAG, DAG)

DCP_SHAPES = {
    "tuples in tuples": DAG,
    "very many axes": (2**61,) * 10**5,
    "a hundred axes": (1,) * 100,
    "2**61": (2**61, 2**61),
    "10**30": (10**30, 6),
    "negative": (-4, 6),
    "text": ("4", 6),
}


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), DCP_SHAPES)
def a_tensor_of_size(path, size):
    change_metadata(path, lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", size))


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), DCP_SHAPES)
def a_tensor_and_chunk_of_size(path, size):
    def change(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = size
        entry.chunks[0].offsets = (0,) * len(size)
        (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
        metadata.storage_data[MetadataIndex("w", (0,) * len(size))] = metadata.storage_data.pop(
            index
        )

    change_metadata(path, change)


@hostile("dcp", ("load", "load_plain_tensors", "consolidate"), {"30": 30, "60": 60})
def a_tensor_divided_along_axes(path, ndim):
    def change(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.size, entry.chunks[0].sizes, entry.chunks[0].offsets = (
            (2,) * ndim,
            (1,) * ndim,
            (0,) * ndim,
        )
        (index,) = [index for index in metadata.storage_data if index.fqn == "w"]
        metadata.storage_data[MetadataIndex("w", (0,) * ndim)] = metadata.storage_data.pop(index)

    change_metadata(path, change)


PLAIN = torch_saved({"a": torch.ones(2)})
ARCHIVES = {
    **{
        f"pickle: {name}": zip_of({"a/data.pkl": data, "a/version": b"3"})
        for name, data in PICKLES.items()
    },
    "a real call": torch_saved(Call(os.system, ("touch harm",))),
    "factory of tuples in tuples": zip_of(
        {"a/data.pkl": b"\x80\x02ccollections\ndefaultdict\n" + tuples(60) + b"\x85R."}
    ),
    "encoding of tuples in tuples": zip_of(
        {"a/data.pkl": b"\x80\x02c_codecs\nencode\nX\1\0\0\0a" + tuples(60) + b"\x86R."}
    ),
    "the same bytes again and again": Later(lambda: zip_of({"a/data.pkl": array_calls(100_000)})),
    "compressed": Later(
        lambda: zip_of({"a/data.pkl": b"\x80\x02]" + b"N" * 10**8 + b"."}, zipfile.ZIP_DEFLATED)
    ),
    "name twice": zip_of({"a/data.pkl": b"\x80\x02N.", "b/data.pkl": b"\x80\x02]."}),
    "storage elsewhere": PLAIN.replace(b"X\x01\0\0\x000q", b"X\x01\0\0\x00/q"),
    "directory beyond the end": zip_of({"a/data.pkl": b"\x80\x02N."})[:-10]
    + b"\xff\xff\xff\x7f" * 2
    + b"\0\0",
    "pickle as it is": pickle.dumps({"a": 1}),
    "old torch.save": torch.save.__doc__.encode(),
    "nothing": b"",
}


HARMLESS = (
    "pickle: memo of two billion",
    "pickle: frame of 2**63",
    "pickle: number of 100000 digits",
)


@hostile(
    "dcp", ("load_common_state_dict",), {k: v for k, v in ARCHIVES.items() if k not in HARMLESS}
)
def a_common_state_archive(path, data):
    # Megatron's layout: a marker, and common state in a file of its own.
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    (path / "common.pt").write_bytes(data)

    def change(metadata):
        for name in [
            n for n, stored in metadata.state_dict_metadata.items() if not hasattr(stored, "chunks")
        ]:
            del metadata.state_dict_metadata[name]

    change_metadata(path, change)


@hostile("dcp", (), {k: ARCHIVES[k] for k in HARMLESS})
def a_harmless_archive(path, data):
    a_common_state_archive(path, data)


@hostile("dcp", ())
def an_archive_with_names_that_lead_elsewhere(path):
    a_common_state_archive(
        path, zip_of({"a/data.pkl": b"\x80\x02N.", "a/../../harm": b"x", "/harm": b"x"})
    )


@hostile(
    "dcp",
    ("load", "load_plain_tensors"),
    {k: v for k, v in ARCHIVES.items() if k[:6] != "pickle" or "system" in k},
)
def a_tensor_archive(path, data):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(data)

    (path / "__0_0.distcp").write_bytes(data)
    change_metadata(path, change)


OBJECT_NAMES = {
    "huge offset": "o/shard_1000000000000000000000000000000_2",
    "huge shape": "o/shard_0_99999999999999999999999999999999",
    "offset of many digits": "o/shard_" + "9" * 5000 + "_1",
    "very many axes": "o/shard_" + ".".join("0" * 50_000) + "_" + ".".join("1" * 50_000),
    "outside": "o/shard_5_2",
    "path": "../../beside/shard_0_1",
    "no shard": "o",
}


@hostile("dcp", (), OBJECT_NAMES)
def an_object_named(path, name):
    def change(metadata):
        (old,) = [n for n in metadata.state_dict_metadata if n == "n.step"]
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(old)
        (index,) = [index for index in metadata.storage_data if index.fqn == old]
        metadata.storage_data[MetadataIndex(name)] = metadata.storage_data.pop(index)

    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    change_metadata(path, change)


# ---- all of them


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in IN_LONG_FORM else []) for n in CASES],
)
def test_hostile_directories_do_no_harm(reader, templates, tmp_path, name):
    kind, make_hostile, refused = CASES[name]
    path = tmp_path / "in" / "c"
    shutil.copytree(templates / kind, path)
    # What a file name that leads elsewhere would find.
    shutil.copytree(templates / kind, tmp_path / "secret")
    shutil.copytree(templates / kind, tmp_path / "in" / "beside")
    before = {
        file: file.read_bytes() for file in (tmp_path / "secret").rglob("*") if file.is_file()
    }
    make_hostile(path)
    outcomes = reader(path)
    assert list(outcomes) == list(VERBS), (
        f"did not end: {next(iter(VERBS.keys() - outcomes.keys()))}"
    )
    for verb, outcome in outcomes.items():
        assert outcome["is_documented"], f"{verb}: {outcome['text']}"
        assert not outcome["events"], f"{verb}: {outcome['events']}"
        named = (
            str(path) in outcome["text"]
            or "No safetensors file can hold the name" in outcome["text"]
        )
        assert named or not outcome["error"], f"{verb} names no file: {outcome['text']}"
        assert len(outcome["text"]) < 5000
    assert {verb for verb in refused if not outcomes[verb]["error"]} == set()
    assert {
        file: file.read_bytes() for file in (tmp_path / "secret").rglob("*") if file.is_file()
    } == before
    assert not (tmp_path / "in" / "harm").exists()
