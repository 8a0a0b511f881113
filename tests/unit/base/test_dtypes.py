from __future__ import annotations

import math

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import distckpt
from distckpt import LoadMismatchError, ShardedTensor, UnsupportedObjectError
from distckpt._base.dtypes import FROM_NAME, ITEM_BYTES, TO_NAME, is_known, is_lossless_cast
from tests.support.reference import skip_where_safetensors_lacks
from tests.support.states import shard_files

DTYPES = list(TO_NAME)
# Older torch releases lack some of the types of 8 and 4 bits.
COPIED_ONLY = [
    getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)
]
NUMBERS = [dtype for dtype in DTYPES if dtype not in COPIED_ONLY]


def random_bits(shape, dtype, seed=0):
    """Make a tensor of any bit patterns, NaN and infinity included."""
    size = math.prod(shape) * dtype.itemsize
    bits = np.random.default_rng(seed).integers(
        0, 2 if dtype == torch.bool else 256, size, np.uint8
    )
    return torch.from_numpy(bits).view(dtype).view(shape)


def bits_of(tensor):
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype)
        .copy_(tensor)
        .flatten()
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def one(key, data, **kwargs):
    return {key: ShardedTensor.from_rank_offsets(key, data, **kwargs)}


# ---- every dtype there and back


def test_every_dtype_that_torch_and_safetensors_both_have_is_supported():
    names = {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "uint32": "U32",
        "int32": "I32",
        "uint64": "U64",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float4_e2m1fn_x2": "F4",
    }
    assert {
        getattr(torch, attribute): name
        for attribute, name in names.items()
        if hasattr(torch, attribute)
    } == TO_NAME
    assert {name: dtype for dtype, name in TO_NAME.items()} == FROM_NAME
    assert set(ITEM_BYTES) == set(names.values())
    assert {name: ITEM_BYTES[name] for name in FROM_NAME} == {
        name: dtype.itemsize for name, dtype in FROM_NAME.items()
    }
    assert {name for name in [*ITEM_BYTES, "F6", "OBJECT", ""] if is_known(name)} == set(FROM_NAME)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_every_dtype_survive_resharding(tmp_path, dtype):
    tensor = random_bits((6, 8), dtype)
    state = {
        i: ShardedTensor.from_rank_offsets("w", part, (1, i, 2))
        for i, part in enumerate(tensor.chunk(2, 1))
    }
    state["scalar"] = ShardedTensor.from_rank_offsets("scalar", random_bits((), dtype))
    state["none"] = ShardedTensor.from_rank_offsets("none", torch.empty((0, 3), dtype=dtype))
    distckpt.save(state, tmp_path / "c")
    targets = [random_bits((2, 8), dtype, seed) for seed in (1, 2, 3)]
    asked = {
        i: ShardedTensor.from_rank_offsets("w", target, (0, i, 3))
        for i, target in enumerate(targets)
    }
    asked |= one("scalar", random_bits((), dtype, 7))
    asked |= one("none", torch.empty((0, 3), dtype=dtype))
    loaded = distckpt.load(asked, tmp_path / "c")
    assert b"".join(map(bits_of, targets)) == bits_of(tensor)
    assert bits_of(loaded["scalar"]) == bits_of(state["scalar"].data)
    assert (loaded["none"].shape, loaded["none"].dtype) == ((0, 3), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_reader_finds_the_same_bits(tmp_path, dtype):
    skip_where_safetensors_lacks(dtype)
    tensor = random_bits((3, 4), dtype)
    distckpt.save(one("w", tensor) | one("scalar", random_bits((), dtype)), tmp_path / "c")
    (file,) = shard_files(tmp_path / "c")
    loaded = safetensors.torch.load_file(file)
    assert (loaded["w"].dtype, loaded["w"].shape) == (dtype, (3, 4))
    assert bits_of(loaded["w"]) == bits_of(tensor)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.get_slice("w").get_dtype() == TO_NAME[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_of_every_dtype_is_zero(tmp_path, dtype):
    tensor = random_bits((2, 4), dtype)
    distckpt.save(one("w", tensor), tmp_path / "c")
    target = random_bits((3, 4), dtype, 1)
    distckpt.load(one("w", target, allow_shape_mismatch=True), tmp_path / "c")
    assert bits_of(target) == bits_of(tensor) + bytes(4 * dtype.itemsize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[1:5:2, 1:7],
        lambda t: t[:, ::2],
        lambda t: t[3:4, ::8],
        lambda t: t[0].expand(5, 8),
        lambda t: t[:0],
    ],
    ids=["transposed", "inner", "every second column", "one item", "expanded", "empty"],
)
def test_views_of_every_dtype_are_saved_as_what_they_show(tmp_path, dtype, view):
    data = view(random_bits((6, 8), dtype))
    distckpt.save(one("w", data), tmp_path / "c")
    assert bits_of(distckpt.open(tmp_path / "c").read_tensors()["w"]) == bits_of(data)


# ---- views that are more than strides


def test_conjugate_and_negative_views_are_resolved(tmp_path):
    base = torch.randn(4, 3, dtype=torch.complex64)
    views = {
        "conj": base.conj(),
        "conj_t": base.mH,
        "imag": base.conj().imag,
        "row": base.conj()[1].imag[:1],
    }
    assert views["imag"].is_neg()
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, v) for k, v in views.items()}, tmp_path / "c"
    )
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert all(
        torch.equal(loaded[key], view.resolve_conj().resolve_neg()) for key, view in views.items()
    )


