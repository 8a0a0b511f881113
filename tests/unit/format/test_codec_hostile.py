"""Encoded objects that somebody has changed or made: they are refused, in bounded memory."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import pathlib
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distckpt._base.tree import HOLE
from distckpt._format.codec import decode, encode
from distckpt._format.codec.decode import DECODERS, ENTRY_DECODERS
from distckpt.megatron.core import CorruptCheckpointError, UnsupportedObjectError
from tests.support.codec_objects import Box, Color, Pair, Point, reference_blob, same

SAMPLE = {
    "t": torch.arange(6).reshape(2, 3),
    "n": [np.ones(3), np.float32(1), np.array(["ab"]), np.datetime64(1, "s")],
    "b": [b"x" * 300, bytearray(b"y"), "\ud800", 1 << 80, float("inf"), 1j, slice(1), range(3)],
    "d": {
        1: {2, 3},
        None: (1,),
        "o": collections.OrderedDict(a=1),
        "dd": collections.defaultdict(int, a=1),
    },
    "x": [
        argparse.Namespace(a=1),
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
        pathlib.Path("a"),
    ],
    "y": [
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
        Color.RED,
        Point(1),
        Pair(1),
        Box(1),
        HOLE,
    ],
}


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x00" * 7,
        b"\x00" * 8,
        b"\xff" * 8,
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 2) + b"\xff\xff",
        struct.pack("<Q", 19) + b'{"__metadata__":[]} ',
        encode(1) + b"\x00",
        encode(torch.ones(3))[:-1],
        encode(b"x" * 1000).replace(b'"U8"', b'"I8"'),
        encode(b"x" * 1000).replace(b"[1000]", b"[1001]"),
        encode(b"x" * 1000).replace(b"[0,1000]", b"[1,1000]"),
        encode(b"x" * 1000).replace(b"[0,1000]", b"[0,1e03]"),
        safetensors.numpy.save({"a": np.zeros(3)}),
        safetensors.numpy.save({}, {"codec_version": "1"}),
        safetensors.numpy.save({}, {"codec_version": "1", "tree_entry": "tree"}),
        reference_blob("1", {"00000000": b"unused"}),
        reference_blob('{"$bytes":0}', {"0": b"x"}),
        reference_blob('[{"$bytes":0},{"$bytes":0}]', {"00000000": b"twice"}),
        *(
            reference_blob(text)
            for text in ("", "[", "NaN", "[Infinity]", '{"a":1,"a":2}', "[" * 100_000, "9" * 5000)
        ),
        reference_blob("[" * 900 + "]" * 900),
        reference_blob('{"$tuple":[' * 450 + "]}" * 450),
    ],
    ids=range(31),
)
def test_a_malformed_blob_is_reported(blob: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        decode(blob)


def test_a_blob_of_a_newer_release_says_what_to_install() -> None:
    with pytest.raises(
        CorruptCheckpointError, match=r"codec version 2; .* Install a newer release"
    ):
        decode(reference_blob("[1]", codec_version="2"))


RAW = bytes(range(24))


@pytest.mark.parametrize(
    "tree",
    [
        {"$nonsense": 1},
        {"$": 1},
        {"$tensor": ["float32", [6], 1]},
        {"$tensor": ["float32", [6], "0"]},
        {"$tensor": ["float32", [6], True]},
        {"$tensor": ["float32", [5], 0]},
        {"$tensor": ["float32", [-2, -3], 0]},
        {"$tensor": ["float32", [6.0], 0]},
        {"$tensor": ["float32", 6, 0]},
        {"$tensor": ["float32", [2**40, 2**40], 0]},
        {"$tensor": ["float32", [0, 2**62, 2**62], 0]},
        {"$tensor": ["quint8", [24], 0]},
        {"$tensor": ["os.system", [24], 0]},
        {"$tensor": [["float32"], [6], 0]},
        {"$tensor": ["float32", [6]]},
        {"$tensor": None},
        {"$ndarray": ["<f4", [5], 0]},
        {"$ndarray": ["|O8", [3], 0]},
        {"$ndarray": ["O", [3], 0]},
        {"$ndarray": ["i4,f8", [2], 0]},
        {"$ndarray": ["|V0", [2**40], 0]},
        {"$ndarray": ["<f5", [1], 0]},
        {"$ndarray": ["<f16", [1], 0]},
        {"$ndarray": [[["a", "<f4"]], [6], 0]},
        {"$ndarray": ["<f4", [0] + [2**62] * 3, 0]},
        {"$numpy": ["<f4", {"$bytes": "AAAA"}]},
        {"$numpy": ["<f4", "AAAAAA=="]},
        {"$numpy": ["str_", {"$bytes": ""}]},
        {"$numpy": ["|O8", {"$bytes": "AAAAAAAAAAA="}]},
        {"$bytes": "?"},
        {"$bytes": "AAA"},
        {"$bytes": None},
        {"$bytes": -1},
        {"$str": "////"},
        {"$int": "0xzz"},
        {"$int": 3},
        {"$float": "00"},
        {"$float": "nan"},
        {"$complex": [1.0]},
        {"$complex": ["1", "2"]},
        {"$tuple": "abc"},
        {"$tuple": {"a": 1}},
        {"$set": [[1]]},
        {"$set": [1, 1]},
        {"$frozenset": [{}]},
        {"$dict": [1]},
        {"$dict": [[1], 2]},
        {"$dict": [1, 2, 1, 3]},
        {"$OrderedDict": [1]},
        {"$defaultdict": ["eval", {}]},
        {"$defaultdict": [["list"], {}]},
        {"$defaultdict": ["list", []]},
        {"$Namespace": {"$dict": [1, 2]}},
        {"$Namespace": []},
        {"$slice": []},
        {"$range": [1, 2, 0]},
        {"$range": [1.5, 2, 1]},
        {"$date": [2020, 13, 1]},
        {"$date": [2020]},
        {"$datetime": {}},
        {"$datetime": {"fields": [2020, 1, 1, 0, 0, 0, 0], "fold": 2, "tzinfo": None}},
        {"$datetime": {"fields": [2020, 1, 1, 0, 0, 0, 0], "fold": 0, "tzinfo": "UTC"}},
        {"$timedelta": [10**12, 0, 0]},
        {"$timezone": [{"$timedelta": [5, 0, 0]}]},
        {"$timezone": []},
        {"$path": ["Popen", "a"]},
        {"$path": ["PurePath", 3]},
        {"$path": ["PurePosixPath", 3]},
        {"$torch.dtype": "load"},
        {"$torch.dtype": []},
        {"$torch.device": "nowhere:1"},
        {"$torch.Size": ["a"]},
        {"$hole": 1},
        {"$object": []},
        {"$object": [[], 1]},
    ],
    ids=str,
)
def test_a_malformed_tree_is_reported(tree: object) -> None:
    entry_name = "00000000"
    # An entry that nothing refers to is an error of its own: leave it out where the tree does not
    # use it.
    entries = {entry_name: RAW} if json.dumps(tree).endswith("0]}") or "tensor" in str(tree) else {}
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        decode(reference_blob(tree, entries))


def test_every_truncation_is_reported() -> None:
    blob = encode(SAMPLE)
    assert same(decode(blob), SAMPLE)
    for length in range(len(blob)):
        with pytest.raises(CorruptCheckpointError):
            decode(blob[:length])


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_damaged_blob_raises_nothing_unexpected(data: st.DataObject) -> None:
    blob = bytearray(encode(SAMPLE))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptCheckpointError, UnsupportedObjectError):
        decode(blob)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(
        [
            "float32",
            "<f4",
            "<U3",
            "|V1",
            "str_",
            "list",
            "PosixPath",
            "AAAA",
            "0x1",
            "cpu",
            "tests.Box",
        ]
    )
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.tuples(st.sampled_from(sorted({*DECODERS, *ENTRY_DECODERS})), inner).map(
            lambda i: dict([i])
        )
    ),
    max_leaves=10,
)


@settings(max_examples=250, deadline=None)
@given(json_values)
def test_an_arbitrary_tree_raises_nothing_unexpected(tree: object) -> None:
    with contextlib.suppress(CorruptCheckpointError, UnsupportedObjectError):
        decode(reference_blob(tree, {"00000000": RAW, "00000001": b""}))
