"""Checkpoints of torch.distributed.checkpoint: read by any layout, consolidated, converted, and
never run.
"""

from __future__ import annotations

import argparse
import collections
import copy as copy_module
import dataclasses
import datetime
import enum
import io
import itertools
import json
import os
import pathlib
import pickle
import pickletools
import re
import shutil
import struct
import sys
import types
import warnings
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import distckpt
from distckpt import (
    CheckpointingException,
    CorruptCheckpointError,
    ShardedObject,
    ShardedTensor,
    UnsupportedObjectError,
)
from distckpt.cli import main
from tests.support.reference import skip_where_safetensors_lacks
from tests.support.states import bits

TENSORS = {
    "rows": torch.arange(12.0).view(4, 3),
    "transposed": torch.arange(30.0, dtype=torch.float64).view(5, 6).t(),
    "permuted": torch.arange(24, dtype=torch.int32).view(2, 3, 4).permute(2, 0, 1),
    "channels.last": torch.arange(48.0)
    .view(2, 3, 2, 4)
    .contiguous(memory_format=torch.channels_last),
    "narrowed": torch.arange(20.0).view(4, 5)[:, 1:3],
    "expanded": torch.arange(3.0).view(1, 3).expand(2, 3),
    "bf16": torch.arange(6).to(torch.bfloat16),
    "fp8": torch.arange(4).to(torch.float8_e4m3fn),
    "uint16": torch.arange(5).to(torch.uint16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3.0], dtype=torch.complex64),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "one": torch.tensor([[7]]),
}
VALUES = {
    "step": 5,
    "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, betas=(0.9, 0.95)),
    "nothing": None,
}
STATE = {
    "model": TENSORS,
    "optimizer": {
        "groups": [{"lr": 0.1}, {"lr": 0.2, "exp_avg": torch.ones(2)}],
        "state": {3: {"step": torch.tensor(4.0)}},
    },
    "mixed": [torch.full((2,), 9.0), 8],
    **VALUES,
}
KEYS = {
    **{f"model.{name}": tensor for name, tensor in TENSORS.items()},
    "optimizer.groups.1.exp_avg": torch.ones(2),
    "optimizer.state.3.step": torch.tensor(4.0),
    "mixed.0": torch.full((2,), 9.0),
}


def save_with_torch(state, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path))
    return str(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_with_torch(STATE, tmp_path_factory.mktemp("dcp") / "checkpoint")


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def whole(key, like):
    blank = torch.zeros(like.shape, dtype=like.dtype)
    return ShardedTensor.from_rank_offsets(key, blank)


# ---- loading


def test_every_kind_of_tensor_loads(saved):
    loaded = distckpt.load(
        {key: whole(key, tensor) for key, tensor in KEYS.items()}, saved, strict="raise"
    )
    assert [key for key, tensor in KEYS.items() if bits(loaded[key]) != bits(tensor)] == []


def test_nested_state_dict_gets_its_values_back(saved):
    asked = {
        "model": {"rows": whole("model.rows", TENSORS["rows"])},
        "optimizer": {
            "groups": [{}, {"exp_avg": whole("optimizer.groups.1.exp_avg", torch.ones(2))}]
        },
        "mixed": [whole("mixed.0", torch.ones(2))],
    }
    loaded = distckpt.load(asked, saved)
    assert loaded["optimizer"]["groups"][0] == {"lr": 0.1}
    assert loaded["optimizer"]["groups"][1]["lr"] == 0.2
    assert torch.equal(loaded["optimizer"]["groups"][1]["exp_avg"], torch.ones(2))
    assert torch.equal(loaded["mixed"][0], torch.full((2,), 9.0))
    assert loaded["mixed"][1] == 8
    assert {name: loaded[name] for name in VALUES} == VALUES


@pytest.mark.parametrize("name", ["rows", "transposed", "permuted", "channels.last"])
def test_parts_load(saved, name):
    tensor, key = TENSORS[name], f"model.{name}"
    for index in range(tensor.shape[0]):
        part = ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(tensor[:1]), (0, index, tensor.shape[0])
        )
        assert torch.equal(distckpt.load({"part": part}, saved)["part"], tensor[index : index + 1])


