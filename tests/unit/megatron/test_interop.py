"""Objects shaped as Megatron Core's are taken by save and load as they are, whether or not Megatron
is installed.

The classes here have the names and fields of `megatron.core.dist_checkpointing.mapping`, in several
versions; the tests with Megatron itself are in tests/distributed.
"""

from __future__ import annotations

import collections
import enum
import importlib
import io
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

import distckpt
from distckpt import InvalidShardingError, UnsupportedObjectError
from distckpt.megatron import interop as megatron
from distckpt.megatron import state_dict_utils, validation
from distckpt.megatron.strategies import async_utils
from distckpt.megatron.strategies.common import (
    TorchCommonLoadStrategy,
    TorchCommonSaveStrategy,
    load_common,
    save_common,
)
from distckpt.megatron.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from distckpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)
from tests.support.reference import megatron_or_skip


class ShardedBase:
    pass


@dataclass
class ShardedTensor(ShardedBase):
    key: str
    data: Any = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple
    global_shape: tuple
    global_offset: tuple
    axis_fragmentations: tuple | None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    has_regular_grid = property(lambda self: self.axis_fragmentations is not None)


@dataclass
class ShardedObject(ShardedBase):
    key: str
    data: Any
    global_shape: tuple
    global_offset: tuple
    replica_id: Any = 0


@dataclass
class ShardedTensorFactory(ShardedBase):
    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: Any = 0
    flattened_range: slice | None = None

    def build(self):
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def without_data(self):
        return replace(self, data=None)


class LocalNonpersistentObject:
    def __init__(self, obj):
        self.obj = obj

    def unwrap(self):
        return self.obj


class PaddedTensor(ShardedTensor):
    """Programs derive classes of their own."""


def tensor(key, data, shape=None, offset=None, fragmentations="regular", **kwargs):
    shape = tuple(data.shape) if shape is None else shape
    offset = (0,) * len(shape) if offset is None else offset
    if fragmentations == "regular":
        fragmentations = (1,) * len(shape)
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), shape, offset, fragmentations, **kwargs
    )


def swiglu(key, data, merged=None):
    """Store one parameter as two halves, as Megatron does; what is merged goes into a list."""

    def build(key, data, replica_id, flattened_range):
        assert flattened_range is None
        gate, up = data.chunk(2)
        shape = tuple(data.shape)
        return [
            ShardedTensor(
                key,
                part,
                data.dtype,
                tuple(part.shape),
                shape,
                (i * len(part), 0),
                (2, 1),
                replica_id,
            )
            for i, part in enumerate((gate, up))
        ]

    def merge(parts):
        assert all(type(part) is torch.Tensor for part in parts)
        if merged is not None:
            merged.append(len(parts))
        return torch.cat(parts)

    return ShardedTensorFactory(key, data, build, merge)


def test_a_state_dict_of_megatron_comes_back(tmp_path):
    weight, fc1 = torch.randn(4, 3), torch.randn(6, 2)
    state = {
        "model": {
            "weight": tensor("weight", weight),
            "layers": [
                tensor("layers", torch.ones(3), (2, 3), (0, 0), (2, 1), prepend_axis_num=1),
                "plain",
            ],
            "last": (
                tensor("layers", torch.full((3,), 2.0), (2, 3), (1, 0), (2, 1), prepend_axis_num=1),
            ),
            "fc1": swiglu("fc1", fc1),
        },
        "rng": ShardedObject("rng", {"seed": 1}, (1,), (0,)),
        "extra": ShardedObject("layer._extra_state", io.BytesIO(b"scales"), (1,), (0,)),
        "metadata": ShardedObject("other._extra_state", torch.arange(3), (1,), (0,)),
        "local": LocalNonpersistentObject([1, 2]),
        "step": 5,
    }
    before = {name: id(value) for name, value in state["model"].items()}
    distckpt.save(state, tmp_path / "c")
    assert {name: id(value) for name, value in state["model"].items()} == before
    assert type(state["model"]["fc1"]) is ShardedTensorFactory

    merged = []
    asked = {
        "model": {
            "weight": tensor("weight", torch.zeros(4, 3)),
            "layers": [
                tensor("layers", torch.zeros(3), (2, 3), (1, 0), (2, 1), prepend_axis_num=1)
            ],
            "fc1": swiglu("fc1", torch.zeros(6, 2), merged),
        },
        "rng": ShardedObject("rng", None, (1,), (0,)),
        "extra": ShardedObject("layer._extra_state", None, (1,), (0,)),
        "metadata": ShardedObject("other._extra_state", None, (1,), (0,)),
        "local": LocalNonpersistentObject("mine"),
    }
    target = asked["model"]["weight"].data
    loaded = distckpt.megatron.load(asked, tmp_path / "c", None, False, strict="raise_all")
    assert loaded["model"]["weight"] is target
    assert torch.equal(target, weight)
    assert torch.equal(loaded["model"]["layers"][0], torch.full((3,), 2.0))
    assert torch.equal(loaded["model"]["fc1"], fc1)
    assert merged == [2]
    assert (loaded["rng"], loaded["local"], loaded["step"]) == ({"seed": 1}, "mine", 5)
    assert loaded["extra"].read() == b"scales"
    assert torch.equal(loaded["metadata"], torch.arange(3))


