"""The settings of a save have one name and one default, and reach the strategy from each function
that takes them.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, CheckpointManager, ShardedTensor
from distckpt._operations.planned_save import SaveSettings
from distckpt.strategies.safetensors import SafetensorsSaveStrategy

# Named otherwise in the settings: limits what is copied, too.
RENAMED = {"max_inflight_bytes": "background_bytes"}


class Recording(SafetensorsSaveStrategy):
    """Keeps the settings that it is configured with."""

    def configure(self, options):
        self.seen = options
        return super().configure(options)


def state():
    return {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3.0)), "step": 4}


@pytest.mark.parametrize(
    ("function", "renamed"),
    [
        (distckpt.save, {}),
        (distckpt.async_save, RENAMED),
        (CheckpointManager, RENAMED),
        (CheckpointManager.save, {}),
    ],
    ids=["save", "async_save", "manager", "manager_save"],
)
def test_defaults_are_those_of_the_settings(function, renamed):
    known = {field.name: field.default for field in dataclasses.fields(SaveSettings)}
    parameters = inspect.signature(function).parameters
    defaults = {
        renamed.get(name, name): parameter.default for name, parameter in parameters.items()
    }
    shared = known.keys() & defaults.keys()
    assert "overwrite" in shared or "durable" in shared
    assert {name: defaults[name] for name in shared} == {name: known[name] for name in shared}


OPTIONS = {
    "durable": False,
    "validate_replicas": True,
    "validate_access_integrity": False,
    "overwrite": True,
}
CASES = {
    "save": (
        lambda path, **kwargs: distckpt.save(state(), path, **kwargs),
        OPTIONS | {"max_inflight_bytes": 9 << 20},
    ),
    "async_save": (
        lambda path, **kwargs: distckpt.async_save(state(), path, **kwargs).result(100),
        OPTIONS | {"timeout": 50.0, "exit_timeout": 40.0},
    ),
    "manager": (
        lambda path, **kwargs: CheckpointManager(path, **kwargs).save(1, state()).result(100),
        {"durable": False, "timeout": 50.0, "exit_timeout": 40.0},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_reach_the_strategy(name, tmp_path):
    save, settings = CASES[name]
    strategy = Recording()
    save(tmp_path / "c", sharded_strategy=strategy, **settings)
    assert {key: getattr(strategy.seen, key) for key in settings} == settings


@pytest.mark.parametrize(("name", "given"), [("async_save", 32 << 20), ("manager", 32 << 20)])
def test_half_of_the_memory_of_a_background_save_is_for_writing(name, given, tmp_path):
    strategy = Recording()
    CASES[name][0](tmp_path / "c", sharded_strategy=strategy, max_inflight_bytes=given)
    assert (strategy.seen.background_bytes, strategy.seen.max_inflight_bytes) == (given, given // 2)


def test_a_checkpoint_whose_manifest_no_reader_would_accept_is_refused(tmp_path):
    """A tensor of 256 TiB, which takes no memory, has 2**30 blocks."""
    huge = torch.zeros(1).expand(1 << 46)
    with pytest.raises(
        CheckpointingException,
        match=r"at least 8589934\d{3} bytes .* 1073741824 blocks .* 4294967296",
    ):
        distckpt.save({"w": ShardedTensor.from_rank_offsets("w", huge)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
