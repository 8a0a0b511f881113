"""Seals of other programs' checkpoints, under every change that disks and programs make."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import distckpt
from distckpt import CheckpointExistsError, CheckpointingException, CorruptCheckpointError
from distckpt.readers import register_reader
from distckpt.torch_dist import export
from tests.support.cli_command import call
from tests.support.toy_format import ToyReader, write_toy

DATA = pathlib.Path(__file__).parents[2] / "data"
SEAL = "distckpt.seal"
FORMATS = [
    "dcp", "torch_dist", "hf", "hf_index", "peft", "zero1", "zero3", "zero2_universal", "toy",
]  # fmt: skip


def some_tensors():
    """Tensors of more than one block, empty, scalar, and in 8 bits."""
    generator = torch.Generator().manual_seed(1)
    return {
        "wide": torch.randn(130, 1100, generator=generator),
        "half": torch.randn(40, 50, generator=generator).bfloat16(),
        "eighth": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
    }


def write_hf(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "tokenizer.txt").write_text("a b c")


def write_hf_index(folder, tensors):
    folder.mkdir()
    weight_map = {}
    for number, (key, tensor) in enumerate(tensors.items(), 1):
        name = f"model-{number:05d}-of-{len(tensors):05d}.safetensors"
        save_file({key: tensor}, folder / name)
        weight_map[key] = name
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def write_peft(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory of each format."""
    root = tmp_path_factory.mktemp("made")
    tensors = some_tensors()
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"model": tensors, "step": 7}, checkpoint_id=root / "dcp")
    write_hf(root / "hf", tensors)
    write_hf_index(root / "hf_index", tensors)
    write_peft(root / "peft", tensors)
    write_toy(root / "toy")
    with zipfile.ZipFile(DATA / "megatron_core_0_14.zip") as archive:
        archive.extractall(root / "torch_dist")
    with zipfile.ZipFile(DATA / "deepspeed_0_19.zip") as archive:
        archive.extractall(root / "deepspeed")
    for name in ("zero1", "zero3", "zero2_universal"):
        [folder] = filter(pathlib.Path.is_dir, (root / "deepspeed" / name).iterdir())
        shutil.copytree(folder, root / name)
    register_reader(ToyReader())
    return root


@pytest.fixture
def copy_of(made, tmp_path):
    return lambda name: shutil.copytree(made / name, tmp_path / name, symlinks=True)


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SEAL)


def contents(folder):
    return {path: path.read_bytes() for path in files_in(folder)}


def loaded(folder):
    """All tensors, and common state."""
    opened = distckpt.open(folder)
    return opened.read_tensors(), opened.common_state


def bits_of(tensor):
    values = tensor.contiguous().view(-1).view(torch.uint8)
    return tensor.dtype, tensor.shape, values.numpy().tobytes()


def same_bits(first, second):
    are_same = [bits_of(first[key]) == bits_of(second[key]) for key in first if key in second]
    return first.keys() == second.keys() and all(are_same)


def check_is_found(folder, path, expected):
    """`verify` names the changed file; a load refuses it, or its values are the sealed ones."""
    report = distckpt.verify(folder)
    assert not report.is_whole
    texts = [f"{problem.file} {problem.message}" for problem in report.problems]
    assert any(str(path) in text for text in texts), texts
    message, found = outcome_of(lambda: loaded(folder)[0])
    if message:
        assert "sealed" in message or path.name in message
    else:
        assert same_bits(found, expected)


def outcome_of(read):
    """The message of the error, or what is read."""
    try:
        return "", read()
    except CheckpointingException as error:
        return str(error), None


@pytest.mark.parametrize("name", FORMATS)
def test_a_seal_changes_nothing_and_is_used_by_every_read(copy_of, name):
    folder = copy_of(name)
    before, expected = contents(folder), loaded(folder)
    assert not distckpt.verify(folder).has_checksums
    report = distckpt.seal(folder)
    assert report.is_new
    assert report.num_files == len(before)
    assert report.num_bytes == sum(map(len, before.values()))
    assert contents(folder) == before
    verified = distckpt.verify(folder)
    assert verified.is_whole
    assert verified.has_checksums
    assert verified.num_bytes >= report.num_bytes
    assert distckpt.verify(folder, "fast").is_whole
    tensors, common = loaded(folder)
    assert same_bits(tensors, expected[0])
    assert repr(common) == repr(expected[1])
    # Sealed twice: the same.
    content = (folder / SEAL).read_bytes()
    assert not distckpt.seal(folder).is_new
    distckpt.seal(folder, overwrite=True)
    assert (folder / SEAL).read_bytes() == content


