"""Checkpoints written when a format was released stay readable; those of newer formats are refused,
with advice.
"""

from __future__ import annotations

import collections
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import load_file

import distckpt
from distckpt import CheckpointManager, CorruptCheckpointError, ShardedObject, ShardedTensor
from distckpt.cli import main
from distckpt.megatron.core import read_marker, write_marker
from distckpt.megatron.validation import READER_VERSION
from tests.data import make_golden
from tests.data.make_golden import CELLS, COMMON, DTYPES, NEW_DTYPES
from tests.support.forged_files import object_of, with_object

DATA = Path(__file__).parents[2] / "data"
CHECKPOINTS = [
    "grid",
    "flat",
    "odd",
    "objects",
    "dtypes",
    "new_dtypes",
    *(f"run/step_000000{i}0" for i in (1, 2, 3)),
]


def expected_in(name):
    """Return the bits of the tensors of a checkpoint, by key."""
    with np.load(DATA / "format-1" / "expected.npz") as arrays:
        return {
            key.partition("/")[2]: arrays[key] for key in arrays.files if key.startswith(f"{name}/")
        }


def bits_of(tensor):
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )


def assert_bits(tensor, expected):
    """Compare a tensor with what numpy has stored of it."""
    assert tuple(tensor.shape) == expected.shape
    assert np.array_equal(bits_of(tensor).numpy().view(expected.dtype), expected)


def needs_dtypes(name):
    if name == "new_dtypes" and not all(hasattr(torch, dtype) for dtype in NEW_DTYPES):
        pytest.skip("this torch lacks some of the dtypes")


def copy_of(checkpoint, tmp_path):
    return Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))


@pytest.fixture(params=["format-1", "format-2", "format-3", "format-3-large", "format-4-large"])
def golden(request):
    """Return the folder of the checkpoints of a format; they hold the same."""
    return DATA / request.param


# ---- every released format stays readable


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_it_is_whole(golden, name):
    needs_dtypes(name)
    report = distckpt.verify(golden / name)
    assert report.problems == ()
    assert report.has_checksums


@pytest.mark.parametrize("name", ["grid", "flat", "dtypes", "new_dtypes"])
def test_tensors_keep_their_bits(golden, name):
    needs_dtypes(name)
    tensors = distckpt.open(golden / name).read_tensors()
    expected = expected_in(name)
    assert tensors.keys() == expected.keys()
    for key, bits in expected.items():
        assert_bits(tensors[key], bits)
        if "dtypes" in name:
            assert str(tensors[key].dtype) == f"torch.{key}"


def test_tensors_of_odd_shapes_keep_their_bits(golden):
    tensors = distckpt.open(golden / "odd").read_tensors()
    expected = expected_in("odd")
    expected["alias"] = expected["tied"]
    assert tensors.keys() == expected.keys()
    for key, bits in expected.items():
        assert_bits(tensors[key], bits)


def test_a_tied_tensor_is_stored_once(golden):
    (file,) = [
        file
        for file in (golden / "odd" / "tensors").iterdir()
        if b'"tied"' in file.read_bytes()[:4096]
    ]
    assert "alias" not in load_file(file)
    assert_bits(load_file(file)["tied"], expected_in("odd")["tied"])


@pytest.mark.parametrize("verify", [True, False])
def test_another_layout_is_filled(golden, verify):
    """Along the axis that was not divided, in uneven parts, and layers without their axis."""
    expected = expected_in("grid")
    asked = {
        "columns": ShardedTensor.from_rank_offsets("columns", torch.zeros(2, 8), (0, 2, 3)),
        "rows": ShardedTensor.from_rank_offsets("rows", torch.zeros(8, 1), (1, 3, 5)),
        "layer": ShardedTensor.from_rank_offsets(
            "stack", torch.zeros(2, 3), (0, 2, 4), prepend_axis_num=1
        ),
    }
    loaded = distckpt.load(asked, golden / "grid", verify=verify)
    assert_bits(loaded["columns"], expected["columns"][4:])
    assert_bits(loaded["rows"], expected["rows"][:, 3:4])
    assert_bits(loaded["layer"], expected["stack"][2])
    assert loaded["step"] == 7
    assert distckpt.open(golden / "grid").metadata == {"layout": "tp2"}


def test_a_part_of_a_flattened_tensor_is_filled(golden):
    bits = expected_in("flat")["weight"].reshape(-1)
    part = ShardedTensor.from_rank_offsets_flat(
        "weight", torch.zeros(9), (7, 5), flattened_range=slice(13, 22)
    )
    assert_bits(distckpt.load({"w": part}, golden / "flat")["w"], bits[13:22])


def described(value):
    """Return a value in a form that compares as it should: types count, and so do the contents of
    tensors.
    """
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        factory = value.default_factory if isinstance(value, collections.defaultdict) else None
        return (
            type(value),
            factory,
            [(described(key), described(item)) for key, item in value.items()],
        )
    if isinstance(value, list | tuple):
        return type(value), [described(item) for item in value]
    return type(value), value if isinstance(value, set | frozenset) else repr(value)


def test_common_state_of_every_kind(golden):
    loaded = distckpt.open(golden / "objects").common_state
    assert loaded.keys() == COMMON.keys()
    for key, value in COMMON.items():
        assert described(loaded[key]) == described(value), key


def test_a_grid_of_objects(golden):
    asked = {str(i): ShardedObject("cells", None, (2, 2), divmod(i, 2)) for i in range(4)}
    loaded = distckpt.load(asked, golden / "objects")
    for i, cell in enumerate(CELLS):
        assert described(loaded[str(i)]) == described(cell)


