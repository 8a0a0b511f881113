"""One process plays all ranks: saves the shards of any layout, loads those of any other; numpy says
what is right.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import LoadMismatchError, ShardedTensor
from tests.support.states import numbered

# ---- layouts


@dataclass(frozen=True)
class Piece:
    """A region of the global tensor, and which of its elements in row-major order (None for
    all).
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    prepended: int = 0
    flat: slice | None = None
    replica_id: int | tuple[int, ...] = 0

    def cut(self, tensor):
        region = tensor[
            tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))
        ]
        return (
            region.reshape(self.local_shape) if self.flat is None else region.reshape(-1)[self.flat]
        )

    @property
    def local_shape(self):
        return self.shape[self.prepended :]

    def shard(self, key, data, global_shape, **kwargs):
        return ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=self.local_shape,
            global_shape=global_shape,
            global_offset=self.offset,
            axis_fragmentations=None,
            replica_id=self.replica_id,
            prepend_axis_num=self.prepended,
            flattened_range=self.flat,
            **kwargs,
        )


@st.composite
def tilings(draw, shape):
    """Draw regions that tile a tensor: a grid with any cuts, empty cells included, or halves of
    halves.
    """
    if draw(st.booleans()):
        cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
        edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
        spans = itertools.product(*(itertools.pairwise(e) for e in edges))
        return [(tuple(low for low, _ in s), tuple(high - low for low, high in s)) for s in spans]
    tiles = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4)) if shape else 0):
        offset, extent = tiles.pop(draw(st.integers(0, len(tiles) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, extent[axis]))
        upper, lower = list(extent), list(extent)
        upper[axis], lower[axis] = at, extent[axis] - at
        moved = list(offset)
        moved[axis] += at
        tiles += [(offset, tuple(upper)), (tuple(moved), tuple(lower))]
    return tiles


@st.composite
def layouts(draw, shape, replicas=True):
    """Draw pieces whose main replicas tile a tensor."""
    # An empty prepended axis would leave no piece, and then there is no tensor.
    prepended = draw(st.integers(0, shape.index(0) if 0 in shape else len(shape)))
    leading = list(itertools.product(*map(range, shape[:prepended])))
    tiles = [
        (index + offset, (1,) * prepended + extent)
        for index in leading
        for offset, extent in draw(tilings(shape[prepended:]))
    ]
    pieces = []
    for offset, extent in tiles:
        if draw(st.booleans()):
            total = math.prod(extent)
            cuts = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=2))), total]
            pieces += [
                Piece(offset, extent, prepended, slice(*span)) for span in itertools.pairwise(cuts)
            ]
        else:
            pieces.append(Piece(offset, extent, prepended))
    for piece in list(pieces) if replicas else ():
        if draw(st.integers(0, 3)) == 0:
            copy = draw(st.sampled_from([1, (0, 1), (2, 0)]))
            pieces.append(Piece(piece.offset, piece.shape, piece.prepended, piece.flat, copy))
    return draw(st.permutations(pieces))


def global_shapes(max_side=5):
    return st.lists(st.integers(0, max_side), max_size=4).map(tuple)


STRIDES = (
    "contiguous",
    "transposed",
    "every second",
    "inside a larger tensor",
    "backwards in memory",
)


def place(shape, dtype, strides, fill=-7):
    """Make a tensor of a shape as a view of a larger one; returns both."""
    shape = tuple(shape)
    if strides == "transposed":
        base = torch.full(shape[::-1], fill, dtype=dtype)
        return base.permute(tuple(reversed(range(len(shape))))), base
    if strides == "every second":
        base = torch.full(tuple(2 * n for n in shape), fill, dtype=dtype)
        return base[tuple(slice(None, None, 2) for _ in shape)], base
    if strides == "inside a larger tensor":
        base = torch.full(tuple(n + 2 for n in shape), fill, dtype=dtype)
        return base[tuple(slice(1, n + 1) for n in shape)], base
    if strides == "backwards in memory":
        base = torch.full((math.prod(shape) + 3,), fill, dtype=dtype)
        return base[3 : 3 + math.prod(shape)].view(shape), base
    base = torch.full(shape, fill, dtype=dtype)
    return base, base


