from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import json
import pathlib
import pickle
import random
import re
import struct
import tracemalloc
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distckpt._base.tree import HOLE
from distckpt._format.codec import decode, encode, fingerprints, register_object_type
from distckpt._format.codec.encode import UnknownObject
from distckpt._format.codec.tree import REGISTERED, REGISTERED_NAMES
from distckpt.megatron.core import CorruptCheckpointError, UnsupportedObjectError
from tests.support.codec_objects import Access, Box, Color, Level, Pair, Point, reference_blob, same

# --- Classes that nobody registers ----------------------------------------------------------------


class Text(str):
    """A subclass that nobody registered."""


class Unknown:
    """A class that nobody registered."""


class UnknownColor(enum.IntFlag):
    RED = 1


# --- Round trips ----------------------------------------------------------------------------------

hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]))
    | st.sampled_from(["$tuple", "$", "", "\0", "\ud800\udc00", "$dict"])
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.sampled_from([None, datetime.timezone.utc]))
    | st.timedeltas()
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
    | st.sampled_from([*Color, *Level, Access.READ, Access.READ | Access.WRITE, Access(0)])
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.quint8, torch.device("cuda:1"), torch.Size([2, 0])]
    )
    | st.sampled_from(
        [
            np.float32(0.1),
            np.int64(-3),
            np.bool_(True),
            np.str_("a"),
            np.bytes_(b"a\0"),
            np.uint8(1),
        ]
    )
    | st.sampled_from(
        [pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:\\a"), pathlib.PurePosixPath("")]
    )
)
keys = st.recursive(
    hashable_leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3) | inner.map(Pair)
    ),
    max_leaves=4,
)
array_dtypes = (
    hnp.boolean_dtypes()
    | hnp.integer_dtypes(endianness="?")
    | hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="?", sizes=(64, 128))
    | hnp.datetime64_dtypes()
    | hnp.timedelta64_dtypes()
    | hnp.byte_string_dtypes(min_len=1, max_len=5)
    | hnp.unicode_string_dtypes(min_len=1, max_len=5)
)
leaves = (
    hashable_leaves
    | st.just(HOLE)
    | st.binary(min_size=250, max_size=600)
    | st.binary(max_size=300).map(bytearray)
    | hnp.arrays(array_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
    | hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, min_side=0, max_side=3)).map(
        torch.from_numpy
    )
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(keys, inner, max_size=3)
    # No class lets its `__dict__` be set to just anything.
    attributes = st.dictionaries(
        st.text().filter(lambda name: name != "__dict__"), inner, max_size=3
    )
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | dicts
        | dicts.map(collections.OrderedDict)
        | dicts.map(lambda items: collections.defaultdict(list, items))
        | st.sets(keys, max_size=3)
        | attributes.map(lambda a: argparse.Namespace(**a))
        | attributes.map(lambda a: types.SimpleNamespace(**a))
        | st.builds(slice, inner, inner, inner)
        | st.tuples(inner, inner).map(Pair._make)
        | st.tuples(inner, inner).map(lambda fields: Point(*fields))
        | inner.map(Box)
    )


objects = st.recursive(leaves, containers, max_leaves=12)


@settings(max_examples=120, deadline=None)
@given(objects)
def test_what_is_decoded_is_what_was_encoded(obj: object) -> None:
    blob = encode(obj)
    assert same(decode(blob), obj)
    assert encode(decode(memoryview(blob))) == blob


TENSOR_DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *(
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        ),
    )
    if hasattr(torch, name)
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TENSOR_DTYPES, ids=str)
def test_tensors_of_every_dtype_keep_their_bits(dtype: torch.dtype) -> None:
    bits = torch.randint(
        0, 2 if dtype == torch.bool else 256, (4, 6 * dtype.itemsize), dtype=torch.uint8
    )
    tensor = bits.view(dtype)
    views = [
        tensor,
        tensor.t(),
        tensor[1:3, 2:4],
        tensor[0, 0],
        tensor[:0],
        tensor[:, :0],
        tensor[::2, ::3],
    ]
    restored = decode(encode(views))
    assert isinstance(restored, list)
    for view, copied in zip(views, restored, strict=True):
        assert same(copied, view)
        # Dense, with the axes in the same order in memory.
        assert copied.stride() == (view.stride() if view is views[1] else copied.clone().stride())
        assert copied.is_contiguous() == (view is not views[1])


