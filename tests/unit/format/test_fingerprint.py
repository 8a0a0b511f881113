"""Sums of regions, against the definition in docs/format.md with Python's integers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from distckpt import Fingerprint
from distckpt._base.dtypes import TO_NAME
from distckpt._format.fingerprint import PRIME, region_number
from tests.support.layouts import bytes_of, global_bytes, tensor_from

DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
SHAPES = [(), (1,), (5,), (700,), (3, 300), (2, 3, 40), (2, 1, 3), (0, 4)]


def mixed(number: int) -> int:
    """The mixing of splitmix64."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def factor(axis: int, index: int) -> int:
    return (mixed(mixed(index) ^ mixed(axis % 2**64))) % PRIME


def number_of(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape) or (1,)
    item = tensor.dtype.itemsize
    num_lanes = max(1, item // 2)
    group = 256 // num_lanes
    lanes = bytes_of(tensor).view(np.int8 if item == 1 else np.int16).reshape(-1, num_lanes)
    total = 0
    for position, index in enumerate(np.ndindex(*shape)):
        product = factor(len(shape) - 1, index[-1] // group)
        for axis, number in enumerate(index[:-1]):
            product *= factor(axis, number)
        for lane, bits in enumerate(lanes[position].tolist()):
            total += product * factor(-1, index[-1] % group * num_lanes + lane) * bits
    return total % PRIME


def content(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    random_bytes = global_bytes("content", shape, dtype)
    if dtype == torch.bool:
        random_bytes &= 1
    return tensor_from(random_bytes, dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_whole_tensor_has_the_number_of_the_definition(shape, dtype):
    tensor = content(shape, dtype)

    assert region_number(tensor, (0,) * len(shape)) == number_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and 0 not in shape], ids=str)
def test_numbers_of_the_two_parts_of_a_tensor_add_up(shape, dtype):
    tensor = content(shape, dtype)
    whole = region_number(tensor, (0,) * len(shape))

    for axis, size in enumerate(shape):
        for cut in {0, 1, size // 3, size // 2, size}:
            parts = tensor.split([cut, size - cut], axis)
            second = tuple(cut if i == axis else 0 for i in range(len(shape)))
            numbers = [region_number(parts[0], (0,) * len(shape)), region_number(parts[1], second)]
            assert sum(numbers) % PRIME == whole, (axis, cut)


def test_strides_do_not_matter():
    tensor = content((40, 600), torch.float32)
    column_major = tensor.t().contiguous().t()
    apart = torch.stack([tensor, tensor], dim=-1)[..., 0]
    conjugated = content((300,), torch.complex64).conj()

    whole = region_number(tensor, (0, 0))

    assert region_number(column_major, (0, 0)) == region_number(apart, (0, 0)) == whole
    assert region_number(conjugated, (0,)) == number_of(conjugated.resolve_conj())


def test_places_matter():
    tensor = content((64, 64), torch.bfloat16)
    whole = region_number(tensor, (0, 0))

    assert region_number(tensor.t(), (0, 0)) != whole
    assert region_number(tensor.roll(1, 0), (0, 0)) != whole
    assert region_number(tensor.roll(1, 1), (0, 0)) != whole
    assert region_number(tensor.view(32, 128), (0, 0)) != whole
    assert region_number(tensor, (1, 0)) != whole


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype in TO_NAME], ids=str)
def test_changes_of_some_elements_are_added(dtype):
    shape = (3, 5, 170)
    before = content(shape, dtype)
    after = before.clone()
    indices = np.array(random.Random(1).sample(range(before.numel()), 40))
    of_bytes = after.view(torch.uint8).view(-1, dtype.itemsize)
    of_bytes[indices] = of_bytes[indices] ^ 1

    old, new = before.view(-1)[indices], after.view(-1)[indices]
    fingerprint = Fingerprint(TO_NAME[dtype], shape, region_number(before, (0, 0, 0)))
    changed = fingerprint.changed(torch.from_numpy(indices), old, new)
    assert changed.number == region_number(after, (0, 0, 0))


@pytest.mark.parametrize(
    ("seed", "num_faults"),
    [(2, 500), *(pytest.param(seed, 10_000, marks=pytest.mark.slow) for seed in range(10))],
)
def test_every_flipped_bit_is_found(seed, num_faults):
    weight = content((16, 300), torch.bfloat16)
    whole = region_number(weight, (0, 0))
    flat = weight.view(torch.uint8).view(-1)
    generator = random.Random(seed)

    for _ in range(num_faults):
        place, bit = generator.randrange(len(flat)), 1 << generator.randrange(8)
        flat[place] ^= bit
        assert region_number(weight, (0, 0)) != whole, (place, bit)
        flat[place] ^= bit


@pytest.mark.parametrize("seed", range(100))
def test_swapped_stale_and_transposed_shards_are_found(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, 48, generator=generator).bfloat16()
    whole = region_number(weight, (0, 0))
    first, second = torch.randperm(6, generator=generator)[:2].tolist()

    for axis in (0, 1):
        parts = list(weight.chunk(6, axis))
        swapped = [*parts]
        swapped[first], swapped[second] = parts[second], parts[first]
        assert region_number(torch.cat(swapped, axis), (0, 0)) != whole
        # Of an earlier version, in which a single element was another.
        parts[first] = parts[first].clone()
        parts[first][3, 2] += 1
        assert region_number(torch.cat(parts, axis), (0, 0)) != whole
        square = weight.clone()
        square[:8, :8] = weight[:8, :8].t()
        assert region_number(square, (0, 0)) != whole
    assert region_number(weight.t(), (0, 0)) != whole