def save(path, tensors, **kwargs):
    """Save `{key: (numpy tensor, pieces, strides)}`."""
    state = {}
    for key, (tensor, pieces, strides) in tensors.items():
        for number, piece in enumerate(pieces):
            values = torch.from_numpy(np.array(piece.cut(tensor)))
            data, _ = place(values.shape, values.dtype, strides)
            data.copy_(values)
            state[f"{key}.{number}"] = piece.shard(key, data, tensor.shape)
    distckpt.save(state, path, **kwargs)


# ---- any layout into any other


def check_any_layout_loads_into_any_other(data):
    shapes = {key: data.draw(global_shapes(), f"shape of {key}") for key in "ab"}
    tensors = {key: numbered(*shape, dtype=torch.int32).numpy() for key, shape in shapes.items()}
    stored = {
        key: (
            tensor,
            data.draw(layouts(tensor.shape), f"stored {key}"),
            data.draw(st.sampled_from(STRIDES)),
        )
        for key, tensor in tensors.items()
    }
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64, torch.float64]), "asked for")
    state, expected = {}, {}
    for key, tensor in tensors.items():
        for number, piece in enumerate(data.draw(layouts(tensor.shape), f"asked for {key}")):
            values = piece.cut(tensor)
            target, base = place(values.shape, dtype, data.draw(st.sampled_from(STRIDES)))
            untouched = int((base == -7).sum()) - target.numel()
            state[f"{key}.{number}"] = piece.shard(key, target, tensor.shape)
            expected[f"{key}.{number}"] = values, target, base, untouched
    with tempfile.TemporaryDirectory() as directory:
        save(f"{directory}/ckpt", stored)
        loaded = distckpt.load(
            state, f"{directory}/ckpt", verify=data.draw(st.sampled_from([True, False]))
        )
        whole = distckpt.open(f"{directory}/ckpt").read_tensors()
    assert loaded.keys() == expected.keys()
    for name, (values, target, base, untouched) in expected.items():
        assert loaded[name] is target
        assert np.array_equal(target.numpy(), values)
        assert int((base == -7).sum()) == untouched
    for key, tensor in tensors.items():
        assert np.array_equal(whole[key].numpy(), tensor)


@settings(max_examples=30)
@given(st.data())
def test_any_layout_loads_into_any_other(data):
    check_any_layout_loads_into_any_other(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5000)
@given(st.data())
def test_any_layout_loads_into_any_other_at_length(data):
    check_any_layout_loads_into_any_other(data)


def regular_grids(shape):
    return list(
        itertools.product(*([n for n in range(1, size + 1) if size % n == 0] for size in shape))
    )


def regular_shards(key, tensor, grid, make=lambda part: part):
    """Cut a tensor into a regular grid with `from_rank_offsets`."""
    for cell in itertools.product(*map(range, grid)):
        part = tensor
        for axis, (position, count) in enumerate(zip(cell, grid, strict=True)):
            part = part.chunk(count, dim=axis)[position]
        offsets = [
            (axis, position, n) for axis, (position, n) in enumerate(zip(cell, grid, strict=True))
        ]
        yield part, ShardedTensor.from_rank_offsets(key, make(part), *offsets)


@pytest.mark.parametrize("shape", [(12,), (6, 6), (2, 3, 4), (2, 2, 2, 3)], ids=str)
def test_every_regular_grid_loads_into_every_other(tmp_path, shape):
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)
    for grid in regular_grids(shape):
        path = tmp_path / "x".join(map(str, grid))
        distckpt.save(
            {str(i): s for i, (_, s) in enumerate(regular_shards("w", tensor, grid))}, path
        )
        for other in regular_grids(shape):
            parts, shards = zip(*regular_shards("w", tensor, other, torch.zeros_like), strict=True)
            distckpt.load(dict(enumerate(shards)), path)
            assert all(
                torch.equal(shard.data, part) for part, shard in zip(parts, shards, strict=True)
            )