def test_questions_about_a_dcp_directory(saved):
    assert {
        key: shard.global_shape
        for key, shard in distckpt.megatron.serialization.load_sharded_metadata(saved).items()
    } == {key: tuple(tensor.shape) for key, tensor in KEYS.items()}
    assert distckpt.open(saved).common_state == {
        **VALUES,
        "optimizer": {"groups": [{"lr": 0.1}, {"lr": 0.2}]},
        "mixed": [8],
    }
    plain = distckpt.open(saved).read_tensors()
    assert [key for key, tensor in KEYS.items() if bits(plain[key]) != bits(tensor)] == []
    assert distckpt.open(saved).metadata is None


def test_a_missing_key_is_named(saved):
    with pytest.raises(distckpt.LoadMismatchError, match=r"model\.row\b.*model\.rows"):
        distckpt.load({"x": whole("model.row", torch.ones(2))}, saved)


def test_nothing_is_removed_from_a_checkpoint_of_others(saved):
    with pytest.raises(CheckpointingException, match="convert"):
        distckpt.megatron.remove_sharded_tensors(saved, "model")


def test_consolidation_to_hugging_face(saved, tmp_path):
    distckpt.consolidate(saved, str(tmp_path / "hf"), keys=["model."], rename={"model.": ""})
    skip_where_safetensors_lacks(*(tensor.dtype for tensor in TENSORS.values()))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == TENSORS.keys()
    assert [name for name, tensor in TENSORS.items() if bits(written[name]) != bits(tensor)] == []


def test_conversion(saved, tmp_path):
    target = str(tmp_path / "converted")
    distckpt.reshard(saved, target)
    assert distckpt.megatron.check_is_distributed_checkpoint(target)
    loaded = distckpt.load(
        {key: whole(key, tensor) for key, tensor in KEYS.items()},
        target,
        strict="raise",
        verify=True,
    )
    assert [key for key, tensor in KEYS.items() if bits(loaded[key]) != bits(tensor)] == []
    assert distckpt.open(target).common_state == distckpt.open(saved).common_state
    copied = shutil.copytree(saved, tmp_path / "copied")
    with pytest.raises(CheckpointingException, match="in its own place"):
        distckpt.reshard(copied, copied, overwrite=True)


