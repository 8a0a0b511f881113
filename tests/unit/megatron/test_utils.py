from __future__ import annotations

import logging
import threading

import pytest
import torch

from distckpt import InvalidShardingError
from distckpt.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from distckpt.megatron import utils
from distckpt.megatron.dict_utils import nested_values
from distckpt.megatron.validation import determine_global_metadata, validate_sharding_integrity
from tests.support.reference import megatron_or_skip


def make_state(module=None):
    """One leaf of each kind, in dicts and in a list; with the classes of distckpt or of another
    module.
    """
    tensor_cls = module.ShardedTensor if module else ShardedTensor
    object_cls = module.ShardedObject if module else ShardedObject
    factory_cls = module.ShardedTensorFactory if module else ShardedTensorFactory
    local_cls = module.LocalNonpersistentObject if module else LocalNonpersistentObject
    return {
        "model": {
            "w": tensor_cls.from_rank_offsets("model.w", torch.zeros(2), (0, 1, 2), replica_id=1),
            "list": [factory_cls("model.f", torch.zeros(1), None, None), 1, "text"],
        },
        "rng": object_cls("rng", "state", (1,), (0,)),
        "local": local_cls(3),
        "step": 5,
    }


def structure(x):
    """Names in place of leaves."""
    if isinstance(x, dict):
        return {k: structure(v) for k, v in x.items()}
    if isinstance(x, list):
        return [structure(v) for v in x]
    return {"LocalNonpersistentObject": "local"}.get(type(x).__name__, getattr(x, "key", x))


T, F, OBJ, L = {"w": "model.w"}, {"list": ["model.f"]}, {"rng": "rng"}, {"local": "local"}
PLAIN = {"model": {"list": [1, "text"]}, "step": 5}
EXTRACTIONS = {
    "extract_sharded_tensors": (
        {"model": T},
        {"model": {"list": ["model.f", 1, "text"]}, **OBJ, **L, "step": 5},
    ),
    "extract_sharded_tensors_and_factories": ({"model": T | F}, PLAIN | OBJ | L),
    "extract_sharded_tensors_or_nonpersistent": ({"model": T | F, **L}, PLAIN | OBJ),
    "extract_sharded_base": ({"model": T | F, **OBJ}, PLAIN | L),
    "extract_nonpersistent": (
        L,
        {"model": {**T, "list": ["model.f", 1, "text"]}, **OBJ, "step": 5},
    ),
}


@pytest.mark.parametrize(("name", "expected"), EXTRACTIONS.items())
def test_extract_takes_out_one_kind(name, expected):
    state = make_state()
    before = structure(state)
    assert tuple(map(structure, getattr(utils, name)(state))) == expected
    assert structure(state) == before


def keys(state):
    return [v.key for v in nested_values(state) if isinstance(v, ShardedBase)]


def test_prefix_is_added_to_every_key_once():
    state = make_state()
    state["tied"] = state["model"]["w"]
    assert utils.add_prefix_for_sharding(state, "run.") is None
    assert keys(state) == ["run.model.w", "run.model.f", "run.rng", "run.model.w"]
    assert list(state) == ["model", "rng", "local", "step", "tied"]


def test_prefix_of_a_single_value():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(1))
    utils.add_prefix_for_sharding(shard, "a.")
    utils.replace_prefix_for_sharding(shard, "a.", "b.")
    utils.apply_prefix_mapping(shard, {"b.": "c."})
    assert shard.key == "c.w"


def test_prefix_is_replaced_in_all_keys_or_in_none():
    state = make_state()
    with pytest.raises(ValueError, match="'rng'"):
        utils.replace_prefix_for_sharding(state, "model.", "m.")
    assert keys(state) == ["model.w", "model.f", "rng"]
    del state["rng"]
    assert utils.replace_prefix_for_sharding(state, "model.", "m.") is None
    assert keys(state) == ["m.w", "m.f"]


def test_first_matching_prefix_is_mapped():
    state = make_state()
    assert (
        utils.apply_prefix_mapping(state, {"model.w": "W", "model.": "other.", "W": "no"}) is None
    )
    assert keys(state) == ["W", "other.f", "rng"]


def test_shard_ids_tell_shards_but_not_replicas_apart():
    def make(position, replica_id, run=None):
        if run is None:
            return ShardedTensor.from_rank_offsets(
                "w", torch.zeros(2), (0, position, 2), replica_id=replica_id
            )
        return ShardedTensor.from_rank_offsets_flat(
            "w", torch.zeros(1), (2,), (0, position, 2), flattened_range=run, replica_id=replica_id
        )

    ids = [
        utils._sharded_tensor_shard_id(s)
        for s in (make(0, 0), make(0, 5), make(1, 0), make(1, 0, slice(0, 1)))
    ]
    assert ids == [("w", (0,), None), ("w", (0,), None), ("w", (2,), None), ("w", (2,), (0, 1))]
    obj = ShardedObject("o", None, (2, 3), (1, 2), replica_id=4)
    assert utils._sharded_object_id(obj) == ("o", (1, 2), (2, 3))


class Float8Tensor:
    def __init__(self, values):
        self.values = values

    def dequantize(self):
        return torch.tensor(self.values)


class MyFloat8Subclass(Float8Tensor):
    pass


