from __future__ import annotations

import json
from functools import partial

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, LoadOptions, SaveOptions, ShardedObject, ShardedTensor
from distckpt.megatron.core import read_marker, write_marker
from distckpt.strategies.base import (
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from distckpt.strategies.safetensors import SafetensorsLoadStrategy, SafetensorsSaveStrategy
from tests.support.states import small_request, small_state
from tests.support.text_strategy import LoadText, SaveText, register_text

# ---- strategies of others


def test_a_strategy_that_is_given_is_used(tmp_path):
    distckpt.save(small_state(), tmp_path / "c", strategy=SaveText())
    assert (tmp_path / "c" / "all.json").exists()
    assert not (tmp_path / "c" / "manifest.safetensors").exists()
    marker = read_marker(tmp_path / "c")
    assert (marker["sharded_backend"], marker["sharded_backend_version"], marker["num_shards"]) == (
        "text",
        3,
        2,
    )
    loaded = distckpt.load(small_request(), tmp_path / "c", strategy=LoadText())
    assert (loaded["w"].tolist(), loaded["step"]) == ([0, 1, 2], 4)


def test_a_registered_strategy_is_found_by_name_and_by_checkpoint(tmp_path):
    register_text()
    distckpt.save(small_state(), tmp_path / "c", strategy=("text", 3))
    for strategy in (None, ("text", 3)):
        loaded = distckpt.load(small_request(), tmp_path / "c", strategy=strategy)
        assert loaded["w"].tolist() == [0, 1, 2]
    reports = []
    more = small_request() | {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(1))}
    loaded = distckpt.load(more, tmp_path / "c", strict="report", on_report=reports.append)
    assert (loaded["step"], reports[0].unexpected) == (4, {"x"})
    with pytest.raises(CheckpointingException, match=r"strategy 'text': only distckpt.load reads"):
        distckpt.open(tmp_path / "c")


@pytest.mark.parametrize(
    "strategy", ["safetensors", SafetensorsLoadStrategy(), object(), SafetensorsSaveStrategy]
)
def test_what_is_no_saving_strategy_is_refused(tmp_path, strategy):
    with pytest.raises(CheckpointingException, match="strategy must be a SaveShardedStrategy"):
        distckpt.save(small_state(), tmp_path / "c", strategy=strategy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "strategy", ["safetensors", SafetensorsSaveStrategy(), object(), SafetensorsLoadStrategy]
)
def test_what_is_no_loading_strategy_is_refused(tmp_path, strategy):
    distckpt.save(small_state(), tmp_path / "c")
    with pytest.raises(CheckpointingException, match="strategy must be a LoadShardedStrategy"):
        distckpt.load(small_request(), tmp_path / "c", strategy=strategy)


@pytest.mark.parametrize("name", [("zarr", 1), ("safetensors", 99)])
def test_an_unknown_backend_is_an_error_that_lists_the_known_ones(tmp_path, name):
    problem = rf"backend '{name[0]}' version {name[1]} \(there is: .*'safetensors' version 1"
    with pytest.raises(CheckpointingException, match=problem):
        distckpt.save(small_state(), tmp_path / "c", strategy=name)
    distckpt.save(small_state(), tmp_path / "c")
    with pytest.raises(CheckpointingException, match=problem):
        distckpt.load(small_request(), tmp_path / "c", strategy=name)


@pytest.mark.parametrize(("backend", "version"), [("zarr", 1), ("safetensors", 99)])
def test_a_checkpoint_of_an_unknown_backend_is_named(tmp_path, backend, version):
    (tmp_path / "c").mkdir()
    marker = {"sharded_backend": backend, "sharded_backend_version": version}
    (tmp_path / "c" / "metadata.json").write_text(json.dumps(marker))
    for function in (partial(distckpt.load, small_request()), distckpt.megatron.load_plain_tensors):
        with pytest.raises(
            CheckpointingException, match=rf"{tmp_path}/c'.* backend '{backend}' version {version}"
        ):
            function(tmp_path / "c")


def test_a_name_stands_for_one_strategy():
    register_text()
    register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SaveText())
    with pytest.raises(
        CheckpointingException, match="'text' version 3 already has SaveText for save_sharded"
    ):
        register_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3, SafetensorsSaveStrategy())
    assert isinstance(get_default_strategy(StrategyAction.SAVE_SHARDED, "text", 3), SaveText)
    with pytest.raises(CheckpointingException, match="No strategy for save_common"):
        get_default_strategy(StrategyAction.SAVE_COMMON, "safetensors", 1)


# ---- the built-in ones


def test_settings_of_one_call_do_not_stay():
    reading, saving = SafetensorsLoadStrategy(), SafetensorsSaveStrategy()
    configured = reading.configure(LoadOptions(verify=False), None)
    assert (configured.options.verify, reading.options.verify) == (False, True)
    assert saving.configure(SaveOptions(validate_replicas=True), None) is not saving
    assert saving.options.validate_replicas is None


def test_strategies_work_without_the_functions_around_them(tmp_path):
    for name in ("tensors", "objects"):
        (tmp_path / name).mkdir()
    sharded = {"w": small_state()["w"], "o": ShardedObject("o", [1], (1,), (0,))}
    fields = SafetensorsSaveStrategy().save(sharded, str(tmp_path))
    write_marker(tmp_path, {"sharded_backend": "safetensors", **fields})
    loaded = SafetensorsLoadStrategy().load(
        {"w": small_request()["w"], "o": sharded["o"].without_data()}, str(tmp_path)
    )
    assert list(loaded) == ["w", "o"]
    assert (loaded["w"].tolist(), loaded["o"]) == ([0, 1, 2], [1])


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
