"""Seals of formats whose tensors are decoded when they are read: all files are sealed whole."""

from __future__ import annotations

import json
import pathlib
import shutil
import tarfile

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, CorruptCheckpointError
from tests.support.disk import flip

GOLDEN = pathlib.Path(__file__).parents[2] / "data" / "orbax_0_12.tar.xz"
LAYOUTS = ["standard", "zarr3", "plain", "plain_zarr3", "step"]

tensorstore = pytest.importorskip("tensorstore")
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="no checkpoint of Orbax is here")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax")
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(directory, filter="data")
    step = shutil.copytree(directory / "items/0", directory / "step")
    for item, name in (("params", "standard"), ("state", "plain_zarr3")):
        shutil.rmtree(step / item)
        shutil.copytree(directory / name, step / item)
        (step / item / "_CHECKPOINT_METADATA").unlink()
    return directory


@pytest.fixture
def copied(made, tmp_path):
    return lambda name: shutil.copytree(made / name, tmp_path / name)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def same_tensors(found, expected):
    return found.keys() == expected.keys() and all(
        map(torch.equal, found.values(), expected.values())
    )


def outcome_of(folder):
    """The message of the error, or tensors and common state."""
    try:
        return "", (distckpt.open(folder).read_tensors(), distckpt.load({}, folder))
    except CorruptCheckpointError as error:
        return str(error), None


def embed_in(folder):
    return "params.params.embed" if folder.name == "step" else "params.embed"


def silent_flip(folder, key):
    """Flip a bit of a chunk such that other values are read; return the file."""
    expected = distckpt.open(folder).read(key)
    frame = b"\x28\xb5\x2f\xfd"
    for path in sorted(files_of(folder), key=lambda path: path.stat().st_size, reverse=True):
        content = path.read_bytes()
        if frame not in content:
            continue
        for position in range(content.index(frame) + len(content) // 2, len(content)):
            flip(path, position)
            try:
                if not torch.equal(distckpt.open(folder).read(key), expected):
                    flip(path, position)
                    return path, position
            except CheckpointingException:
                pass
            flip(path, position)
    raise AssertionError("no bit is flipped silently")


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_flipped_bit_in_a_chunk_is_found_by_every_read_of_it(copied, tmp_path, name):
    folder = copied(name)
    key = embed_in(folder)
    expected = distckpt.open(folder).read_tensors()
    path, position = silent_flip(folder, key)
    distckpt.seal(folder)
    assert same_tensors(distckpt.open(folder).read_tensors(), expected)
    distckpt.reshard(folder, tmp_path / "ours")
    distckpt.consolidate(folder, tmp_path / "export")
    assert distckpt.diff(folder, tmp_path / "ours").is_same
    flip(path, position)
    opened = distckpt.open(folder)
    part = distckpt.ShardedTensor.from_rank_offsets(key, torch.zeros_like(expected[key]))
    for door in (
        lambda: distckpt.load({"part": part}, folder),
        lambda: opened.read(key, (slice(1),)),
        lambda: distckpt.consolidate(folder, tmp_path / "other"),
        lambda: distckpt.reshard(folder, tmp_path / "other"),
        lambda: distckpt.diff(folder, tmp_path / "ours"),
    ):
        with pytest.raises(CorruptCheckpointError, match=f"{path}.*checksum.*{key}"):
            door()
    assert not (tmp_path / "other").exists()
    other = key.replace("embed", "layers.0")
    assert torch.equal(opened.read(other), expected[other])
    problems = distckpt.verify(folder).problems
    assert any(problem.key == key for problem in problems)
    # Without the seal, nobody sees it.
    changed = distckpt.load({"part": part}, folder, verify=False)["part"]
    assert not torch.equal(changed, expected[key])


@pytest.mark.parametrize("name", ["standard", "plain_zarr3"])
def test_all_files_are_compared(copied, name):
    folder = copied(name)
    expected = outcome_of(folder)[1]
    paths = files_of(folder)
    assert distckpt.seal(folder).num_files == len(paths)
    assert not distckpt.seal(folder).is_new
    assert distckpt.verify(folder).is_whole
    for number, path in enumerate(paths):
        content = path.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes(byte ^ 1 for byte in content[middle:][:1])
        others = (flipped + content[middle + 1 :], content[:-1], content + b"\0")
        path.write_bytes(others[number % 3] if content else b"\0")
        problems = distckpt.verify(folder).problems
        texts = [f"{problem.file} {problem.message}" for problem in problems]
        assert any(str(path) in text for text in texts), (path, problems)
        # A load refuses it, or its values are the sealed ones.
        message, found = outcome_of(folder)
        is_same = found and same_tensors(found[0], expected[0]) and found[1] == expected[1]
        assert is_same or "sealed" in message
        path.write_bytes(content)
    assert distckpt.verify(folder).is_whole


@pytest.mark.parametrize("name", ["plain", "plain_zarr3"])
def test_a_chunk_that_is_gone_is_not_read_as_zeros(copied, name):
    folder = copied(name)
    described = json.loads((folder / "_METADATA").read_text())
    described["store_array_data_equal_to_fill_value"] = False
    (folder / "_METADATA").write_text(json.dumps(described))
    distckpt.seal(folder)
    for path in (folder / "params.embed").rglob("*"):
        if path.is_file() and path.name not in (".zarray", "zarr.json"):
            path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"params\.embed.*missing"):
        distckpt.open(folder).read("params.embed")


