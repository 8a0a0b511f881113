"""File systems that are not the one that tests are written on: mounted ones, and those that servers
show through fsspec.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.torch
import torch

import distckpt
from distckpt import CheckpointManager, list_checkpoints
from distckpt._storage import locations, object_store
from distckpt.megatron.core import CheckpointExistsError, CorruptCheckpointError
from distckpt.streaming import save_safetensors_streaming_sharded
from tests.support.disks import bindfs, loop_disk, served
from tests.support.harness import run
from tests.support.large_states import holds, large_state, numbers
from tests.support.other_program import as_another_program
from tests.support.states import state_of, value_in

pytestmark = pytest.mark.slow

MOUNTED = ["bindfs", "btrfs", "xfs"]
SERVED = ["sftp", "webdav"]


class Place(NamedTuple):
    """A place on a file system, and the local directory in which all that is there can be seen."""

    url: str
    directory: Path

    def folders(self) -> list[str]:
        """Return the names in the place, after a look for folders without files in it."""
        empty = [below for below, folders, files in os.walk(self.directory) if not folders + files]
        assert empty == []
        return sorted(os.listdir(self.directory))


def place_on(kind: str, tmp_path: Path):
    folder, shown = tmp_path / "disk", tmp_path / "shown"
    folder.mkdir()
    if kind in SERVED:
        with served(kind, folder) as root:
            yield Place(f"{root}/run", folder / "run")
    elif kind == "bindfs":
        shown.mkdir()
        with bindfs(folder, shown):
            yield Place(f"{shown}/run", folder / "run")
    else:
        with loop_disk(kind, folder, tmp_path / "image", 600 << 20):
            yield Place(f"{folder}/run", folder / "run")


@pytest.fixture(params=[*MOUNTED, *SERVED])
def place(request, tmp_path):
    yield from place_on(request.param, tmp_path)


@pytest.fixture(params=MOUNTED)
def mounted(request, tmp_path):
    yield from place_on(request.param, tmp_path)


def test_saves_exports_and_copies(place):
    distckpt.save(large_state(1), f"{place.url}/c")
    distckpt.save(large_state(2), f"{place.url}/c", overwrite=True)
    distckpt.async_save(large_state(3), f"{place.url}/c", overwrite=True).result()
    with pytest.raises(CheckpointExistsError, match="already holds"):
        distckpt.save(large_state(4), f"{place.url}/c")
    assert holds(f"{place.url}/c", 3)
    report = distckpt.verify(f"{place.url}/c")
    assert report.is_whole
    assert report.strays == ()
    distckpt.reshard(f"{place.url}/c", f"{place.url}/resharded", num_ranks=2)
    assert distckpt.diff(f"{place.url}/c", f"{place.url}/resharded").is_same
    distckpt.consolidate(f"{place.url}/c", f"{place.url}/hf")
    exported = safetensors.torch.load_file(place.directory / "hf/model.safetensors")
    assert torch.equal(exported["w"], numbers(3))
    assert place.folders() == ["c", "hf", "resharded"]


def test_a_run(place):
    with CheckpointManager(f"{place.url}/steps", keep_last=2) as manager:
        for step in range(1, 5):
            manager.save(step, state_of(step))
    assert manager.not_removed == {}
    assert [info.step for info in list_checkpoints(f"{place.url}/steps")] == [3, 4]
    found = CheckpointManager(f"{place.url}/steps")
    assert (found.latest(), found.skipped) == (4, {})
    assert value_in(f"{place.url}/steps/step_00000004") == 4
    assert place.folders() == ["steps"]


def test_a_step_that_is_replaced_in_place(place):
    distckpt.save(state_of(1), f"{place.url}/c")
    distckpt.reshard(f"{place.url}/c", f"{place.url}/c", num_ranks=2, overwrite=True)
    assert value_in(f"{place.url}/c") == 1
    assert place.folders() == ["c"]


def test_streaming(place):
    tensors = {f"t{i}": numbers(i) for i in range(2)}
    metas = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    save_safetensors_streaming_sharded(
        tensors.items(), f"{place.url}/hf", metas, max_file_bytes=20 << 20
    )
    for file in (place.directory / "hf").glob("*.safetensors"):
        for name, tensor in safetensors.torch.load_file(file).items():
            assert torch.equal(tensor, tensors.pop(name))
    assert tensors == {}


def test_an_export_of_a_damaged_checkpoint_leaves_nothing(place):
    distckpt.save(large_state(1), f"{place.url}/c")
    [file] = place.directory.glob("c/tensors*/*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"?")
    with pytest.raises(CorruptCheckpointError, match="Checksum"):
        distckpt.consolidate(f"{place.url}/c", f"{place.url}/hf")
    assert not list(place.directory.glob("hf/*.safetensors"))


def test_a_stream_that_fails_puts_no_part_of_a_file(tmp_path):
    def content():
        yield b"half"
        raise ValueError("no more")

    with served("webdav", tmp_path) as root:
        file = object_store.at(f"{root}/file")
        with pytest.raises(ValueError, match="no more"):
            file.write_stream(content, 8, 1, 8)
    assert list(tmp_path.iterdir()) == []


# --- Mounted file systems -------------------------------------------------------------------------


def save_on_ranks(rank, url):
    for value in (1, 2):
        distckpt.save(state_of(value, rank, 2, 50), url, overwrite=True)
    distckpt.reshard(url, f"{url}.resharded")


def test_several_ranks(mounted):
    run(save_on_ranks, 2, f"{mounted.url}/c")
    rows = distckpt.open(f"{mounted.url}/c.resharded").read_tensors(["rows"])["rows"]
    assert torch.equal(rows, torch.full((100, 256), 2.0))
    assert mounted.folders() == ["c", "c.resharded"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_at_once_one_wins(mounted, overwrite):
    location, others = f"{mounted.url}/c", iter([1])
    if overwrite:
        distckpt.save(state_of(1), location)

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, state_of(3), location, overwrite=overwrite)

    if overwrite:
        distckpt.save(state_of(2), location, overwrite=True, progress=progress)
    else:
        with pytest.raises(CheckpointExistsError):
            distckpt.save(state_of(2), location, progress=progress)
    assert value_in(location) == (2 if overwrite else 3)
    assert mounted.folders() == ["c"]


def test_what_readers_have_open_goes_with_the_next_save(mounted):
    with CheckpointManager(f"{mounted.url}/steps", keep_last=1, async_save=False) as manager:
        manager.save(1, state_of(1))
        distckpt.save(state_of(1), f"{mounted.url}/c")
        opened = [path.open("rb") for path in Path(mounted.url).rglob("*.safetensors")]
        manager.save(2, state_of(2))
        distckpt.save(state_of(2), f"{mounted.url}/c", overwrite=True)
        assert [info.step for info in list_checkpoints(f"{mounted.url}/steps")] == [2]
        assert value_in(f"{mounted.url}/c") == 2
        for file in opened:
            assert file.read(8)
            file.close()
        manager.save(3, state_of(3))
        distckpt.save(state_of(3), f"{mounted.url}/c", overwrite=True)
    assert mounted.folders() == ["c", "steps"]
    names = ["latest_checkpointed_iteration.txt", "step_00000003"]
    assert sorted(os.listdir(f"{mounted.url}/steps")) == names
    assert locations.list_names(mounted.url) == ["c", "steps"]
