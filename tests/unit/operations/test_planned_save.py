"""Options of a save have one name and one default, and reach the strategy from each function that
takes them.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, CheckpointManager, SaveOptions, ShardedTensor
from distckpt.strategies.safetensors import SafetensorsSaveStrategy
from tests.support.states import small_state


class Recording(SafetensorsSaveStrategy):
    """Keeps the options that it is configured with."""

    def configure(self, options, process_group):
        self.seen = options
        return super().configure(options, process_group)


def save_in_background(path, **given):
    return distckpt.async_save(small_state(), path, **given).result(100)


def save_with_manager(path, **given):
    return CheckpointManager(path, **given).save(1, small_state()).result(100)


SAVES = {
    "save": partial(distckpt.save, small_state()),
    "async_save": save_in_background,
    "manager": save_with_manager,
}
CHANGES = {"durable": False, "validate_replicas": True, "timeout": 50.0, "exit_timeout": 40.0}


@pytest.mark.parametrize("way", ["by keyword", "as a value", "both"])
@pytest.mark.parametrize("name", SAVES)
def test_options_reach_the_strategy(name, way, tmp_path):
    strategy = Recording()
    options = None if way == "by keyword" else SaveOptions(**CHANGES)
    changes = CHANGES if way == "by keyword" else {}
    if way == "both":
        options = dataclasses.replace(options, durable=True, strategy=strategy)
        changes = {"durable": False}
    SAVES[name](
        tmp_path / "c",
        **({} if way == "both" else {"strategy": strategy}),
        options=options,
        **changes,
    )
    assert {key: getattr(strategy.seen, key) for key in CHANGES} == CHANGES


@pytest.mark.parametrize("name", ["save", "async_save"])
def test_an_option_that_there_is_not_is_named(name, tmp_path):
    with pytest.raises(
        TypeError, match=rf"{name}\(\) has no option 'durabel' \(did you mean 'durable'"
    ):
        SAVES[name](tmp_path / "c", durabel=False)
    with pytest.raises(TypeError, match=f"options of {name} is a SaveOptions, got LoadOptions"):
        SAVES[name](tmp_path / "c", options=distckpt.LoadOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["async_save", "manager"])
def test_half_of_the_memory_of_a_background_save_is_for_writing(name, tmp_path):
    strategy = Recording()
    SAVES[name](tmp_path / "c", strategy=strategy, max_inflight_bytes=32 << 20)
    assert strategy.seen.max_inflight_bytes == 16 << 20


def test_a_checkpoint_whose_manifest_no_reader_would_accept_is_refused(tmp_path):
    """A tensor of 256 TiB, which takes no memory, has 2**30 blocks."""
    huge = torch.zeros(1).expand(1 << 46)
    with pytest.raises(
        CheckpointingException,
        match=r"8589934592 bytes of checksums in a file, and readers accept 4294967296",
    ):
        distckpt.save({"w": ShardedTensor.from_rank_offsets("w", huge)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
