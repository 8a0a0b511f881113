from __future__ import annotations

import itertools
import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import distckpt
from distckpt import InvalidShardingError, ShardedObject, ShardedTensor
from distckpt._state.shards import merge_tables, shard_table
from distckpt._state.validation import validate_shards
from distckpt.megatron.core import (
    CheckpointingException,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadMismatchError,
    UnsupportedObjectError,
    read_marker,
    write_marker,
)
from distckpt.megatron.validation import (
    StrictHandling,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
    verify_checkpoint,
)
from distckpt.modules import make_sharded_tensors_for_checkpoint, sharded_state_dict
from distckpt.readers import Region
from tests.support.reference import megatron_or_skip


def tensor_shard(key, region, global_shape, replica_id=0, dtype=torch.float32):
    return ShardedTensor(
        key, None, dtype, region.shape, global_shape, region.offset, None, replica_id
    )


def validate(*shards_of_ranks, **kwargs):
    validate_shards(merge_tables([shard_table(shards) for shards in shards_of_ranks]), **kwargs)


def problem_of(*shards_of_ranks, **kwargs):
    with pytest.raises(InvalidShardingError) as caught:
        validate(*shards_of_ranks, **kwargs)
    return str(caught.value)


# ---- against counting


@st.composite
def clusters(draw):
    """Draw shards of up to 3 ranks that mostly cover their tensors once, and how often each element
    is covered.
    """
    num_ranks = draw(st.integers(1, 3))
    shards_of_ranks = [[] for _ in range(num_ranks)]
    main_counts, copy_counts = {}, {}
    spoil = draw(st.booleans())
    for key in "abc"[: draw(st.integers(1, 3))]:
        is_object = draw(st.booleans())
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        main_counts[key], copy_counts[key] = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        if is_object:
            regions = [Region(index, (1,) * len(shape)) for index in np.ndindex(*shape)]
        else:
            cuts = [sorted(draw(st.lists(st.integers(0, n), max_size=2))) for n in shape]
            edges = [[0, *inner, n] for inner, n in zip(cuts, shape, strict=True)]
            regions = [
                Region(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))
                for spans in itertools.product(*(itertools.pairwise(e) for e in edges))
            ]
        if not regions:
            # A key that nobody mentions is none.
            del main_counts[key], copy_counts[key]
        for region in regions:
            replicas = (
                draw(st.sampled_from([[0], [0], [0], [0, 1], [1, 2], [], [0, 0]])) if spoil else [0]
            )
            for replica in replicas:
                if is_object:
                    shard = ShardedObject(key, None, shape, region.offset, replica)
                else:
                    shard = tensor_shard(key, region, shape, replica)
                shards_of_ranks[draw(st.integers(0, num_ranks - 1))].append(shard)
                counts = copy_counts if replica else main_counts
                counts[key][region.slices()] += 1
    mentioned = {shard.key for shards in shards_of_ranks for shard in shards}
    counts = {key: (main_counts[key], copy_counts[key]) for key in main_counts if key in mentioned}
    return shards_of_ranks, counts


@settings(max_examples=120)
@given(clusters())
def test_what_is_wrong_is_what_counting_finds(cluster):
    shards_of_ranks, counts = cluster
    bad = {key: main for key, (main, _) in counts.items() if (main != 1).any()}
    if not bad:
        validate(*shards_of_ranks)
        return
    problem = problem_of(*shards_of_ranks)
    for key in counts:
        assert (f"key {key!r}" in problem) == (key in bad)
    for key, main in bad.items():
        element = tuple(np.argwhere(main != 1)[0].tolist())
        line = next(line for line in problem.splitlines() if f"key {key!r}" in line)
        if main[element] > 1:
            expected = f"{main[element]} main replicas hold the same element {element}"
        elif counts[key][1][element]:
            expected = f"no main replica holds element {element}"
        else:
            expected = f"no rank holds element {element}"
        assert expected in line


@settings(max_examples=200)
@given(clusters())
def test_where_gaps_are_allowed_only_overlaps_are_wrong(cluster):
    shards_of_ranks, counts = cluster
    bad = {key for key, (main, _) in counts.items() if (main > 1).any()}
    if not bad:
        validate(*shards_of_ranks, allow_gaps=True)
        return
    problem = problem_of(*shards_of_ranks, allow_gaps=True)
    assert all((f"key {key!r}" in problem) == (key in bad) for key in counts)


