"""Files that were changed at random: every way to read them gives an error or the values that were
saved.
"""

from __future__ import annotations

import collections
import os
import shutil

import numpy as np
import pytest
import safetensors.numpy
import torch

import distckpt
from distckpt import CheckpointingException, ShardedTensor

SHAPES = {"w": (420, 1502), "x": (3, 500, 172), "b": (70_001,)}
"""Their chunks have several blocks, which begin where no row does."""


def values_of(step):
    random = np.random.default_rng(step)
    return {key: random.standard_normal(shape, np.float32) for key, shape in SHAPES.items()}


def shard_of(key, tensor, offset):
    return ShardedTensor(key, tensor, tensor.dtype, tuple(tensor.shape), SHAPES[key], offset, None)


def save(path, step):
    """Save each matrix in halves, which go to two files."""
    state = {}
    for key, values in values_of(step).items():
        for half in np.split(values, 2 if values.ndim > 1 else 1, axis=-1):
            offset = (0,) * (values.ndim - 1) + (
                values.shape[-1] // 2 if len(state) % 2 and values.ndim > 1 else 0,
            )
            state[f"{key} {offset}"] = shard_of(key, torch.from_numpy(half.copy()), offset)
    distckpt.save(state, path, durable=False)


# ---- ways to read


def read_regions(path, regions, dtype=torch.float32):
    state = {}
    for number, (key, where) in enumerate(regions):
        target = torch.full([axis.stop - axis.start for axis in where], -1, dtype=dtype)
        state[str(number)] = shard_of(key, target, tuple(axis.start for axis in where))
    distckpt.load(state, path)
    return {
        str(where): (key, where, state[str(number)].data.numpy())
        for number, (key, where) in enumerate(regions)
    }


def whole(path, random):
    return read_regions(
        path, [(key, tuple(slice(0, size) for size in shape)) for key, shape in SHAPES.items()]
    )


def random_slice(random, size):
    length = int(size ** random.random())
    start = int(random.integers(size - length + 1))
    return slice(start, start + length)


def parts(path, random):
    dtype = random.choice([torch.float32, torch.float64])
    chosen = [
        (key, tuple(random_slice(random, size) for size in shape)) for key, shape in SHAPES.items()
    ]
    return read_regions(path, chosen, dtype)


def resharded(path, random):
    """The part of one of three ranks, along the last axis or the first."""
    rank, axis = int(random.integers(3)), int(random.choice([0, -1]))
    regions = []
    for key, shape in SHAPES.items():
        where = [slice(0, size) for size in shape]
        where[axis] = slice(rank * shape[axis] // 3, (rank + 1) * shape[axis] // 3)
        regions.append((key, tuple(where)))
    return read_regions(path, regions)


def plain(path, random):
    loaded = distckpt.open(path).read_tensors()
    assert loaded.keys() == SHAPES.keys()
    return {key: (key, (), tensor.numpy()) for key, tensor in loaded.items()}


def exported(path, random):
    target = path.parent / "exported"
    shutil.rmtree(target, ignore_errors=True)
    distckpt.consolidate(path, target)
    loaded = safetensors.numpy.load_file(target / "model.safetensors")
    assert loaded.keys() == SHAPES.keys()
    return {key: (key, (), values) for key, values in loaded.items()}


READERS = (whole, parts, resharded, plain, exported)


# ---- changes


def flip_bits(path, files, random):
    with files[random.integers(len(files))].open("r+b") as file:
        for position in random.integers(
            0, os.fstat(file.fileno()).st_size, int(300 ** random.random())
        ).tolist():
            byte = os.pread(file.fileno(), 1, position)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << int(random.integers(8))]), position)


def cut_off(path, files, random):
    file = files[random.integers(len(files))]
    os.truncate(file, int(random.integers(file.stat().st_size)))


def swap_files(path, files, random):
    """Two files that save different tensors of equal sizes; or any others."""
    first, second = (files[i] for i in random.choice(len(files), 2, replace=False))
    first.rename(path / "aside")
    second.rename(first)
    (path / "aside").rename(second)


def replace_files(path, files, random):
    """Files of another checkpoint of the job take the place of those of the same name, all but the
    marker.
    """
    files = [file for file in files if file.name != "metadata.json"]
    for file in random.choice(files, random.integers(1, len(files) + 1), replace=False):
        shutil.copyfile(path.parent / "older" / file.relative_to(path), file)


def lose_writes(path, files, random):
    """Pages hold what an older save wrote there, or nothing."""
    file = files[random.integers(len(files))]
    first, last = (np.sort(random.integers(0, file.stat().st_size, 2)) >> 12 << 12).tolist()
    older = (path.parent / "older" / file.relative_to(path)).read_bytes()
    with file.open("r+b") as opened:
        os.pwrite(
            opened.fileno(), older[first:last] if random.integers(2) else bytes(last - first), first
        )


CHANGES = (flip_bits, cut_off, swap_files, replace_files, lose_writes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mutations")
    save(folder / "saved", 2)
    save(folder / "older", 1)
    return folder


def outcome_of(read, path, random):
    """Return whether a reader gives what was saved ("right"), something else ("WRONG"), or raises
    an error.
    """
    try:
        found = read(path, random)
    except CheckpointingException:
        return "error"
    saved = values_of(2)
    is_right = all(
        np.array_equal(values, saved[key][where]) for key, where, values in found.values()
    )
    return "right" if is_right else "WRONG"


def count_outcomes(folder, num_changes):
    counts = collections.Counter()
    for number in range(num_changes):
        random = np.random.default_rng(number)
        path = folder / "c"
        shutil.copytree(folder / "saved", path)
        # Most of what is stored is tensors.
        files = sorted(path.rglob("tensors/*" if random.integers(4) else "*"))
        change = CHANGES[number % len(CHANGES)]
        change(path, [file for file in files if file.is_file()], random)
        for read in READERS:
            counts[change.__name__, read.__name__, outcome_of(read, path, random)] += 1
        shutil.rmtree(path)
    return counts


def check(folder, num_changes):
    for read in READERS:
        assert outcome_of(read, folder / "saved", np.random.default_rng(0)) == "right"
    counts = count_outcomes(folder, num_changes)
    print(counts)
    assert not [case for case in counts if case[2] == "WRONG"], counts
    for change in CHANGES:
        assert counts[change.__name__, "whole", "error"], change


def test_a_changed_file_is_found_or_does_no_harm(folder):
    check(folder, 25)


@pytest.mark.slow
def test_2000_changed_files_are_found_or_do_no_harm(folder):
    check(folder, 2000)
