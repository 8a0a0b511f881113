"""`distckpt.open`: what a checkpoint holds, and reads of tensors and regions, compared with numpy
and the safetensors library.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import warnings

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

import distckpt
from distckpt import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    ShardedObject,
    ShardedTensor,
    TensorInfo,
)
from distckpt.strategies.base import SaveShardedStrategy
from tests.support.disk import flip
from tests.support.hf_folders import same_bytes
from tests.support.quantized_models import fp8_block, mxfp4
from tests.support.read_counts import counted_reads
from tests.support.states import numbered, save_checkpoint

SCALAR = torch.tensor(7, dtype=torch.int64)
TENSORS = {
    "layers.0.weight": numbered(10, 6),
    "layers.1.weight": numbered(12, 5, 3, dtype=torch.bfloat16),
    "steps": SCALAR,
    "empty": torch.zeros(0, 4),
}


def random_slices(shape, chooser):
    """Return slices of the first axes, with open and negative ends."""
    slices = []
    for size in shape[: chooser.randint(0, len(shape))]:
        start, stop = sorted((chooser.randint(0, size), chooser.randint(0, size)))
        first = chooser.choice([start, start - size] if start < size else [start])
        last = chooser.choice([stop, stop - size] if stop < size else [stop, None])
        slices.append(slice(chooser.choice([first, None]) if start == 0 else first, last))
    return tuple(slices)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint whose tensors are cut into several chunks and files."""
    folder = tmp_path_factory.mktemp("saved")
    objects = {
        f"rng.{rank}": ShardedObject("rng", {"seed": rank}, (2, 1), (rank, 0)) for rank in range(2)
    }
    save_checkpoint(folder / "one", TENSORS, **objects, step=5, args={"lr": [0.1, 0.2]})
    distckpt.reshard(
        folder / "one", folder / "c", num_ranks=3, grids={"layers.1.weight": (2, 3, 1)}
    )
    return folder / "c"


# --- What it holds --------------------------------------------------------------------------------


def test_what_a_checkpoint_holds(saved):
    checkpoint = distckpt.open(saved)
    assert checkpoint.location == str(saved)
    assert checkpoint.tensors == {
        key: TensorInfo(key, tuple(tensor.shape), tensor.dtype) for key, tensor in TENSORS.items()
    }
    assert checkpoint.objects == {"rng": (2, 1)}
    assert checkpoint.common_state == {"step": 5, "args": {"lr": [0.1, 0.2]}}
    assert checkpoint.metadata is None
    assert repr(checkpoint) == f"<Checkpoint {str(saved)!r}: 4 tensors, 1 sharded objects>"


def test_metadata_is_what_save_was_given(tmp_path):
    distckpt.save({"step": 1}, tmp_path / "c", content_metadata={"kind": "test", "sizes": [1, 2]})
    checkpoint = distckpt.open(tmp_path / "c")
    assert checkpoint.metadata == {"kind": "test", "sizes": [1, 2]}
    assert checkpoint.common_state["step"] == 1
    assert (checkpoint.tensors, checkpoint.objects) == ({}, {})
    assert checkpoint.read_tensors() == {}


def test_common_state_is_read_when_it_is_needed_and_once(tmp_path):
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3)), "text": "x" * 1_000_000}
    distckpt.save(state, tmp_path / "c")
    with counted_reads() as counts:
        checkpoint = distckpt.open(tmp_path / "c")
        checkpoint.read("w")
    assert counts.num_bytes < 100_000
    assert len(checkpoint.common_state["text"]) == 1_000_000
    with counted_reads() as counts:
        assert len(checkpoint.common_state["text"]) == 1_000_000
    assert counts.num_bytes < 100_000


def test_tied_tensors_have_all_their_names(tmp_path):
    tensor = numbered(4, 4)
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key in ("head", "embedding")}
    distckpt.save(state, tmp_path / "c")
    checkpoint = distckpt.open(tmp_path / "c")
    assert set(checkpoint.tensors) == {"head", "embedding"}
    assert same_bytes(checkpoint.read_tensors(), {"head": tensor, "embedding": tensor})


# --- Reads ----------------------------------------------------------------------------------------


def test_tensors_read_whole(saved):
    checkpoint = distckpt.open(saved)
    assert same_bytes({key: checkpoint.read(key) for key in TENSORS}, TENSORS)
    assert same_bytes(checkpoint.read_tensors(), TENSORS)
    chosen = ["steps", "layers.0.weight"]
    assert same_bytes(checkpoint.read_tensors(chosen), {key: TENSORS[key] for key in chosen})
    assert checkpoint.read_tensors([]) == {}


def test_regions_are_those_of_numpy(saved):
    checkpoint, chooser = distckpt.open(saved), random.Random(1)
    for _ in range(200):
        key = chooser.choice(list(TENSORS))
        region = random_slices(TENSORS[key].shape, chooser)
        part = np.asarray(TENSORS[key].float().numpy()[region])
        expected = torch.from_numpy(part).to(TENSORS[key].dtype)
        assert same_bytes({key: checkpoint.read(key, region)}, {key: expected}), (key, region)