def some_files_in(folder):
    """A few files of those with very many that are alike."""
    paths = files_in(folder)
    return random.Random(folder.name).sample(paths, min(len(paths), 10))


@pytest.mark.parametrize("name", FORMATS)
def test_a_flipped_bit_in_any_file_is_found(copy_of, name):
    folder = copy_of(name)
    expected, _ = loaded(folder)
    distckpt.seal(folder)
    rng = random.Random(name)
    for path in some_files_in(folder):
        content = path.read_bytes()
        positions = {0, len(content) // 2, len(content) - 1, rng.randrange(len(content))}
        for position in positions:
            flipped = bytearray(content)
            flipped[position] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            check_is_found(folder, path, expected)
        path.write_bytes(content)
    assert distckpt.verify(folder).is_whole


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_another_size_or_name_are_found(copy_of, name):
    folder = copy_of(name)
    expected, _ = loaded(folder)
    distckpt.seal(folder)
    for path in some_files_in(folder):
        content = path.read_bytes()
        for other in (content[:-1], content + b"\0", b""):
            path.write_bytes(other)
            check_is_found(folder, path, expected)
        path.write_bytes(content)
        renamed = path.with_name(f"x{path.name}")
        path.rename(renamed)
        check_is_lost(folder, path)
        renamed.rename(path)
    assert distckpt.verify(folder).is_whole


def check_is_lost(folder, path):
    """A renamed file is named; that no format is recognized any more is said by any reader."""
    message, report = outcome_of(lambda: distckpt.verify(folder))
    problems = report.problems if report else ()
    texts = [message, *(f"{problem.file} {problem.message}" for problem in problems)]
    assert any(path.name in text for text in texts), texts


@pytest.mark.parametrize("name", ["dcp", "hf_index", "zero3", "zero2_universal"])
def test_swapped_files_of_equal_size_are_found(copy_of, name):
    folder = copy_of(name)
    paths = files_in(folder)
    if name in ("dcp", "hf_index"):
        extra = [folder / "notes_1.txt", folder / "notes_2.txt"]
        for number, path in enumerate(extra):
            path.write_text(f"notes {number}")
        paths += extra
    expected, _ = loaded(folder)
    distckpt.seal(folder)
    num_swaps = 0
    for first in paths:
        for second in paths:
            contents_of = first.read_bytes(), second.read_bytes()
            if first >= second or contents_of[0] == contents_of[1]:
                continue
            if len(contents_of[0]) == len(contents_of[1]):
                num_swaps += 1
                first.write_bytes(contents_of[1])
                second.write_bytes(contents_of[0])
                check_is_found(folder, first, expected)
                first.write_bytes(contents_of[0])
                second.write_bytes(contents_of[1])
    assert num_swaps
    assert distckpt.verify(folder).is_whole


@pytest.mark.parametrize("name", ["dcp", "hf", "zero1"])
def test_a_damaged_seal_is_an_error_at_every_door(copy_of, name):
    folder = copy_of(name)
    expected, _ = loaded(folder)
    distckpt.seal(folder)
    seal = folder / SEAL
    content = seal.read_bytes()
    rng = random.Random(3)
    places = [*range(40), len(content) - 1, *(rng.randrange(len(content)) for _ in range(20))]
    others = [b"", content[:30], content[:-1], content + b"\n"]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << rng.randrange(8)
        others.append(bytes(flipped))
    for other in others:
        seal.write_bytes(other)
        with pytest.raises(CorruptCheckpointError, match=r"distckpt\.seal"):
            distckpt.open(folder)
        [problem] = distckpt.verify(folder).problems
        assert SEAL in problem.message
    for door in (
        lambda: distckpt.load({}, folder, strict="report"),
        lambda: distckpt.reshard(folder, folder.with_name("new")),
        lambda: distckpt.consolidate(folder, folder.with_name("export")),
        lambda: distckpt.diff(folder, folder),
        lambda: distckpt.seal(folder),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"distckpt\.seal"):
            door()
    seal.unlink()
    assert same_bits(loaded(folder)[0], expected)


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def position_of(path, tensor):
    return path.read_bytes().index(tensor.numpy().tobytes())


def target_of(key, tensor):
    return {key: distckpt.ShardedTensor.from_rank_offsets(key, torch.zeros_like(tensor))}


def test_a_partial_read_compares_the_blocks_that_it_touches(copy_of):
    folder = copy_of("hf")
    wide = load_file(folder / "model.safetensors")["wide"]
    distckpt.seal(folder)
    path = folder / "model.safetensors"
    # In the second block of 256 KiB, which begins in row 59.
    flip(path, position_of(path, wide) + 300_000)
    opened = distckpt.open(folder)
    assert torch.equal(opened.read("wide", (slice(0, 59),)), wide[:59])
    with pytest.raises(CorruptCheckpointError, match=r"'wide'.*sealed.*--overwrite"):
        opened.read("wide", (slice(60, 70),))
    [problem] = distckpt.verify(folder).problems
    assert (problem.key, problem.region) == ("wide", "[0:130, 0:1100]")
    start = position_of(path, wide[:10]) + 262_144
    assert (problem.first_byte, problem.stop_byte) == (start, start + 262_144)


def test_a_load_without_verification_does_not_look_at_the_seal(copy_of):
    folder = copy_of("hf")
    distckpt.seal(folder)
    (folder / SEAL).write_bytes(b"nothing")
    wide = some_tensors()["wide"]
    found = distckpt.load(target_of("wide", wide), folder, verify=False)
    assert torch.equal(found["wide"], wide)
    with pytest.raises(CorruptCheckpointError, match="seal"):
        distckpt.load(target_of("wide", wide), folder)


def test_a_step_that_is_written_again_is_refused_until_it_is_sealed_again(copy_of):
    folder = copy_of("hf")
    distckpt.seal(folder)
    tensors = {**some_tensors(), "wide": torch.ones(130, 1100)}
    save_file(tensors, folder / "model.safetensors")
    target = target_of("wide", tensors["wide"])
    with pytest.raises(CorruptCheckpointError, match=r"sealed.*--overwrite"):
        distckpt.load(target, folder)
    with pytest.raises(CheckpointExistsError, match=r"model\.safetensors.*--overwrite"):
        distckpt.seal(folder)
    assert distckpt.seal(folder, overwrite=True).is_new
    assert torch.equal(distckpt.load(target, folder)["wide"], tensors["wide"])


def test_files_that_no_reader_looks_at_change_without_stopping_a_load(copy_of):
    folder = copy_of("hf")
    distckpt.seal(folder)
    (folder / "tokenizer.txt").write_text("x y z")
    (folder / "README.md").write_text("new")
    assert same_bits(loaded(folder)[0], some_tensors())
    named = {os.path.basename(p.file): p.message for p in distckpt.verify(folder).problems}
    assert sorted(named) == ["README.md", "tokenizer.txt"]
    assert "added" in named["README.md"]


def test_an_added_file_that_a_reader_looks_at_stops_a_load(copy_of):
    folder = copy_of("hf_index")
    distckpt.seal(folder)
    save_file({"more": torch.ones(3)}, folder / "more.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"more\.safetensors.*added"):
        distckpt.open(folder)


def test_a_marker_that_was_removed_is_named(copy_of):
    folder = copy_of("dcp")
    distckpt.seal(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(CorruptCheckpointError, match="names the files"):
        distckpt.open(folder)
    # Another program's files beside it do not stand in for it.
    save_file({"more": torch.ones(3)}, folder / "more.safetensors")
    with pytest.raises(CorruptCheckpointError, match="sealed"):
        distckpt.open(folder)


def test_a_run_of_deepspeed_is_sealed_in_the_folder_of_its_step(made, tmp_path):
    run = shutil.copytree(made / "deepspeed" / "zero1", tmp_path / "run")
    expected, _ = loaded(run)
    assert distckpt.seal(run).location == str(run / "global_step3")
    assert sorted(os.listdir(run)) == ["global_step3", "latest"]
    assert not distckpt.seal(run / "global_step3").is_new
    for place in (run, run / "global_step3"):
        assert distckpt.verify(place).has_checksums
        assert same_bits(loaded(place)[0], expected)
    path = run / "global_step3" / "mp_rank_00_model_states.pt"
    flip(path, 200)
    for place in (run, run / "global_step3"):
        check_is_found(place, path, expected)
        with pytest.raises(CorruptCheckpointError):
            distckpt.open(place)


def test_a_single_file_is_compared_with_the_seal_of_its_directory(copy_of):
    folder = copy_of("hf")
    path = folder / "model.safetensors"
    with pytest.raises(CheckpointingException, match="seal its directory"):
        distckpt.seal(path)
    distckpt.seal(folder)
    assert same_bits(loaded(path)[0], some_tensors())
    assert distckpt.verify(path).has_checksums
    flip(path, position_of(path, some_tensors()["wide"]))
    with pytest.raises(CorruptCheckpointError, match="'wide'"):
        loaded(path)


def test_links_are_sealed_as_what_they_lead_to(made, tmp_path):
    blobs = shutil.copytree(made / "hf", tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    distckpt.seal(snapshot)
    assert sorted(os.listdir(blobs)) == sorted(os.listdir(made / "hf"))
    assert same_bits(loaded(snapshot)[0], some_tensors())
    copied = shutil.copytree(snapshot, tmp_path / "copied")
    assert distckpt.verify(copied).is_whole
    flip(blobs / "config.json", 3)
    with pytest.raises(CorruptCheckpointError, match=r"config\.json.*sealed|sealed.*config\.json"):
        distckpt.open(snapshot)


def make_link(path):
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_link, os.mkfifo])
def test_what_is_no_file_is_refused_by_name(copy_of, make):
    folder = copy_of("hf")
    make(folder / "strange.bin")
    with pytest.raises(CheckpointingException, match=r"strange\.bin.*cannot be sealed.*[Rr]emove"):
        distckpt.seal(folder)
    assert not (folder / SEAL).exists()
    (folder / "strange.bin").unlink()
    distckpt.seal(folder)
    # Later, it is named by what reads it, and by verify.
    make(folder / "strange.bin")
    assert same_bits(loaded(folder)[0], some_tensors())
    [problem] = distckpt.verify(folder).problems
    assert problem.file.endswith("strange.bin")
    (folder / "config.json").unlink()
    make(folder / "config.json")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        distckpt.open(folder)


def test_an_overwrite_takes_the_seal_away(copy_of):
    source = copy_of("hf_index")
    folder = copy_of("hf")
    distckpt.seal(folder)
    with pytest.raises(CheckpointExistsError):
        distckpt.consolidate(source, folder)
    assert distckpt.verify(folder).has_checksums

    def fail(*_):
        raise OSError("a disk fails")

    with pytest.raises(OSError, match="disk"):
        distckpt.consolidate(source, folder, overwrite=True, progress=fail)
    assert distckpt.verify(folder).has_checksums
    distckpt.consolidate(source, folder, overwrite=True, dtype=torch.bfloat16)
    assert not (folder / SEAL).exists()
    assert loaded(folder)[0]["wide"].dtype == torch.bfloat16
    assert (folder / "tokenizer.txt").exists()
    for write in (distckpt.reshard, export):
        folder = copy_of("dcp")
        distckpt.seal(folder)
        write(source, folder, overwrite=True)
        assert not (folder / SEAL).exists()
        assert torch.equal(loaded(folder)[0]["wide"], some_tensors()["wide"])
        shutil.rmtree(folder)


def test_a_copy_goes_with_its_seal_or_without(copy_of, tmp_path):
    folder = copy_of("torch_dist")
    distckpt.seal(folder)
    copied = shutil.copytree(folder, tmp_path / "copied")
    assert distckpt.verify(copied).has_checksums
    (copied / SEAL).unlink()
    assert not distckpt.verify(copied).has_checksums
    assert distckpt.verify(copied).is_whole


def test_own_checkpoints_are_refused(tmp_path):
    distckpt.save({"x": torch.ones(3)}, tmp_path / "own")
    with pytest.raises(CheckpointingException, match="has checksums already"):
        distckpt.seal(tmp_path / "own")
    with pytest.raises(distckpt.CheckpointNotFoundError):
        distckpt.seal(tmp_path / "nowhere")


def test_a_directory_that_is_written_meanwhile_is_refused(copy_of):
    folder = copy_of("hf")

    def write(*_):
        (folder / "tokenizer.txt").write_text("other")

    with pytest.raises(CheckpointingException, match=r"tokenizer\.txt.*written to"):
        distckpt.seal(folder, progress=write)
    assert not (folder / SEAL).exists()

    def add(*_):
        (folder / "new.txt").write_text("new")

    with pytest.raises(CheckpointingException, match="written to"):
        distckpt.seal(folder, progress=add)
    assert sorted(os.listdir(folder)) == [
        "config.json", "model.safetensors", "new.txt", "tokenizer.txt",
    ]  # fmt: skip


def test_verbs_read_what_is_sealed(copy_of, tmp_path):
    folder = copy_of("dcp")
    tensors = {f"model.{key}": tensor for key, tensor in some_tensors().items()}
    distckpt.seal(folder)
    distckpt.reshard(folder, tmp_path / "own")
    assert same_bits(distckpt.open(tmp_path / "own").read_tensors(), tensors)
    assert distckpt.diff(folder, tmp_path / "own").is_same
    distckpt.consolidate(folder, tmp_path / "export")
    assert same_bits(load_file(tmp_path / "export" / "model.safetensors"), tensors)
    with pytest.raises(CheckpointingException, match="own place"):
        distckpt.reshard(folder, folder, overwrite=True)
    [path] = folder.glob("*.distcp")
    flip(path, position_of(path, tensors["model.wide"]))
    for door in (
        lambda: distckpt.reshard(folder, tmp_path / "other"),
        lambda: distckpt.consolidate(folder, tmp_path / "other"),
        lambda: distckpt.diff(folder, tmp_path / "own"),
        lambda: distckpt.load(target_of("model.wide", tensors["model.wide"]), folder),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"model\.wide"):
            door()
    assert not (tmp_path / "other").exists()


def test_the_command_line_seals_and_verifies(copy_of, tmp_path, capsys):
    folder = copy_of("hf")
    assert call(capsys, "seal", folder).startswith(f"sealed: {folder}, 3 files")
    assert "unchanged since it was sealed" in call(capsys, "seal", folder, "--jobs", "1")
    assert "no checksums" not in call(capsys, "verify", folder)
    (folder / "tokenizer.txt").write_text("A B C")
    assert "tokenizer.txt" in call(capsys, "verify", folder, code=1)
    parts = ("--journal", tmp_path / "journal", "--part")
    call(capsys, "verify", folder, *parts, "0/2")
    assert "tokenizer.txt" in call(capsys, "verify", folder, *parts, "1/2", code=1)
    call(capsys, "seal", folder, code=1)
    assert json.loads(call(capsys, "seal", folder, "--overwrite", "--json"))["is_new"]


def test_object_stores_have_seals(made):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("dcp", "hf_index", "zero2_universal"):
        location = f"memory://seal-{name}"
        expected, _ = loaded(made / name)
        memory.put(f"{made / name}/", f"/seal-{name}/", recursive=True)
        before = memory.find(f"/seal-{name}")
        assert distckpt.seal(location).num_files == len(before)
        assert memory.find(f"/seal-{name}") == sorted([*before, f"/seal-{name}/{SEAL}"])
        assert not distckpt.seal(location).is_new
        assert distckpt.verify(location).has_checksums
        assert same_bits(loaded(location)[0], expected)
        for path in before:
            content = memory.cat(path)
            memory.pipe(path, content[:-1] + bytes([content[-1] ^ 1]))
            found = [problem.file for problem in distckpt.verify(location).problems]
            assert any(file.endswith(path) for file in found), path
            memory.pipe(path, content)
        memory.rm(f"/seal-{name}", recursive=True)


def test_shards_of_hugging_face_are_consolidated_as_sealed(tmp_path):
    from distckpt.hf import consolidate_safetensors_files_on_every_rank

    shards = tmp_path / "shards"
    state = {"w": torch.arange(6.0).view(2, 3)}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(shards, save_distributed=True))
    distckpt.seal(shards)
    [path] = shards.glob("*.safetensors")
    flip(path, position_of(path, state["w"]))
    with pytest.raises(ValueError, match=r"'w'.*sealed"):
        consolidate_safetensors_files_on_every_rank(str(shards), str(tmp_path / "out"), {"w": 1})