def test_the_order_of_axes_is_beside_the_bytes_and_checked() -> None:
    tensor = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    blob = encode({"a": torch.ones(2), "b": tensor, "part": tensor[:, :1]})
    restored = decode(blob)
    assert isinstance(restored, dict)
    assert torch.equal(restored["b"], tensor)
    assert restored["b"].stride() == tensor.stride()
    assert restored["part"].permute(1, 2, 0).is_contiguous()
    length = int.from_bytes(blob[:8], "little")
    metadata = json.loads(blob[8 : 8 + length])["__metadata__"]
    assert json.loads(metadata["orders"]) == {"1": [1, 2, 0], "2": [1, 2, 0]}
    for order in (b"[1,2,1]", b"[1,0,3]", b'[1,2,""', b'"1,2,0"'):
        with pytest.raises(CorruptCheckpointError):
            decode(blob.replace(b"[1,2,0]", order))
    # Readers that do not know it have the values.
    ignored = decode(blob.replace(b'"orders"', b'"others"'))
    assert isinstance(ignored, dict)
    assert torch.equal(ignored["b"], tensor)
    assert ignored["b"].is_contiguous()


def test_conjugate_and_negative_views_are_resolved() -> None:
    numbers = torch.tensor([1 + 2j, -3 - 4j])
    restored = decode(encode([numbers.conj(), numbers.conj().imag]))
    assert isinstance(restored, list)
    assert restored[0].tolist() == [1 - 2j, -3 + 4j]
    assert restored[1].tolist() == [-2.0, 4.0]
    assert not restored[0].is_conj()
    assert not restored[1].is_neg()


def test_parameters_come_back_as_plain_tensors() -> None:
    restored = decode(encode(torch.nn.Parameter(torch.ones(3))))
    assert type(restored) is torch.Tensor
    assert not restored.requires_grad


def test_decoded_tensors_and_arrays_own_writable_memory() -> None:
    blob = bytearray(encode([torch.zeros(3), np.zeros(3), bytearray(1000)]))
    tensor, array, raw = decode(memoryview(blob))  # type: ignore[misc]
    blob[:] = b"\xff" * len(blob)
    assert tensor.tolist() == array.tolist() == [0.0] * 3
    assert raw == bytes(1000)
    tensor += 1
    array += 1
    assert tensor.requires_grad_().is_leaf
    assert array.flags.owndata


def test_random_states_can_be_restored() -> None:
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    expected = (random.random(), np.random.random(), torch.rand(1).item())
    python_state, numpy_state, torch_state = decode(encode(states))  # type: ignore[misc]
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize(
    "obj",
    [
        float("nan"),
        struct.unpack("d", struct.pack("Q", 0xFFF8000000000123))[0],
        -0.0,
        5e-324,
        complex(-0.0, float("-inf")),
        10**5000,
        -(10**5000),
        2**63,
        2**64 - 1,
        "\ud800\udc00",
        "\U00010000",
        {"\udc00": 1},
        {1: "int", "1": "str", None: 0, (1, "a"): 2, 1.5: 3, b"b": 4, frozenset({1}): 5},
        {True: "bool"},
        {"$tuple": []},
        {"$tuple": 1, "b": 2},
        {0: {"$x": 1}},
        {frozenset({b"x" * 1000}): 1},
        collections.OrderedDict([(2, 1), (1, 2)]),
        collections.defaultdict(None, {1: 2}),
        collections.defaultdict(collections.Counter, a=collections.Counter("abab")),
        collections.Counter({"a": -1.5, None: 0}),
        [collections.deque([torch.ones(1), 2], maxlen=3), collections.deque()],
        datetime.datetime(
            2020,
            10,
            25,
            1,
            30,
            fold=1,
            tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET"),
        ),
        datetime.timezone(datetime.timedelta(seconds=-1)),
        np.array("2020-01-01", "M8[D]"),
        np.datetime64("NaT", "s"),
        np.float32("nan"),
        np.void(b"abcd"),
        np.str_(""),
        np.str_("a\0"),
        np.bytes_(b"a\0"),
        np.array(["é", ""]),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 3), ">i4"),
        np.arange(4.0)[::-2],
        np.arange(4.0)[::-2][:1],
        np.broadcast_to(np.float32(3), (2, 2)),
        torch.ones(()).expand(2, 3),
        torch.arange(4)[::2][:1],
        torch.ones(1).as_strided((1, 1), (0, 7)),
        torch.arange(9)[4],
        Pair(Point(1), Pair(Color.RED)),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_unusual_values_round_trip(obj: object) -> None:
    assert same(decode(encode(obj)), obj)