def test_flat_optimizer_shards_that_cross_rows_load_under_other_numbers_of_ranks(tmp_path):
    # ZeRO-1: each data-parallel rank holds an equal run of the flattened tensor-parallel shard,
    # padding aside.
    tensor = torch.arange(12 * 10, dtype=torch.float32).view(12, 10)

    def state(tp, dp, axis, make):
        parts = {}
        for tp_rank in range(tp):
            local = tensor.chunk(tp, dim=axis)[tp_rank]
            share = -(-local.numel() // dp)
            for dp_rank in range(dp):
                bounds = slice(
                    min(dp_rank * share, local.numel()), min((dp_rank + 1) * share, local.numel())
                )
                values = local.flatten()[bounds]
                shard = ShardedTensor.from_rank_offsets_flat(
                    "exp_avg",
                    make(values),
                    tuple(local.shape),
                    (axis, tp_rank, tp),
                    flattened_range=bounds,
                )
                parts[tp_rank, dp_rank] = shard, values
        return parts

    layouts = [(tp, dp, axis) for tp in (1, 2) for dp in (1, 3, 7) for axis in (0, 1)]
    for layout in layouts:
        path = tmp_path / "-".join(map(str, layout))
        distckpt.save({key: shard for key, (shard, _) in state(*layout, torch.clone).items()}, path)
        for other in layouts:
            asked = state(*other, torch.zeros_like)
            distckpt.load({key: shard for key, (shard, _) in asked.items()}, path)
            assert all(torch.equal(shard.data, values) for shard, values in asked.values())
        whole = ShardedTensor.from_rank_offsets("exp_avg", torch.zeros(12, 10))
        assert torch.equal(distckpt.load({"w": whole}, path)["w"], tensor)


def test_layers_stacked_on_a_prepended_axis_load_as_one_tensor_and_back(tmp_path):
    layers = [torch.full((3, 2), float(i)) for i in range(4)]
    state = {
        f"layers.{i}": ShardedTensor.from_rank_offsets(
            "layers", layer, (0, i, 4), prepend_axis_num=1
        )
        for i, layer in enumerate(layers)
    }
    distckpt.save(state, tmp_path / "a")
    stacked = distckpt.load(
        {"w": ShardedTensor.from_rank_offsets("layers", torch.zeros(4, 3, 2))}, tmp_path / "a"
    )["w"]
    assert torch.equal(stacked, torch.stack(layers))
    distckpt.save({"w": ShardedTensor.from_rank_offsets("layers", stacked)}, tmp_path / "b")
    one = ShardedTensor.from_rank_offsets(
        "layers", torch.zeros(3, 2), (0, 2, 4), prepend_axis_num=1
    )
    assert torch.equal(distckpt.load({"w": one}, tmp_path / "b")["w"], layers[2])


def test_a_rank_may_hold_several_shards_of_one_key(tmp_path):
    tensor = torch.arange(16.0).view(4, 4)
    state = {
        f"{i}{j}": ShardedTensor.from_rank_offsets(
            "w", tensor[2 * i : 2 * i + 2, 2 * j : 2 * j + 2], (0, i, 2), (1, j, 2)
        )
        for i in range(2)
        for j in range(2)
    }
    distckpt.save(state, tmp_path / "c")
    assert torch.equal(distckpt.open(tmp_path / "c").read_tensors()["w"], tensor)


# ---- tensors of other shapes


def check_other_shapes(data):
    ndim = data.draw(st.integers(0, 3))
    sizes = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim).map(tuple)
    stored, wanted = data.draw(sizes, "stored"), data.draw(sizes, "asked for")
    tensor = numbered(*stored, dtype=torch.int32).numpy()
    padded = np.zeros(tuple(map(max, stored, wanted)), np.int32)
    padded[tuple(slice(n) for n in stored)] = tensor
    expected = padded[tuple(slice(n) for n in wanted)]
    pieces = data.draw(layouts(wanted), "asked for")
    dtype = data.draw(st.sampled_from([torch.int32, torch.float64]))
    targets = [
        place(piece.cut(expected).shape, dtype, data.draw(st.sampled_from(STRIDES)))[0]
        for piece in pieces
    ]
    state = {
        str(number): piece.shard("w", target, wanted, allow_shape_mismatch=True)
        for number, (piece, target) in enumerate(zip(pieces, targets, strict=True))
    }
    with tempfile.TemporaryDirectory() as directory:
        save(
            f"{directory}/ckpt", {"w": (tensor, data.draw(layouts(stored), "stored"), "contiguous")}
        )
        distckpt.load(state, f"{directory}/ckpt")
    for piece, target in zip(pieces, targets, strict=True):
        assert np.array_equal(target.numpy(), piece.cut(expected))