def test_conversion_of_a_remote_source(saved, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(saved, "/dcp_source", recursive=True)
    try:
        distckpt.reshard("memory://dcp_source", str(tmp_path / "converted"))
    finally:
        memory.rm("/dcp_source", recursive=True)
    plain = distckpt.open(str(tmp_path / "converted")).read_tensors()
    assert [key for key, tensor in KEYS.items() if bits(plain[key]) != bits(tensor)] == []


def test_conversion_from_the_command_line(saved, tmp_path, capsys):
    assert main(["convert", saved, str(tmp_path / "converted")]) == 0
    assert str(tmp_path / "converted") in capsys.readouterr().out
    assert distckpt.open(tmp_path / "converted").tensors.keys() == KEYS.keys()
    assert distckpt.open(tmp_path / "converted").common_state["step"] == 5
    arguments = [
        "convert",
        saved,
        str(tmp_path / "converted"),
        "--overwrite",
        "--without-common-state",
        "--json",
    ]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["location"] == str(tmp_path / "converted")
    assert distckpt.open(tmp_path / "converted").common_state == {}
    assert main(["convert", saved, str(tmp_path / "converted")]) == 1


def test_conversion_with_other_common_state(tmp_path):
    source = save_with_torch({"w": torch.ones(2), "odd": Odd(1)}, tmp_path / "source")
    with pytest.raises(UnsupportedObjectError, match="Odd"):
        distckpt.reshard(source, str(tmp_path / "converted"))
    distckpt.reshard(source, str(tmp_path / "converted"), common_state={"step": 1})
    assert distckpt.open(str(tmp_path / "converted")).common_state == {"step": 1}


# ---- values that are not tensors


class Odd:
    def __init__(self, value):
        self.value = value


class Colour(enum.Enum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float
    name: str = "adam"

    def __post_init__(self):
        object.__setattr__(self, "lr_text", f"{self.lr}")


PLAIN = {
    "numbers": [0, -1, 255, 256, 65536, 2**40, -(2**70), 1.5, float("inf"), 1 + 2j],
    "texts": ["", "a", "ä\ud800", "x" * 300],
    "bytes": [b"", b"a\xff", bytearray(b"ab")],
    "sets": [set(), {1, 2}, frozenset({"a"})],
    "others": [
        slice(1, None),
        range(3),
        torch.Size([1, 2]),
        torch.float8_e5m2,
        torch.device("cuda", 1),
    ],
    "times": [
        datetime.date(2024, 1, 2),
        datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.timezone.utc),
    ],
    "delta": datetime.timedelta(1, 2),
    "path": pathlib.PurePosixPath("/a/b"),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "default": collections.defaultdict(list, {"a": [1]}),
    "default.str": collections.defaultdict(str),
    "default.int": collections.defaultdict(int),
    "simple": types.SimpleNamespace(a=1),
    "nested": {"a": [{"b": (1, (2, 3))}]},
    "keys": {1: "a", (1, "b"): 2, None: 3},
}


def archive_of(obj, **kwargs):
    buffer = io.BytesIO()
    torch.save(obj, buffer, **kwargs)
    return buffer.getvalue()


def megatron_folder(path, objects=None, common=None):
    """Write a directory as Megatron lays it out, with objects (by unique key) and common state
    given as bytes.
    """
    os.makedirs(path, exist_ok=True)
    blobs = objects or {}
    data = dcp.metadata.Metadata({}, storage_data={})
    with open(f"{path}/__0_0.distcp", "wb") as file:
        for name, blob in blobs.items():
            info = dcp.filesystem._StorageInfo("__0_0.distcp", file.tell(), len(blob))
            data.state_dict_metadata[name] = dcp.metadata.BytesStorageMetadata()
            data.storage_data[dcp.metadata.MetadataIndex(name)] = info
            file.write(blob)
    if common is not None:
        pathlib.Path(path, "common.pt").write_bytes(common)
    pathlib.Path(path, ".metadata").write_bytes(pickle.dumps(data))
    pathlib.Path(path, "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    return str(path)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_objects_come_back(tmp_path, protocol):
    folder = megatron_folder(tmp_path / "c", common=archive_of(PLAIN, pickle_protocol=protocol))
    assert distckpt.open(folder).common_state == PLAIN


@pytest.mark.parametrize("protocol", [2, 5])
def test_what_several_places_share_comes_back_in_all_of_them(tmp_path, protocol):
    array, file = np.arange(6, dtype=">i4"), io.BytesIO(b"abc")
    obj = {
        "first": array,
        "again": array,
        "other": array[:3],
        "dtype": array.dtype,
        "file": file,
        "the same": file,
    }
    folder = megatron_folder(tmp_path / "c", common=archive_of(obj, pickle_protocol=protocol))
    loaded = distckpt.open(folder).common_state
    assert [loaded[name].tolist() for name in ("first", "again", "other")] == [
        [*range(6)],
        [*range(6)],
        [0, 1, 2],
    ]
    assert loaded["dtype"] == array.dtype
    assert loaded["file"].getvalue() == loaded["the same"].getvalue() == b"abc"


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_tensors_and_files_in_memory_come_back(tmp_path, protocol):
    weight = torch.nn.Parameter(torch.arange(4.0))
    arrays = {
        "float": np.arange(6.0).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "bool": np.array([True]),
        "text": np.array(["ab", "c"]),
        "empty": np.zeros((0, 2), np.float32),
        "rng": np.random.RandomState(0).get_state()[1],
    }
    scalars = [np.float32(1.5), np.int64(3), np.bool_(True)]
    obj = {
        **arrays,
        "scalars": scalars,
        "weight": weight,
        "view": weight.detach()[1:3],
        "file": io.BytesIO(b"abc"),
        "transposed": torch.arange(6).view(2, 3).t(),
        "module": torch.nn.Linear(2, 1).state_dict(),
    }
    folder = megatron_folder(tmp_path / "c", common=archive_of(obj, pickle_protocol=protocol))
    loaded = distckpt.open(folder).common_state
    for name, array in arrays.items():
        assert (loaded[name].dtype, loaded[name].tolist()) == (array.dtype, array.tolist())
    assert [(type(value), value) for value in loaded["scalars"]] == [
        (type(value), value) for value in scalars
    ]
    assert torch.equal(loaded["weight"], weight)
    assert torch.equal(loaded["view"], weight[1:3])
    assert loaded["file"].read() == b"abc"
    assert torch.equal(loaded["transposed"], obj["transposed"])
    assert torch.equal(loaded["module"]["weight"], obj["module"]["weight"])


def test_classes_are_admitted_by_registering_them(tmp_path):
    common = {"colour": Colour.RED, "point": Point(1, 2), "settings": Settings(0.5)}
    folder = megatron_folder(tmp_path / "c", common=archive_of(common))
    with pytest.raises(UnsupportedObjectError, match=r"common\.pt.*Colour.*register_object_type"):
        _ = distckpt.open(folder).common_state
    distckpt.register_object_type(Colour)
    distckpt.register_object_type(Point)
    distckpt.register_object_type(Settings)
    loaded = distckpt.open(folder).common_state
    assert loaded == common
    assert loaded["settings"].lr_text == "0.5"


def test_a_checkpoint_of_nothing(tmp_path):
    folder = megatron_folder(tmp_path / "c")
    assert distckpt.load({}, folder) == {}
    distckpt.reshard(folder, tmp_path / "converted")
    assert distckpt.load({}, tmp_path / "converted") == {}


def test_objects_of_megatron(tmp_path):
    cells = {f"rng/shard_{i}.{j}_2.3": [{"cell": (i, j)}] for i in range(2) for j in range(3)}
    objects = {
        **cells,
        "with/slash/shard_0_1": [[1, 2]],
        "old/shard_0.0_2": ["a"],
        "old/shard_0.1_2": ["b"],
    }
    folder = megatron_folder(
        tmp_path / "c", {name: archive_of(value) for name, value in objects.items()}
    )
    assert distckpt.load(
        {
            "rng": ShardedObject("rng", None, (2, 3), (1, 2)),
            "slash": ShardedObject("with/slash", None, (1,), (0,)),
            "old": ShardedObject("old", None, (2, 2), (0, 1)),
        },
        folder,
    ) == {"rng": {"cell": (1, 2)}, "slash": [1, 2], "old": "b"}
    with pytest.raises(distckpt.LoadMismatchError, match="rng"):
        distckpt.load({"rng": ShardedObject("rng", None, (6,), (0,))}, folder)


def test_common_state_of_later_megatron(tmp_path):
    folder = megatron_folder(
        tmp_path / "c", {"common_state/shard_0_1": archive_of([{"iteration": 3}])}
    )
    assert distckpt.open(folder).common_state == {"iteration": 3}
    assert distckpt.megatron.serialization.load_sharded_metadata(folder) == {}


# ---- flattened tensors of Megatron Core up to 0.15


@pytest.mark.parametrize("cuts", [[0, 48], [0, 14, 48], [0, 1, 3, 26, 47, 48], [0, 12, 24, 48]])
def test_flattened_tensors_load_in_other_layouts(tmp_path, cuts):
    full = torch.arange(2 * 12 * 16.0).view(2, 12, 16)
    grid, local = (2, 2, 2), (1, 6, 8)  # The first axis is prepended.
    data = dcp.metadata.Metadata({}, storage_data={})
    chunks = []
    with open(tmp_path / "__0_0.distcp", "wb") as file:
        for cell in np.ndindex(*grid):
            index = tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, local, strict=True))
            flat = full[index].flatten()
            for start, stop in itertools.pairwise(cuts):
                part = flat[start:stop].clone().view(1, 1, 1, -1)
                offset = torch.Size([*cell, start])
                blob = archive_of(part)
                index = dcp.metadata.MetadataIndex("exp_avg", offset)
                data.storage_data[index] = dcp.filesystem._StorageInfo(
                    "__0_0.distcp", file.tell(), len(blob)
                )
                chunks.append(dcp.metadata.ChunkStorageMetadata(offset, part.shape))
                file.write(blob)
    properties = dcp.metadata.TensorProperties(torch.float32)
    data.state_dict_metadata["exp_avg"] = dcp.metadata.TensorStorageMetadata(
        properties, torch.Size([*grid, 48]), chunks
    )
    data.mcore_data = {"exp_avg": {"nd_reformulated_orig_global_shape": (2, 12, 16)}}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(data))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    loaded = distckpt.load({"x": whole("exp_avg", full)}, tmp_path)
    assert torch.equal(loaded["x"], full)
    column = ShardedTensor.from_rank_offsets(
        "exp_avg", torch.zeros(12, 4), (0, 1, 2), (2, 3, 4), prepend_axis_num=1
    )
    assert torch.equal(distckpt.load({"x": column}, tmp_path)["x"], full[1, :, 12:])
    flat = ShardedTensor.from_rank_offsets_flat(
        "exp_avg", torch.zeros(50), (2, 4, 16), (1, 2, 3), flattened_range=slice(30, 80)
    )
    assert torch.equal(distckpt.load({"x": flat}, tmp_path)["x"], full[:, 8:].flatten()[30:80])