def test_a_value_referred_to_twice_is_written_twice() -> None:
    tensor = torch.zeros(1000)
    first, second = decode(encode([tensor, tensor]))  # type: ignore[misc]
    first += 1
    assert second.sum() == 0


def test_hole_is_one_object() -> None:
    assert decode(encode([1, HOLE])) == [1, HOLE]
    assert decode(encode([HOLE]))[0] is HOLE  # type: ignore[index]
    assert copy.copy(HOLE) is copy.deepcopy(HOLE) is pickle.loads(pickle.dumps(HOLE)) is HOLE
    assert repr(HOLE) == "<hole>"


# --- The outer format -----------------------------------------------------------------------------


def test_the_reference_library_reads_the_blob(tmp_path: pathlib.Path) -> None:
    tensor = torch.arange(4, dtype=torch.bfloat16).reshape(2, 2)
    obj = {
        "é": [tensor, '\x00"\\', b"x" * 1000],
        "n": np.arange(3, dtype="<i4"),
        "none": torch.zeros(0),
    }
    path = tmp_path / "object.safetensors"
    path.write_bytes(encode(obj))
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
        names = sorted(file.keys())
        entries = [file.get_tensor(name).tobytes() for name in names]
        assert all(file.get_slice(name).get_dtype() == "U8" for name in names)
    assert metadata.keys() == {"tree", "codec_version"}
    assert metadata["codec_version"] == "1"
    assert json.loads(metadata["tree"]) == {
        "é": [{"$tensor": ["bfloat16", [2, 2], 0]}, '\x00"\\', {"$bytes": 1}],
        "n": {"$ndarray": ["<i4", [3], 2]},
        "none": {"$tensor": ["float32", [0], 3]},
    }
    assert entries == [
        tensor.view(torch.uint8).numpy().tobytes(),
        b"x" * 1000,
        struct.pack("<3i", 0, 1, 2),
        b"",
    ]


def test_a_blob_written_by_the_reference_library_is_read() -> None:
    tree = [{"$tensor": ["int16", [2], 0]}, {"$bytes": 1}]
    blob = reference_blob(tree, {"00000000": struct.pack("<2h", 1, -2), "00000001": b"raw"})
    tensor, raw = decode(blob)  # type: ignore[misc]
    assert tensor.tolist() == [1, -2]
    assert raw == b"raw"


def test_a_tree_too_long_for_a_header_is_an_entry(tmp_path: pathlib.Path) -> None:
    obj = ["\x00" * 3_000_000, torch.ones(2)]
    path = tmp_path / "object.safetensors"
    path.write_bytes(encode(obj))
    with safetensors.safe_open(path, "np") as file:
        assert len(file.get_tensor("tree")) > 6 * 3_000_000
    assert same(decode(path.read_bytes()), obj)


def test_the_bytes_of_a_tensor_are_copied_once() -> None:
    tensor = torch.zeros(4 << 20, dtype=torch.uint8)
    tracemalloc.start()
    blob = encode({"t": tensor})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(blob) <= peak < 1.1 * len(blob)