@settings(max_examples=30)
@given(st.data())
def test_a_tensor_of_another_shape_is_cropped_or_padded_with_zeros_where_allowed(data):
    check_other_shapes(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5000)
@given(st.data())
def test_a_tensor_of_another_shape_is_cropped_or_padded_at_length(data):
    check_other_shapes(data)


def test_a_padded_vocabulary_loads_under_another_padding(tmp_path):
    words = torch.arange(1.0, 11.0).view(10, 1).expand(10, 3)
    padded = torch.cat([words, torch.zeros(2, 3)])
    state = {
        str(i): ShardedTensor.from_rank_offsets(
            "embedding", part, (0, i, 4), allow_shape_mismatch=True
        )
        for i, part in enumerate(padded.chunk(4))
    }
    distckpt.save(state, tmp_path / "c")
    targets = [torch.full((8, 3), -1.0) for _ in range(2)]
    state = {
        str(i): ShardedTensor.from_rank_offsets(
            "embedding", part, (0, i, 2), allow_shape_mismatch=True
        )
        for i, part in enumerate(targets)
    }
    distckpt.load(state, tmp_path / "c")
    assert torch.equal(torch.cat(targets), torch.cat([words, torch.zeros(6, 3)]))


def test_another_shape_is_an_error_where_it_is_not_allowed_and_nothing_is_touched(tmp_path):
    distckpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 3))}, tmp_path / "c")
    target = torch.full((5, 3), -1.0)
    with pytest.raises(LoadMismatchError, match=r"'w'.*\(4, 3\).*\(5, 3\).*allow_shape_mismatch"):
        distckpt.load({"w": ShardedTensor.from_rank_offsets("w", target)}, tmp_path / "c")
    assert bool((target == -1).all())


# ---- elements that were not saved