def test_float8_tensors_are_dequantized():
    state = make_state()
    ordinary = state["model"]["w"].data
    state["rng"].data = MyFloat8Subclass([1.5, 2.0])
    state["model"]["list"][0].data = Float8Tensor([3.0])
    utils.force_all_tensors_to_non_fp8(state)
    assert torch.equal(state["rng"].data, torch.tensor([1.5, 2.0]))
    assert torch.equal(state["model"]["list"][0].data, torch.tensor([3.0]))
    # Each torch.Tensor has a dequantize method, which does not make it a Float8 tensor.
    assert state["model"]["w"].data is ordinary


def test_dequantized_shard_has_the_dtype_of_its_data():
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(2, dtype=torch.bfloat16))
    shard.data = Float8Tensor([1.0, 2.0])
    utils.force_all_tensors_to_non_fp8([shard])
    assert shard.dtype == torch.float32
    shard.validate_metadata_integrity()


def test_metadata_is_copied_without_the_process_group():
    metadata = {"dp_cp_group": object(), "singleton_local_shards": True}
    assert utils._clean_metadata_for_serialization(metadata) == {"singleton_local_shards": True}
    assert "dp_cp_group" in metadata
    assert utils._clean_metadata_for_serialization(None) is None


def test_zip_strict():
    assert list(utils.zip_strict([1, 2], (x for x in "ab"))) == [(1, "a"), (2, "b")]
    assert list(utils.zip_strict()) == []
    with pytest.raises(ValueError, match=r"\[2, 3, 2\]"):
        utils.zip_strict([1, 2], [1, 2, 3], "ab")


def test_logger_stack_nests_names_and_loggers():
    mine = logging.getLogger("test_utils.mine")
    with utils.logger_stack() as (name, fallback):
        assert (name, fallback.name) == ("", "distckpt.megatron.utils")
    with (
        utils.logger_stack("save", mine),
        utils.logger_stack(),
        utils.logger_stack("write") as (name, current),
    ):
        assert (name, current) == ("save.write", mine)
    with pytest.raises(KeyError), utils.logger_stack("failing", mine):
        raise KeyError
    with utils.logger_stack("next") as (name, current):
        assert (name, current) == ("next", fallback)


def test_logger_stack_of_one_thread_is_not_seen_in_another():
    seen = []

    def enter():
        with utils.logger_stack("thread") as (name, _):
            seen.append(name)

    with utils.logger_stack("main"):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert seen == ["thread"]


def test_debug_time_logs_with_the_scope(caplog):
    caplog.set_level(logging.DEBUG)
    with utils.debug_time("save"), utils.debug_time("write", threshold=0.0):
        utils.debug_msg("hello")
    records = [(r.levelname, r.getMessage().split(" took")[0]) for r in caplog.records]
    assert records == [("DEBUG", "save.write hello"), ("WARNING", "save.write"), ("DEBUG", "save")]


def test_debug_time_keeps_quiet_below_the_threshold_but_hides_no_error(caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(KeyError), utils.debug_time("fast", threshold=1e6):
        raise KeyError
    assert caplog.records == []


@pytest.fixture(scope="module")
def megatron():
    return megatron_or_skip("dist_checkpointing.utils"), megatron_or_skip(
        "dist_checkpointing.mapping"
    )


@pytest.mark.parametrize("name", EXTRACTIONS)
def test_extract_agrees_with_megatron(megatron, name):
    their_utils, their_mapping = megatron
    theirs = getattr(their_utils, name)(make_state(their_mapping))
    ours = getattr(utils, name)(make_state())
    given_theirs = getattr(utils, name)(make_state(their_mapping))
    assert (
        tuple(map(structure, ours))
        == tuple(map(structure, theirs))
        == tuple(map(structure, given_theirs))
    )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("add_prefix_for_sharding", ("p.",)),
        ("replace_prefix_for_sharding", ("", "q.")),
        ("apply_prefix_mapping", ({"model": "m", "model.w": "never"},)),
    ],
)
def test_prefixes_agree_with_megatron(megatron, name, args):
    their_utils, their_mapping = megatron
    ours, theirs, given_theirs = make_state(), make_state(their_mapping), make_state(their_mapping)
    getattr(utils, name)(ours, *args)
    getattr(utils, name)(given_theirs, *args)
    getattr(their_utils, name)(theirs, *args)
    assert structure(ours) == structure(theirs) == structure(given_theirs)


def test_factories_of_megatron_are_applied_and_merged(megatron):
    _, their_mapping = megatron
    build = lambda key, tensor, *_: [their_mapping.ShardedTensor.from_rank_offsets(key, tensor[:1])]  # noqa: E731
    factory = their_mapping.ShardedTensorFactory(
        "f", torch.ones(2), build, lambda parts: torch.cat(parts * 2)
    )
    state = {"list": [factory, 1]}
    apply_factories(state)
    assert state["list"][0][0].key == "f"
    loaded = apply_factory_merges({"list": [[torch.ones(1)], 1]}, {"list": {0: factory}})
    assert loaded["list"][0].tolist() == [1, 1]


def test_shards_of_megatron_are_validated(megatron):
    _, their_mapping = megatron
    part = their_mapping.ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))
    mine, of_all = determine_global_metadata({"w": part})
    assert [shard.key for shard in mine] == ["w"]
    with pytest.raises(InvalidShardingError, match="'w'"):
        validate_sharding_integrity([[part]])
    with pytest.raises(InvalidShardingError, match="'w'"):
        validate_sharding_integrity(of_all)


def test_every_name_of_megatron_is_here(megatron):
    their_utils, _ = megatron
    names = [
        n
        for n, v in vars(their_utils).items()
        if getattr(v, "__module__", None) == their_utils.__name__
    ]
    assert len(names) > 10
    assert [n for n in names if not hasattr(utils, n)] == []