# ---- messages


def test_a_gap_is_named_with_key_and_element():
    problem = problem_of([tensor_shard("w", Region((0, 0), (2, 4)), (4, 4))], [])
    assert "key 'w' (global shape (4, 4)): no rank holds element (2, 0)" in problem


def test_a_shard_held_only_as_a_copy_is_named_with_its_ranks():
    copy = tensor_shard("w", Region((2,), (2,)), (4,), replica_id=(0, 1))
    problem = problem_of([tensor_shard("w", Region((0,), (2,)), (4,))], [copy], [copy])
    assert "no main replica holds element (2,)" in problem
    assert "[2:4] on rank 1 and [2:4] on rank 2" in problem


def test_experts_that_every_rank_numbers_from_0_are_found():
    shards_of_ranks = [
        [tensor_shard(f"experts.{i}.w", Region((0,), (4,)), (4,)) for i in range(2)]
        for _ in range(3)
    ]
    problem = problem_of(*shards_of_ranks)
    assert "key 'experts.0.w'" in problem
    assert "3 main replicas hold the same element (0,)" in problem
    assert "[0:4] on rank 0 and [0:4] on rank 1 and [0:4] on rank 2" in problem
    assert "experts counted from 0 on every rank" in problem


def test_many_wrong_keys_are_summed_up():
    shards = [tensor_shard(f"layers.{i}.w", Region((0,), (2,)), (4,)) for i in range(40)]
    problem = problem_of(shards)
    assert len(problem.splitlines()) < 10
    assert "'layers.{0..39}.w' (40 keys)" in problem


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (
            tensor_shard("w", Region((0,), (4,)), (4,)),
            tensor_shard("w", Region((0,), (4,)), (4,), 1, torch.bfloat16),
            r"'w' has two meanings {where}: F32 of \(4,\) and BF16 of \(4,\)",
        ),
        (
            tensor_shard("w", Region((0,), (4,)), (4,)),
            tensor_shard("w", Region((0,), (4,)), (8,)),
            r"'w' has two meanings {where}: F32 of \(4,\) and F32 of \(8,\)",
        ),
        (
            tensor_shard("w", Region((0,), (4,)), (4,)),
            ShardedObject("w", 1, (4,), (0,)),
            r"'w' has two meanings {where}: F32 of \(4,\) and an object grid \(4,\)",
        ),
        (
            ShardedObject("w", 1, (2,), (0,)),
            ShardedObject("w", 1, (3,), (1,)),
            r"'w' has two meanings {where}: an object grid \(2,\) and an object grid \(3,\)",
        ),
    ],
    ids=["dtype", "global shape", "tensor and object", "object grid"],
)
def test_ranks_that_disagree_about_a_key_are_named(first, second, problem):
    with pytest.raises(InvalidShardingError, match=problem.format(where="on rank 1 and on rank 2")):
        validate([], [first], [second])
    with pytest.raises(InvalidShardingError, match=problem.format(where="in one state dict")):
        validate([first, second])


def test_shards_outside_of_their_tensor_are_refused_when_saving(tmp_path):
    padded = ShardedTensor(
        "w", torch.ones(3), torch.float32, (3,), (8,), (6,), None, allow_shape_mismatch=True
    )
    with pytest.raises(
        InvalidShardingError, match=r"\[6:9\] of key 'w' lies outside its global shape \(8,\)"
    ):
        distckpt.save({"w": padded}, tmp_path / "c", validate_access_integrity=False)
    assert list(tmp_path.iterdir()) == []


def test_tensors_too_large_for_any_storage_are_refused():
    shape = (2**31, 2**31)
    assert "more elements than any storage holds" in problem_of(
        [tensor_shard("w", Region((0, 0), shape), shape)]
    )
    validate([tensor_shard("w", Region((0, 0), (2**30, 2**30)), (2**30, 2**30))])


def test_large_grids_are_checked_in_little_time():
    # A check that compares all pairs would not end before the test times out.
    side, step = 300, 3
    shards = [
        tensor_shard("w", Region((step * i, step * j), (step, step)), (step * side, step * side))
        for i in range(side)
        for j in range(side)
    ]
    table = merge_tables([shard_table(shards)])
    validate_shards(table)
    table.offsets[77_777] = table.offsets[77_776]
    with pytest.raises(InvalidShardingError, match="2 main replicas hold the same element"):
        validate_shards(table)