def test_folders_that_are_links_are_sealed(copied, tmp_path):
    folder = copied("standard")
    path, position = silent_flip(folder, "params.embed")
    process = folder / "ocdbt.process_0"
    process.rename(tmp_path / "elsewhere")
    process.symlink_to(tmp_path / "elsewhere")
    distckpt.seal(folder)
    assert distckpt.verify(folder).is_whole
    flip(path, position)
    with pytest.raises(CorruptCheckpointError, match=r"ocdbt\.process_0.*params\.embed"):
        distckpt.open(folder).read("params.embed")
    # A link that leads back would make files without end.
    flip(path, position)
    (folder / "again").symlink_to(folder)
    with pytest.raises(CheckpointingException, match="again"):
        distckpt.seal(folder, overwrite=True)


@pytest.mark.parametrize("item", ["params", "state"])
def test_an_item_is_compared_with_the_seal_of_its_step(copied, item):
    step = copied("step")
    item = step / item
    expected = distckpt.open(item).read_tensors()
    path, position = silent_flip(item, "params.embed")
    distckpt.seal(step)
    assert distckpt.verify(item).has_checksums
    assert same_tensors(distckpt.open(item).read_tensors(), expected)
    flip(path, position)
    with pytest.raises(CorruptCheckpointError, match=r"params\.embed"):
        distckpt.open(item).read("params.embed")
    assert not distckpt.verify(item).is_whole
    flip(path, position)
    # Changes of other items do not matter.
    for other in step.iterdir():
        if other.is_dir() and other != item:
            shutil.rmtree(other)
    assert distckpt.verify(item).is_whole
    assert same_tensors(distckpt.open(item).read_tensors(), expected)
    # It may have a seal of its own.
    assert distckpt.seal(item).is_new
    assert distckpt.verify(item).is_whole


def test_the_values_of_json_items_are_compared(copied):
    step = copied("steps/20")
    distckpt.seal(step)
    path = step / "metrics" / "metrics"
    path.write_text(path.read_text().replace("10", "11"))
    with pytest.raises(CorruptCheckpointError, match="metrics"):
        distckpt.load({}, step)


@pytest.mark.parametrize("name", ["more/metadata", "more/_METADATA"])
def test_an_item_that_was_added_is_found(copied, name):
    step = copied("step")
    distckpt.seal(step)
    shutil.copytree(step / "state", step / "more")
    if name == "more/metadata":
        (step / "more/_METADATA").write_text("{}")
        (step / "more/_METADATA").rename(step / name)
    with pytest.raises(CorruptCheckpointError, match=r"more.*was added"):
        distckpt.open(step)


def test_arrays_of_many_axes_are_sealed(made, tmp_path):
    folder = shutil.copytree(made / "plain_zarr3", tmp_path / "plain_zarr3")
    shutil.rmtree(folder / "params.embed")
    metadata = {
        "shape": [4, 3, 2, 2],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 3, 1, 2]}},
    }
    store = {"driver": "file", "path": f"{folder}/params.embed/"}
    spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
    array = tensorstore.open(spec, create=True).result()
    array.write(torch.arange(48.0).view(4, 3, 2, 2).numpy()).result()
    distckpt.seal(folder)
    found = distckpt.open(folder).read("params.embed")
    assert torch.equal(found, torch.arange(48.0).view(4, 3, 2, 2))
    flip(folder / "params.embed/c/1/0/1/0", 3)
    assert torch.equal(distckpt.open(folder).read("params.embed", (slice(2, 4),)), found[2:])
    with pytest.raises(CorruptCheckpointError, match=r"params\.embed/c/1/0/1/0"):
        distckpt.open(folder).read("params.embed", (slice(1, 2),))


def test_values_are_found_in_a_database_of_any_height(tmp_path):
    from distckpt._foreign.orbax.values import Database

    base = {"driver": "file", "path": f"{tmp_path}/"}
    config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 8}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    store = tensorstore.KvStore.open(spec).result()
    values = {f"layer.{number:03d}/0.0": bytes([number]) * 20 for number in range(60)}
    with tensorstore.Transaction() as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value
    database = Database(str(tmp_path), None)
    for key, value in values.items():
        assert database.find(key).read() == value
    for key in ("", "layer.0", "layer.0300", "layer.061/0.0", "zzz"):
        assert database.find(key) is None


@pytest.mark.parametrize("name", ["standard", "plain_zarr3"])
def test_object_stores_have_seals(copied, name):
    import fsspec

    folder = copied(name)
    expected = distckpt.open(folder).read_tensors()
    path, position = silent_flip(folder, "params.embed")
    memory = fsspec.filesystem("memory")
    memory.put(f"{folder}/", f"/sealed-{name}/", recursive=True)
    location = f"memory://sealed-{name}"
    assert distckpt.seal(location).is_new
    assert same_tensors(distckpt.open(location).read_tensors(), expected)
    assert distckpt.verify(location).has_checksums
    flip(path, position)
    memory.pipe(f"/sealed-{name}/{path.relative_to(folder)}", path.read_bytes())
    with pytest.raises(CorruptCheckpointError, match=r"sealed.*params\.embed"):
        distckpt.open(location).read("params.embed")
    assert not distckpt.verify(location).is_whole
    memory.rm(f"/sealed-{name}", recursive=True)