# --- What cannot be stored ------------------------------------------------------------------------

cyclic: list[object] = [0]
cyclic.append({"back": cyclic})
cyclic_box = Box(None)
cyclic_box.content = [cyclic_box]
nested: object = 0
for _ in range(1000):
    nested = [nested]


@pytest.mark.parametrize(
    ("obj", "parts"),
    [
        (
            {"args": types.SimpleNamespace(optimizer=[0, 1, 2, Unknown()])},
            ["['args'].optimizer[3]", "Unknown"],
        ),
        ([Unknown()], ["register_object_type(Unknown, to_state=..., from_state=...)"]),
        (Unknown(), ["the object of type"]),
        ([Text("a")], ["[0]", "Text", "convert it to str"]),
        (
            {"c": UnknownColor.RED},
            ["['c']", "UnknownColor", "register_object_type(UnknownColor)", "convert it to int"],
        ),
        (Point([Unknown()]), [".x[0]"]),
        (Box(Unknown()), ["[0]"]),
        ({Text("key"): 1}, ["<key>", "Text"]),
        ({(1, Unknown): 1}, ["<key>[1]", "type"]),
        ({"s": {1, Unknown}}, ["['s']<element>", "classes, functions and modules"]),
        ([len], ["[0]", "classes, functions and modules"]),
        ({"t": {torch.ones(1)}}, ["['t']<element>", "Tensor", "set"]),
        (
            collections.defaultdict(lambda: 0),
            ["defaultdict", "default_factory", "Convert it to a dict"],
        ),
        (type("Bag", (dict,), {})(), ["Bag", "convert it to dict"]),
        ([torch.ones(2).to_sparse()], ["[0]", "torch.sparse_coo"]),
        ([torch.ones(2, device="meta")], ["[0]", "meta"]),
        (
            [torch.nn.parameter.UninitializedParameter()],
            ["UninitializedParameter", "ShardedTensor"],
        ),
        ([np.array([None])], ["[0]", "object", "lists"]),
        ([np.zeros(2, [("a", "i4")])], ["[0]", "structured"]),
        ([np.ma.masked_array([1])], ["MaskedArray", "convert it to ndarray"]),
        ([np.longdouble(1)], ["[0]", np.longdouble.__name__]),
        (cyclic, ["[1]['back']", "contains itself"]),
        (cyclic_box, ["[0]", "contains itself"]),
        (nested, ["[0][0]", "containers"]),
    ],
    ids=range(24),
)
def test_an_unsupported_value_is_named_with_its_path(obj: object, parts: list[str]) -> None:
    for function in (encode, fingerprints):
        with pytest.raises(UnsupportedObjectError) as caught:
            function(obj)
        for part in parts:
            assert part in str(caught.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: (inner,),
        lambda inner: {1: inner},
        lambda inner: collections.defaultdict(None, {1: collections.OrderedDict({1: inner})}),
        Pair,
        Box,
    ],
)
def test_what_is_too_deep_to_be_read_is_not_written(wrap: Callable[[object], object]) -> None:
    obj: object = 0
    deepest = b""
    for _ in range(1000):
        obj = wrap(obj)
        try:
            deepest = encode(obj)
        except UnsupportedObjectError:
            break
    else:
        pytest.fail("no limit")
    assert encode(decode(deepest)) == deepest


# --- Registering ----------------------------------------------------------------------------------


def test_registering_the_same_class_again_is_fine() -> None:
    assert register_object_type(Color) is Color
    assert decode(encode(Color.RED)) is Color.RED


def test_registering_refuses_what_is_ambiguous() -> None:
    class Other:
        pass

    with pytest.raises(ValueError, match=r"tests\.Box.*another class"):
        register_object_type(Other, "tests.Box", to_state=vars, from_state=lambda state: Other())
    with pytest.raises(ValueError, match="already"):
        register_object_type(Color, "another name")
    with pytest.raises(ValueError, match="without being registered"):
        register_object_type(dict)
    with pytest.raises(ValueError, match="without being registered"):
        register_object_type(np.float32)
    with pytest.raises(TypeError, match="to_state"):
        register_object_type(Other)
    with pytest.raises(TypeError, match="both"):
        register_object_type(Other, to_state=vars)
    with pytest.raises(TypeError, match="class"):
        register_object_type(3)  # type: ignore[type-var]