# ---- grids of every kind, through save


@pytest.mark.parametrize(
    "shards",
    [
        [ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 2))],
        [ShardedTensor("w", torch.zeros(3), torch.float32, (3,), (5,), (0,), None)],
        [ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 3), prepend_axis_num=1)],
        [
            ShardedTensor.from_rank_offsets_flat(
                "w", torch.zeros(3), (2, 3), flattened_range=slice(0, 3)
            ),
            ShardedTensor.from_rank_offsets_flat(
                "w", torch.zeros(2), (2, 3), flattened_range=slice(4, 6)
            ),
        ],
        [ShardedObject("w", 1, (2,), (0,))],
    ],
    ids=["regular grid", "irregular grid", "prepended axis", "flattened range", "objects"],
)
def test_a_hole_is_found_even_by_one_process_alone(tmp_path, shards):
    with pytest.raises(InvalidShardingError, match=r"key 'w'.*no rank holds element"):
        distckpt.save(dict(enumerate(shards)), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize(
    "shards",
    [
        [
            ShardedTensor("w", torch.zeros(3), torch.float32, (3,), (5,), (0,), None),
            ShardedTensor("w", torch.zeros(3), torch.float32, (3,), (5,), (2,), None),
        ],
        [
            ShardedTensor.from_rank_offsets_flat(
                "w", torch.zeros(4), (2, 3), flattened_range=slice(0, 4)
            ),
            ShardedTensor.from_rank_offsets_flat(
                "w", torch.zeros(3), (2, 3), flattened_range=slice(3, 6)
            ),
        ],
        [ShardedObject("w", 1, (1,), (0,)), ShardedObject("w", 2, (1,), (0,))],
        [ShardedTensor.from_rank_offsets("w", torch.zeros(()))] * 2,
    ],
    ids=["irregular grid", "flattened range", "objects", "0-dim"],
)
def test_an_overlap_is_never_saved(tmp_path, shards, validated):
    with pytest.raises(
        InvalidShardingError, match=r"key 'w'.*2 main replicas hold the same element"
    ):
        distckpt.save(dict(enumerate(shards)), tmp_path / "c", validate_access_integrity=validated)
    assert list(tmp_path.iterdir()) == []


def test_shards_without_elements_are_fine(tmp_path):
    # On a regular grid, on an irregular one, and with a prepended axis.
    state = {
        "empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3), (0, 1, 2)),
        "also empty": ShardedTensor.from_rank_offsets("empty", torch.zeros(0, 3), (0, 0, 2)),
        "rest": ShardedTensor(
            "uneven", torch.zeros(0, 3), torch.float32, (0, 3), (4, 3), (4, 0), None
        ),
        "all": ShardedTensor(
            "uneven", torch.ones(4, 3), torch.float32, (4, 3), (4, 3), (0, 0), None
        ),
        "layer": ShardedTensor(
            "stack", torch.ones(2), torch.float32, (2,), (2, 2), (1, 0), None, prepend_axis_num=1
        ),
        "other layer": ShardedTensor(
            "stack", torch.ones(2), torch.float32, (2,), (2, 2), (0, 0), None, 0, 1
        ),
    }
    distckpt.save(state, tmp_path / "c")
    loaded = distckpt.megatron.load_plain_tensors(tmp_path / "c")
    assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == {
        "empty": (0, 3),
        "uneven": (4, 3),
        "stack": (2, 2),
    }


# ---- replicas that are none


@pytest.mark.parametrize(
    ("shards", "differs"),
    [
        (
            [
                ShardedTensor.from_rank_offsets("w", torch.arange(4.0)),
                ShardedTensor.from_rank_offsets(
                    "w", torch.tensor([0.0, 1.0, 2.0, 3.5]), replica_id=1
                ),
            ],
            r"key 'w': region \[0:4\] differs between rank 0 and rank 0",
        ),
        (
            [
                ShardedObject("rng", [1, 2], (1,), (0,)),
                ShardedObject("rng", [1, 3], (1,), (0,), replica_id=1),
            ],
            r"key 'rng': region \[0:1\] differs between rank 0 and rank 0",
        ),
    ],
    ids=["tensor", "object"],
)
def test_copies_that_differ_are_found_when_asked_for(tmp_path, shards, differs):
    with pytest.raises(InvalidShardingError, match=differs):
        distckpt.save(dict(enumerate(shards)), tmp_path / "c", validate_replicas=True)
    assert list(tmp_path.iterdir()) == []
    distckpt.save(dict(enumerate(shards)), tmp_path / "c")


def test_copies_with_other_strides_are_equal(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    shards = [
        ShardedTensor.from_rank_offsets("w", base),
        ShardedTensor.from_rank_offsets("w", base.t().contiguous().t(), replica_id=1),
        ShardedTensor.from_rank_offsets("z", torch.tensor([1 + 2j, 3 - 4j])),
        ShardedTensor.from_rank_offsets("z", torch.tensor([1 - 2j, 3 + 4j]).conj(), replica_id=1),
    ]
    distckpt.save(dict(enumerate(shards)), tmp_path / "c", validate_replicas=True)
    assert torch.equal(distckpt.megatron.load_plain_tensors(tmp_path / "c")["w"], base)


# ---- what cannot be saved


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (torch.empty(3, device="meta"), "has no data"),
        (torch.ones(3).to_sparse(), "layout torch.sparse_coo"),
    ],
    ids=["meta", "sparse"],
)
def test_tensors_without_readable_elements_are_refused(tmp_path, data, problem):
    with pytest.raises(CheckpointingException, match=f"'w'.*{problem}"):
        distckpt.save({"w": ShardedTensor.from_rank_offsets("w", data)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_shards_without_data_are_refused(tmp_path):
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(3)).without_data()
    with pytest.raises(CheckpointingException, match=r"'w' at offset \(0,\) has no data"):
        distckpt.save({"w": shard}, tmp_path / "c")


def test_objects_of_unknown_types_are_refused_with_their_key(tmp_path):
    with pytest.raises(
        UnsupportedObjectError, match=r"The object 'loader' cannot be saved: .*object"
    ):
        distckpt.save(
            {"loader": ShardedObject("loader", {"a": object()}, (1,), (0,))}, tmp_path / "c"
        )
    assert list(tmp_path.iterdir()) == []


# ---- Megatron's functions


def test_global_metadata_of_one_process_are_its_own():
    state = {
        "w": [
            ShardedTensor.from_rank_offsets(
                "w", torch.ones(2, 3), (0, 1, 2), replica_id=(0, 1), prepend_axis_num=1
            )
        ],
        "flat": ShardedTensor.from_rank_offsets_flat(
            "f", torch.ones(2), (3,), flattened_range=slice(1, 3)
        ),
        "o": {"inner": ShardedObject("o", [1], (2,), (1,))},
        "step": 3,
    }
    mine, of_all = determine_global_metadata(state)
    assert [shard.key for shard in mine] == ["w", "f", "o"]
    assert all(shard.data is None for shard in mine)
    assert of_all == [mine]


def test_sharding_of_all_ranks_can_be_checked_alone():
    first = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 0, 2))
    second = ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, 1, 2))
    validate_sharding_integrity([[first], [second]])
    with pytest.raises(InvalidShardingError, match="no rank holds element"):
        validate_sharding_integrity([[first], []])


