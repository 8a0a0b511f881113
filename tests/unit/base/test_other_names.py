"""Names of other libraries lead to what has their place here."""

from __future__ import annotations

import pytest

import distckpt
from distckpt import CheckpointManager, CheckpointNotFoundError


@pytest.mark.parametrize(
    ("call", "here"),
    [
        (lambda root: CheckpointManager(root, max_to_keep=3), "keep_last"),
        (lambda root: distckpt.load({}, root, map_location="cpu"), "materialize='cpu'"),
        (lambda root: distckpt.load({}, root, weights_only=True), "no pickle is read"),
        (lambda root: distckpt.save({}, root / "a", exist_ok=True), "overwrite"),
    ],
)
def test_options(tmp_path, call, here):
    with pytest.raises(TypeError, match=here):
        call(tmp_path)


@pytest.mark.parametrize(
    ("owner", "name", "here"),
    [
        (distckpt, "Checkpointer", "distckpt.CheckpointManager"),
        (distckpt, "restore", "load"),
        (distckpt, "export", "consolidate"),
        (distckpt, "convert", "reshard"),
        (CheckpointManager, "latest_step", r"latest\(\)"),
        (CheckpointManager, "restore", "load"),
        (CheckpointManager, "wait_until_finished", r"wait\(\)"),
    ],
)
def test_attributes(tmp_path, owner, name, here):
    thing = owner(tmp_path) if isinstance(owner, type) else owner
    with pytest.raises(AttributeError, match=f"no attribute '{name}' .here: .*{here}"):
        getattr(thing, name)
    assert not hasattr(thing, "nothing")


def test_attributes_of_checkpoints_and_handles(tmp_path):
    handle = distckpt.async_save({"step": 3}, tmp_path / "a")
    with pytest.raises(AttributeError, match=r"'SaveHandle' .* 'wait' .here: result\(\)"):
        handle.wait()
    handle.result()
    checkpoint = distckpt.open(tmp_path / "a")
    with pytest.raises(AttributeError, match=r"'Checkpoint' .* 'step' .here: common_state"):
        checkpoint.step  # noqa: B018
    with pytest.raises(AttributeError, match=r"'keys' .here: tensors"):
        checkpoint.keys()


def test_a_run_that_begins_says_how_to_ask(tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(CheckpointNotFoundError, match=r"only if manager\.steps\(\) has any"),
    ):
        manager.load({})