class Grade(enum.IntEnum):
    """Needs no registration: this module can be imported."""

    LOW = 1
    HIGH = 2


def test_members_of_an_importable_int_enum_need_no_registration() -> None:
    blob = encode({"level": Grade.HIGH, Grade.LOW: [2]})
    stored = reference_blob({"$object": [f"{__name__}.Grade", "HIGH"]})
    assert decode(stored) is Grade.HIGH
    # In another process.
    REGISTERED.pop(Grade)
    REGISTERED_NAMES.pop(f"{__name__}.Grade")
    decoded = decode(blob)
    assert isinstance(decoded, dict)
    assert decoded["level"] is Grade.HIGH
    assert next(key for key in decoded if key != "level") is Grade.LOW
    for name in (f"{__name__}.Unlevel", "no_such_module.Grade", "enum.IntEnum.LOW", "builtins.int"):
        with pytest.raises(UnsupportedObjectError, match="unknown here"):
            decode(reference_blob({"$object": [name, "HIGH"]}))
    with pytest.raises(UnsupportedObjectError, match="does not fit its class"):
        decode(reference_blob({"$object": [f"{__name__}.Grade", "TOP"]}))
    in_program = enum.IntEnum("Program", {"A": 1}, module="__main__")
    with pytest.raises(UnsupportedObjectError, match=r"register_object_type\(Program\)"):
        encode(in_program.A)


def test_all_classes_that_are_not_registered_are_named_at_once() -> None:
    class Inner:
        pass

    class Outer:
        def __init__(self) -> None:
            self.inner, self.function = Inner(), len

    with pytest.raises(UnsupportedObjectError) as caught:
        encode({"a": [1, Outer()], "b": Unknown(), "c": [Outer(), UnknownColor.RED]})
    text = str(caught.value)
    assert "Cannot store ['a'][1] of type" in text
    assert re.findall(r"register_object_type\((\w+)", text) == [
        "Outer",
        "Inner",
        "Unknown",
        "UnknownColor",
    ]
    assert "['a'][1].inner of type" in text
    assert text.count("Outer") == 2 + text.count("<locals>.Outer") - 1


def test_a_class_unknown_to_the_reader_is_named() -> None:
    with pytest.raises(
        UnsupportedObjectError,
        match=r"at \[0\].*'my\.Thing'.*register_object_type\(cls, name='my\.Thing'\)",
    ):
        decode(reference_blob([{"$object": ["my.Thing", {}]}]))


def unknown(state: object, name: str = "my.Thing") -> dict[str, object]:
    return {"$object": [name, state]}


def test_a_placeholder_is_stored_again_as_it_was_and_used_for_nothing_else() -> None:
    keyed = {"$dict": [unknown("RED", "my.Color"), 1, unknown("BLUE", "my.Color"), 2]}
    tensor = {"$tensor": ["uint8", [2], 0]}
    in_known = {
        "$object": [
            f"{Point.__module__}.Point",
            {"$SimpleNamespace": {"x": unknown({"t": tensor}), "y": []}},
        ]
    }
    tree = ["before", in_known, keyed, {"$set": [unknown("RED", "my.Color")]}]
    obj: Any = decode(reference_blob(tree, {"00000000": b"\x01\x02"}), placeholders=True)
    blob = encode(obj)
    assert (
        json.loads(
            json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]["tree"]
        )
        == tree
    )
    assert blob.endswith(b"\x01\x02")
    assert encode(copy.deepcopy(obj)) == blob
    assert encode(pickle.loads(pickle.dumps(obj))) == blob
    # One that is registered here, but not all that it holds.
    _, point, colors, _ = obj
    assert isinstance(point, UnknownObject)
    assert point.state.x.state["t"].tolist() == [1, 2]
    red = next(iter(colors))
    assert (colors[red], red == copy.deepcopy(red), red == point) == (1, True, False)
    assert not hasattr(point, "x")
    with pytest.raises(AttributeError, match=r"'x'.*'my\.Thing'"):
        point.x  # noqa: B018
    for use in (
        bool,
        int,
        len,
        iter,
        lambda red: red == "RED",
        lambda red: red + 1,
        lambda red: red[0],
    ):
        with pytest.raises(UnsupportedObjectError, match=r"my\.Color"):
            use(red)


