"""Folders of safetensors files that others wrote: what is read, and what is refused, naming file
and key.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import struct
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import distckpt
from distckpt import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    ShardedTensor,
)
from distckpt.cli import main
from distckpt.hf import consolidate_safetensors_files
from distckpt.megatron.core import CheckpointingException
from tests.support.hf_folders import (
    INDEX,
    read_export,
    same_bytes,
    shard_name,
    tilings,
    write_folder,
    write_indexed,
    write_plain,
    write_shard,
)
from tests.support.hooked_store import hooked_reads

ROWS = torch.arange(12 * 5, dtype=torch.float32).view(12, 5)
COLUMNS = torch.arange(4 * 6, dtype=torch.bfloat16).view(4, 6)
NORM = torch.arange(7, dtype=torch.float32)
STEP = torch.tensor(17)


def consolidated(folder):
    with tempfile.TemporaryDirectory() as beside:
        try:
            distckpt.consolidate(folder, f"{beside}/export")
        except BaseException:
            assert os.listdir(beside) == [], "something was written before everything was checked"
            raise


def consolidated_as_torch_does(folder):
    with tempfile.TemporaryDirectory() as beside:
        try:
            consolidate_safetensors_files(str(folder), f"{beside}/export")
        except BaseException:
            assert os.listdir(beside) == [], "something was written before everything was checked"
            raise


DOORS = [
    pytest.param(distckpt.megatron.load_plain_tensors, CorruptCheckpointError, id="load"),
    pytest.param(consolidated, CorruptCheckpointError, id="consolidate"),
    pytest.param(consolidated_as_torch_does, ValueError, id="torch's name"),
]


@pytest.fixture
def folder(tmp_path):
    """Three ranks: `rows` is cut along axis 0, `columns` along axis 1; `norm` and `step` lie with
    ranks 1 and 2.
    """
    path = tmp_path / "sharded"
    for rank in range(3):
        pieces = {
            "rows": ((4 * rank, 0), ROWS[4 * rank : 4 * rank + 4]),
            "columns": ((0, 2 * rank), COLUMNS[:, 2 * rank : 2 * rank + 2]),
        }
        pieces |= {"norm": ((0,), NORM)} if rank == 0 else {}
        pieces |= {"step": ((), STEP)} if rank == 1 else {}
        write_shard(path, rank + 1, pieces)
    return path


# ---- what is read


def test_a_folder_of_shards_reads_as_whole_tensors(folder):
    assert same_bytes(
        distckpt.open(folder).read_tensors(),
        {"rows": ROWS, "columns": COLUMNS, "norm": NORM, "step": STEP},
    )
    described = distckpt.open(folder).tensors
    assert {key: (info.dtype, info.shape) for key, info in described.items()} == {
        "rows": (torch.float32, (12, 5)),
        "columns": (torch.bfloat16, (4, 6)),
        "norm": (torch.float32, (7,)),
        "step": (torch.int64, ()),
    }
    assert distckpt.open(folder).common_state == {}


def test_several_files_and_chunks_of_a_rank(tmp_path):
    write_shard(tmp_path, 1, {"rows": ((0, 0), ROWS[:3])}, 1, 2)
    write_shard(tmp_path, 1, {"rows": ((9, 0), ROWS[9:])}, 2, 2)
    write_shard(tmp_path, 2, {"rows": ((3, 0), ROWS[3:9])}, 2, 2)
    assert same_bytes(distckpt.open(tmp_path).read_tensors(), {"rows": ROWS})


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_tiling_of_the_shards_gives_any_region(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), "shape"))
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    pieces = data.draw(tilings(shape), "chunks")
    region = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    with tempfile.TemporaryDirectory() as directory:
        for number, (offset, extent) in enumerate(pieces, 1):
            part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
            write_shard(Path(directory), number, {"w": (offset, part)})
        expected = tensor.numpy()[tuple(slice(*span) for span in region)]
        local_shape = tuple(high - low for low, high in region)
        target = torch.full(local_shape, -1, dtype=torch.int16)
        offset = tuple(low for low, _ in region)
        shard = ShardedTensor("w", target, target.dtype, local_shape, shape, offset, None)
        distckpt.load({"w": shard}, directory)
    assert (target.numpy() == expected).all()


def test_a_plain_directory_with_an_index_and_one_with_a_single_file(tmp_path):
    files = {
        "model-00001-of-00002.safetensors": {"a": ROWS},
        "model-00002-of-00002.safetensors": {"b": NORM, "c": STEP},
    }
    tensors = {"a": ROWS, "b": NORM, "c": STEP}
    assert same_bytes(
        distckpt.open(write_indexed(tmp_path / "several", files)).read_tensors(), tensors
    )
    write_plain(tmp_path / "one" / "model.safetensors", tensors)
    assert same_bytes(distckpt.open(tmp_path / "one").read_tensors(), tensors)


def test_what_the_index_does_not_name_is_left_out_with_a_warning(tmp_path, caplog):
    write_indexed(tmp_path, {"model-00001-of-00001.safetensors": {"a": ROWS}})
    write_plain(tmp_path / "model-00001-of-00001.safetensors", {"a": ROWS, "layers.0.b": NORM})
    write_plain(tmp_path / "consolidated.safetensors", {"a": ROWS + 1})
    with caplog.at_level(logging.WARNING, "distckpt"):
        assert same_bytes(distckpt.open(tmp_path).read_tensors(), {"a": ROWS})
    assert "'layers.0.b'" in caplog.text


def test_a_header_longer_than_what_is_read_at_first(tmp_path):
    tensors = {
        f"model.layers.{i}.{'long.' * 300}weight": torch.full((2,), float(i)) for i in range(1500)
    }
    (path,) = write_folder(tmp_path, tensors, 0, 1)
    assert struct.unpack("<Q", path.read_bytes()[:8])[0] > 2 << 20
    assert same_bytes(distckpt.open(tmp_path).read_tensors(), tensors)


# ---- what is refused: shards that do not belong together


def without_rank(rank):
    def change(folder):
        (folder / shard_name(rank)).unlink()

    return change


def left_by_more_ranks(folder):
    write_shard(folder, 4, {"rows": ((9, 0), ROWS[9:])})


def left_by_another_mapping(folder):
    write_shard(folder, 1, {"norm": ((0,), NORM)}, 2, 2)


def other_dtype(folder):
    write_shard(
        folder, 3, {"rows": ((8, 0), ROWS[8:].double()), "columns": ((0, 4), COLUMNS[:, 4:])}
    )


def other_number_of_axes(folder):
    write_shard(folder, 3, {"rows": ((8,), ROWS[8:, 0]), "columns": ((0, 4), COLUMNS[:, 4:])})


def gap(folder):
    write_shard(
        folder,
        2,
        {"rows": ((5, 0), ROWS[5:8]), "columns": ((0, 2), COLUMNS[:, 2:4]), "step": ((), STEP)},
    )


def narrower(folder):
    write_shard(
        folder,
        2,
        {"rows": ((4, 0), ROWS[4:8, :4]), "columns": ((0, 2), COLUMNS[:, 2:4]), "step": ((), STEP)},
    )


def overlap(folder):
    write_shard(
        folder,
        2,
        {"rows": ((3, 0), ROWS[3:8]), "columns": ((0, 2), COLUMNS[:, 2:4]), "step": ((), STEP)},
    )


def whole_beside_its_parts(folder):
    write_shard(folder, 9, {"rows": ((0, 0), ROWS)})


def twice_without_axes(folder):
    write_shard(
        folder,
        3,
        {"rows": ((8, 0), ROWS[8:]), "columns": ((0, 4), COLUMNS[:, 4:]), "step": ((), STEP)},
    )


def no_sharding_info(folder):
    write_plain(folder / "model.safetensors", {"other": NORM})


DO_NOT_BELONG = [
    (without_rank(1), "rows|columns", shard_name(2), "missing"),
    (without_rank(2), "rows|columns", shard_name(3), "missing"),
    (left_by_more_ranks, "rows", shard_name(4), "is stored several times"),
    (left_by_another_mapping, "norm", shard_name(1, 2, 2), "is stored several times"),
    (other_dtype, "rows", shard_name(3), "F64.*different saves"),
    (other_number_of_axes, "rows", shard_name(3), "different saves"),
    (gap, "rows", shard_name(2), r"element \(4, 0\) is in no file"),
    (narrower, "rows", shard_name(2), r"element \(4, 4\) is in no file"),
    (overlap, "rows", shard_name(2), r"element \(3, 0\) is stored several times"),
    (whole_beside_its_parts, "rows", shard_name(9), "is stored several times"),
    (twice_without_axes, "step", shard_name(3), "is stored several times"),
]


@pytest.mark.parametrize(("door", "error"), DOORS)
@pytest.mark.parametrize(
    ("change", "key", "file", "text"),
    DO_NOT_BELONG,
    ids=[f"{change.__name__}-{file[6:11]}" for change, _, file, _ in DO_NOT_BELONG],
)
def test_shards_that_do_not_belong_together(folder, change, key, file, text, door, error):
    change(folder)
    with pytest.raises(error, match=text) as caught:
        door(folder)
    assert re.search(f"'({key})'", str(caught.value))
    assert file in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(("door", "error"), DOORS)
def test_a_file_without_sharding_info_among_shards(folder, door, error):
    no_sharding_info(folder)
    with pytest.raises(error, match=r"model\.safetensors.*DCP_SHARDING_INFO"):
        door(folder)


def test_under_torchs_name_a_folder_without_sharding_info_is_a_value_error(tmp_path):
    write_plain(tmp_path / "model.safetensors", {"a": NORM})
    with pytest.raises(ValueError, match=r"model\.safetensors.*DCP_SHARDING_INFO"):
        consolidated_as_torch_does(tmp_path)
    consolidated(tmp_path)


@pytest.fixture
def own_folder(tmp_path):
    """Three shard files of ours: they know the global shape."""
    for rank in range(3):
        path = write_shard(
            tmp_path / "own", rank + 1, {"rows": ((4 * rank, 0), ROWS[4 * rank : 4 * rank + 4])}
        )
        add_metadata(path, {"distckpt_global_shapes": '{"rows": [12, 5]}'})
    return tmp_path / "own"


def test_our_shard_files_carry_the_global_shape(tmp_path):
    distckpt.save({"rows": ShardedTensor.from_rank_offsets("rows", ROWS)}, tmp_path / "checkpoint")
    (path,) = (tmp_path / "checkpoint" / "tensors").iterdir()
    assert split_file(path)[0]["__metadata__"]["distckpt_global_shapes"] == '{"rows":[12,5]}'
    assert same_bytes(distckpt.open(path.parent).read_tensors(), {"rows": ROWS})


@pytest.mark.parametrize(("door", "error"), DOORS)
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_any_of_our_shard_files_that_is_missing_is_noticed(own_folder, missing, door, error):
    assert same_bytes(distckpt.open(own_folder).read_tensors(), {"rows": ROWS})
    (own_folder / shard_name(missing)).unlink()
    with pytest.raises(
        error,
        match=rf"'rows' \(global shape \(12, 5\)\).*element \({4 * missing - 4}, 0\) is in no",
    ):
        door(own_folder)


@pytest.mark.parametrize(("door", "error"), DOORS)
@pytest.mark.parametrize("shape", [[16, 5], [11, 5], [12], "12"])
def test_our_shard_files_of_different_saves(own_folder, shape, door, error):
    add_metadata(
        own_folder / shard_name(3), {"distckpt_global_shapes": json.dumps({"rows": shape})}
    )
    with pytest.raises(error, match="rows") as caught:
        door(own_folder)
    assert shard_name(3) in str(caught.value)
    assert str(shape).strip("[]") in str(caught.value)


@pytest.mark.parametrize(("door", "error"), DOORS)
def test_a_shard_outside_of_its_global_shape(own_folder, door, error):
    for path in own_folder.iterdir():
        add_metadata(path, {"distckpt_global_shapes": '{"rows": [11, 5]}'})
    with pytest.raises(error, match=rf"'rows'.*{shard_name(3)}.*\(11, 5\)"):
        door(own_folder)


# ---- what is refused: damaged files


def split_file(path):
    content = path.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def join_file(path, header, data):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def add_metadata(path, entries):
    header, data = split_file(path)
    header["__metadata__"] |= entries
    join_file(path, header, data)


def header_change(change):
    def damage(path):
        header, data = split_file(path)
        join_file(path, change(header), data)

    return damage


def with_entry(**fields):
    return header_change(lambda header: header | {"rows": header["rows"] | fields})


def with_info(text):
    return header_change(lambda header: header | {"__metadata__": {"DCP_SHARDING_INFO": text}})


def with_offsets(offsets):
    info = {"rows": [4, 0], "columns": [0, 2], "step": []} | {"rows": offsets}
    return with_info(json.dumps({key: {"saved_offsets": value} for key, value in info.items()}))


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "four bytes": lambda path: path.write_bytes(b"1234"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no header": lambda path: path.write_bytes(b"\xff" * 100),
    "header cut off": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "data cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "header no JSON": header_change(lambda header: json.dumps(header)[:-1] + "]"),
    "header a list": header_change(lambda header: "[]"),
    "header nests too deeply": header_change(lambda header: "[" * 100_000),
    "unknown dtype": with_entry(dtype="F6_E9M9"),
    "negative shape": with_entry(shape=[-4, -5]),
    "shape no list": with_entry(shape=None),
    "offsets beyond the file": with_entry(data_offsets=[0, 10**6]),
    "one offset": with_entry(data_offsets=[0]),
    "no dtype": header_change(lambda header: header | {"rows": {}}),
    "entry a number": header_change(lambda header: header | {"rows": 3}),
    "info no JSON": with_info("{"),
    "info a list": with_info("[]"),
    "info without the key": with_info("{}"),
    "offsets none": with_offsets(None),
    "offsets texts": with_offsets(["a", "b"]),
    "offsets negative": with_offsets([-4, 0]),
    "offsets too few": with_offsets([4]),
    "offsets huge": with_offsets([2**70, 0]),
    "offsets infinite": with_offsets([math.inf, 0]),
    "offsets fractions": with_offsets([4.5, 0]),
    "offsets not whole numbers": with_offsets([4.0, 0]),
    "offsets true or false": with_offsets([4, False]),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize(("door", "error"), DOORS)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_named(folder, damage, door, error):
    damage(folder / shard_name(2))
    with pytest.raises(error, match=shard_name(2)):
        door(folder)


# Reading the folder never fails with anything that is not an error of ours, whatever stands in the
# headers.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(["F32", "rows", "1", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rows", "saved_offsets"]), inner)
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_header_makes_reading_fail_in_an_unknown_way(data):
    with tempfile.TemporaryDirectory() as directory:
        path = write_shard(Path(directory), 1, {"rows": ((0, 0), ROWS), "norm": ((0,), NORM)})
        write_shard(Path(directory), 2, {"rows": ((12, 0), ROWS)})
        header, content = split_file(path)
        info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        value = data.draw(json_values, "value")
        place = data.draw(
            st.sampled_from(["entry", "field", "info", "offsets", "metadata", "bytes"]), "place"
        )
        if place == "entry":
            header["rows"] = value
        elif place == "field":
            header["rows"][data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))] = value
        elif place == "info":
            info["rows"] = value
        elif place == "offsets":
            info["rows"]["saved_offsets"] = [value, 0]
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        if place == "metadata":
            header["__metadata__"] = value
        join_file(path, header, content)
        if place == "bytes":
            damaged = bytearray(path.read_bytes())
            damaged[data.draw(st.integers(0, len(damaged) - len(content) - 1))] = data.draw(
                st.integers(0, 255)
            )
            path.write_bytes(damaged)
        with contextlib.suppress(CheckpointingException):
            distckpt.open(directory).read_tensors()


# ---- what is refused: indexes


def test_the_index_of_a_variant_names_its_files(tmp_path):
    files = {f"part{i}.fp16.safetensors": {f"layers.{i}": ROWS} for i in (1, 2, 3)}
    write_indexed(tmp_path, files)
    (tmp_path / INDEX).rename(tmp_path / "model.safetensors.index.fp16.json")
    assert len(distckpt.open(tmp_path).read_tensors()) == 3
    write_plain(tmp_path / "model.safetensors", {"layers.4": ROWS})
    (tmp_path / "part2.fp16.safetensors").unlink()
    # What is there besides has its own names.
    assert "model.safetensors" in distckpt.verify(tmp_path).problems[0].message
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"part2.*missing.*index\.fp16\.json"):
        distckpt.open(tmp_path).read_tensors()
    assert not distckpt.verify(tmp_path).is_whole


def test_a_numbered_file_is_missing(tmp_path):
    files = {f"model-{i:05}-of-00003.safetensors": {f"layers.{i}": ROWS} for i in (1, 2, 3)}
    write_indexed(tmp_path, files)
    (tmp_path / INDEX).unlink()
    assert len(distckpt.open(tmp_path).read_tensors()) == 3
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert (
        "holds 2 of the 3 files 'model-*-of-00003.safetensors'"
        in distckpt.verify(tmp_path).problems[0].message
    )
    with pytest.raises(CorruptCheckpointError, match="copy the others"):
        distckpt.open(tmp_path).read_tensors()
    assert set(distckpt.open(tmp_path / "model-00003-of-00003.safetensors").read_tensors()) == {
        "layers.3"
    }


def test_a_single_file_beside_another_one_without_an_index(tmp_path):
    write_plain(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    write_plain(tmp_path / "adapter_model.safetensors", {"b": torch.ones(2)})
    with pytest.raises(CorruptCheckpointError, match=r"holds model\.safetensors, which is a whole"):
        distckpt.open(tmp_path)
    assert list(distckpt.open(tmp_path / "model.safetensors").tensors) == ["a"]


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "removed")
    with pytest.raises(CorruptCheckpointError, match=r"is missing \(a link to .*removed"):
        distckpt.open(tmp_path)


def test_an_index_beside_a_single_file(tmp_path):
    write_indexed(tmp_path, {"model-00001-of-00001.safetensors": {"rows": ROWS}})
    write_plain(tmp_path / "model.safetensors", {"rows": -ROWS})
    with pytest.raises(CorruptCheckpointError, match=r"of two exports.*remove one"):
        distckpt.open(tmp_path).read_tensors()
    assert torch.equal(distckpt.open(tmp_path / "model.safetensors").read_tensors()["rows"], -ROWS)
    write_indexed(tmp_path, {"model.safetensors": {"rows": ROWS}})
    assert torch.equal(distckpt.open(tmp_path).read_tensors()["rows"], ROWS)


INDEXES = {
    "no JSON": ("{", "damaged"),
    "a list": ("[]", "damaged"),
    "a key twice": (
        '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}',
        "damaged.*a name twice",
    ),
    "no weight map": ("{}", "damaged.*weight_map"),
    "a weight map of numbers": ('{"weight_map": {"a": 1}}', INDEX),
    "a weight map that is a list": ('{"weight_map": ["a"]}', INDEX),
    "a file elsewhere": ('{"weight_map": {"a": "../one.safetensors"}}', r"\.\./one\.safetensors"),
    "a pickle": ('{"weight_map": {"a": "pytorch_model.bin"}}', r"pytorch_model\.bin"),
    "a file that is missing": (
        '{"weight_map": {"a": "two.safetensors"}}',
        r"two\.safetensors' is missing",
    ),
    "a key that is missing": (
        '{"weight_map": {"a": "one.safetensors", "layers.1.c": "one.safetensors"}}',
        r"'one\.safetensors' holds 'layers\.1\.c'.*did you mean 'layers\.1\.b'",
    ),
    "an empty weight map": ('{"weight_map": {}}', INDEX),
}


@pytest.mark.parametrize(("door", "error"), DOORS[:2])
@pytest.mark.parametrize(("text", "match"), INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_does_not_fit(tmp_path, text, match, door, error):
    write_plain(tmp_path / "one.safetensors", {"a": ROWS, "layers.1.b": NORM})
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(error, match=match):
        door(tmp_path)


@pytest.mark.parametrize(
    "door",
    [distckpt.megatron.load_plain_tensors, consolidated, consolidated_as_torch_does],
)
def test_a_folder_without_safetensors_files(tmp_path, door):
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError, match=str(path)):
            door(path)


# ---- places


@pytest.mark.parametrize(
    "name", ["with [brackets] and *", "with  spaces", "ünïcödé-模型", "a%20b#c?d", "-rf", "{x}"]
)
def test_unusual_paths(tmp_path, name):
    write_folder(tmp_path / name / "in", {"w": ROWS, "n": NORM}, 0, 3)
    assert same_bytes(distckpt.open(tmp_path / name / "in").read_tensors(), {"w": ROWS, "n": NORM})
    assert same_bytes(
        distckpt.open(f"file://{tmp_path / name / 'in'}").read_tensors(), {"w": ROWS, "n": NORM}
    )


# ---- indexes that name too little, or files elsewhere, and other precisions


def mtp_folder(folder):
    """Write a directory whose index has forgotten a file, and a tensor of another one."""
    files = {f"model-0000{n}-of-00002.safetensors": {f"{n}.weight": ROWS * n} for n in (1, 2)}
    write_indexed(folder, files)
    # An earlier export of the same tensors is no reason to warn.
    write_plain(folder / "model-00003-of-00003.safetensors", {"1.weight": ROWS})
    write_plain(folder / "model-mtp-of-00002.safetensors", {"mtp.weight": NORM})
    write_plain(folder / "model-00002-of-00002.safetensors", {"2.weight": ROWS, "extra": NORM})
    return folder


def modules_of(*names):
    modules = torch.nn.ModuleDict({name: torch.nn.Module() for name in names})
    for name in names:
        modules[name].weight = torch.nn.Parameter(torch.zeros(7 if name == "mtp" else (12, 5)))
    return modules


DOORS = {
    "open": lambda folder, beside: distckpt.open(folder),
    "verify": lambda folder, beside: distckpt.verify(folder),
    "consolidate": lambda folder, beside: distckpt.consolidate(folder, beside / "out"),
    "reshard": lambda folder, beside: distckpt.reshard(folder, beside / "out"),
    "load": lambda folder, beside: distckpt.load({"model": modules_of("1", "2")}, folder),
    "inspect": lambda folder, beside: main(["inspect", str(folder)]),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=list(DOORS))
def test_tensors_that_an_index_has_forgotten_are_named(door, tmp_path, caplog):
    door(mtp_folder(tmp_path / "folder"), tmp_path)
    told = " ".join(caplog.messages)
    assert "'mtp.weight', in 'model-mtp-of-00002.safetensors'" in told
    # Once, although exports read the headers again before they commit.
    assert told.count("'extra', in 'model-00002-of-00002.safetensors'") == 1
    assert "of-00003" not in told


def test_a_load_says_which_file_holds_what_the_index_has_forgotten(tmp_path):
    folder = mtp_folder(tmp_path / "folder")
    message = r"Not in .*: 'mtp\.weight'.* The index does not name .* in 'model-mtp-of-00002"
    with pytest.raises(LoadMismatchError, match=message):
        distckpt.load({"model": modules_of("1", "2", "mtp")}, folder)
    with pytest.raises(LoadMismatchError, match=message):
        distckpt.dcp.load({"mtp.weight": torch.zeros(7)}, checkpoint_id=folder)


def test_a_damaged_file_that_no_index_names_is_no_error(tmp_path, caplog):
    folder = mtp_folder(tmp_path / "folder")
    (folder / "model-mtp-of-00002.safetensors").write_bytes(b"cut")
    assert torch.equal(distckpt.open(folder).read("1.weight"), ROWS)
    assert "model-mtp-of-00002.safetensors' is not a complete safetensors file" in caplog.text


def test_an_index_names_files_in_folders(tmp_path):
    files = {f"weights/{n}/model-0000{n}-of-00002.safetensors": {f"{n}": ROWS * n} for n in (1, 2)}
    write_indexed(tmp_path / "folder", files)
    distckpt.consolidate(tmp_path / "folder", tmp_path / "out", like=tmp_path / "folder")
    for place in ("folder", "out"):
        opened = distckpt.open(tmp_path / place)
        assert all(torch.equal(opened.read(f"{n}"), ROWS * n) for n in (1, 2))
    assert distckpt.verify(tmp_path / "folder").is_whole
    (tmp_path / "folder" / next(iter(files))).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"weights/1/.* is missing, but model\.safe"):
        distckpt.open(tmp_path / "folder")


def test_metadata_may_be_null(tmp_path):
    """As MLX writes it."""
    header = {"__metadata__": None, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1, 2))
    assert load_file(path)["w"].tolist() == [1, 2]
    assert distckpt.open(tmp_path).read("w").tolist() == [1, 2]


STEMS = ["diffusion_pytorch_model", "model"]
FULL, HALF = {"a.weight": ROWS, "b": NORM}, {"a.weight": ROWS.half(), "b": NORM.half()}


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("variant", ["fp16", "non_ema"])
@pytest.mark.parametrize("are_many", [False, True])
def test_another_precision_beside_the_files_is_left_alone(stem, variant, are_many, tmp_path):
    folder = tmp_path / "folder"
    for name, tensors, kind in ((stem, FULL, ""), (f"{stem}.{variant}", HALF, f"{variant}.")):
        files = {f"{name}.safetensors": tensors}
        if are_many:
            pairs = enumerate(tensors.items(), 1)
            files = {f"{name}-0000{n}-of-00002.safetensors": {k: t} for n, (k, t) in pairs}
        for file, content in files.items():
            write_plain(folder / file, content)
        weight_map = {key: file for file, content in files.items() for key in content}
        if are_many:
            index = folder / f"{stem}.safetensors.index.{kind}json"
            index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert same_bytes(distckpt.open(folder).read_tensors(), FULL)
    distckpt.consolidate(folder, tmp_path / "out", extra_files_from=folder)
    assert same_bytes(read_export(tmp_path / "out"), FULL)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("stem", STEMS)
def test_files_with_names_like_a_precision_and_other_tensors_are_not_left_alone(stem, tmp_path):
    write_plain(tmp_path / f"{stem}.safetensors", FULL)
    write_plain(tmp_path / f"{stem}.mtp.safetensors", {"mtp": NORM})
    if stem == "model":
        with pytest.raises(
            CorruptCheckpointError, match=r"no model\.safetensors\.index\.json says"
        ):
            distckpt.open(tmp_path)
    else:
        assert same_bytes(distckpt.open(tmp_path).read_tensors(), {**FULL, "mtp": NORM})


@pytest.mark.parametrize("names", [["model"], ["model-00001-of-00002", "model-00002-of-00002"]])
def test_mistrals_own_format_beside_the_files_is_left_alone(names, tmp_path):
    for number, name in enumerate(names):
        write_plain(tmp_path / f"{name}.safetensors", {f"{number}.weight": ROWS})
    write_plain(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": NORM})
    assert len(distckpt.open(tmp_path).tensors) == len(names)
    for name in names:
        (tmp_path / f"{name}.safetensors").unlink()
    assert set(distckpt.open(tmp_path).tensors) == {"tok_embeddings.weight"}


def test_headers_of_files_are_requested_at_the_same_time(tmp_path):
    # Both wait until the other one is there; a request after the other breaks the barrier.
    write_indexed(tmp_path, {"a.safetensors": {"rows": ROWS}, "b.safetensors": {"norm": NORM}})
    both = threading.Barrier(2, timeout=20)
    waited = set()

    def wait(path, start, stop):
        if path.endswith(".safetensors") and path not in waited:
            waited.add(path)
            both.wait()

    with hooked_reads(wait):
        tensors = distckpt.open(f"hooked://{tmp_path}").read_tensors()
    assert same_bytes(tensors, {"rows": ROWS, "norm": NORM})
    assert len(waited) == 2