def test_a_region_is_all_that_is_read(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": numbered(4096, 1024)}, num_parts=8)
    checkpoint = distckpt.open(tmp_path / "c")
    with counted_reads() as counts:
        assert checkpoint.read("w", (slice(7, 9),))[0, 0] == 7 * 1024 + 1
    assert counts.num_bytes < 1 << 20


def test_files_of_the_safetensors_library(tmp_path):
    tensors = {"a": numbered(9, 4), "b.c": numbered(6, dtype=torch.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = distckpt.open(path)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert set(checkpoint.tensors) == set(file.keys())
            for key in file.keys():  # noqa: SIM118
                assert torch.equal(checkpoint.read(key), file.get_tensor(key))
            part = file.get_slice("a")[2:5, 1:3]
        assert torch.equal(checkpoint.read("a", (slice(2, 5), slice(1, 3))), part)
        assert (checkpoint.common_state, checkpoint.metadata) == ({}, None)


def test_a_checkpoint_of_torch(tmp_path):
    tensors = {"w": numbered(5, 3), "v": numbered(4)}
    with warnings.catch_warnings():
        # It warns that one process saves alone.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save({**tensors, "step": 3}, checkpoint_id=str(tmp_path / "c"))
    checkpoint = distckpt.open(tmp_path / "c")
    assert same_bytes(checkpoint.read_tensors(), tensors)
    assert torch.equal(checkpoint.read("w", (slice(None), slice(1, 2))), tensors["w"][:, 1:2])


def test_a_checkpoint_at_a_url(saved):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(saved), "/open_me", recursive=True)
    try:
        checkpoint = distckpt.open("memory://open_me")
        assert same_bytes(checkpoint.read_tensors(), TENSORS)
        part = checkpoint.read("layers.1.weight", (slice(3, 9), slice(2, 4)))
        assert torch.equal(part, TENSORS["layers.1.weight"][3:9, 2:4])
        assert checkpoint.common_state["step"] == 5
        memory.rm("/open_me", recursive=True)
        with pytest.raises(CheckpointNotFoundError, match="was removed"):
            checkpoint.read("layers.0.weight")
    finally:
        if memory.exists("/open_me"):
            memory.rm("/open_me", recursive=True)


@pytest.mark.parametrize("make", [fp8_block, mxfp4])
def test_quantized_tensors_are_values_or_as_they_are_stored(make, tmp_path):
    model = make()
    model.write(tmp_path)
    checkpoint = distckpt.open(tmp_path)
    for key, info in checkpoint.tensors.items():
        expected = model.values[key].to(info.dtype)
        assert same_bytes({key: checkpoint.read(key)}, {key: expected})
        rows = (slice(1, 2),)
        assert same_bytes({key: checkpoint.read(key, rows)}, {key: expected[rows]})
    assert checkpoint.tensors.keys() == model.values.keys()
    assert same_bytes(distckpt.open(tmp_path, as_stored=True).read_tensors(), model.tensors)


# --- Errors ---------------------------------------------------------------------------------------


def test_unknown_keys_are_named_with_the_nearest_one(saved):
    checkpoint = distckpt.open(saved)
    with pytest.raises(LoadMismatchError, match=r"'layers\.0\.weigth'.*did you mean.*weight'"):
        checkpoint.read("layers.0.weigth")
    with pytest.raises(LoadMismatchError, match=r"'nothing'"):
        checkpoint.read_tensors(["steps", "nothing"])
    with pytest.raises(LoadMismatchError, match="'rng' is a sharded object"):
        checkpoint.read("rng")


@pytest.mark.parametrize(
    ("region", "text"),
    [
        ((slice(0, 11),), "[0:11]"),
        ((slice(-11, None),), "[-11:]"),
        ((slice(5, 2),), "[5:2]"),
        ((slice(0, 4, 2),), "[0:4:2]"),
        ((slice(None, 3), slice(None), slice(1)), "[:3, :, :1]"),
    ],
)
def test_a_region_that_is_not_there(saved, region, text):
    with pytest.raises(LoadMismatchError) as caught:
        distckpt.open(saved).read("layers.0.weight", region)
    for part in ("'layers.0.weight'", "(10, 6)", f"no region {text}"):
        assert part in str(caught.value)


@pytest.mark.parametrize("region", [3, (3,), slice(0, 2), [slice(0, 2)], "a"])
def test_a_region_that_is_none(saved, region):
    with pytest.raises(TypeError, match="region is a tuple of slices"):
        distckpt.open(saved).read("layers.0.weight", region)


@pytest.mark.parametrize("keys", ["steps", b"steps", [1], 3])
def test_keys_are_a_list_of_keys(saved, keys):
    with pytest.raises(TypeError, match="keys is a list of whole keys"):
        distckpt.open(saved).read_tensors(keys)


def test_nothing_to_open(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        distckpt.open(tmp_path / "nothing")


def test_a_directory_of_a_save_that_is_running_is_not_suggested(tmp_path):
    (tmp_path / ".step.tmp-0123456789abcdef").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="does not exist") as caught:
        distckpt.open(tmp_path / "step")
    assert "did you mean" not in str(caught.value)
    (tmp_path / "steps").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"did you mean 'steps'\?"):
        distckpt.open(tmp_path / "step")


class SaveNumbers(SaveShardedStrategy):
    backend = "numbers"
    version = 1

    def save(self, sharded_state_dict, checkpoint_dir):
        np.save(os.path.join(checkpoint_dir, "numbers.npy"), np.arange(3))


def test_a_checkpoint_of_a_strategy_of_ones_own_is_refused_by_name(tmp_path):
    distckpt.save({"step": 1}, tmp_path / "c", strategy=SaveNumbers())
    with pytest.raises(CheckpointingException, match=r"strategy 'numbers'.*distckpt\.load"):
        distckpt.open(tmp_path / "c")


def test_a_changed_byte_is_found(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    for file in (tmp_path / "c" / "tensors").iterdir():
        flip(file, -1)
    with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
        distckpt.open(tmp_path / "c").read_tensors()


# --- Changes while it is open ---------------------------------------------------------------------


def replace_checkpoint(path):
    save_checkpoint(path.with_name("other"), {"w": 2 * numbered(300, 7)})
    shutil.rmtree(path)
    path.with_name("other").rename(path)


def overwrite(path):
    state = {"w": ShardedTensor.from_rank_offsets("w", 2 * numbered(300, 7)), "step": 2}
    distckpt.save(state, path, overwrite=True)


def pickle_and_back(checkpoint):
    return pickle.loads(pickle.dumps(checkpoint))


@pytest.mark.parametrize("change", [replace_checkpoint, overwrite])
def test_a_checkpoint_that_was_replaced(change, tmp_path):
    save_checkpoint(tmp_path / "c", {"w": numbered(300, 7)}, step=1)
    checkpoint = distckpt.open(tmp_path / "c")
    assert torch.equal(checkpoint.read("w"), numbered(300, 7))
    change(tmp_path / "c")
    reads = [
        lambda: checkpoint.read("w", (slice(0, 3),)),
        checkpoint.read_tensors,
        lambda: checkpoint.common_state,
    ]
    for read in reads:
        with pytest.raises(CheckpointingException, match="was replaced after it was opened"):
            read()
    assert torch.equal(distckpt.open(tmp_path / "c").read("w"), 2 * numbered(300, 7))


def test_a_file_without_checksums_that_was_replaced(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"w": numbered(30, 7)}, file)
    for path in (tmp_path, file):
        checkpoint = distckpt.open(path)
        checkpoint.read("w")
        save_file({"w": 2 * numbered(30, 7)}, file)
        os.utime(file, (0, os.stat(file).st_mtime + 1))
        with pytest.raises(CheckpointingException, match="was replaced or written to"):
            checkpoint.read("w")


@pytest.mark.parametrize("copied", [pickle_and_back, copy.copy, copy.deepcopy])
def test_an_open_checkpoint_can_be_sent_and_copied(copied, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    checkpoint = distckpt.open(tmp_path / "c")
    assert checkpoint.common_state  # what was read is not sent
    assert len(pickle.dumps(checkpoint)) < 2000
    other = copied(checkpoint)
    assert other.location == checkpoint.location
    assert other.tensors == checkpoint.tensors
    assert other.common_state == checkpoint.common_state
    for key, value in checkpoint.read_tensors().items():
        assert torch.equal(other.read(key), value)
    shutil.rmtree(tmp_path / "c")
    save_checkpoint(tmp_path / "c", {"w": numbered(3, 7)}, step=1)
    with pytest.raises(CheckpointingException, match="was replaced after it was opened"):
        copied(checkpoint)


def test_an_open_checkpoint_is_sent_with_its_view_of_codes(tmp_path):
    weight = torch.full((4, 4), 3.0)
    codes = {"l.weight": weight.to(torch.float8_e4m3fn), "l.weight_scale": torch.full((1,), 2.0)}
    save_file(codes, tmp_path / "model.safetensors")
    settings = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for as_stored, expected in ((True, weight), (False, 2 * weight)):
        checkpoint = pickle_and_back(distckpt.open(tmp_path, as_stored=as_stored))
        assert torch.equal(checkpoint.read("l.weight").float(), expected)


def test_what_an_open_checkpoint_says_cannot_be_changed(saved):
    checkpoint = distckpt.open(saved)
    for mapping in (checkpoint.tensors, checkpoint.objects):
        with pytest.raises(TypeError):
            mapping["new"] = 1
        assert "new" not in mapping


def test_a_checkpoint_that_was_removed(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    checkpoint = distckpt.open(tmp_path / "c")
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="was removed"):
        checkpoint.read("layers.0.weight")
    with pytest.raises(CheckpointNotFoundError, match="was removed"):
        _ = checkpoint.common_state


def test_a_damaged_checkpoint_is_not_called_replaced(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "c")
    checkpoint = distckpt.open(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "tensors")
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        checkpoint.read("layers.0.weight")
    marker = json.loads((tmp_path / "c" / "metadata.json").read_text())
    assert marker["sharded_backend"] == "safetensors"
