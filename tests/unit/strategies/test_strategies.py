from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, ShardedObject, ShardedTensor
from distckpt._format.codec import decode, encode
from distckpt.megatron.core import read_marker, write_marker
from distckpt.megatron.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from distckpt.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from distckpt.strategies.base import (
    LoadShardedStrategy,
    Options,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from distckpt.strategies.safetensors import SafetensorsLoadStrategy, SafetensorsSaveStrategy


class SaveText(SaveShardedStrategy):
    """Stores whole tensors as lists of numbers in one JSON file."""

    backend = "text"
    version = 3

    def save(self, sharded_state_dict, checkpoint_dir):
        content = {}
        for shard in sharded_state_dict.values():
            is_tensor = isinstance(shard, ShardedTensor)
            content[shard.key] = shard.data.tolist() if is_tensor else encode(shard.data).hex()
        Path(checkpoint_dir, "all.json").write_text(json.dumps(content))
        return {"num_shards": len(content)}


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


class LoadText(LoadShardedStrategy):
    backend = "text"
    version = 3

    def load(self, sharded_state_dict, checkpoint_dir):
        content = json.loads(Path(checkpoint_dir, "all.json").read_text())
        return {
            name: torch.tensor(content[shard.key])
            if isinstance(shard, ShardedTensor)
            else decode(bytes.fromhex(content[shard.key]))
            for name, shard in sharded_state_dict.items()
        }

    def load_tensors_metadata(self, checkpoint_dir):
        content = json.loads(Path(checkpoint_dir, "all.json").read_text())
        tensors = {
            key: torch.tensor(value) for key, value in content.items() if isinstance(value, list)
        }
        return {
            key: ShardedTensor.from_rank_offsets(key, t).without_data()
            for key, t in tensors.items()
        }

    def load_sharded_metadata(self, checkpoint_dir):
        return self.load_tensors_metadata(checkpoint_dir)


@pytest.fixture(scope="module")
def registered():
    """Register the two strategies under their backend and version."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SaveText())
    register_default_strategy(StrategyAction.LOAD_SHARDED, "text", 3, LoadText())


def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0)), "step": 4}


def asked():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}


# ---- strategies of others


def test_a_strategy_that_is_given_is_used(tmp_path):
    distckpt.save(state(), tmp_path / "c", strategy=SaveText())
    assert (tmp_path / "c" / "all.json").exists()
    assert not (tmp_path / "c" / "manifest.safetensors").exists()
    marker = read_marker(tmp_path / "c")
    assert (marker["sharded_backend"], marker["sharded_backend_version"], marker["num_shards"]) == (
        "text",
        3,
        2,
    )
    loaded = distckpt.load(asked(), tmp_path / "c", strategy=LoadText())
    assert (loaded["w"].tolist(), loaded["step"]) == ([0, 1, 2], 4)


def test_a_registered_strategy_is_found_by_name_and_by_checkpoint(tmp_path, registered):
    distckpt.save(state(), tmp_path / "c", strategy=("text", 3))
    for strategy in (None, ("text", 3)):
        assert distckpt.load(asked(), tmp_path / "c", strategy=strategy)["w"].tolist() == [0, 1, 2]
    assert distckpt.open(tmp_path / "c").common_state == {"step": 4}
    assert distckpt.open(tmp_path / "c").read_tensors()["w"].tolist() == [0, 1, 2]
    assert distckpt.open(tmp_path / "c").tensors.keys() == {"w"}
    loaded, missing, unexpected = distckpt.load(
        asked() | {"x": state()["w"]}, tmp_path / "c", strict="return_all"
    )
    assert (loaded["step"], missing, unexpected) == (4, set(), set())
    assert isinstance(get_default_load_sharded_strategy(tmp_path / "c"), LoadText)
    assert isinstance(get_default_save_sharded_strategy("text", 3), SaveText)


def test_what_a_strategy_cannot_do_is_said(tmp_path, registered):
    distckpt.save(state(), tmp_path / "c", strategy=SaveText())
    with pytest.raises(CheckpointingException, match="LoadText cannot remove tensors"):
        distckpt.remove_sharded_tensors(tmp_path / "c", "w")


@pytest.mark.parametrize(
    "strategy", ["safetensors", SafetensorsLoadStrategy(), object(), SafetensorsSaveStrategy]
)
def test_what_is_no_saving_strategy_is_refused(tmp_path, strategy):
    with pytest.raises(
        CheckpointingException, match="sharded_strategy must be a SaveShardedStrategy"
    ):
        distckpt.save(state(), tmp_path / "c", strategy=strategy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "strategy", ["safetensors", SafetensorsSaveStrategy(), object(), SafetensorsLoadStrategy]
)
def test_what_is_no_loading_strategy_is_refused(tmp_path, strategy):
    distckpt.save(state(), tmp_path / "c")
    with pytest.raises(
        CheckpointingException, match="sharded_strategy must be a LoadShardedStrategy"
    ):
        distckpt.load(asked(), tmp_path / "c", strategy=strategy)


@pytest.mark.parametrize("name", [("zarr", 1), ("safetensors", 99)])
def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(tmp_path, name):
    problem = rf"backend '{name[0]}' version {name[1]} \(there is: .*'safetensors' version 1"
    with pytest.raises(CheckpointingException, match=problem):
        distckpt.save(state(), tmp_path / "c", strategy=name)
    distckpt.save(state(), tmp_path / "c")
    with pytest.raises(CheckpointingException, match=problem):
        distckpt.load(asked(), tmp_path / "c", strategy=name)


@pytest.mark.parametrize(("backend", "version"), [("zarr", 1), ("safetensors", 99)])
def test_a_checkpoint_of_an_unknown_backend_is_named(tmp_path, backend, version):
    (tmp_path / "c").mkdir()
    marker = {"sharded_backend": backend, "sharded_backend_version": version}
    (tmp_path / "c" / "metadata.json").write_text(json.dumps(marker))
    for function in (
        lambda path: distckpt.load(asked(), path),
        distckpt.megatron.load_plain_tensors,
    ):
        with pytest.raises(
            CheckpointingException, match=rf"{tmp_path}/c'.* backend '{backend}' version {version}"
        ):
            function(tmp_path / "c")


def test_a_name_stands_for_one_strategy(registered):
    register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SaveText())
    with pytest.raises(
        CheckpointingException, match="'text' version 3 already has SaveText for save_sharded"
    ):
        register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SafetensorsSaveStrategy())
    assert isinstance(get_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3), SaveText)
    with pytest.raises(CheckpointingException, match="No strategy for save_common"):
        get_default_strategy(StrategyAction.SAVE_COMMON, "text", 3)


# ---- the built-in ones


def test_settings_of_one_call_do_not_stay(tmp_path):
    strategy = get_default_load_sharded_strategy()
    configured = strategy.configure(Options(verify=True, allow_dtype_cast=True))
    assert (configured.options.verify, strategy.options.verify) == ("full", "read")
    saving = get_default_save_sharded_strategy()
    assert saving.configure(Options(validate_replicas=True)) is not saving
    assert not saving.options.validate_replicas


def test_strategies_work_without_the_functions_around_them(tmp_path):
    for name in ("tensors", "objects"):
        (tmp_path / name).mkdir()
    sharded = {"w": state()["w"], "o": ShardedObject("o", [1], (1,), (0,))}
    fields = SafetensorsSaveStrategy().save(sharded, str(tmp_path))
    write_marker(tmp_path, {"sharded_backend": "safetensors", **fields})
    loaded = SafetensorsLoadStrategy().load(
        {"w": asked()["w"], "o": sharded["o"].without_data()}, str(tmp_path)
    )
    assert list(loaded) == ["w", "o"]
    assert (loaded["w"].tolist(), loaded["o"]) == ([0, 1, 2], [1])


# ---- Megatron's wrappers


def test_wrappers_do_what_they_wrap(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    saving = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("safetensors", 1), None, True
    )
    distckpt.save(state(), tmp_path / "c", strategy=saving)
    assert (saving.backend, saving.version) == ("safetensors", 1)
    loading = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(tmp_path / "c"), None, True, "broadcast"
    )
    loaded = distckpt.load(asked(), tmp_path / "c", strategy=loading, strict="raise")
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
        distckpt.save(
            dict(enumerate(twice)),
            tmp_path / "c",
            strategy=FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy()),
            validate_replicas=True,
        )
    distckpt.save(state(), tmp_path / "c")
    half = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, dtype=torch.float16))}
    loading = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy())
    with pytest.raises(distckpt.LoadMismatchError, match="allow_dtype_cast"):
        distckpt.load(half, tmp_path / "c", strategy=loading)
    assert distckpt.load(half, tmp_path / "c", strategy=loading, allow_dtype_cast=True)[
        "w"
    ].tolist() == [
        0,
        1,
        2,
    ]


def test_a_load_names_tensors_that_do_not_fit_their_new_range(tmp_path, caplog):
    held = {
        "w": torch.tensor([[1e5, 1.0], [-7e4, 3.0]]),
        "x": torch.full((2,), 6e4),
        "y": torch.tensor([3e38, 1.0]),
    }
    distckpt.save(
        {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in held.items()},
        tmp_path / "c",
    )

    def load(dtypes):
        wanted = {key: torch.zeros(held[key].shape, dtype=dtype) for key, dtype in dtypes.items()}
        state = {
            key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in wanted.items()
        }
        caplog.clear()
        loaded = distckpt.load(state, tmp_path / "c", allow_dtype_cast=True)
        assert all(torch.equal(loaded[key], held[key].to(dtype)) for key, dtype in dtypes.items())
        return caplog.text

    assert "2 values are not finite after conversion to a smaller range: 'w'" in load(
        dict.fromkeys("wx", torch.half)
    )
    assert load({"w": torch.bfloat16, "x": torch.float16, "y": torch.bfloat16}) == ""


def test_wrappers_of_strategies_of_others(tmp_path):
    distckpt.save(state(), tmp_path / "c", strategy=FullyParallelSaveStrategyWrapper(SaveText()))
    assert read_marker(tmp_path / "c")["sharded_backend"] == "text"
    loaded = distckpt.load(
        asked(), tmp_path / "c", strategy=FullyParallelLoadStrategyWrapper(LoadText())
    )
    assert loaded["w"].tolist() == [0, 1, 2]
