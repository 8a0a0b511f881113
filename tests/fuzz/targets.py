"""What is fuzzed: every reader of bytes that somebody else may have written.

A target gets bytes and either makes something usable of them, or raises the error that it
documents. Anything else (another error, a crash, a hang, an answer that contradicts itself) is a
finding.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import CheckpointingException, ShardedObject, ShardedTensor
from distckpt._checkpoint import opening
from distckpt._foreign import hugging_face
from distckpt._foreign.torch_dist import metadata as torch_dist_metadata
from distckpt._foreign.torch_dist.objects import read_object
from distckpt._foreign.torch_dist.reader import TorchDistReader
from distckpt._foreign.torch_dist.unpickle import RefusedGlobalError
from distckpt._format import codec, safetensors_file
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.manifest_reading import manifest_from_bytes
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import whole
from distckpt._plan.load import Request, plan_load
from distckpt._ranks.collectives import Ranks
from distckpt.cli._grid import list_files
from distckpt.cli._groups import group_keys
from distckpt.cli._summary import summarize
from distckpt.megatron import core
from tests.support.manifests import example_manifest

Run = Callable[[bytes], None]

WEIGHT = torch.arange(24.0).view(4, 6)
"""The tensor `w` of every example."""


class Target(NamedTuple):
    """A reader to be fuzzed.

    Attributes:
        name: of the target and of the folder of its corpus.
        prepare: puts what the reader needs into an empty folder; returns valid inputs, and what to
            call with an input.
        max_bytes: of an input that a fuzzer makes.
    """

    name: str
    prepare: Callable[[Path], tuple[list[bytes], Run]]
    max_bytes: int = 8192


@contextlib.contextmanager
def documented_errors(location: object = "") -> Iterator[None]:
    """Accept errors of this package that name the location."""
    text = str(location)
    try:
        yield
    except CheckpointingException as error:
        text = str(error)
    assert str(location) in text, f"{location!s} is not named: {text}"
    assert len(text) < 20_000


# ---- the manifest

NASTY = [
    0,
    1,
    -1,
    2,
    5,
    16,
    64,
    2**16,
    2**20,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64 - 1,
    10**30,
]
SHAPES: list[tuple[int, ...]] = [(-1,), (-1, 1), (1, -1), (1, -1, 1), (0, -1), (-1, 0)]
KINDS = [np.int64, np.uint64, np.int8, np.float32, np.bool_]
TEXTS = [
    "",
    "a",
    "a.1",
    "/",
    "..",
    "../x",
    "/etc/passwd",
    "tensors/a",
    "tensors/a/b",
    "x\0",
    "\ud800",
    "n" * 300,
    "9" * 5000,
]
JSON_VALUES: list[Any] = [
    None,
    True,
    1.5,
    float("inf"),
    float("nan"),
    [],
    {},
    [[]],
    {"a": "a"},
    *TEXTS,
    *NASTY,
]


def use_manifest(data: bytes) -> None:
    """Open a manifest, and do with it what readers do."""
    with documented_errors("here"):
        manifest = manifest_from_bytes(data, "here")
        assert manifest_from_bytes(manifest.to_bytes(), "here").to_bytes() == manifest.to_bytes()
        for row in range(min(len(manifest.key_ids), 50)):
            region = manifest.chunk_region(row)
            shape = manifest.global_shapes[manifest.key_ids[row]]
            assert all(
                0 <= o <= o + n <= size
                for o, n, size in zip(region.offset, region.shape, shape, strict=True)
            )
        summarize(StoredCheckpoint("here", manifest))
        group_keys(manifest)
        list_files(manifest)
        for key, key_id in list(manifest.key_index.items())[:20]:
            shape = manifest.global_shapes[key_id]
            copies = plan_load(
                StoredCheckpoint("here", manifest), [Request(key, shape, whole(shape))]
            )
            assert sum(copy.target.num_elements for copy in copies) == whole(shape).num_elements


def _manifest(folder: Path) -> tuple[list[bytes], Run]:
    empty = Manifest([], [], [], ChunkTable.empty(), {}, 64)
    return [example_manifest().to_bytes(), empty.to_bytes()], use_manifest


def _json_value(number: int) -> Any:
    return copy.deepcopy(JSON_VALUES[number % len(JSON_VALUES)])


def edit_manifest(edits: bytes) -> bytes:  # noqa: C901 one branch a kind of edit
    """Change a valid manifest: each 4 bytes of `edits` say what, where, where within and to which
    value.
    """
    columns = safetensors.numpy.load(example_manifest().to_bytes())
    fields = json.loads(columns.pop("json").tobytes())
    for what, where, within, value in zip(*(edits[i::4] for i in range(4)), strict=False):
        name = sorted(columns)[where % len(columns)]
        column = columns[name]
        if what % 6 == 0 and column.size:
            number = NASTY[value % len(NASTY)] % 2**64
            column = np.ascontiguousarray(column)
            wrapped = np.array(number, np.uint64).astype(column.dtype)
            column.reshape(-1)[within % column.size] = wrapped
        elif what % 6 == 1:
            column = (
                column[: len(column) - 1] if within % 2 else np.concatenate([column, column[-1:]])
            )
        elif what % 6 == 2:
            shape = SHAPES[value % len(SHAPES)]
            with contextlib.suppress(ValueError):
                column = column.reshape(shape)
        elif what % 6 == 3 and column.size:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                column = column.astype(KINDS[value % len(KINDS)])
        elif what % 6 == 4:
            fields[sorted(fields)[where % len(fields)]] = _json_value(value)
        elif what % 6 == 5:
            entries = fields[sorted(fields)[where % len(fields)]]
            target = (
                entries[within % len(entries)] if type(entries) is list and entries else entries
            )
            if type(target) is list and target:
                target[(within >> 4) % len(target)] = _json_value(value)
            elif type(entries) is list and entries:
                entries[within % len(entries)] = _json_value(value)
            elif type(entries) is dict:
                entries[str(TEXTS[within % len(TEXTS)])] = _json_value(value)
        columns[name] = column if column.ndim else columns[name]
    columns = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    return safetensors.numpy.save(
        {**columns, "json": np.frombuffer(json.dumps(fields).encode(), np.uint8)}
    )


def _manifest_fields(folder: Path) -> tuple[list[bytes], Run]:
    seeds = [
        bytes([what, where, within, value])
        for what in range(6)
        for where in range(9)
        for within, value in [(0, 0), (1, 1), (2, 4), (0, 8)]
    ]
    return [b"", *seeds], lambda data: use_manifest(edit_manifest(data[:32]))


# ---- safetensors files


def _shard_header(folder: Path) -> tuple[list[bytes], Run]:
    def run(data: bytes) -> None:
        # The one internal reader here: its callers turn ValueError into errors that name the file.
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            length = safetensors_file.header_length(data, len(data))
            _, entries = safetensors_file.parse_header(data[:length], len(data))
            assert sum(entry.num_bytes for entry in entries) == len(data) - length
            torch_reads = {name: tuple(tensor.shape) for name, tensor in _reference(data).items()}
            assert torch_reads.items() <= {entry.name: entry.shape for entry in entries}.items()

    return _safetensors_seeds(), run


def _reference(data: bytes) -> dict[str, torch.Tensor]:
    """Read with the reference implementation; nothing where it refuses (we accept a little
    more).
    """
    try:
        return safetensors.torch.load(data)
    except Exception:
        return {}


def _safetensors_seeds() -> list[bytes]:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.tensor([True]),
        "c": torch.zeros(0, 3),
        "d": torch.tensor(2),
    }
    info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}}), "format": "pt"}
    shapes = {**info, "distckpt_global_shapes": json.dumps({"a": [2, 3]})}
    plain = safetensors.torch.save(tensors, {"format": "pt"})
    return [
        plain,
        *(safetensors.torch.save({"a": tensors["a"]}, meta) for meta in (info, shapes)),
        safetensors.torch.save({}),
    ]


def _hf_file(folder: Path) -> tuple[list[bytes], Run]:
    def run(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        with documented_errors(folder):
            tensors = distckpt.open(folder).read_tensors()
            assert sum(tensor.nbytes for tensor in tensors.values()) <= len(data)

    return _safetensors_seeds(), run


def _hf_index(folder: Path) -> tuple[list[bytes], Run]:
    for name, key in (
        ("model-00001-of-00002.safetensors", "a"),
        ("model-00002-of-00002.safetensors", "b"),
    ):
        (folder / name).write_bytes(safetensors.torch.save({key: torch.arange(4.0)}))
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 32}, "weight_map": weight_map}

    def run(data: bytes) -> None:
        (folder / "model.safetensors.index.json").write_bytes(data)
        with documented_errors(folder):
            assert set(hugging_face.read_directory(str(folder)).keys) <= {"a", "b"}

    return [
        json.dumps(index).encode(),
        json.dumps({"weight_map": {"a": weight_map["a"]}}).encode(),
    ], run


# ---- checkpoints of this package


def save_example(path: Path) -> None:
    """Save a checkpoint with tensors in two chunks, an object and common state."""
    state: dict[str, Any] = {
        str(i): ShardedTensor.from_rank_offsets("w", WEIGHT[:, 3 * i : 3 * i + 3], (1, i, 2))
        for i in range(2)
    }
    distckpt.save({**state, "o": ShardedObject("o", {"n": 1}, (1,), (0,)), "step": 7}, path)


def _marker(folder: Path) -> tuple[list[bytes], Run]:
    save_example(folder / "c")
    path = folder / "c" / core.CONFIG_FNAME
    marker = path.read_bytes()
    megatron = (
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
        b'"common_backend": "torch"}'
    )

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with documented_errors(folder):
            distckpt.megatron.check_is_distributed_checkpoint(folder / "c")
            assert opening.open_checkpoint(Ranks.alone(), str(folder / "c")).manifest.keys
            assert distckpt.open(folder / "c").common_state == {"step": 7}

    return [
        marker,
        megatron,
        marker.replace(b'"manifest"', b'"manager": {"step": 3}, "manifest"'),
    ], run


def example_object() -> dict[str, Any]:
    """Make an object of many of the types that the codec knows."""
    return {
        "step": 7,
        "lr": 1e-3,
        "text": "\ud800",
        "none": None,
        3: (1, 2),
        "inf": float("inf"),
        "big": 2**70,
        "set": {1, "a"},
        "frozen": frozenset({2}),
        "bytes": b"abc",
        "long": bytearray(300),
        "complex": 1j,
        "tensor": torch.arange(6).view(2, 3),
        "array": np.arange(4.0),
        "scalar": np.float32(1.5),
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "path": Path("/tmp"),
        "range": range(3),
        "slice": slice(1, None),
        "text scalar": np.str_("x"),
    }


def _codec_blob(folder: Path) -> tuple[list[bytes], Run]:
    def run(data: bytes) -> None:
        with documented_errors():
            blob = codec.encode(codec.decode(data))
            assert codec.encode(codec.decode(blob)) == blob

    return [
        codec.encode(obj) for obj in (example_object(), None, [1, {"a": "b"}], torch.zeros(2))
    ], run


def _codec_tree(folder: Path) -> tuple[list[bytes], Run]:
    whole_blob = codec.encode(example_object())
    header_bytes = safetensors_file.header_length(whole_blob, len(whole_blob))
    metadata, _ = safetensors_file.parse_header(whole_blob[:header_bytes], len(whole_blob))
    entries = {f"{i:08}": bytes(n) for i, n in enumerate((0, 1, 8, 24, 300))}

    def run(data: bytes) -> None:
        tree = data.decode("utf-8", "replace")
        used = {
            name: raw
            for name, raw in entries.items()
            if f"{int(name)}]" in tree or f": {int(name)}" in tree
        }
        with documented_errors():
            blob = safetensors_file.join_file(
                used, {"codec_version": codec.CODEC_VERSION, "tree": tree}
            )
            again = codec.encode(codec.decode(blob))
            assert codec.encode(codec.decode(again)) == again

    tags = [
        '{"$tensor":["float32",[2,3],3]}',
        '{"$ndarray":["<f8",[1],2]}',
        '{"$bytes":0}',
        '{"$tuple":[1,{"$set":[1,2]}]}',
        '{"$datetime":{"fields":[2020,1,1,0,0,0,0],"fold":0,"tzinfo":null}}',
        '{"$dict":[1,2,{"$tuple":[1]},3]}',
        '{"$numpy":["<U4",{"$bytes":"YQAAAA=="}]}',
        '{"$object":["a.b",{"x":1}]}',
        '{"$int":"0x123456789abcdef01"}',
        '{"$defaultdict":["list",{"a":[1]}]}',
        '{"$timezone":[{"$timedelta":[0,3600,0]}]}',
        '{"$path":["PosixPath","/a"]}',
        '{"$SimpleNamespace":{"a":1}}',
        '{"$float":"7ff8000000000000"}',
        '{"$range":[0,3,1]}',
        '{"$slice":[1,2,null]}',
    ]
    return [metadata["tree"].encode("utf-8", "surrogatepass"), *(tag.encode() for tag in tags)], run


# ---- checkpoints of PyTorch and Megatron Core


def save_dcp(path: Path) -> None:
    """Let PyTorch save a checkpoint of tensors and values."""
    state = {"w": WEIGHT, "n": {"step": 3, "list": [1, torch.arange(4)]}}
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def _dcp_metadata_file(folder: Path) -> tuple[list[bytes], Run]:
    save_dcp(folder / "dcp")
    path = folder / "m" / ".metadata"
    path.parent.mkdir()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with documented_errors(path):
            metadata = torch_dist_metadata.read_metadata(str(path))
            assert all(
                len(region.shape) == len(t.shape)
                for t in metadata.tensors
                for region, _ in t.chunks
            )

    return [(folder / "dcp" / ".metadata").read_bytes(), *HOSTILE_PICKLES], run


HOSTILE_PICKLES = [
    b"cos\nsystem\n(S'x'\ntR.",
    b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x01x\x85R.",
    pickle.dumps({"a": [1, (2, 3)], "b": {4}}),
    b"\x80\x02]q\x00h\x00a.",
    b"\x80\x04)" + b"2\x86" * 30 + b".",
]
"""A call by name, in two protocols; plain values; a list inside itself; 2**30 tuples in 60
bytes.
"""


def _dcp_directory(folder: Path) -> tuple[list[bytes], Run]:
    save_dcp(folder / "dcp")
    path = folder / "dcp" / "__0_0.distcp"
    data = path.read_bytes()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        with documented_errors(folder):
            assert TorchDistReader().manifest(str(folder / "dcp")).keys
            _ = distckpt.open(folder / "dcp").common_state

    return [data], run


def torch_saved(obj: object) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(obj, file)
    return file.getvalue()


def _torch_object(folder: Path) -> tuple[list[bytes], Run]:
    def run(data: bytes) -> None:
        # `_decode` of the reader turns these into errors that name file and object.
        with contextlib.suppress(
            RefusedGlobalError, ValueError, TypeError, IndexError, RecursionError
        ):
            read_object(data)

    plain = {
        "a": torch.arange(4),
        "n": np.arange(3),
        "l": [1, (2.5, {"x"})],
        "d": torch.float16,
        "s": np.float64(1),
    }
    return [torch_saved(plain), torch_saved(torch.ones(2, 3)), torch_saved(None)], run


def _torch_pickle(folder: Path) -> tuple[list[bytes], Run]:
    # The pickle alone, put into an archive: mutations of a whole archive seldom get past its
    # directory.
    def archive(data: bytes) -> bytes:
        names = {
            "a/data.pkl": data,
            "a/byteorder": b"little",
            "a/data/0": bytes(64),
            "a/version": b"3\n",
        }
        body, directory = b"", b""
        for name, content in names.items():
            fixed = struct.pack(
                "<HHHHHIIIHH", 0, 0, 0, 0, 0, 0, len(content), len(content), len(name), 0
            )
            directory += (
                b"PK\1\2\0\0" + fixed + struct.pack("<HHHII", 0, 0, 0, 0, len(body)) + name.encode()
            )
            body += b"PK\3\4" + fixed + name.encode() + content
        end = struct.pack("<HHHHIIH", 0, 0, len(names), len(names), len(directory), len(body), 0)
        return body + directory + b"PK\5\6" + end

    seeds = []
    for obj in (
        torch.ones(2, 3),
        {"n": np.arange(3), "o": [1, (2.5, {"x"})]},
        io.BytesIO(b"x"),
        torch.device("cpu"),
    ):
        blob = torch_saved(obj)
        seeds.append(_pickle_in(blob))
    assert read_object(archive(seeds[1]))["o"] == [1, (2.5, {"x"})]
    assert read_object(archive(seeds[0])).shape == (2, 3)
    _, run = _torch_object(folder)
    return [*seeds, *HOSTILE_PICKLES[:4]], lambda data: run(archive(data))


def _pickle_in(blob: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


TARGETS = {
    target.name: target
    for target in (
        Target("manifest", _manifest),
        Target("manifest_fields", _manifest_fields, 32),
        Target("shard_header", _shard_header, 2048),
        Target("hf_file", _hf_file, 2048),
        Target("hf_index", _hf_index, 1024),
        Target("marker", _marker, 1024),
        Target("codec_blob", _codec_blob, 4096),
        Target("codec_tree", _codec_tree, 2048),
        Target("dcp_metadata", _dcp_metadata_file, 4096),
        Target("dcp_directory", _dcp_directory, 8192),
        Target("torch_object", _torch_object, 4096),
        Target("torch_pickle", _torch_pickle, 1024),
    )
}
