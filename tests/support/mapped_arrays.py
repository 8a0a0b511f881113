"""Mapped tensors as numpy arrays: what the tests of rules compare."""

from __future__ import annotations

import math

import numpy as np

from distckpt.rules import TensorSpec


def infos(arrays, dtype="I64"):
    return {key: TensorSpec(array.shape, dtype) for key, array in arrays.items()}


def numbered_arrays(**shapes):
    """Make arrays in which no number occurs twice, none of them 0."""
    arrays, first = {}, 1
    for key, shape in shapes.items():
        arrays[key.replace("__", ".")] = np.arange(
            first, first + math.prod(shape), dtype=np.int64
        ).reshape(shape)
        first += math.prod(shape)
    return arrays


def materialize(mapped, arrays):
    """Copy the parts of one tensor together; every element must be given exactly once."""
    result, covers = np.zeros(mapped.shape, np.int64), np.zeros(mapped.shape, np.int64)
    for part in mapped.parts:
        values = arrays[part.key][part.source.slices(part.source_step)].transpose(part.order)
        place = part.target.slices(part.target_step)
        result[place] = values.reshape(part.target.shape) + part.add
        covers[place] += 1
    for region in mapped.padding:
        covers[region.slices()] += 1
    assert (covers == 1).all()
    return result


def materialize_all(mapped, arrays):
    return {name: materialize(tensor, arrays) for name, tensor in mapped.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)