def extract_megatron(place):
    """Put a checkpoint that Megatron Core 0.14 wrote into a directory."""
    data = pathlib.Path(__file__).parents[2] / "data" / "megatron_core_0_14.zip"
    with zipfile.ZipFile(data) as archive:
        archive.extractall(place)


def test_a_checkpoint_that_megatron_core_0_14_wrote(tmp_path):
    """Two ranks wrote it: flattened pieces of `exp_avg` (layers as a prepended axis, two parts
    along its last axis) and of `bias` (two parts), which each rank held a part of; rows of `w`; an
    object for each rank.
    """
    extract_megatron(tmp_path / "c")
    full = {
        "exp_avg": torch.arange(96.0).view(2, 6, 8),
        "bias": torch.arange(100.0, 112.0),
        "w": torch.tensor([0.0, 0, 1, 1]).view(4, 1).expand(4, 3),
    }
    asked = {key: whole(key, tensor) for key, tensor in full.items()}
    asked["o"] = ShardedObject("o", None, (2,), (1,))
    loaded = distckpt.load(asked, tmp_path / "c", strategy=("torch_dist", 1), strict="raise")
    assert [key for key, tensor in full.items() if not torch.equal(loaded[key], tensor)] == []
    assert (loaded["o"], loaded["it"]) == ({"r": 1}, 3)
    flat = ShardedTensor.from_rank_offsets_flat(
        "exp_avg",
        torch.zeros(20),
        (3, 8),
        (0, 1, 2),
        (1, 1, 2),
        prepend_axis_num=1,
        flattened_range=slice(3, 23),
    )
    assert torch.equal(
        distckpt.load({"x": flat}, tmp_path / "c")["x"], full["exp_avg"][1, 3:].flatten()[3:23]
    )
    distckpt.reshard(tmp_path / "c", tmp_path / "converted")
    plain = distckpt.open(tmp_path / "converted").read_tensors()
    assert [key for key, tensor in full.items() if not torch.equal(plain[key], tensor)] == []