def test_strictness_is_applied_to_given_metadata(caplog):
    mine = {
        "a": ShardedTensor.from_rank_offsets("a", torch.ones(2)),
        "list": [ShardedTensor.from_rank_offsets("b", torch.ones(2)), 3],
    }
    local, of_all = determine_global_metadata(mine)
    stored = {
        "a": ShardedTensor.from_rank_offsets("a", torch.ones(2)),
        "c": ShardedObject("c", None, (1,), (0,)),
    }

    def apply(strict, checked=True, of_all=of_all, stored=stored):
        return validate_integrity_and_strict_load(mine, strict, checked, local, of_all, stored)

    with caplog.at_level(logging.WARNING, logger="distckpt.megatron.validation"):
        state, missing, unexpected = apply(StrictHandling.LOG_ALL)
    assert (state.keys(), state["list"], missing, unexpected) == ({"a", "list"}, [3], {"c"}, {"b"})
    assert "'b'" in caplog.text
    assert "'c'" in caplog.text
    assert apply(StrictHandling.ASSUME_OK_UNEXPECTED) == (mine, set(), set())
    with pytest.raises(LoadMismatchError) as caught:
        apply(StrictHandling.RAISE_ALL)
    assert (caught.value.missing, caught.value.unexpected) == ({"c"}, {"b"})
    with pytest.raises(CheckpointingException, match="ckpt_sharded_metadata is None"):
        apply(StrictHandling.LOG_UNEXPECTED, stored=None)
    with pytest.raises(CheckpointingException, match="global_metadata is None"):
        apply(StrictHandling.ASSUME_OK_UNEXPECTED, of_all=None)