def test_conjugate_and_negative_views_are_filled_with_what_they_should_show(tmp_path):
    tensor = torch.randn(4, 3, dtype=torch.complex64)
    distckpt.save(one("z", tensor) | one("x", tensor.real.clone()), tmp_path / "c")
    conjugate = torch.zeros(4, 3, dtype=torch.complex64).conj()
    negative = torch.zeros(4, 3, dtype=torch.complex64).conj().imag
    distckpt.load(one("z", conjugate) | one("x", negative), tmp_path / "c")
    assert torch.equal(conjugate.resolve_conj(), tensor)
    assert torch.equal(negative.resolve_neg(), tensor.real)


def test_parameters_are_saved_and_filled_in_place(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    hidden = parameter * 2
    distckpt.save(one("w", parameter) | one("hidden", hidden), tmp_path / "c")
    target = torch.nn.Parameter(torch.zeros(4, 3))
    address = target.data_ptr()
    loaded = distckpt.load(one("w", target), tmp_path / "c")
    assert loaded["w"] is target
    assert target.data_ptr() == address
    assert target.requires_grad
    assert target.is_leaf
    assert torch.equal(target, parameter)
    assert torch.equal(distckpt.open(tmp_path / "c").read_tensors()["hidden"], hidden)


# ---- tensors that share memory


def test_tied_tensors_are_stored_once_and_both_come_back(tmp_path):
    weight = torch.randn(64, 512)
    tied = (
        one("embedding", weight)
        | one("output", weight.view(64, 512))
        | one("other", weight.clone())
    )
    distckpt.save(tied, tmp_path / "c")
    (file,) = shard_files(tmp_path / "c")
    stored = safetensors.torch.load_file(file)
    assert stored.keys() in ({"embedding", "other"}, {"output", "other"})
    assert file.stat().st_size < 2.2 * weight.nbytes
    targets = one("embedding", torch.zeros(64, 512)) | one("output", torch.zeros(64, 512))
    loaded = distckpt.megatron.load(targets, tmp_path / "c", strict="log_all")
    assert torch.equal(loaded["embedding"], weight)
    assert torch.equal(loaded["output"], weight)
    assert loaded["embedding"] is not loaded["output"]
    assert distckpt.open(tmp_path / "c").tensors.keys() == {"embedding", "output", "other"}
    half = ShardedTensor.from_rank_offsets("output", torch.zeros(64, 256), (1, 1, 2))
    assert torch.equal(distckpt.load({"w": half}, tmp_path / "c")["w"], weight[:, 256:])


def test_tied_shards_of_several_ranks_are_stored_once(tmp_path):
    weight = torch.randn(8, 4)
    state = {
        (key, i): ShardedTensor.from_rank_offsets(key, part, (0, i, 2))
        for i, part in enumerate(weight.chunk(2))
        for key in ("embedding", "output")
    }
    distckpt.save(state, tmp_path / "c")
    assert sum(len(safetensors.torch.load_file(file)) for file in shard_files(tmp_path / "c")) == 1
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert torch.equal(loaded["embedding"], weight)
    assert torch.equal(loaded["output"], weight)


def test_tensors_that_share_only_storage_are_stored_each(tmp_path):
    base = torch.randn(6, 4)
    views = {
        "base": base,
        "top": base[:3],
        "bottom": base[3:],
        "transposed": base.t(),
        "bits": base.view(torch.int32),
    }
    distckpt.save(
        {k: ShardedTensor.from_rank_offsets(k, v) for k, v in views.items()}, tmp_path / "c"
    )
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert all(torch.equal(loaded[key], view) for key, view in views.items())


def test_tied_targets_are_filled_both_and_stay_tied(tmp_path):
    distckpt.save(one("a", torch.ones(3)) | one("b", torch.ones(3)), tmp_path / "c")
    target = torch.zeros(3)
    loaded = distckpt.load(one("a", target) | one("b", target), tmp_path / "c")
    assert loaded["a"] is target
    assert loaded["b"] is target
    assert torch.equal(target, torch.ones(3))


# ---- conversion while loading


def all_values(dtype):
    """Every value of a type of up to 16 bits, and the extremes of a larger one."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize <= 2:
        bits = np.arange(
            2 ** (8 * dtype.itemsize), dtype=np.uint8 if dtype.itemsize == 1 else np.uint16
        )
        return torch.from_numpy(bits).view(dtype)
    if dtype.is_complex:
        return torch.tensor([1 + 2j, complex(torch.finfo(torch.float32).max, 0)], dtype=dtype)
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        subnormal = math.ldexp(info.tiny, -(23 if dtype == torch.float32 else 52))
        return torch.tensor(
            [0.0, -0.0, 1 + info.eps, info.max, info.min, info.tiny, subnormal, math.inf, math.nan],
            dtype=dtype,
        )
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, info.min, info.max, info.max - 1], dtype=dtype)


def exact(tensor):
    """Give the values as Python numbers, NaN as None."""
    values = (tensor.double() if tensor.dtype.is_floating_point else tensor).tolist()
    return [v if v == v else None for v in values]


def keeps_all_values(source, target):
    values = all_values(source)
    return exact(values.to(target)) == exact(values)


@pytest.mark.parametrize("source", NUMBERS, ids=str)
def test_conversions_that_count_as_lossless_keep_every_value(source):
    lossless = [target for target in NUMBERS if is_lossless_cast(source, target)]
    assert source in lossless
    assert [target for target in lossless if not keeps_all_values(source, target)] == []


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (torch.bfloat16, [torch.float32, torch.float64]),
        (torch.float16, [torch.float32, torch.float64]),
        (torch.float32, [torch.float64, torch.complex64]),
        (torch.float8_e4m3fn, [torch.float16, torch.bfloat16, torch.float32]),
        (torch.float8_e5m2, [torch.float16, torch.bfloat16, torch.float32]),
        (torch.int32, [torch.int64, torch.float64]),
        (
            torch.uint8,
            [torch.int16, torch.uint16, torch.int64, torch.float16, torch.bfloat16, torch.float32],
        ),
        (torch.int64, []),
        (torch.float64, []),
        (torch.complex64, []),
    ],
    ids=str,
)
def test_widening_conversions_count_as_lossless_and_narrowing_ones_do_not(source, targets):
    assert all(is_lossless_cast(source, target) for target in targets)
    narrowing = {target for target in NUMBERS if target.itemsize < source.itemsize}
    assert not any(is_lossless_cast(source, target) for target in narrowing)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float16, torch.float64),
        (torch.uint16, torch.int32),
        (torch.bool, torch.int8),
        (torch.float32, torch.complex64),
    ],
    ids=str,
)
def test_wider_targets_get_the_same_values(tmp_path, source, target):
    tensor = all_values(source)
    distckpt.save(one("w", tensor), tmp_path / "c")
    loaded = distckpt.load(one("w", torch.zeros(len(tensor), dtype=target)), tmp_path / "c")["w"]
    assert loaded.dtype == target
    assert exact(loaded) == exact(tensor)


@pytest.mark.parametrize(
    ("source", "target", "stored", "converted"),
    [
        (torch.float32, torch.bfloat16, [1.001, 3.0], [1.0, 3.0]),
        (torch.int64, torch.uint8, [300, 1], [44, 1]),
        (torch.float64, torch.float32, [0.1, 2.0], [0.1, 2.0]),
    ],
    ids=str,
)
def test_conversion_that_loses_information_happens_only_when_asked_for(
    tmp_path, source, target, stored, converted
):
    tensor = torch.tensor(stored, dtype=source)
    distckpt.save(one("w", tensor), tmp_path / "c")
    into = torch.full((2,), 7, dtype=target)
    with pytest.raises(
        LoadMismatchError, match=f"'w' .*{source}.*{target}.*allow_dtype_cast=True"
    ) as caught:
        distckpt.load(one("w", into), tmp_path / "c")
    assert caught.value.unexpected == {"w"}
    assert into.tolist() == [7, 7]
    distckpt.load(one("w", into), tmp_path / "c", allow_dtype_cast=True)
    assert torch.equal(into, torch.tensor(converted, dtype=target))


@pytest.mark.parametrize("dtype", COPIED_ONLY, ids=str)
def test_scale_and_packed_types_are_never_converted_unasked(dtype):
    assert is_lossless_cast(dtype, dtype)
    assert not any(
        is_lossless_cast(dtype, other) or is_lossless_cast(other, dtype) for other in NUMBERS
    )


def test_dtypes_that_safetensors_lacks_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        UnsupportedObjectError, match=r"'w' has dtype torch.uint4.*Convert it first"
    ):
        distckpt.save(one("w", torch.empty(2, dtype=torch.uint4)), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