@pytest.mark.parametrize("file", ["common.pt", "metadata.json"])
@pytest.mark.parametrize(
    "read",
    [
        lambda place: distckpt.load({}, place),
        lambda place: distckpt.open(place).common_state,
        lambda place: distckpt.reshard(place, place.with_name("out")),
        lambda place: distckpt.consolidate(place, place.with_name("out")),
    ],
    ids=["load", "open", "reshard", "consolidate"],
)
def test_a_checkpoint_of_megatron_without_one_of_its_small_files(tmp_path, read, file):
    """A copy or a save that was interrupted: the iteration would be lost without a word."""
    place = tmp_path / "c"
    extract_megatron(place)
    (place / file).unlink()
    with pytest.raises(CorruptCheckpointError, match=rf"{re.escape(file)}.*Restore"):
        read(place)
    assert not (tmp_path / "out").exists()
    report = distckpt.verify(place)
    assert [file in problem.message for problem in report.problems] == [True]


def test_tensors_of_a_checkpoint_of_megatron_with_an_empty_common_file(tmp_path):
    place = tmp_path / "c"
    extract_megatron(place)
    torch.save({}, place / "common.pt")
    assert distckpt.open(place).common_state == {}
    assert torch.equal(distckpt.open(place).read("bias"), torch.arange(100.0, 112.0))


# ---- damage


def error_of(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    return None


def test_a_missing_file_is_named(copy):
    os.unlink(copy / "__0_0.distcp")
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*missing.*'model\.rows'"):
        distckpt.load({}, copy)


def test_a_cut_file_is_named(copy):
    file = copy / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 10)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*'\S+' lies in it.*cut off"):
        distckpt.load({}, copy)