@settings(max_examples=30)
@given(st.data())
def test_what_was_saved_with_gaps_loads_and_the_gaps_are_errors(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    tensor = numbered(*shape, dtype=torch.int32).numpy()
    pieces = data.draw(layouts(shape, replicas=False), "stored")
    kept = [piece for piece in pieces if data.draw(st.booleans())]
    is_stored = np.zeros(shape, bool)
    for piece in kept:
        flat = numbered(*shape, dtype=torch.int32).numpy() - 1
        is_stored.reshape(-1)[piece.cut(flat).reshape(-1)] = True
    with tempfile.TemporaryDirectory() as directory:
        save(
            f"{directory}/ckpt",
            {"w": (tensor, kept, "contiguous")},
            validate_access_integrity=False,
        )
        for piece in data.draw(layouts(shape, replicas=False), "asked for"):
            target = torch.full(piece.cut(tensor).shape, -1, dtype=torch.int32)
            state = {"w": piece.shard("w", target, shape)}
            if not kept:
                continue
            if piece.cut(is_stored).all():
                distckpt.load(state, f"{directory}/ckpt")
                assert np.array_equal(target.numpy(), piece.cut(tensor))
            else:
                with pytest.raises(LoadMismatchError, match="key 'w' is not stored completely"):
                    distckpt.load(state, f"{directory}/ckpt")
                assert bool((target == -1).all())


# ---- tensors large enough to be moved in several parts


LARGE_SHAPES = [(37, 1100, 129), (2500, 2200), (5_250_001,), (1, 5, 1_048_576), (1_000_003, 1, 5)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Save one float32 tensor of about 20 MB per shape, in thirds along its longest axis; returns
    path and tensors.
    """
    path = tmp_path_factory.mktemp("large") / "ckpt"
    tensors, state = {}, {}
    for shape in LARGE_SHAPES:
        tensor = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        tensors[str(shape)] = tensor
        axis = shape.index(max(shape))
        offset = 0
        for number, part in enumerate(np.array_split(tensor, 3, axis=axis)):
            moved = tuple(offset if i == axis else 0 for i in range(len(shape)))
            piece = Piece(moved, part.shape)
            state[shape, number] = piece.shard(str(shape), torch.from_numpy(part), shape)
            offset += part.shape[axis]
    distckpt.save(state, path)
    return path, tensors


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shape", LARGE_SHAPES, ids=str)
def test_parts_of_large_tensors(large, shape, verify):
    path, tensors = large
    tensor = tensors[str(shape)]
    random = np.random.default_rng(sum(shape))
    pieces = [Piece((0,) * len(shape), shape)]
    for axis, size in enumerate(shape):
        # A thin slice and a thick one of every axis, all else whole.
        for extent in {max(1, size // 100), max(1, size - size // 10)}:
            at = int(random.integers(0, size - extent + 1))
            offset = tuple(at if i == axis else 0 for i in range(len(shape)))
            pieces.append(
                Piece(offset, tuple(extent if i == axis else n for i, n in enumerate(shape)))
            )
    total = math.prod(shape)
    for _ in range(2):
        start, stop = sorted(random.integers(0, total + 1, 2).tolist())
        pieces.append(Piece((0,) * len(shape), shape, flat=slice(start, stop)))
    state, expected = {}, []
    for number, piece in enumerate(pieces):
        values = piece.cut(tensor)
        # Half of the targets have other strides, so that they cannot be read into directly.
        target, _ = place(
            values.shape, torch.float32, "inside a larger tensor" if number % 2 else "contiguous"
        )
        state[number] = piece.shard(str(shape), target, shape)
        expected.append((target, values))
    distckpt.load(state, path, verify=verify, validate_access_integrity=False)
    assert all(np.array_equal(target.numpy(), values) for target, values in expected)


def test_large_tensors_are_converted_in_parts(large):
    path, tensors = large
    shape = LARGE_SHAPES[0]
    target = torch.zeros(shape, dtype=torch.float64)
    distckpt.load({"w": ShardedTensor.from_rank_offsets(str(shape), target)}, path)
    assert np.array_equal(target.numpy(), tensors[str(shape)])


def test_large_tensors_with_other_strides_are_saved_in_parts(tmp_path):
    base = torch.arange(3_000_000, dtype=torch.float32).view(1000, 3000)
    state = {
        "transposed": ShardedTensor.from_rank_offsets("transposed", base.t()),
        "part": ShardedTensor.from_rank_offsets("part", base[:, 1:2999]),
        "expanded": ShardedTensor.from_rank_offsets("expanded", base[0].expand(1000, 3000)),
    }
    distckpt.save(state, tmp_path / "c")
    loaded = distckpt.open(tmp_path / "c").read_tensors()
    assert torch.equal(loaded["transposed"], base.t())
    assert torch.equal(loaded["part"], base[:, 1:2999])
    assert torch.equal(loaded["expanded"], base[0].expand(1000, 3000))


def test_a_part_of_a_tensor_is_read_without_the_rest(large):
    path, tensors = large
    shape = (1, 5, 1_048_576)
    with open("/proc/self/io") as file:
        before = int(file.readline().split()[1])
    target = torch.zeros(1, 5, 1000)
    piece = Piece((0, 0, 500_000), (1, 5, 1000))
    distckpt.load({"w": piece.shard(str(shape), target, shape)}, path, verify=False)
    with open("/proc/self/io") as file:
        read = int(file.readline().split()[1]) - before
    assert np.array_equal(target.numpy(), tensors[str(shape)][:, :, 500_000:501_000])
    assert read < 10 * 2**20 < tensors[str(shape)].nbytes
