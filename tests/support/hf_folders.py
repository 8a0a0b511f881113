"""Folders of shards as torch's distributed writer leaves them, and exports, through the reference
library.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import torch
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from tests.support.reference import skip_where_safetensors_lacks

INDEX = "model.safetensors.index.json"


def shard_name(rank, index=1, total=1):
    """Name a file as torch does: ranks and files count from 1."""
    return f"shard-{rank:05d}-model-{index:05d}-of-{total:05d}.safetensors"


def write_shard(folder, rank, pieces, index=1, total=1, info=None):
    """Write one file of `{key: (offset, tensor)}` with torch's sharding metadata (or `info` in its
    place).
    """
    folder.mkdir(parents=True, exist_ok=True)
    offsets = {key: {"saved_offsets": list(offset)} for key, (offset, _) in pieces.items()}
    metadata = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    metadata |= {} if info is None else {"DCP_SHARDING_INFO": info}
    tensors = {
        key: tensor.clone(memory_format=torch.contiguous_format)
        for key, (_, tensor) in pieces.items()
    }
    path = folder / shard_name(rank, index, total)
    skip_where_safetensors_lacks(*(tensor.dtype for tensor in tensors.values()))
    save_file(tensors, path, metadata=metadata)
    return path


def parts_along(tensor, axis, num_parts):
    """Cut a tensor as torch.chunk does; yields (offset, part)."""
    position = 0
    for part in tensor.chunk(num_parts, axis):
        yield tuple(position if i == axis else 0 for i in range(tensor.ndim)), part
        position += part.shape[axis]


def write_folder(folder, tensors, axis, num_ranks):
    """Write a folder in which every tensor is cut along an axis, one part a rank; a tensor without
    it is rank 1's.
    """
    by_rank = [{} for _ in range(num_ranks)]
    for key, tensor in tensors.items():
        whole = [((0,) * tensor.ndim, tensor)]
        parts = parts_along(tensor, axis, num_ranks) if tensor.ndim > axis else whole
        for pieces, part in zip(by_rank, parts, strict=False):
            pieces[key] = part
    return [write_shard(folder, rank, pieces) for rank, pieces in enumerate(by_rank, 1) if pieces]


def write_plain(path, tensors):
    """Write a file of whole tensors, as Hugging Face's libraries do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    skip_where_safetensors_lacks(*(tensor.dtype for tensor in tensors.values()))
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write_indexed(folder, files):
    """Write `{file name: {key: tensor}}` and the index."""
    for name, tensors in files.items():
        write_plain(folder / name, tensors)
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return folder


def header_text(path):
    """Return the header of a safetensors file."""
    with open(path, "rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def read_export(folder):
    """Read an export as its users do; everything that files and index say must agree."""
    folder = Path(folder)
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
    tensors, weight_map = {}, {}
    for name in names:
        skip_where_safetensors_lacks(*re.findall(r'"dtype": *"(\w+)"', header_text(folder / name)))
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():  # noqa: SIM118
                assert key not in tensors
                tensors[key], weight_map[key] = file.get_tensor(key), name
    if names == ["model.safetensors"]:
        assert not (folder / INDEX).exists()
        return tensors
    index = json.loads((folder / INDEX).read_text())
    assert index == {
        "metadata": {
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
            "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        },
        "weight_map": weight_map,
    }
    return tensors


def same_bytes(found, expected):
    """Compare dtypes, shapes and bytes of two dicts of tensors."""
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert np.array_equal(raw(found[key]), raw(tensor)), key
    return True


def raw(tensor):
    """Return the bytes of a tensor in row-major order."""
    return (
        tensor.contiguous()
        .view(-1 if tensor.ndim == 0 else tensor.shape)
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
    )


@st.composite
def tilings(draw, shape):
    """Draw regions (offset, shape) that tile a tensor: a grid with any cuts, or halves of
    halves.
    """
    if draw(st.booleans()):
        cuts = [
            sorted(draw(st.sets(st.integers(1, n - 1), max_size=2))) if n > 1 else [] for n in shape
        ]
        spans = itertools.product(
            *(itertools.pairwise([0, *inner, n]) for inner, n in zip(cuts, shape, strict=True))
        )
        return [
            (tuple(low for low, _ in span), tuple(high - low for low, high in span))
            for span in spans
        ]
    regions = [((0,) * len(shape), tuple(shape))]
    for _ in range(draw(st.integers(0, 5))):
        offset, extent = regions.pop(draw(st.integers(0, len(regions) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[axis]))
        lower = tuple(o + at if i == axis else o for i, o in enumerate(offset))
        for first, num in ((offset, at), (lower, extent[axis] - at)):
            region = first, tuple(num if i == axis else n for i, n in enumerate(extent))
            regions += [region] if num else []
    return regions