def test_missing_and_empty_metadata_are_named(copy):
    (copy / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata.*damaged"):
        distckpt.load({}, copy)
    os.unlink(copy / ".metadata")
    with pytest.raises(distckpt.CheckpointNotFoundError):
        distckpt.load({}, copy)
    (copy / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata.*missing"):
        distckpt.load({}, copy)


def test_every_cut_and_every_changed_byte_of_metadata_gives_an_error_of_ours_or_a_checkpoint(copy):
    content = (copy / ".metadata").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(content)
        damaged[rng.integers(len(damaged))] = rng.integers(256)
        (copy / ".metadata").write_bytes(
            bytes(damaged[: rng.integers(len(damaged))] if rng.random() < 0.3 else damaged)
        )
        error = error_of(distckpt.megatron.load_tensors_metadata, copy)
        assert error is None or (
            isinstance(error, CheckpointingException) and str(copy) in str(error)
        ), error


def test_changed_archives_give_an_error_of_ours_or_a_checkpoint(tmp_path):
    path = pathlib.Path(
        save_with_torch({"w": torch.arange(6.0), "value": {"a": [1, 2]}}, tmp_path / "c")
    )
    content = (path / "__0_0.distcp").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(damaged))] = rng.integers(256)
        (path / "__0_0.distcp").write_bytes(bytes(damaged))
        error = error_of(distckpt.load, {"w": whole("w", torch.zeros(6))}, path)
        assert error is None or (
            isinstance(error, CheckpointingException) and "__0_0.distcp" in str(error)
        ), error