def layer(index):
    return tensor("layers", torch.ones(3), (2, 3), (index, 0), (2, 1), prepend_axis_num=1)


def test_a_key_that_two_objects_of_megatron_have_is_named_with_both_places(tmp_path):
    one, other = torch.ones(6, 2), torch.zeros(6, 2)
    pairs = [
        ({"a": tensor("w", one), "b": [tensor("w", other)]}, "'w'", "'a' and at 'b.0'"),
        ({"a": swiglu("fc1", one), "b": {"c": swiglu("fc1", other)}}, "'fc1'", "'a' and at 'b.c'"),
        (dict(enumerate(map(layer, [0, 1, 0]))), "'layers'", "'0' and at '2'"),
    ]
    for state, key, places in pairs:
        with pytest.raises(distckpt.InvalidShardingError) as caught:
            distckpt.megatron.save(state, tmp_path / "c")
        for words in (key, places, "another key", "prefix=", "another offset"):
            assert words in str(caught.value)
        assert "Modules" not in str(caught.value)


def test_tensors_without_data_are_allocated(tmp_path):
    distckpt.save({"w": tensor("w", torch.arange(6.0))}, tmp_path / "c")
    shard = ShardedTensor("w", None, torch.float32, (3,), (6,), (3,), (2,))
    assert torch.equal(distckpt.load({"w": shard}, tmp_path / "c")["w"], torch.arange(3.0, 6.0))
    assert shard.data is None


def test_irregular_and_flattened_shards(tmp_path):
    full = torch.arange(35.0).view(5, 7)
    uneven = [
        tensor("w", full[:2], (5, 7), (0, 0), None),
        tensor("w", full[2:], (5, 7), (2, 0), None),
    ]
    distckpt.save({"parts": uneven}, tmp_path / "c")
    flat = ShardedTensor(
        "w",
        torch.zeros(9),
        torch.float32,
        (5, 7),
        (5, 7),
        (0, 0),
        (1, 1),
        flattened_range=slice(10, 19),
    )
    assert torch.equal(distckpt.load({"flat": flat}, tmp_path / "c")["flat"], full.flatten()[10:19])


def test_padding_that_differs(tmp_path):
    distckpt.save({"w": tensor("vocabulary", torch.ones(6, 2))}, tmp_path / "c")
    longer = PaddedTensor(
        "vocabulary",
        torch.full((4, 2), 9.0),
        torch.float32,
        (4, 2),
        (8, 2),
        (4, 0),
        (2, 1),
        allow_shape_mismatch=True,
    )
    assert torch.equal(
        distckpt.load({"w": longer}, tmp_path / "c")["w"],
        torch.tensor([[1.0, 1]] * 2 + [[0, 0]] * 2),
    )


