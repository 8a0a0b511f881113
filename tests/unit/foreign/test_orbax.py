"""Checkpoints of Orbax: those in `tests/data/orbax_0_12.tar.xz` were written by Orbax itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
import tensorstore
import torch
from safetensors.torch import load_file

import distckpt
from distckpt._foreign.orbax.arrays import DecodedCells
from tests.data.make_orbax import DTYPES, arrays, trees
from tests.support.cli_command import call
from tests.support.disk import flip
from tests.support.orbax_trees import check, unpack, write_chunks

SAME = ["standard", "pytree", "zarr3", "plain", "plain_zarr3", "v1"]
NAMES = [name for name in trees() if name != "dotted" and "dtypes" not in name]
knows_all_dtypes = pytest.mark.skipif(
    not hasattr(tensorstore, "float4_e2m1fn"), reason="an old version of tensorstore"
)
ZSTD_FRAME = bytes.fromhex("28b52ffd")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("orbax"))


@pytest.fixture
def copied(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copied")


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_the_bits_that_orbax_was_given(made, name):
    opened = distckpt.open(made / name)
    check(opened.read_tensors(), trees()[name])
    report = distckpt.verify(made / name)
    assert report.is_whole
    assert report.num_bytes == sum(t.nbytes for t in opened.read_tensors().values())


@knows_all_dtypes
@pytest.mark.parametrize("name", ["dtypes_pytree", "dtypes_zarr3"])
def test_all_dtypes_are_read(made, name):
    found = distckpt.open(made / name).read_tensors()
    check(found, trees()[name])
    assert len(found) == len(DTYPES)


@pytest.mark.parametrize("name", SAME)
def test_other_values_are_common_state(made, name):
    common = distckpt.load({}, made / name)
    assert common.pop("text", None) == (None if name == "standard" else "some text")
    # Orbax does not say that `of_ints` had numbers as keys.
    assert common == {
        "step": 5,
        "rate": 0.25,
        "is_best": True,
        "list": [],
        "tuple": (),
        "none": None,
        "empty": {},
    }
    assert type(common["is_best"]) is bool
    assert type(common["step"]) is int


def test_load_fills_tensors_and_regions(made):
    expected = trees()["hosts/0"]["both"]
    rows = torch.zeros(4, 20)
    columns = torch.zeros(16, 5)
    shard = distckpt.ShardedTensor.from_rank_offsets
    distckpt.load({"rows": shard("both", rows, (0, 2, 4))}, made / "hosts/0")
    distckpt.load({"columns": shard("both", columns, (1, 1, 4))}, made / "hosts/0")
    assert np.array_equal(rows.numpy(), expected[8:12])
    assert np.array_equal(columns.numpy(), expected[:, 5:10])
    part = distckpt.open(made / "hosts/0").read("columns", (slice(1, 3), slice(7, 33)))
    assert np.array_equal(part.numpy(), trees()["hosts/0"]["columns"][1:3, 7:33])


@pytest.mark.parametrize("name", ["standard", "chunks_zarr3", "plain", "hosts/0"])
def test_all_verbs_take_them(made, tmp_path, name, capsys):
    distckpt.reshard(made / name, tmp_path / "ours")
    check(distckpt.open(tmp_path / "ours").read_tensors(), trees()[name])
    assert distckpt.load({}, tmp_path / "ours") == distckpt.load({}, made / name)
    assert distckpt.diff(made / name, tmp_path / "ours").is_same
    distckpt.consolidate(made / name, tmp_path / "exported")
    check(load_file(tmp_path / "exported/model.safetensors"), trees()[name])
    assert "orbax" in call(capsys, "inspect", made / name)
    assert call(capsys, "verify", made / name).startswith("OK")


# ---- directories


def test_one_item_has_the_names_of_its_tree_and_several_begin_with_the_item(made):
    assert distckpt.load({}, made / "steps/20") == {
        "none": None,
        "empty": {},
        "metrics": {"loss": 10.0},
    }
    check(distckpt.open(made / "steps/3/default").read_tensors(), trees()["steps/3"])
    items = distckpt.open(made / "items/0")
    expected = {name: trees()[f"items/0/{name}"] for name in ("params", "state")}
    check(items.read_tensors(), expected)
    nothing = {"none": None, "empty": {}}
    assert items.common_state == {"params": nothing, "state": nothing, "extra": {"seen": 7}}


def test_an_item_may_have_the_name_of_a_step(copied):
    step = copied / "items/0"
    (step / "state").rename(step / "ema_999")
    marker = step / "_CHECKPOINT_METADATA"
    marker.write_text(marker.read_text().replace('"state"', '"ema_999"'))
    expected = {"params": arrays(1), "ema_999": arrays(2)}
    check(distckpt.open(step).read_tensors(), expected)
    # Versions without that file are read by the folders alone.
    marker.unlink()
    check(distckpt.open(step).read_tensors(), expected)


def test_an_item_without_arrays_is_read(copied):
    # So are states of optimizers without moments: Orbax makes no database for them.
    step = copied / "items/0"
    shutil.rmtree(step / "state")
    (step / "state").mkdir()
    path = [{"key": "0", "key_type": 1}]
    row = {"key_metadata": path, "value_metadata": {"value_type": "None", "skip_deserialize": True}}
    described = {"tree_metadata": {"('0',)": row}, "use_ocdbt": True, "use_zarr3": False}
    (step / "state/_METADATA").write_text(json.dumps(described))
    opened = distckpt.open(step)
    check(opened.read_tensors(), {"params": arrays(1)})
    assert opened.common_state["state"] == {"0": None}
    assert distckpt.load({}, step / "state") == {"0": None}
    assert distckpt.verify(step).is_whole
    distckpt.reshard(step / "state", copied / "ours")
    assert distckpt.load({}, copied / "ours") == {"0": None}


@pytest.mark.parametrize("lost", ["state", "state/_METADATA", "extra", "extra/metadata"])
def test_an_item_that_is_missing_is_an_error(copied, lost):
    step = copied / "items/0"
    (step / lost).rename(copied / "lost")
    with pytest.raises(distckpt.CorruptCheckpointError, match=f"{step / lost.split('/')[0]}"):
        distckpt.open(step)
    assert not distckpt.verify(step).is_whole
    check(distckpt.open(step / "params").read_tensors(), arrays(1))


def test_an_item_of_another_kind_is_named_in_a_warning(copied, caplog):
    step = copied / "items/0"
    (step / "iterator").mkdir()
    (step / "iterator/process_0-of-1").write_text("any")
    marker = step / "_CHECKPOINT_METADATA"
    fields = json.loads(marker.read_text())
    fields["item_handlers"]["iterator"] = "grain.PyGrainCheckpointHandler"
    marker.write_text(json.dumps(fields))
    found = distckpt.open(step).read_tensors()
    check(found, {"params": arrays(1), "state": arrays(2)})
    assert f"{step / 'iterator'}" in caplog.text


def test_a_folder_of_checkpoints_is_not_one(made, tmp_path):
    for name in ("standard", "plain"):
        shutil.copytree(made / name, tmp_path / "runs" / name)
    with pytest.raises(distckpt.CheckpointNotFoundError, match="runs"):
        distckpt.open(tmp_path / "runs")


def test_a_save_does_not_hide_one(copied):
    for name in ("standard", "items/0"):
        with pytest.raises(distckpt.CheckpointExistsError, match="holds a checkpoint of Orbax"):
            distckpt.save({"weight": torch.ones(2)}, copied / name)
    check(distckpt.open(copied / "standard").read_tensors(), arrays(0))


def test_verify_of_a_sealed_one_has_checksums(copied, capsys):
    distckpt.seal(copied / "standard")
    report = distckpt.verify(copied / "standard")
    assert report.is_whole
    assert report.has_checksums
    for verb in ("verify", "inspect"):
        assert "no checksums" not in call(capsys, verb, copied / "standard")


def test_a_root_of_steps_names_the_newest(made):
    with pytest.raises(distckpt.CheckpointNotFoundError, match=r"The newest is .*steps/20'"):
        distckpt.load({}, made / "steps")


def test_two_leaves_with_one_name_are_refused(made):
    with pytest.raises(distckpt.CheckpointingException, match=r"\['a', 'b'\] and \['a\.b'\]"):
        distckpt.open(made / "dotted")


def test_items_whose_names_meet_are_refused(copied):
    shutil.copytree(copied / "standard", copied / "items/0/params.params")
    shutil.copytree(copied / "standard", copied / "meeting/params")
    tree = copied / "meeting/params.x"
    shutil.copytree(copied / "chunks_pytree", tree)
    (copied / "meeting/params/_CHECKPOINT_METADATA").unlink()
    (tree / "_CHECKPOINT_METADATA").unlink()
    fields = json.loads((copied / "meeting/params/_METADATA").read_text())
    row = {"key_metadata": [{"key": "x", "key_type": 2}, {"key": "x", "key_type": 2}]}
    value = {"value_type": "jax.Array", "skip_deserialize": False}
    fields["tree_metadata"]["more"] = {**row, "value_metadata": value}
    (copied / "meeting/params/_METADATA").write_text(json.dumps(fields))
    with pytest.raises(distckpt.CheckpointingException, match=r"'params\.x\.x'"):
        distckpt.open(copied / "meeting")


def test_an_old_layout_is_refused_by_name(copied):
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):
        (copied / "plain" / name).unlink()
    (copied / "plain/checkpoint").write_bytes(b"\x81\xa1a\xc0")
    with pytest.raises(distckpt.CheckpointingException, match="old version of Orbax or Flax"):
        distckpt.load({}, copied / "plain")


def test_an_unfinished_save_is_refused(copied):
    name = "standard.orbax-checkpoint-tmp"
    (copied / "standard").rename(copied / name)
    with pytest.raises(distckpt.CheckpointingException, match="has not finished"):
        distckpt.load({}, copied / name)


def test_arrays_outside_of_the_directory_are_not_read(copied):
    path = copied / "plain/_METADATA"
    path.write_text(path.read_text().replace('"key": "embed"', '"key": "/../../standard"'))
    with pytest.raises(distckpt.CheckpointingException, match="which no key can have"):
        distckpt.open(copied / "plain")


@pytest.fixture
def at_url(made, memory):
    """Put a checkpoint into an object store; returns its URL."""

    def put(directory, name="saved"):
        fsspec.filesystem("memory").put(str(directory), f"/bucket/{name}", recursive=True)
        return f"{memory}/{name}"

    return put


@pytest.mark.parametrize("name", NAMES)
def test_arrays_at_urls_have_the_same_bits(made, at_url, name):
    url = at_url(made / name)
    check(distckpt.open(url).read_tensors(), trees()[name])
    assert distckpt.load({}, url) == distckpt.load({}, made / name)
    assert distckpt.verify(url).is_whole


def test_a_deep_index_leads_to_all_chunks_at_a_url(tmp_path, at_url):
    values = np.arange(800, dtype=np.int32).reshape(80, 10)
    config = {"max_decoded_node_bytes": 200, "max_inline_value_bytes": 20}
    write_chunks(tmp_path / "made", values, (1, 7), config=config)
    opened = distckpt.open(at_url(tmp_path / "made"))
    assert np.array_equal(opened.read("x").numpy(), values)
    assert np.array_equal(opened.read("x", (slice(77, 79),)).numpy(), values[77:79])


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("uses_ocdbt", [True, False])
def test_a_chunk_that_is_not_stored_at_a_url(tmp_path, at_url, uses_ocdbt, is_complete):
    values = np.zeros((4, 6), np.float32)
    values[1] = 3.5
    write_chunks(tmp_path / "made", values, (1, 6), uses_ocdbt=uses_ocdbt)
    description = tmp_path / "made/_METADATA"
    if not is_complete:
        fields = json.loads(description.read_text())
        fields["store_array_data_equal_to_fill_value"] = False
        description.write_text(json.dumps(fields))
    opened = distckpt.open(at_url(tmp_path / "made"))
    if is_complete:
        with pytest.raises(distckpt.CorruptCheckpointError, match=r"'x', \[0:1, 0:6\]"):
            opened.read("x")
    else:
        assert np.array_equal(opened.read("x").numpy(), values)


@pytest.mark.parametrize("uses_ocdbt", [True, False])
def test_a_large_chunk_is_read_in_parts(tmp_path, at_url, uses_ocdbt, monkeypatch):
    monkeypatch.setattr("distckpt._foreign.orbax.values.PART_BYTES", 1000)
    values = np.random.default_rng(0).standard_normal((2, 777), dtype=np.float32)
    write_chunks(tmp_path / "made", values, (1, 777), uses_ocdbt=uses_ocdbt)
    assert np.array_equal(distckpt.open(at_url(tmp_path / "made")).read("x").numpy(), values)


@pytest.mark.parametrize("name", ["standard", "plain"])
def test_no_damage_at_a_url_goes_unnoticed(made, at_url, name):
    expected = trees()[name]
    files = fsspec.filesystem("memory")
    url = at_url(made / name)
    num_noticed = 0
    for path in files.find("/bucket/saved"):
        content = files.cat_file(path)
        for changed in (None, content[: len(content) // 2]):
            files.rm_file(path)
            if changed is not None:
                files.pipe_file(path, changed)
            error = error_of(url, expected)
            if changed is not None or not path.endswith("_METADATA"):
                assert distckpt.verify(url).is_whole == (error is None), path
            if error is not None:
                num_noticed += 1
                assert url in error
            files.pipe_file(path, content)
    assert num_noticed >= 5
    check(distckpt.open(url).read_tensors(), expected)


def test_a_flipped_bit_in_the_index_at_a_url_is_an_error(made, at_url):
    files = fsspec.filesystem("memory")
    url = at_url(made / "standard")
    index = [path for path in files.find("/bucket/saved") if "ocdbt.process" not in path]
    for path in index:
        if not path.endswith("manifest.ocdbt") and "/d/" not in path:
            continue
        content = files.cat_file(path)
        for position in range(0, len(content), 1 + len(content) // 12):
            changed = bytearray(content)
            changed[position] ^= 1
            files.pipe_file(path, bytes(changed))
            with pytest.raises(distckpt.CheckpointingException, match=path.removeprefix("/bucket")):
                distckpt.open(url).read_tensors()
        files.pipe_file(path, content)


# ---- damage


def files_with_data(directory):
    """The files of hosts that hold more than a node of the database."""
    return [path for path in directory.rglob("d/*") if "process" in str(path)]


def error_of(path, expected):
    """The error of reading, or None if everything is as expected."""
    try:
        check(distckpt.open(path).read_tensors(), expected)
    except distckpt.CheckpointingException as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", ["standard", "zarr3", "plain", "plain_zarr3"])
def test_no_cut_or_missing_file_goes_unnoticed(made, tmp_path, name):
    expected = trees()[name]
    files = [path.relative_to(made / name) for path in (made / name).rglob("*") if path.is_file()]
    num_noticed = 0
    for file in files:
        for how in ("cut", "missing"):
            copy = shutil.copytree(made / name, tmp_path / "damaged")
            if how == "cut":
                content = (copy / file).read_bytes()
                (copy / file).write_bytes(content[: len(content) // 2])
            else:
                (copy / file).unlink()
            error = error_of(copy, expected)
            if not (how == "missing" and file.name == "_METADATA"):
                assert distckpt.verify(copy).is_whole == (error is None)
            if error is not None:
                num_noticed += 1
                assert str(copy) in error
            shutil.rmtree(copy)
    assert num_noticed >= 6


@pytest.mark.parametrize("name", ["standard", "zarr3"])
def test_a_flipped_bit_in_the_index_is_an_error_that_names_the_file(made, tmp_path, name):
    sizes = {}
    for file in ("manifest.ocdbt", *(f"d/{path.name}" for path in (made / name / "d").iterdir())):
        sizes[file] = (made / name / file).stat().st_size
    for file, size in sizes.items():
        for position in range(0, size, 1 + size // 20):
            copy = shutil.copytree(made / name, tmp_path / "damaged")
            flip(copy / file, position)
            with pytest.raises(distckpt.CheckpointingException, match=file):
                distckpt.open(copy).read_tensors()
            (problem,) = distckpt.verify(copy).problems
            assert file in problem.message
            shutil.rmtree(copy)


def test_a_damaged_chunk_is_reported_with_its_key_and_file(copied):
    path = copied / "standard"
    largest = max(files_with_data(path), key=lambda file: file.stat().st_size)
    start = largest.read_bytes().index(ZSTD_FRAME)
    flip(largest, start)
    (problem,) = distckpt.verify(path).problems
    assert (problem.key, problem.region) == ("params.embed", "[0:48, 0:24]")
    assert str(largest) in problem.message
    with pytest.raises(distckpt.CheckpointingException, match=f"'params.embed'.*{largest}"):
        distckpt.open(path).read("params.embed")
    assert distckpt.open(path).read("params.zeros").shape == (5, 7)


def test_a_broken_number_is_found_by_verify(copied):
    (copied / "plain/step/0").write_bytes(b"broken")
    (problem,) = distckpt.verify(copied / "plain").problems
    assert "'step'" in problem.message
    with pytest.raises(distckpt.CheckpointingException, match="'step'"):
        distckpt.load({}, copied / "plain")


# ---- how much is read


def test_a_region_decodes_the_chunks_it_touches_and_each_once(made, monkeypatch):
    from distckpt._foreign.orbax import arrays

    decoded = []
    decode = arrays.StoredArray.decode

    def counted(self, cell):
        decoded.append(cell)
        return decode(self, cell)

    monkeypatch.setattr(arrays.StoredArray, "decode", counted)
    opened = distckpt.open(made / "chunks_zarr3")
    opened.read("x", (slice(0, 1), slice(0, 1)))
    assert len(decoded) == 1
    decoded.clear()
    distckpt.open(made / "chunks_zarr3").read("x")
    num_chunks = len(decoded)
    assert len(set(decoded)) == num_chunks > 5
    decoded.clear()
    assert distckpt.verify(made / "chunks_zarr3").is_whole
    assert sorted(decoded) == list(range(num_chunks))


def test_a_chunk_stays_while_threads_wait_for_it():
    cells = DecodedCells()
    decoded = []

    def read(name):
        def decode():
            decoded.append(name)
            while decoded == ["a"] and len(cells._changed._waiters) < 4:
                os.sched_yield()
            return np.zeros(8, np.uint8)

        return cells.get((name, 0), 8, 2, 8, decode)

    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(read, "a")
        while not decoded:
            os.sched_yield()
        assert all(len(content) == 8 for content in pool.map(read, "baab"))
        first.result()
    # Neither is fetched again, though there is room for one only.
    assert sorted(decoded) == ["a", "b"]


def test_a_package_that_is_missing_is_named(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(distckpt.CheckpointingException, match=r"pip install 'distckpt\[orbax\]'"):
        distckpt.open(made / "standard")


def read_in_worker(opened, answers):
    try:
        opened.read("params.embed")
    except distckpt.CheckpointingException as error:
        answers.put(str(error))


@pytest.mark.parametrize("has_read", [True, False])
def test_a_forked_process_is_refused(made, has_read):
    opened = distckpt.open(made / "standard")
    if has_read:
        opened.read("params.embed")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    worker = context.Process(target=read_in_worker, args=(opened, answers))
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert "start this one with 'spawn'" in answers.get()


def test_parts_and_a_replaced_checkpoint(copied, tmp_path, capsys):
    source, journal = copied / "standard", tmp_path / "journal"
    for part in ("0/2", "1/2"):
        options = ["--journal", journal, "--part", part]
        call(capsys, "consolidate", source, tmp_path / "exported", "--part", part)
        text = call(capsys, "verify", source, *options)
    assert "OK: " in text
    check(load_file(tmp_path / "exported/model.safetensors"), trees()["standard"])
    opened = distckpt.open(source)
    shutil.rmtree(source)
    shutil.copytree(copied / "zarr3", source)
    with pytest.raises(distckpt.CheckpointingException, match="was replaced or written to"):
        opened.read_tensors()