def change_metadata(path, change):
    with open(path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_file_outside_of_the_checkpoint_is_not_read(copy):
    def elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../secret"

    change_metadata(copy, elsewhere)
    with pytest.raises(CorruptCheckpointError, match=r"\.\./secret.*elsewhere"):
        distckpt.load({}, copy)


def test_gaps_and_overlaps_are_found(copy):
    def stretch(metadata):
        metadata.state_dict_metadata["model.rows"].size = torch.Size([5, 3])

    change_metadata(copy, stretch)
    with pytest.raises(CorruptCheckpointError, match=r"model\.rows.*\(4, 0\).*is in no file"):
        distckpt.load({}, copy)


def test_metadata_and_archives_that_contradict_each_other(copy):
    def exchange(metadata):
        entries = metadata.state_dict_metadata
        entries["model.rows"].properties.dtype = torch.int32

    change_metadata(copy, exchange)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*model\.rows.*float32"):
        distckpt.load({}, copy)


def test_transforms_are_refused(copy):
    def compress(metadata):
        next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

    change_metadata(copy, compress)
    with pytest.raises(CheckpointingException, match="zstd"):
        distckpt.load({}, copy)


# ---- hostile pickles: nothing runs, and what they name is said


class Ran(Exception):
    pass


def run_me(*args):
    os.environ["DISTCKPT_HOSTILE"] = "ran"
    raise Ran


def reducing(function, *args):
    class Payload:
        def __reduce__(self):
            return function, args

    return Payload()


def opcodes(*parts):
    return b"\x80\x04" + b"".join(parts) + b"."


def text(value):
    return pickle.SHORT_BINUNICODE + struct.pack("<B", len(value)) + value.encode()


def named(module, name):
    return text(module) + text(name) + pickle.STACK_GLOBAL


HOSTILE = {
    "reduce": (pickle.dumps(reducing(os.system, "exit 1")), r"(posix|nt)\.system"),
    "reduce, protocol 2": (pickle.dumps(reducing(os.system, "exit 1"), 2), r"(posix|nt)\.system"),
    "our own function": (pickle.dumps(reducing(run_me)), "run_me"),
    "eval": (pickle.dumps(reducing(eval, "1")), r"builtins\.eval"),
    "getattr": (pickle.dumps(reducing(getattr, "", "join")), r"builtins\.getattr"),
    "dotted path in a module that is admitted": (
        opcodes(named("torch", "os.system"), text("exit 1"), b"\x85R"),
        r"torch\.os\.system",
    ),
    "attribute of a class that is admitted": (
        opcodes(
            named("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"), b")R"
        ),
        "__globals__",
    ),
    "module that is imported by being named": (opcodes(named("antigravity", "x")), "antigravity"),
    "torch.load": (opcodes(named("torch", "load"), text("file"), b"\x85R"), r"torch\.load"),
    "lines as in protocol 0": (b"cos\nsystem\n(S'exit 1'\ntR.", r"os\.system"),
    "class as an instance": (b"(S'exit 1'\nios\nsystem\n.", "instruction STRING"),
    "extension code of a byte": (opcodes(b"\x82\x01"), "instruction"),
    "extension code of four bytes": (opcodes(b"\x84\x01\x00\x00\x00"), "instruction"),
    "persistent id": (opcodes(text("x"), b"Q"), "persistent"),
    "state for a class": (
        opcodes(
            named("torch.distributed.checkpoint.metadata", "Metadata"), b"}", text("make"), b"Nsb"
        ),
        "a state for a",
    ),
    "state for a dict": (opcodes(b"}}", text("__setstate__"), b"Nsb"), "a state for a dict"),
    "call of a value": (opcodes(text("x"), b")R"), "a call of a str"),
    "call of a record": (
        opcodes(named("torch.distributed.checkpoint.metadata", "Metadata"), b")\x81)R"),
        "a call of a Record",
    ),
    "a memo that takes all memory": (opcodes(b"Nr\xff\xff\xff\xff"), "holds no Metadata"),
    "a text longer than the file": (
        opcodes(b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"),
        "only 1 remain",
    ),
    "bytes longer than the file": (opcodes(b"B\xff\xff\xff\xff"), "only 1 remain"),
    "a memo that is empty": (opcodes(b"h\x05"), "KeyError"),
    "an empty stack": (opcodes(b"R"), "IndexError"),
    "no mark": (opcodes(b"t"), "IndexError"),
    "a list as a key": (opcodes(b"}]Ns"), "a key made of list"),
    "deeply nested tuples as a key": (
        opcodes(b"})" + b"\x85" * 100_000 + b"Ns"),
        "a key made of tuple",
    ),
    "deeply nested lists": (opcodes(b"]" * 100_000 + b"a" * 99_999), "holds no Metadata"),
    "a shape made of texts": (opcodes(named("torch", "Size"), text("ab"), b"\x85R"), "torch.Size"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused(name, copy, monkeypatch):
    monkeypatch.delenv("DISTCKPT_HOSTILE", raising=False)
    payload, named_there = HOSTILE[name]
    (copy / ".metadata").write_bytes(payload)
    modules = set(sys.modules)
    with pytest.raises(CorruptCheckpointError, match=named_there):
        distckpt.load({}, copy)
    assert "DISTCKPT_HOSTILE" not in os.environ
    assert "antigravity" not in set(sys.modules) - modules


def archive_with(data, name="data.pkl", compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if name != "a memo that takes all memory"]
)
def test_hostile_common_state_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.delenv("DISTCKPT_HOSTILE", raising=False)
    payload, named_there = HOSTILE[name]
    if named_there == "holds no Metadata":
        named_there = "256 levels"
    folder = megatron_folder(tmp_path / "c", common=archive_with(payload))
    if (
        "Metadata" in name
        or "record" in name
        or "class that is admitted" in name
        or name == "state for a class"
    ):
        named_there = "torch.distributed.checkpoint.metadata"
    with pytest.raises(
        (CorruptCheckpointError, UnsupportedObjectError), match=f"common.pt.*{named_there}"
    ):
        _ = distckpt.open(folder).common_state
    assert "DISTCKPT_HOSTILE" not in os.environ


def of_one_storage(count, num_bytes):
    """Return an archive of many tensors whose storages are entries for the same bytes."""
    whole, buffer = (
        zipfile.ZipFile(
            io.BytesIO(
                archive_of([torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(count)])
            )
        ),
        io.BytesIO(),
    )
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("archive/data.pkl", "archive/byteorder", "archive/data/0"):
            archive.writestr(name, whole.read(name))
        for number in range(1, count):
            archive.filelist.append(copy_module.copy(archive.filelist[-1]))
            archive.filelist[-1].filename = f"archive/data/{number}"
    return buffer.getvalue()


ARCHIVE_BOMBS = {
    "many entries of the same bytes": of_one_storage(50, 1 << 16),
    "a tensor again and again": archive_of([torch.zeros(1 << 15)] * 1000),
    "tensors of one element": archive_of([torch.zeros(1).expand(1_000_000) for _ in range(20)]),
    "a file in memory again and again": archive_of([io.BytesIO(bytes(1 << 16))] * 1000),
}

SIZE_BOMBS = {
    "a file in memory of a number": opcodes(named("_io", "BytesIO"), b")R(J\xff\xff\xff\x7fK\0Ntb"),
    "a list of lists of lists": opcodes(
        b"]\x94", *(b"0](" + (b"h" + bytes([i])) * 10 + b"e\x94" for i in range(30))
    ),
    "a list that contains itself": opcodes(b"]\x94h\x00a"),
    "bytes of a number": opcodes(named("builtins", "bytearray"), b"J\xff\xff\xff\x7f\x85R"),
    "an array of a size": opcodes(
        named("numpy._core.numeric", "_frombuffer"),
        b"(C\x01a",
        named("numpy", "dtype"),
        text("f8"),
        b"\x85R",
        b"J\xff\xff\xff\x7f\x85",
        text("C"),
        b"tR",
    ),
}


@pytest.mark.parametrize("name", SIZE_BOMBS)
def test_small_pickles_of_large_objects_are_refused(name, tmp_path):
    folder = megatron_folder(tmp_path / "c", common=archive_with(SIZE_BOMBS[name]))
    with pytest.raises(CorruptCheckpointError, match=r"common\.pt"):
        _ = distckpt.open(folder).common_state


@pytest.mark.parametrize("name", ARCHIVE_BOMBS)
def test_small_archives_of_large_objects_are_refused(name, tmp_path):
    folder = megatron_folder(tmp_path / "c", common=ARCHIVE_BOMBS[name])
    with pytest.raises(
        CorruptCheckpointError, match=r"common\.pt.*(amounts to more than|take more room)"
    ):
        _ = distckpt.open(folder).common_state


def one_list_for_many_keys(metadata):
    entry = metadata.state_dict_metadata["model.rows"]
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "model.rows"][
        :1
    ]
    entry.chunks = entry.chunks[:1] * 1000
    for number in range(1000):
        metadata.state_dict_metadata[f"k{number}"] = entry
        metadata.storage_data[dcp.metadata.MetadataIndex(f"k{number}", entry.chunks[0].offsets)] = (
            info
        )


def one_item_for_many_keys(metadata):
    one_list_for_many_keys(metadata)
    del metadata.state_dict_metadata["model.rows"].chunks[1:]


def a_deep_path(metadata):
    metadata.planner_data = dict.fromkeys(metadata.planner_data, ("a",) * 100_000)


def a_long_path_for_many_names(metadata):
    metadata.planner_data |= dict.fromkeys(map(str, range(1000)), ("a" * 10_000,))


def a_list_with_a_far_end(metadata):
    metadata.planner_data = {name: (name, 2**20 - 1) for name in metadata.planner_data}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (one_list_for_many_keys, "more parts than it has bytes"),
        (one_item_for_many_keys, "where other items lie"),
        (a_deep_path, "has no path"),
        (a_long_path_for_many_names, "paths are longer than their names"),
        (a_list_with_a_far_end, "more items than it has values"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_small_metadata_of_large_checkpoints_is_refused(copy, change, problem):
    change_metadata(copy, change)
    with pytest.raises(CorruptCheckpointError, match=problem):
        _ = distckpt.open(copy).common_state


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        (b"PK", "not a complete archive"),
        (archive_with(b"N.", name="other"), "data.pkl"),
        (archive_with(b"N" * 1000 + b".", compression=zipfile.ZIP_DEFLATED), "compressed"),
        (pickle.dumps({"a": 1}), "not a complete archive"),
    ],
)
def test_files_that_are_no_archives_are_refused(blob, problem, tmp_path):
    folder = megatron_folder(tmp_path / "c", common=blob)
    with pytest.raises(CorruptCheckpointError, match=problem):
        _ = distckpt.open(folder).common_state


def test_hostile_tensor_archives_are_refused(copy):
    payload = archive_with(HOSTILE["reduce"][0])

    def point(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == "model.rows":
                info.offset, info.length = (copy / "__0_0.distcp").stat().st_size, len(payload)

    change_metadata(copy, point)
    with open(copy / "__0_0.distcp", "ab") as file:
        file.write(payload)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp.*model\.rows.*system"):
        distckpt.load({}, copy)


def test_what_the_tests_call_hostile_is_hostile():
    """Python's own reader runs it."""
    with pytest.raises(Ran):
        pickle.loads(HOSTILE["our own function"][0])
    assert os.environ.pop("DISTCKPT_HOSTILE") == "ran"
    assert any(
        code.name == "STACK_GLOBAL" for code, _, _ in pickletools.genops(HOSTILE["torch.load"][0])
    )