def test_containers_of_other_classes(tmp_path):
    state = collections.OrderedDict(a=collections.OrderedDict(w=tensor("w", torch.ones(2))), b=1)
    distckpt.save(state, tmp_path / "c")
    assert distckpt.megatron.serialization.load_sharded_metadata(tmp_path / "c").keys() == {"w"}
    assert distckpt.megatron.load_common_state_dict(tmp_path / "c") == {"b": 1}


class Tagged(torch.Tensor):
    """A subclass without data of its own, as Transformer Engine has for bookkeeping."""


class Packed(torch.Tensor):
    """An 8-bit tensor that poses as a bfloat16 one, as those of Transformer Engine do."""

    @staticmethod
    def __new__(cls, packed):
        return torch.Tensor._make_wrapper_subclass(cls, packed.shape, dtype=torch.bfloat16)

    def __init__(self, packed):
        self.packed = packed

    def dequantize(self):
        return self.packed.to(torch.bfloat16) * 2

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].packed)
        raise NotImplementedError(function)


def test_subclasses_of_tensors(tmp_path):
    tagged, packed = (
        torch.arange(4.0).as_subclass(Tagged),
        Packed(torch.arange(4, dtype=torch.uint8)),
    )
    distckpt.save({"a": tensor("a", tagged), "b": tensor("b", packed)}, tmp_path / "c")
    asked = {
        "a": tensor("a", torch.zeros(4).as_subclass(Tagged)),
        "b": tensor("b", Packed(torch.zeros(4, dtype=torch.uint8))),
    }
    loaded = distckpt.load(asked, tmp_path / "c")
    assert loaded["a"].tolist() == [0, 1, 2, 3]
    assert (type(loaded["b"]), loaded["b"].dtype, loaded["b"].tolist()) == (
        torch.Tensor,
        torch.bfloat16,
        [0, 2, 4, 6],
    )


def test_mistakes_are_found_as_in_objects_of_distckpt(tmp_path):
    with pytest.raises(InvalidShardingError, match=r"'w'.*past the end"):
        distckpt.save({"w": tensor("w", torch.ones(4), (6,), (4,), (2,))}, tmp_path / "c")
    with pytest.raises(InvalidShardingError, match=r"'w'.*no rank holds"):
        distckpt.save({"w": tensor("w", torch.ones(4), (8,), (4,), (2,))}, tmp_path / "c")


def test_classes_that_share_only_the_name_are_not_taken_for_it(tmp_path):
    class ShardedTensor:
        key = data = dtype = local_shape = None

    with pytest.raises(UnsupportedObjectError, match="ShardedTensor"):
        distckpt.save({"w": ShardedTensor()}, tmp_path / "c")


def test_convert_gives_objects_of_distckpt():
    weight = torch.ones(2)
    state = {
        "a": [tensor("w", weight), (ShardedObject("o", 1, (1,), (0,)),)],
        "f": swiglu("f", torch.ones(2, 1)),
        "n": 1,
    }
    converted = megatron.convert(state)
    assert type(state["a"][0]) is ShardedTensor
    assert converted["a"][0] == distckpt.ShardedTensor(
        "w", weight, torch.float32, (2,), (2,), (0,), (1,)
    )
    assert converted["a"][0].data is weight
    assert converted["a"][1] == (distckpt.ShardedObject("o", 1, (1,), (0,)),)
    assert type(converted["f"]) is distckpt.ShardedTensorFactory
    assert converted["n"] == 1


def test_an_enum_in_the_arguments_is_refused_with_the_way_out(tmp_path):
    class Backend(enum.Enum):
        AUTO = 1

    with pytest.raises(
        UnsupportedObjectError, match=r"\['args'\]\['backend'\].*register_object_type\(Backend\)"
    ):
        distckpt.save({"args": {"backend": Backend.AUTO}}, tmp_path / "c")


def test_files_in_memory_are_compared_by_content(tmp_path):
    distckpt.save({"common": io.BytesIO(b"abc"), "array": np.arange(2)}, tmp_path / "c")
    assert distckpt.load({}, tmp_path / "c")["common"].getvalue() == b"abc"


