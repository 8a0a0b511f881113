"""The strategies that Megatron's programs use: defaults, wrappers, and their queries."""

from __future__ import annotations

import logging

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, ShardedObject, ShardedTensor, megatron
from distckpt.megatron.core import read_marker
from distckpt.megatron.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_sharded_metadata,
)
from distckpt.megatron.strategies.async_utils import AsyncRequest
from distckpt.megatron.strategies.base import AsyncSaveShardedStrategy
from distckpt.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from distckpt.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tests.support.states import small_request, small_state
from tests.support.text_strategy import LoadText, SaveText, register_text


def test_methods_take_paths(tmp_path):
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    distckpt.save({"w": shard, "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path / "c")
    strategy = get_default_load_sharded_strategy(tmp_path / "c")
    for reader in (strategy, FullyParallelLoadStrategyWrapper(strategy)):
        assert reader.load_tensors_metadata(tmp_path / "c").keys() == {"w"}
        assert reader.load_sharded_metadata(tmp_path / "c").keys() > {"w", "o/shard_0_1"}
        assert reader.load({"w": shard}, tmp_path / "c")["w"].tolist() == [1, 1]
    strategy.remove_sharded_tensors(tmp_path / "c", "w")
    assert distckpt.open(tmp_path / "c").tensors == {}


def test_what_is_no_strategy_is_refused(tmp_path):
    for what in (object(), "torch_dist", TorchDistLoadShardedStrategy()):
        with pytest.raises(CheckpointingException, match="strategy must be a SaveShardedStrategy"):
            FullyParallelSaveStrategyWrapper(what)
        with pytest.raises(CheckpointingException, match="strategy must be a SaveShardedStrategy"):
            megatron.save(small_state(), tmp_path / "c", what)


def test_defaults_are_found_by_name_and_by_checkpoint(tmp_path):
    register_text()
    for name in ("torch_dist", "safetensors"):
        found = get_default_save_sharded_strategy(name)
        assert isinstance(found, TorchDistSaveShardedStrategy)
        assert isinstance(found, AsyncSaveShardedStrategy)
        assert (found.backend, found.version) == ("safetensors", 1)
    with pytest.raises(CheckpointingException, match=r"No strategy .* 'zarr' version 1"):
        get_default_save_sharded_strategy("zarr", 1)
    assert isinstance(get_default_load_sharded_strategy(), TorchDistLoadShardedStrategy)
    with pytest.raises(distckpt.CheckpointNotFoundError):
        get_default_load_sharded_strategy(tmp_path / "c")


def test_a_registered_strategy_is_asked_about_its_checkpoints(tmp_path):
    register_text()
    path = tmp_path / "c"
    megatron.save(small_state(), path, ("text", 3))
    assert megatron.load(small_request(), path, ("text", 3))["w"].tolist() == [0, 1, 2]
    assert megatron.load_common_state_dict(path) == {"step": 4}
    assert megatron.load_plain_tensors(path)["w"].tolist() == [0, 1, 2]
    assert megatron.load_tensors_metadata(path).keys() == {"w"}
    assert megatron.load_tensors_metadata(path, LoadText()).keys() == {"w"}
    assert load_sharded_metadata(path).keys() == {"w"}
    loaded, missing, unexpected = megatron.load(small_request(), path, strict="return_all")
    assert (loaded["step"], missing, unexpected) == (4, set(), set())
    assert isinstance(get_default_load_sharded_strategy(path), LoadText)
    assert isinstance(get_default_save_sharded_strategy("text", 3), SaveText)
    with pytest.raises(CheckpointingException, match="LoadText cannot remove tensors"):
        megatron.remove_sharded_tensors(path, "w")


class SaveAsRequest(AsyncSaveShardedStrategy):
    """Gives its work as a request."""

    backend = "text"
    version = 3

    def async_save(self, sharded_state_dict, checkpoint_dir):
        return AsyncRequest(SaveText().save, (sharded_state_dict, checkpoint_dir), [])


def test_a_strategy_that_gives_requests_can_save(tmp_path):
    register_text()
    megatron.save(small_state(), tmp_path / "c", SaveAsRequest())
    assert megatron.load(small_request(), tmp_path / "c")["w"].tolist() == [0, 1, 2]


def test_wrappers_do_what_they_wrap(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    saving = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("safetensors", 1), None, True
    )
    megatron.save(small_state(), tmp_path / "c", saving)
    assert (saving.backend, saving.version) == ("safetensors", 1)
    loading = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(tmp_path / "c"), None, True, "broadcast"
    )
    loaded = megatron.load(small_request(), tmp_path / "c", loading, strict="raise_all")
    assert (loaded["w"].tolist(), loaded["step"]) == ([0, 1, 2], 4)
    assert loading.load_tensors_metadata(str(tmp_path / "c")).keys() == {"w"}
    assert "w" in loading.load_sharded_metadata(str(tmp_path / "c"))
    loading.remove_sharded_tensors(str(tmp_path / "c"), "w")
    assert distckpt.open(tmp_path / "c").read_tensors() == {}
    assert caplog.text == ""


def test_wrappers_hand_settings_on(tmp_path):
    twice = [
        ShardedTensor.from_rank_offsets("w", torch.ones(3) * i, replica_id=i) for i in range(2)
    ]
    with pytest.raises(distckpt.InvalidShardingError, match="replicas of each other"):
        megatron.save(
            dict(enumerate(twice)),
            tmp_path / "c",
            strategy=FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy()),
            validate_replicas=True,
        )
    megatron.save(small_state(), tmp_path / "c")
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, dtype=torch.float16))}
    loading = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy())
    with pytest.raises(distckpt.LoadMismatchError, match="allow_dtype_cast"):
        megatron.load(half, tmp_path / "c", loading)
    assert megatron.load(half, tmp_path / "c", loading, allow_dtype_cast=True)["w"].tolist() == [
        0,
        1,
        2,
    ]


def test_wrappers_of_strategies_of_others(tmp_path):
    megatron.save(small_state(), tmp_path / "c", FullyParallelSaveStrategyWrapper(SaveText()))
    assert read_marker(tmp_path / "c")["sharded_backend"] == "text"
    loaded = megatron.load(
        small_request(), tmp_path / "c", FullyParallelLoadStrategyWrapper(LoadText())
    )
    assert loaded["w"].tolist() == [0, 1, 2]


def test_a_class_derived_from_a_wrapper_is_called(tmp_path):
    calls = []

    class Noting(FullyParallelSaveStrategyWrapper):
        def prepare(self, sharded_state_dict):
            calls.append(sorted(shard.key for shard in sharded_state_dict.values()))
            return super().prepare(sharded_state_dict)

    for base in (None, SaveText()):
        megatron.save(small_state(), tmp_path / f"c{len(calls)}", Noting(base))
    assert [keys[-1] for keys in calls] == ["w", "w"]
    assert megatron.load(small_request(), tmp_path / "c0")["w"].tolist() == [0, 1, 2]
