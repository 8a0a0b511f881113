"""Tensors compared with the trees that Orbax was given."""

from __future__ import annotations

import json
import pathlib
import tarfile

import numpy as np
import tensorstore
import torch

from tests.data.make_orbax import leaves_of

WIDER = {"int4": "int8", "int2": "int8"} | dict.fromkeys(
    ["float8_e4m3b11fnuz", "float8_e3m4", "float4_e2m1fn"], "bfloat16"
)
"""Dtypes that torch lacks, and those of the tensors that hold their values."""

_GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "orbax_0_12.tar.xz"


def unpack(directory):
    """Unpack the checkpoints that Orbax wrote into a directory, and return it."""
    with tarfile.open(_GOLDEN) as archive:
        archive.extractall(directory, filter="data")
    return directory


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def check(found, tree):
    """Compare all bits with what was given to Orbax."""
    expected = leaves_of(tree)
    assert set(found) == set(expected)
    for name, array in expected.items():
        values = array.astype(np.dtype(WIDER.get(array.dtype.name, array.dtype.name)))
        assert found[name].shape == array.shape
        assert str(found[name].dtype) == f"torch.{values.dtype.name}"
        assert bits(found[name]) == values.tobytes()


def write_chunks(directory, values, chunk, driver="zarr", uses_ocdbt=True, config=None):
    """Write one array as Orbax does, by tensorstore; return the bytes of its chunks."""
    place = {"driver": "file", "path": f"{directory}/"}
    store = {**place, "path": f"{directory}/x/"}
    if uses_ocdbt:
        store = {"driver": "ocdbt", "base": place, "path": "x/", "config": config or {}}
    metadata = {"dtype": values.dtype.str, "chunks": chunk, "fill_value": 0}
    metadata["compressor"] = {"id": "zstd", "level": 1}
    if driver == "zarr3":
        inner = {"chunk_shape": chunk, "codecs": [{"name": "bytes"}, {"name": "zstd"}]}
        sharding = {"name": "sharding_indexed", "configuration": inner}
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        metadata = {"data_type": values.dtype.name, "chunk_grid": grid, "codecs": [sharding]}
    metadata["shape"] = values.shape
    spec = {"driver": driver, "kvstore": store, "metadata": metadata}
    array = tensorstore.open(spec, create=True).result()
    array[...].write(values).result()
    keys = [{"key": "x", "key_type": 2}]
    row = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    described = {
        "tree_metadata": {"('x',)": row},
        "use_ocdbt": uses_ocdbt,
        "use_zarr3": driver == "zarr3",
        "store_array_data_equal_to_fill_value": True,
    }
    (directory / "_METADATA").write_text(json.dumps(described))
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