IMPORTS = {
    "": "ShardedTensor ShardedObject LocalNonpersistentObject save load load_common_state_dict "
    "load_content_metadata load_plain_tensors load_tensors_metadata remove_sharded_tensors "
    "check_is_distributed_checkpoint",
    ".core": "CheckpointingException CheckpointingConfig maybe_load_config save_config",
    ".dict_utils": "dict_list_map_inplace nested_values extract_matching_values diff merge "
    "map_reduce",
    ".mapping": "LocalNonpersistentObject ReplicaId ShardedObject ShardedStateDict ShardedTensor "
    "ShardedTensorFactory StateDict ShardedBase apply_factories apply_factory_merges "
    "is_main_replica",
    ".optimizer": "KEEP_VARS_HINT get_optim_param_to_id_map get_param_id_to_sharded_param_map "
    "make_sharded_optimizer_tensor optim_state_to_sharding_state",
    ".utils": "_clean_metadata_for_serialization add_prefix_for_sharding apply_prefix_mapping "
    "extract_sharded_tensors extract_sharded_tensors_and_factories replace_prefix_for_sharding",
    ".validation": "StrictHandling parse_strict_flag adjust_non_strict_load "
    "maybe_report_missing_and_unexpected_keys save_integrity_manifest verify_integrity_manifest",
    ".serialization": "load load_common_state_dict save get_default_load_sharded_strategy "
    "StateDict get_default_save_sharded_strategy CkptShardedMetadata",
    ".state_dict_utils": "save_preprocess load_preprocess filter_out_empty_flatten_tensor",
    ".strategies.fully_parallel": "FullyParallelSaveStrategyWrapper "
    "FullyParallelLoadStrategyWrapper",
    ".strategies.base": "LoadShardedStrategy SaveShardedStrategy AsyncSaveShardedStrategy "
    "StrategyAction get_default_strategy",
    ".strategies.torch": "TorchDistSaveShardedStrategy TorchDistLoadShardedStrategy "
    "get_async_strategy",
    ".strategies.common": "load_common save_common TorchCommonLoadStrategy TorchCommonSaveStrategy",
    ".strategies.filesystem_async": "_results_queue get_write_results_queue",
    ".strategies.tensorstore": "",
    ".strategies.async_utils": "AsyncRequest AsyncCallsQueue AsyncCaller TemporalAsyncCaller "
    "PersistentAsyncCaller _disable_gc _set_process_qos",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_what_megatron_and_its_users_import_is_there(module):
    found = importlib.import_module(f"distckpt.megatron{module}")
    assert [name for name in IMPORTS[module].split() if not hasattr(found, name)] == []


FORWARDED = {
    "exchange_utils": (
        "distribute_shards_to_ranks",
        "ShardDistribution",
        "exchange_by_distribution",
    ),
    "strategies.torch": ("_get_filesystem_reader", "mcore_to_pyt_state_dict"),
    "strategies.filesystem_async": ("FileSystemWriterAsync",),
    "strategies.state_dict_saver": ("save_state_dict_async_plan", "save_state_dict_async_finalize"),
    "strategies.cached_metadata_filesystem_reader": ("CachedMetadataFileSystemReader",),
}


@pytest.mark.parametrize("path", FORWARDED)
def test_what_concerns_megatrons_own_files_is_megatrons(path):
    theirs, ours = (
        megatron_or_skip(f"dist_checkpointing.{path}"),
        importlib.import_module(f"distckpt.megatron.{path}"),
    )
    for name in FORWARDED[path]:
        found = getattr(ours, name)
        assert getattr(found, "__wrapped__", found) is getattr(theirs, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ours.nothing


def test_what_the_installed_megatron_lacks_is_named(monkeypatch):
    megatron_or_skip("dist_checkpointing")
    monkeypatch.setitem(
        sys.modules, "megatron.core.dist_checkpointing.gpt_checkpoint_interop", None
    )
    interop = importlib.import_module("distckpt.megatron.gpt_checkpoint_interop")
    with pytest.raises(ImportError, match="Install a version of megatron-core"):
        _ = interop.gpt_compatible_layer_maps


def test_strategies_of_megatron_save_and_load_on_their_own(tmp_path):
    save = TorchDistSaveShardedStrategy(thread_count=2, cached_metadata=True)
    state = {"model": {"w": tensor("w", torch.arange(3.0))}, "step": 3}
    save.save(state, tmp_path / "a")
    FullyParallelSaveStrategyWrapper(save).async_save(state, tmp_path / "b").execute_sync()
    FullyParallelSaveStrategyWrapper(
        None, None, True, "torch_dist", 1, pg_cache_path="x"
    ).async_save(state, tmp_path / "c", "mcore").execute_sync()
    for name in "abc":
        wanted = {"model": {"w": tensor("w", torch.zeros(3))}}
        loaded = TorchDistLoadShardedStrategy(cache_metadata=True).load(wanted, tmp_path / name)
        assert loaded["model"]["w"].tolist() == [0, 1, 2]
        assert TorchDistLoadShardedStrategy().load_tensors_metadata(tmp_path / name).keys() == {"w"}
        assert (
            load_common(tmp_path / name)
            == TorchCommonLoadStrategy().load_common(tmp_path / name)
            == {"step": 3}
        )
    with pytest.raises(distckpt.CheckpointingException, match="zarr"):
        TorchDistSaveShardedStrategy("zarr")
    for refused in (TorchCommonSaveStrategy, lambda: save_common({}, tmp_path)):
        with pytest.raises(distckpt.CheckpointingException, match=r"distckpt\.save"):
            refused()


def test_integrity_of_a_checkpoint(tmp_path):
    distckpt.save({"w": tensor("w", torch.arange(3.0))}, tmp_path / "c")
    validation.save_integrity_manifest(tmp_path / "c")
    validation.verify_integrity_manifest(tmp_path / "c")
    (file,) = (tmp_path / "c" / "tensors").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(distckpt.CorruptCheckpointError):
        validation.verify_integrity_manifest(tmp_path / "c")
    with pytest.raises(
        distckpt.LoadMismatchError, match=r"Unexpected keys.*'b'.*Missing keys.*'a'"
    ):
        validation.maybe_report_missing_and_unexpected_keys({"a"}, {"b"})
    state = {"a": [tensor("a", torch.ones(1)), tensor("b", torch.ones(1))]}
    assert validation.adjust_non_strict_load(state, {"a"}) == {"a": state["a"][1:]}


def test_preparation_of_state_dicts():
    def state():
        return {
            "w": tensor("w", torch.ones(2)),
            "f": swiglu("f", torch.ones(4, 2)),
            "n": 1,
            "local": LocalNonpersistentObject(5),
        }

    given = state()
    sharded, common = state_dict_utils.save_preprocess(given)
    assert (list(sharded), [part.key for part in sharded["f"]], common) == (
        ["w", "f"],
        ["f", "f"],
        {"n": 1},
    )
    given = state()
    copied, local, factories = state_dict_utils.load_preprocess(given)
    assert (local, factories["f"].data, type(given["f"])) == (
        {"local": 5},
        None,
        ShardedTensorFactory,
    )
    assert [part.key for part in copied["f"]] == ["f", "f"]


def test_callers_and_strategies_for_the_background():
    name, modules = get_async_strategy("nvrx")
    assert (name, modules["AsyncCallsQueue"]) == ("nvrx", async_utils.AsyncCallsQueue)
    # As Megatron-LM makes it for this strategy.
    assert modules["AsyncCallsQueue"](persistent=True, cpu_shm_mode=True) is not None
    assert get_async_strategy("mcore", "AsyncRequest")[1] is async_utils.AsyncRequest
    with pytest.raises(TypeError, match="'other'"):
        get_async_strategy("other")
    done = []
    caller = async_utils.TemporalAsyncCaller()
    caller.schedule_async_call(
        async_utils.AsyncRequest(done.append, (1,), [lambda: done.append("finalized")])
    )
    assert caller.is_current_async_call_done(blocking=True)
    caller.close()
    assert done == [1]