def test_a_class_of_the_main_program_is_registered_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cls = dataclasses.make_dataclass("Schedule", ["lr"])
    cls.__module__ = "__main__"
    register_object_type(cls)
    assert "register_object_type(Schedule, 'my_project.Schedule')" in caplog.text
    caplog.clear()
    named = dataclasses.make_dataclass("Named", ["lr"])
    named.__module__ = "__main__"
    register_object_type(named, "tests.Named")
    assert caplog.text == ""


def test_fields_of_other_versions_of_a_class() -> None:
    name = f"{Point.__module__}.Point"

    def stored(fields: dict[str, object]) -> bytes:
        return reference_blob({"$object": [name, {"$SimpleNamespace": fields}]})

    assert decode(stored({"x": 1, "y": 2})) == Point(1, 2)
    assert decode(stored({"x": 1})) == Point(1, [])
    with pytest.raises(UnsupportedObjectError, match=r"Point.*'x'"):
        decode(stored({"y": 1}))
    with pytest.raises(UnsupportedObjectError, match=r"Point.*'z'"):
        decode(stored({"x": 1, "z": 1}))
    with pytest.raises(UnsupportedObjectError, match=r"Color.*GREEN"):
        decode(reference_blob({"$object": [f"{Color.__module__}.Color", "GREEN"]}))


# --- Fingerprints ---------------------------------------------------------------------------------


def test_fingerprints_name_the_leaves() -> None:
    obj = {
        "args": {"lr": 0.1, "a.b": 1, "0": 2, "": 3},
        "rng": [1, (2, 3)],
        0: {None: 1},
        "empty": {},
        "t": {1: []},
    }
    assert fingerprints(obj).keys() == {
        *(
            "args.lr",
            'args["a.b"]',
            'args["0"]',
            'args[""]',
            "rng[0]",
            "rng[1]",
            "0[null]",
            "empty",
            "t.1",
        )
    }
    assert fingerprints([]).keys() == fingerprints(3).keys() == {""}
    assert all(len(digest) == 16 and int(digest, 16) >= 0 for digest in fingerprints(obj).values())


@settings(max_examples=100, deadline=None)
@given(objects, objects)
def test_fingerprints_agree_exactly_for_equal_objects(a: object, b: object) -> None:
    assert fingerprints(a) == fingerprints(decode(encode(a)))
    if encode(a) != encode(b) and not isinstance(a, dict):
        assert fingerprints(a) != fingerprints(b)


def test_fingerprints_tell_which_entries_differ() -> None:
    def state(**changed: object) -> dict[str, object]:
        return {
            "step": 1,
            "w": [torch.ones(3), np.zeros(2)],
            "big": b"x" * 1000,
            "i": {"x": [1]},
            **changed,
        }

    def differing(other: dict[str, object]) -> list[str]:
        a, b = fingerprints(state()), fingerprints(other)
        return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))

    assert differing(state()) == []
    assert differing(state(step=1.0)) == ["step"]
    assert differing(state(step=True)) == ["step"]
    assert differing(state(w=[torch.ones(3), np.full(2, 1e-300)])) == ["w[1]"]
    assert differing(state(big=b"x" * 999 + b"y")) == ["big"]
    assert differing(state(i={"x": {0: 1}})) == ["i.x.0", "i.x[0]"]
    assert differing(dict(reversed(state().items()))) == []