def test_a_run_is_resumed(golden, tmp_path):
    manager = CheckpointManager(copy_of(golden / "run", tmp_path), keep_last=2, best_metric="loss")
    assert manager.latest() == 30
    target = ShardedTensor.from_rank_offsets("w", torch.zeros(8, 2))
    for step in (10, 20, 30):
        loaded = manager.load({"w": target}, step=step)
        assert_bits(loaded["w"], expected_in("run")[f"step {step}"])
        assert loaded["step"] == step
    manager.save(40, make_golden.run_state(0, 30) | {"w": target}, metrics={"loss": 4.0}).result(
        200
    )
    manager.close()
    steps = sorted(path.name for path in (tmp_path / "run").glob("step_*"))
    assert steps == ["step_00000010", "step_00000030", "step_00000040"], (
        "what was saved then counts as a manager's own"
    )


def test_it_is_consolidated(golden, tmp_path):
    distckpt.consolidate(golden / "grid", tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for key, bits in expected_in("grid").items():
        assert_bits(exported[key], bits)


def test_other_readers_open_the_files(golden):
    """The shards are safetensors files that say where their pieces belong: numpy can put them
    together.
    """
    found = {key: np.zeros_like(bits) for key, bits in expected_in("grid").items()}
    for file in (golden / "grid" / "tensors").iterdir():
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for key, values in safetensors.numpy.load(raw).items():
            offset = places[key]["saved_offsets"]
            where = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
            found[key][where] = values.view(np.uint32)
    for key, bits in expected_in("grid").items():
        assert np.array_equal(found[key], bits)


def test_all_dtypes_and_kinds_are_there(golden):
    """What the format page lists is what these checkpoints hold."""
    stored = {str(shard.dtype) for shard in distckpt.open(golden / "dtypes").tensors.values()}
    assert stored == {f"torch.{name}" for name in DTYPES}


# ---- a newer one is refused, or read where its writer says that it can be


def change_marker(path, **fields):
    write_marker(path, {**read_marker(path), **fields})


READERS = {
    "load": lambda path: distckpt.load(
        {"b": ShardedTensor.from_rank_offsets("bias", torch.zeros(4, 3))}, path
    ),
    "load_plain_tensors": distckpt.megatron.load_plain_tensors,
    "load_common_state_dict": distckpt.megatron.load_common_state_dict,
    "load_tensors_metadata": distckpt.megatron.load_tensors_metadata,
    "load_sharded_metadata": distckpt.megatron.serialization.load_sharded_metadata,
    "remove_sharded_tensors": lambda path: distckpt.megatron.remove_sharded_tensors(path, "bias"),
    "consolidate": lambda path: distckpt.consolidate(path, path.parent / "export"),
}
REFUSAL = (
    rf"needs a reader of format version {READER_VERSION + 1}; "
    rf".* reads up to {READER_VERSION}. Install a newer release"
)


@pytest.mark.parametrize("reader", READERS)
def test_a_newer_format_is_refused_with_what_to_do(golden, reader, tmp_path):
    path = copy_of(golden / "grid", tmp_path)
    change_marker(path, format_version=READER_VERSION + 1, min_reader_version=READER_VERSION + 1)
    with pytest.raises(CorruptCheckpointError, match=REFUSAL) as caught:
        READERS[reader](path)
    assert str(path) in str(caught.value)


def test_verify_says_that_the_format_is_newer(golden, tmp_path):
    path = copy_of(golden / "grid", tmp_path)
    change_marker(path, min_reader_version=READER_VERSION + 1)
    (problem,) = distckpt.verify(path).problems
    assert "newer release" in problem.message


@pytest.mark.parametrize("verb", ["inspect", "verify", "consolidate"])
def test_the_command_line_says_that_the_format_is_newer(golden, verb, tmp_path, capsys):
    path = copy_of(golden / "grid", tmp_path)
    change_marker(path, min_reader_version=READER_VERSION + 1)
    more = [str(tmp_path / "export")] if verb == "consolidate" else []
    assert main([verb, str(path), *more]) != 0
    captured = capsys.readouterr()
    assert "newer release" in " ".join((captured.out + captured.err).split())
    assert "Traceback" not in captured.err


def test_a_manager_says_why_it_passes_over_a_newer_step(golden, tmp_path):
    root = copy_of(golden / "run", tmp_path)
    change_marker(root / "step_00000030", min_reader_version=READER_VERSION + 1)
    manager = CheckpointManager(root)
    assert manager.latest() == 20
    assert "newer release" in manager.skipped[30]


@pytest.mark.parametrize("value", ["2", None, [1], 1.5, True, -1, 10**30])
def test_a_version_that_is_none_is_refused(golden, value, tmp_path):
    path = copy_of(golden / "grid", tmp_path)
    change_marker(path, min_reader_version=value)
    with pytest.raises(CorruptCheckpointError, match="needs a reader of format version"):
        distckpt.open(path).read_tensors()


def test_a_newer_format_that_this_reader_may_read_is_read(golden, tmp_path):
    """A writer that changes nothing that a reader of format 1 must know raises `format_version`
    alone.
    """
    path = copy_of(golden / "grid", tmp_path)
    change_marker(path, format_version=READER_VERSION + 5, new_field={"a": [1]}, another="x")
    assert distckpt.verify(path).is_whole
    for key, bits in expected_in("grid").items():
        assert_bits(distckpt.open(path).read_tensors()[key], bits)


def test_a_newer_encoding_of_objects_is_refused_with_what_to_do(tmp_path):
    distckpt.save({}, tmp_path / "c")
    with_object(tmp_path / "c", object_of({}, codec_version="2"))
    with pytest.raises(distckpt.CheckpointingException, match="newer release"):
        distckpt.load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path / "c")
