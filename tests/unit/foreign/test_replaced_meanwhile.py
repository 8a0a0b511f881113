"""Checkpoints of other programs that are written anew while they are read: nothing in the files
tells, and no result has values of both.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

import distckpt
from distckpt import CheckpointingException, ShardedTensor
from distckpt._checkpoint.consistent_read import seconds_until_settled
from distckpt._foreign import hugging_face
from distckpt._storage.file_state import FileState, has_changed
from distckpt.readers import register_reader
from distckpt.torch_dist import export as export_to_torch
from tests.support.calls import READS, recorded, watched
from tests.support.cli_command import call, call_error
from tests.support.hf_folders import INDEX, write_indexed, write_plain
from tests.support.toy_format import ToyReader, write_toy

KEYS = [f"layers.{number}.weight" for number in range(6)]


def version(number):
    """Return the tensors of one version; all versions have the same headers."""
    return {key: torch.full((64, 32), float(number)) for key in KEYS}


def write(folder, number):
    """Write a version under the names of the one before, as `save_pretrained` does."""
    files = {f"model-{key}.safetensors": {key: value} for key, value in version(number).items()}
    return write_indexed(folder, files)


def rewritten(folder):
    write(folder, 2)


def with_equal_times(folder, put):
    """Put the second version in the place of each file, of equal size, with its old time."""
    for name, value in version(2).items():
        path = folder / f"model-{name}.safetensors"
        before, header = path.stat(), path.read_bytes()[: -value.nbytes]
        put(path, header + value.numpy().tobytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size


def replace(path, content):
    path.with_name("new").write_bytes(content)
    os.replace(path.with_name("new"), path)


def replaced_with_equal_times(folder):
    """As by `rsync -t`."""
    with_equal_times(folder, replace)


def rewritten_with_equal_times(folder):
    """As by `cp -p` onto the files that are there."""
    with_equal_times(folder, lambda path, content: path.write_bytes(content))


def swapped(folder):
    """Let another directory take the place of the one that was opened."""
    write(folder.with_name("other"), 2)
    folder.rename(folder.with_name("away"))
    folder.with_name("other").rename(folder)


CHANGES = [rewritten, replaced_with_equal_times, rewritten_with_equal_times, swapped]


def once_in_between(change, folder):
    """Return a `progress` that changes a folder when a part of it was read."""
    changes = [change]

    def progress(done, total):
        if 0 < done < total and changes:
            changes.pop()(folder)

    return progress


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch):
    """Let one thread read, so that a part is read after the change."""
    monkeypatch.setattr("distckpt._checkpoint.shards.num_threads_within", lambda *_: 1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_load_begins_again(tmp_path, change, caplog):
    folder = write(tmp_path / "in", 1)
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(64, 32)) for key in KEYS}
    loaded = distckpt.load(state, folder, progress=once_in_between(change, folder))
    assert {float(value) for tensor in loaded.values() for value in tensor.unique()} == {2.0}
    assert "was overwritten while it was read" in caplog.text


def reshard(folder, out, progress):
    distckpt.reshard(folder, out, progress=progress)


def consolidate(folder, out, progress):
    distckpt.consolidate(folder, out, progress=progress, max_file_bytes=20_000)


def merge(folder, out, progress):
    other = write(out.with_name("second"), 1)
    distckpt.merge([folder, other], out, progress=progress, max_file_bytes=20_000)


def convert_to_torch(folder, out, progress):
    export_to_torch(folder, out, progress=progress)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verb", [consolidate, reshard, merge, convert_to_torch])
def test_what_is_written_is_given_up(tmp_path, verb, change):
    folder = write(tmp_path / "in", 1)
    with pytest.raises(CheckpointingException, match="was replaced"):
        verb(folder, tmp_path / "out", once_in_between(change, folder))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["inspect", "cat", "cat --json", "cat --npy"])
def test_commands_print_nothing(tmp_path, capsys, verb):
    """Nor do they leave a file, when what they have read last is replaced."""
    folder, out = write(tmp_path / "in", 1), tmp_path / "out.npy"
    arguments = [*verb.split(), *([out] if verb.endswith("npy") else [])]
    arguments[1:1] = [folder] if verb == "inspect" else [folder, KEYS[0]]
    with recorded(folder) as calls:
        call(capsys, *arguments)
    reads = [str(each) for each in calls if each.name in READS]
    left = [rewritten, *[None] * (reads.count(reads[-1]) - 1)]
    out.unlink(missing_ok=True)

    def on_call(each, moment):
        if str(each) == reads[-1] and moment == "after" and (change := left.pop()):
            change(folder)

    with watched(folder, on_call):
        assert "was replaced or written to" in call_error(capsys, *arguments)
    assert not out.exists()


@pytest.mark.parametrize("change", CHANGES)
def test_an_open_checkpoint_refuses_to_read_on(tmp_path, change):
    folder = write(tmp_path / "in", 1)
    checkpoint = distckpt.open(folder)
    assert torch.equal(checkpoint.read(KEYS[0]), version(1)[KEYS[0]])
    change(folder)
    with pytest.raises(CheckpointingException, match="was replaced"):
        checkpoint.read(KEYS[1])
    assert torch.equal(distckpt.open(folder).read(KEYS[1]), version(2)[KEYS[1]])


@pytest.mark.parametrize("verb", [consolidate, merge])
def test_a_version_that_was_there_for_a_moment_is_not_read(tmp_path, verb):
    """When somebody looks again, all files are as they were."""
    folder = write(tmp_path / "in", 1)
    other, away = write(tmp_path / "other", 2), tmp_path / "away"
    changes = [(other, folder, away), (away, folder, other)]

    def swap(done, total):
        if done and changes:
            come, stay, go = changes.pop(0)
            stay.rename(go)
            come.rename(stay)

    with pytest.raises(CheckpointingException, match=r"model-layers.*safetensors' was replaced"):
        verb(folder, tmp_path / "out", swap)
    assert not (tmp_path / "out").exists()


def test_verify_begins_again(tmp_path, monkeypatch):
    """What is replaced meanwhile is not damaged."""
    folder, other = write(tmp_path / "in", 1), tmp_path / "other"
    write_indexed(other, {"model-x.safetensors": version(2)})
    (tmp_path / "latest").symlink_to(folder)

    def swap():
        (tmp_path / "new").symlink_to(other)
        os.replace(tmp_path / "new", tmp_path / "latest")

    monkeypatch.setattr(hugging_face, "read_header", once(swap))
    report = distckpt.verify(tmp_path / "latest")
    assert report.problems == ()
    assert report.num_files == 1


@pytest.mark.parametrize(
    "name", ["nohup.out", "optimizer.pt", "trainer_state.json", "events.out.tfevents.1", "stderr"]
)
def test_other_files_may_be_written_to_meanwhile(tmp_path, name):
    folder = write(tmp_path / "in", 1)
    (folder / name).write_text("{}")

    def append(done, total):
        (folder / name).write_text(f"{{}}{' ' * done}")

    distckpt.consolidate(folder, tmp_path / "out", progress=append, max_file_bytes=20_000)
    assert distckpt.open(tmp_path / "out").read_tensors().keys() == set(KEYS)


def test_a_change_is_told_with_the_name_of_the_file(tmp_path):
    folder = write(tmp_path / "in", 1)
    checkpoint = distckpt.open(folder)
    os.utime(folder / f"model-{KEYS[4]}.safetensors")
    with pytest.raises(CheckpointingException, match=r"model-layers.4.weight.safetensors' was"):
        checkpoint.read(KEYS[1])


@pytest.mark.parametrize(
    ("modified", "expected"),
    [
        (100.0, 1.5),  # a file system that knows whole seconds, perhaps only even ones
        (98.0, 0.0),
        (100.49, 0.01),
        (100.4, 0.0),
        (200.0, 0.0),  # of a clock that is ahead
        (None, 0.0),
    ],
)
def test_files_are_looked_at_when_a_change_gives_them_another_time(modified, expected):
    states = [FileState(1, 50.0, inode=1), FileState(1, modified, inode=2)]
    assert seconds_until_settled(states, 100.5) == pytest.approx(expected)
    assert seconds_until_settled([FileState(1, modified, etag="a")], 100.5) == 0


@pytest.mark.parametrize(
    ("now", "again", "is_write"),
    [
        # The system sets the time of a new mode before the mode: seen before that, and after it.
        ({"changed": 2}, {"changed": 2, "attributes": (1, 0o600)}, False),
        ({"changed": 2, "attributes": (1, 0o600)}, None, False),
        ({"changed": 2}, {"changed": 2}, True),
        ({"changed": 2}, None, True),
        # Another file was there for a moment.
        ({"changed": 2, "inode": 8}, {}, True),
        ({"changed": 2, "modified": 60.0}, {}, True),
    ],
)
def test_a_mode_that_changes_while_it_is_looked_at_is_no_write(now, again, is_write):
    before = FileState(1, 50.0, inode=7, changed=1, attributes=(1, 0o644))
    later = None if again is None else before._replace(**again)
    assert has_changed(before, before._replace(**now), lambda: later) == is_write


def file_with(keys):
    """Return a file in which tensors lie in this order; for all orders, it has as many bytes."""
    places = {key: [32 * place, 32 * place + 32] for place, key in enumerate(keys)}
    entries = {
        key: {"dtype": "F32", "shape": [8], "data_offsets": places[key]} for key in sorted(keys)
    }
    header = json.dumps(entries).encode()
    values = [torch.full((8,), float(ord(key))).numpy().tobytes() for key in keys]
    return len(header).to_bytes(8, "little") + header + b"".join(values)


def once(change):
    """Return a `read_header` that changes something when it has read the first header."""
    read_header, changes = hugging_face.read_header, [change]

    def read(path):
        header = read_header(path)
        if changes:
            changes.pop()()
        return header

    return read


def test_a_file_that_is_replaced_when_its_header_was_read(tmp_path, monkeypatch):
    path = tmp_path / "1.safetensors"
    path.write_bytes(file_with("ab"))
    write_plain(tmp_path / "2.safetensors", {"c": torch.zeros(8)})
    change = once(lambda: path.write_bytes(file_with("ba")))
    monkeypatch.setattr(hugging_face, "read_header", change)
    found = distckpt.open(tmp_path).read_tensors()
    assert [float(found[key][0]) for key in "ab"] == [ord("a"), ord("b")]


def test_a_folder_of_other_files_takes_the_place_while_headers_are_read(tmp_path, monkeypatch):
    """Index and files, which are looked at one after the other, are of two versions then."""
    folder, other = write(tmp_path / "in", 1), tmp_path / "other"
    write_indexed(other, {"model-x.safetensors": version(2)})

    def swap():
        folder.rename(tmp_path / "away")
        other.rename(folder)

    monkeypatch.setattr(hugging_face, "read_header", once(swap))
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(64, 32)) for key in KEYS}
    loaded = distckpt.load(state, folder)
    assert all(torch.equal(loaded[key], value) for key, value in version(2).items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_description_that_is_written_last(tmp_path):
    """As by torch: its data are there before the file that says where each tensor lies."""
    folder = tmp_path / "in"
    ones, twos = torch.ones(300_000), torch.full((300_000,), 2.0)
    dcp.save({"a": ones, "b": twos}, checkpoint_id=tmp_path / "before")
    dcp.save({"b": twos, "a": ones}, checkpoint_id=folder)
    after = (folder / ".metadata").read_bytes()
    shutil.copy(tmp_path / "before" / ".metadata", folder)
    state = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(300_000)) for key in "ab"}
    changes = [lambda: (folder / ".metadata").write_bytes(after)]

    def progress(done, total):
        if changes:
            changes.pop()()

    loaded = distckpt.load(state, folder, progress=progress)
    assert torch.equal(loaded["a"], ones)
    assert torch.equal(loaded["b"], twos)


class Changing(ToyReader):
    """A reader that finds that something has changed."""

    def is_unchanged(self, stored):
        return False


@pytest.mark.parametrize("verb", [consolidate, reshard, convert_to_torch])
def test_a_reader_is_asked_before_anything_is_committed(tmp_path, verb):
    register_reader(Changing())
    try:
        with pytest.raises(CheckpointingException, match="was replaced"):
            verb(write_toy(tmp_path / "toy"), tmp_path / "out", None)
    finally:
        register_reader(ToyReader())
    assert not (tmp_path / "out").exists()


def test_links_and_modes_are_no_changes(tmp_path):
    folder = write(tmp_path / "in", 1)
    checkpoint = distckpt.open(folder)
    for path in folder.iterdir():
        os.link(path, tmp_path / path.name)
        path.chmod(0o600)
        path.rename(folder / "away")
        (folder / "away").rename(path)
    assert torch.equal(checkpoint.read(KEYS[1]), version(1)[KEYS[1]])


def test_other_files_may_come_and_go(tmp_path):
    folder = write(tmp_path / "in", 1)
    (folder / "README.md").write_text("Hello")
    checkpoint = distckpt.open(folder)
    (folder / "README.md").write_text("Hello, again")
    shutil.copy(folder / INDEX, folder / "copy.json")
    assert torch.equal(checkpoint.read(KEYS[1]), version(1)[KEYS[1]])