def test_strict_flags_are_modes_or_their_names():
    for mode in StrictHandling:
        assert parse_strict_flag(mode) is mode
        assert parse_strict_flag(mode.value) is mode
    for wrong in ("RAISE_ALL", True, None, "strict"):
        with pytest.raises(
            ValueError, match=f"Invalid strict flag: {re.escape(repr(wrong))}.*'raise_all'"
        ):
            parse_strict_flag(wrong)


def test_modes_agree_with_megatron():
    theirs = megatron_or_skip("dist_checkpointing.validation").StrictHandling
    assert {mode.name: mode.value for mode in StrictHandling} == {
        mode.name: mode.value for mode in theirs
    }
    for name in (
        "requires_explicit_ckpt_mismatch_check",
        "requires_global_app_metadata",
        "requires_returning_mismatch_keys",
    ):
        for mode in StrictHandling:
            assert getattr(StrictHandling, name)(mode) == getattr(theirs, name)(theirs(mode.value))


# ---- checkpoints


def test_a_checkpoint_is_recognised_by_its_marker(tmp_path):
    distckpt.save({"step": 1}, tmp_path / "c")
    assert verify_checkpoint(str(tmp_path / "c"))["sharded_backend"] == "safetensors"
    with pytest.raises(CheckpointNotFoundError, match="directory /nowhere does not exist"):
        verify_checkpoint("/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"has no metadata\.json"):
        verify_checkpoint(str(tmp_path / "empty"))


@pytest.mark.parametrize("version", [5, "1", None, [1]])
def test_a_checkpoint_of_a_newer_format_is_refused(tmp_path, version):
    distckpt.save({"step": 1}, tmp_path / "c")
    write_marker(tmp_path / "c", {**read_marker(tmp_path / "c"), "min_reader_version": version})
    with pytest.raises(CorruptCheckpointError, match="needs a reader of format version"):
        distckpt.load({}, tmp_path / "c")


# ---- which copy is the main one, where nobody has said


class Part(torch.nn.Module):
    """One of some parts of a tensor of four elements, which describes itself."""

    def __init__(self, number, count):
        super().__init__()
        self.place = number, count
        self.weight = torch.nn.Parameter(torch.ones(4 // count))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = {"weight": self.weight}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, tp_group=self.place
        )


@pytest.mark.parametrize(
    ("said", "main_ranks"),
    [
        ([{}, {}, {}, {}], [0, 2]),
        ([{"replica_id": 1}, {"replica_id": 0}, {}, {}], [1, 2]),
        ([{"replica_id": 1}, {"replica_id": 1}, {"replica_id": (1, 0)}, {}], [3]),
        ([{"replica_id": rank} for rank in range(4)], [0, 2]),
    ],
    ids=["nobody", "two copies", "all but one", "by rank"],
)
def test_the_lowest_rank_has_the_main_replica_of_those_that_may(said, main_ranks):
    """Ranks 0 and 1 have the first half, rank 2 the second, and rank 3 all of it, as a stage
    divided otherwise has.
    """
    parts = [(0, 2), (0, 2), (1, 2), (0, 1)]
    shards = [
        [sharded_state_dict(torch.nn.ModuleDict({"p": Part(*part)}), **kwargs)["p.weight"]]
        for part, kwargs in zip(parts, said, strict=True)
    ]
    table = merge_tables([shard_table(of_rank) for of_rank in shards])
    validate_shards(table)
    assert table.ranks[table.is_main].tolist() == main_ranks


def test_a_main_replica_that_was_named_is_the_only_one():
    open_one = sharded_state_dict(torch.nn.ModuleDict({"p": Part(0, 1)}))["p.weight"]
    named = ShardedTensor.from_rank_offsets("p.weight", torch.ones(4))
    assert merge_tables([shard_table([open_one]), shard_table([named])]).is_main.tolist() == [
        False,
        True,
    ]
    gap = [sharded_state_dict(torch.nn.ModuleDict({"p": Part(1, 2)}))["p.weight"]]
    with pytest.raises(InvalidShardingError, match="no rank holds element"):
        validate(gap, gap)
