"""Fused parameters under any division among ranks, flat or not; numpy says what is where, Megatron
what is stored.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import (
    InvalidShardingError,
    LoadMismatchError,
    ShardedTensor,
    ShardedTensorFactory,
)
from distckpt.factories import apply_swiglu_sharded_factory, qkv_factory, swiglu_factory
from distckpt.mapping import apply_factories, apply_factory_merges
from distckpt.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from tests.support.states import numbered


def shard_of(
    key, local, global_size, offset, dim, data=None, prepended=(), flat=None, replica_id=0
):
    """Describe a local array as the indices from `offset` on of axis `dim`; `prepended` has
    (position, size) pairs.
    """
    data = (
        torch.from_numpy(local.reshape(-1)[flat] if flat else local.copy())
        if data is None
        else data
    )
    return ShardedTensor(
        key,
        data,
        data.dtype,
        local.shape,
        (
            *(size for _, size in prepended),
            *local.shape[:dim],
            global_size,
            *local.shape[dim + 1 :],
        ),
        (
            *(position for position, _ in prepended),
            *(offset if axis == dim else 0 for axis in range(local.ndim)),
        ),
        None,
        replica_id,
        len(prepended),
        flattened_range=flat,
    )


# ---- two kinds of fused parameter: what a rank holds, what is stored, and the factory between them


class SwiGLU:
    """Gate and up; the rows of each are divided among ranks."""

    def __init__(self, rows, other_shape, dim, separate):
        shape = (*other_shape[:dim], rows, *other_shape[dim:])
        self.gate, self.up = numbered(2, *shape).numpy()
        self.num_units, self.dim, self.separate = rows, dim, separate

    def local(self, first, last):
        index = (slice(None),) * self.dim + (slice(first, last),)
        return np.concatenate([self.gate[index], self.up[index]], self.dim)

    def factory(self, key, first, last, **kwargs):
        local = self.local(first, last)
        shard = shard_of(key, local, 2 * self.num_units, 2 * first, self.dim, **kwargs)
        return swiglu_factory(shard, dim=self.dim, separate=self.separate)

    def stored(self, key):
        if self.separate:
            return {f"{key}_w": self.gate, f"{key}_v": self.up}
        return {key: np.concatenate([self.gate, self.up], self.dim)}


class QKV:
    """Groups of query heads with a key and a value head; `copies` ranks share each of the
    latter.
    """

    def __init__(self, queries, groups, copies, head_size, other_shape, dim, layout):
        self.num_heads, self.num_kv_heads, self.copies, self.dim = (
            queries * groups * copies,
            groups,
            copies,
            dim,
        )
        self.num_units, self.queries, self.head_size, self.layout = (
            groups * copies,
            queries,
            head_size,
            layout,
        )
        fused = (*other_shape[:dim], (self.num_heads + 2 * groups) * head_size, *other_shape[dim:])
        self.whole = numbered(*fused).numpy()
        heads = np.split(self.whole, self.num_heads + 2 * groups, dim)
        per_group = queries * copies + 2
        self.groups = [heads[i : i + per_group] for i in range(0, len(heads), per_group)]

    def local(self, first, last):
        units = []
        for number in range(first, last):
            *queries, key, value = self.groups[number // self.copies]
            own = number % self.copies * self.queries
            units.append((queries[own : own + self.queries], [key], [value]))
        order = units if self.layout == "grouped" else zip(*units, strict=True)
        heads = [head for blocks in order for block in blocks for head in block]
        empty = self.whole[(slice(None),) * self.dim + (slice(0, 0),)]
        return np.concatenate([empty, *heads], self.dim)

    def factory(self, key, first, last, **kwargs):
        unit = (self.queries + 2) * self.head_size
        shard = shard_of(
            key, self.local(first, last), self.num_units * unit, first * unit, self.dim, **kwargs
        )
        return qkv_factory(
            shard,
            self.num_heads,
            self.num_kv_heads,
            layout=self.layout,
            kv_copies=self.copies,
            dim=self.dim,
        )

    def stored(self, key):
        return {key: self.whole}


@st.composite
def fused_parameters(draw):
    other_shape = draw(st.sampled_from([(), (3,), (2, 3)]))
    dim = draw(st.integers(0, len(other_shape)))
    if draw(st.booleans()):
        return SwiGLU(draw(st.integers(1, 6)), other_shape, dim, draw(st.booleans()))
    numbers = [draw(st.integers(1, 3)) for _ in range(4)]
    return QKV(*numbers, other_shape, dim, draw(st.sampled_from(["grouped", "concatenated"])))


@st.composite
def divisions(draw, fused):
    """Draw who holds what: for each tensor parallel rank the units, and the flat runs of its data
    parallel ranks.
    """
    cuts = [
        0,
        *sorted(draw(st.lists(st.integers(0, fused.num_units), max_size=3))),
        fused.num_units,
    ]
    held = []
    for first, last in itertools.pairwise(cuts):
        size = fused.local(first, last).size
        ends = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
        runs = [slice(*run) for run in itertools.pairwise(ends)] if draw(st.booleans()) else [None]
        held += [(first, last, run) for run in runs]
    return held


def expected(fused, first, last, run):
    local = fused.local(first, last)
    return local if run is None else local.reshape(-1)[run]


def check_any_division_loads_into_any_other(data):
    fused = data.draw(fused_parameters())
    position, size = data.draw(st.sampled_from([(0, 1), (1, 2)]))
    prepended = ((position, size),) if data.draw(st.booleans()) else ()
    state = [
        fused.factory("w", *held[:2], flat=held[2], prepended=prepended)
        for held in data.draw(divisions(fused))
    ]
    # The other layers.
    for other in set(range(size)) - {position} if prepended else ():
        state.append(fused.factory("w", 0, fused.num_units, prepended=((other, size),)))
    wanted = data.draw(divisions(fused))
    parts = [expected(fused, *held) for held in wanted]
    targets = [torch.full(part.shape, -7.0) for part in parts]
    asked = [
        fused.factory("w", *held[:2], flat=held[2], prepended=prepended, data=target)
        for held, target in zip(wanted, targets, strict=True)
    ]
    with tempfile.TemporaryDirectory() as directory:
        distckpt.save({"all": state}, f"{directory}/c")
        stored = distckpt.open(f"{directory}/c").read_tensors()
        loaded = distckpt.load({"all": asked}, f"{directory}/c")["all"]
    for key, tensor in fused.stored("w").items():
        assert np.array_equal(
            stored.pop(key).numpy(), np.stack([tensor] * size) if prepended else tensor
        )
    assert stored == {}
    for result, target, part in zip(loaded, targets, parts, strict=True):
        assert np.array_equal(result.numpy(), part)
        assert result.data_ptr() == target.data_ptr()
        assert result.shape == part.shape


@settings(max_examples=40)
@given(st.data())
def test_any_division_loads_into_any_other(data):
    check_any_division_loads_into_any_other(data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=5000)
@given(st.data())
def test_any_division_loads_into_any_other_at_length(data):
    check_any_division_loads_into_any_other(data)


def test_models_of_both_layouts_read_each_others_checkpoints_and_plain_ones(tmp_path):
    grouped, concatenated = (
        QKV(2, 4, 1, 3, (5,), 0, layout) for layout in ("grouped", "concatenated")
    )
    assert not np.array_equal(grouped.local(0, 4), concatenated.local(0, 4))
    distckpt.save({i: concatenated.factory("qkv", i, i + 1) for i in range(4)}, tmp_path / "c")
    for fused in (grouped, concatenated):
        loaded = distckpt.load(
            {i: fused.factory("qkv", i, i + 2, data=torch.zeros(24, 5)) for i in (0, 2)},
            tmp_path / "c",
        )
        assert all(np.array_equal(loaded[i].numpy(), fused.local(i, i + 2)) for i in (0, 2))
    # In Megatron's layout a rank holds consecutive rows, so a shard without a factory is the same
    # thing.
    plain = ShardedTensor.from_rank_offsets("qkv", torch.zeros(24, 5), (0, 1, 2))
    assert np.array_equal(
        distckpt.load({"w": plain}, tmp_path / "c")["w"].numpy(), grouped.local(2, 4)
    )


def test_whole_groups_of_one_rank_are_one_chunk_though_they_were_apart_in_memory(tmp_path):
    fused = QKV(2, 4, 1, 3, (5,), 0, "concatenated")
    built = fused.factory("qkv", 0, 4).build()
    assert len(built) == 12
    distckpt.save({"qkv": fused.factory("qkv", 0, 4)}, tmp_path / "c")
    assert len(list((tmp_path / "c" / "tensors").iterdir())) == 1


# ---- replica ids


def test_replica_ids_are_kept_and_shared_heads_have_a_number_more():
    swiglu = SwiGLU(4, (3,), 0, False).factory("w", 0, 2, replica_id=(0, 3))
    assert [shard.replica_id for shard in swiglu.build()] == [(0, 3), (0, 3)]
    assert [shard.replica_id for shard in replace(swiglu, replica_id=5).build()] == [5, 5]
    flat = replace(
        swiglu, data=torch.zeros(5), flattened_range=slice(4, 9), replica_id=(0, 1)
    ).build()
    assert {shard.replica_id for shard in flat["shards"]} == {(0, 1)}

    # Two ranks of two query heads each share one key head and one value head.
    fused = QKV(2, 1, 2, 1, (), 0, "concatenated")
    built = [fused.factory("w", i, i + 1, replica_id=(0, 7)).build() for i in range(2)]
    assert [
        [(s.global_offset, s.local_shape, s.replica_id) for s in shards] for shards in built
    ] == [
        [((0,), (2,), (0, 7)), ((4,), (2,), (0, 7))],
        [((2,), (2,), (0, 7)), ((4,), (2,), (0, 7, 1))],
    ]


# ---- beside Megatron


def megatron_parts(built):
    return [
        (
            s.key,
            tuple(s.local_shape),
            tuple(s.global_shape),
            tuple(s.global_offset),
            s.prepend_axis_num,
            s.replica_id,
        )
        for s in built
    ]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "offsets", [(), ((0, 3, 8),), ((0, 1, 2), (1, 3, 4))], ids=["plain", "layers", "experts"]
)
@pytest.mark.parametrize("shape", [(8, 5), (6,)], ids=["weight", "bias"])
def test_swiglu_is_stored_as_megatron_stores_it(separate, offsets, shape):
    mlp = pytest.importorskip("megatron.core.transformer.mlp")
    theirs = pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    tensor = numbered(*shape)
    description = (*offsets, (len(offsets), 2, 4))
    options = {"replica_id": (0, 0, 1), "prepend_axis_num": len(offsets)}
    reference = mlp.apply_swiglu_sharded_factory(
        theirs.ShardedTensor.from_rank_offsets("fc1", tensor, *description, **options),
        offsets,
        separate,
    )
    ours = apply_swiglu_sharded_factory(
        ShardedTensor.from_rank_offsets("fc1", tensor, *description, **options), offsets, separate
    )
    assert megatron_parts(ours.build()) == megatron_parts(reference.build())
    for mine, other in zip(ours.build(), reference.build(), strict=True):
        assert torch.equal(mine.data, other.data)
    parts = [shard.data for shard in reference.build()]
    assert torch.equal(ours.merge_fn([part.clone() for part in parts]), reference.merge_fn(parts))
    fields = ("key", "data", "build_fn", "merge_fn", "replica_id", "flattened_range")
    assert [vars(ours)[name] for name in ("key", "replica_id", "flattened_range")] == [
        "fc1",
        (0, 0, 1),
        None,
    ]
    assert tuple(vars(ours)) == tuple(vars(reference)) == fields


# ---- optimizer states


def test_optimizer_states_take_the_form_of_their_parameters(tmp_path):
    fused = SwiGLU(4, (3,), 0, False)
    halves = [torch.nn.Parameter(torch.from_numpy(fused.local(2 * i, 2 * i + 2))) for i in range(2)]
    optimizer = torch.optim.Adam(halves)
    for half in halves:
        half.grad = half.detach() / 10
    optimizer.step()
    model = {
        str(i): fused.factory("fc1", 2 * i, 2 * i + 2, data=half) for i, half in enumerate(halves)
    }
    state = optimizer.state_dict()
    optim_state_to_sharding_state(
        state, get_param_id_to_sharded_param_map(model, halves), exclude_keys="step"
    )
    assert all(isinstance(state["state"][i]["exp_avg"], ShardedTensorFactory) for i in range(2))
    distckpt.save({"optimizer": state}, tmp_path / "c")
    moments = distckpt.open(tmp_path / "c").read_tensors()["optimizer.state.exp_avg.fc1"]
    (whole,) = fused.stored("w").values()
    assert np.allclose(moments.numpy(), 0.1 * whole / 10)


def test_a_factory_serves_flat_optimizer_states_of_any_dtype_by_replacing_its_fields(tmp_path):
    # ZeRO-1: three ranks hold runs of the flattened parameter that cross from gate to up.
    fused = SwiGLU(4, (3,), 0, False)
    (whole,) = fused.stored("w").values()
    parameter = fused.factory("fc1", 0, 4, replica_id=(0, 1))
    runs = [slice(0, 7), slice(7, 17), slice(17, 24)]
    values = torch.from_numpy(fused.local(0, 4)).flatten().double() / 3
    state = [
        replace(parameter, key="exp_avg.fc1", data=values[run], flattened_range=run, replica_id=0)
        for run in runs
    ]
    distckpt.save({"state": state}, tmp_path / "c")
    stored = distckpt.open(tmp_path / "c").read_tensors()["exp_avg.fc1"]
    assert stored.dtype == torch.float64
    assert np.array_equal(stored.numpy(), torch.from_numpy(whole).double().numpy() / 3)


# ---- through the functions that apply factories


@pytest.mark.parametrize(
    "run", [None, slice(0, 24), slice(5, 17), slice(3, 3), slice(None, 4), slice(20, None)], ids=str
)
def test_factories_are_applied_and_merged_by_megatrons_functions(run):
    fused = SwiGLU(4, (3,), 0, False)
    values = expected(fused, 0, 4, slice(run.start, run.stop) if run else None)
    factory = fused.factory("w", 0, 4, flat=run)
    state = {"layer": {"fc1": factory}}
    apply_factories(state)
    state["layer"]["fc1"] = distckpt.megatron.dict_utils.dict_list_map_outplace(
        lambda v: v.data.clone() if isinstance(v, ShardedTensor) else v, state["layer"]["fc1"]
    )
    merged = apply_factory_merges(state, {"layer": {"fc1": factory.without_data()}})
    assert np.array_equal(merged["layer"]["fc1"].numpy(), values)
    assert merged["layer"]["fc1"].shape == values.shape


def test_saving_and_loading_do_not_change_the_state_dict(tmp_path):
    factory = SwiGLU(2, (3,), 0, False).factory("w", 0, 2, flat=slice(0, 12))
    state = {"w": factory}
    distckpt.save(state, tmp_path / "c")
    distckpt.load(state, tmp_path / "c")
    assert state == {"w": factory}


@pytest.mark.parametrize("flat", [None, slice(5, 16)], ids=["whole", "flat"])
def test_a_part_that_is_not_stored_is_unexpected_and_its_parameter_left_out(flat, tmp_path):
    stored = SwiGLU(4, (3,), 0, True).factory("mlp", 0, 4).build()
    distckpt.save({"gate": stored[0], "n": 5}, tmp_path / "c")
    asked = {"fc1": SwiGLU(4, (3,), 0, True).factory("mlp", 0, 4, flat=flat), "n": 0}
    with pytest.raises(LoadMismatchError, match="mlp_v"):
        distckpt.megatron.load(asked, tmp_path / "c", None, False, strict="raise_all")
    loaded, missing, unexpected = distckpt.megatron.load(
        asked, tmp_path / "c", None, False, strict="return_all"
    )
    assert (loaded, missing, unexpected) == ({"n": 5}, set(), {"mlp_v"})


def test_a_parameter_that_is_not_contiguous_is_merged_into_a_new_tensor(tmp_path):
    fused = SwiGLU(4, (3,), 0, False)
    distckpt.save({"w": fused.factory("w", 0, 4)}, tmp_path / "c")
    target = torch.zeros(3, 8).t()
    loaded = distckpt.load({"w": fused.factory("w", 0, 4, data=target)}, tmp_path / "c")["w"]
    assert np.array_equal(loaded.numpy(), fused.local(0, 4))
    assert torch.equal(target, loaded)


def test_merging_does_not_take_other_memory_for_that_of_the_parameter():
    fused = SwiGLU(4, (3,), 0, False)
    factory = fused.factory("w", 0, 4)
    gate, up = (torch.from_numpy(half.copy()) for half in (fused.gate, fused.up))
    # One memory, but not in the order of the parameter.
    swapped = torch.cat([up, gate])
    assert np.array_equal(factory.merge_fn([swapped[4:], swapped[:4]]).numpy(), fused.local(0, 4))
    # The right places in two memories.
    assert np.array_equal(
        factory.merge_fn([gate, torch.cat([gate, up])[4:]]).numpy(), fused.local(0, 4)
    )


# ---- errors


def fused_shard(shape=(6, 2), *offsets, **kwargs):
    return ShardedTensor.from_rank_offsets("w", torch.zeros(shape), *offsets, **kwargs)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: swiglu_factory(fused_shard((3, 2))),
            r"'w'.*halves.*dim 0 the shard has 3 of 3 from 0",
        ),
        (lambda: swiglu_factory(fused_shard(), dim=2), r"'w'.*no dim 2 in local shape \(6, 2\)"),
        (
            lambda: swiglu_factory(fused_shard(allow_shape_mismatch=True)),
            "'w'.*allow_shape_mismatch",
        ),
        (
            lambda: apply_swiglu_sharded_factory(fused_shard(), ((0, 1, 4),)),
            r"'w'.*\(\(0, 1, 4\),\).*prepended axes",
        ),
        (
            lambda: qkv_factory(fused_shard(), 3, 2, layout="grouped"),
            "'w'.*3 query heads cannot be divided",
        ),
        (
            lambda: qkv_factory(fused_shard(), 3, 0, layout="grouped"),
            "'w'.*3 query heads cannot be divided",
        ),
        (
            lambda: qkv_factory(fused_shard(), 4, 2, layout="grouped"),
            "'w'.*global size 6 along dim 0 is not a multiple of 8",
        ),
        (
            lambda: qkv_factory(fused_shard((6, 2), (0, 0, 2)), 2, 1, layout="grouped"),
            "'w'.*not complete groups of 12",
        ),
        (
            lambda: qkv_factory(fused_shard(), 4, 1, layout="interleaved"),
            "'w'.*layout must be .*got 'interleaved'",
        ),
        (
            lambda: swiglu_factory(fused_shard()).build_fn("k", torch.zeros(4, 2), 0, None),
            r"'k'.*\(4, 2\).*\(6, 2\)",
        ),
        (
            lambda: swiglu_factory(fused_shard()).build_fn("k", torch.zeros(4), 0, slice(3, 9)),
            r"'k'.*\(4,\).*\(6,\) for slice\(3, 9, None\) of local shape \(6, 2\)",
        ),
    ],
)
def test_errors_name_the_key_and_what_does_not_fit(make, problem):
    with pytest.raises(InvalidShardingError, match=problem):
        make()
