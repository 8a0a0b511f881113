"""Directories that were copied or downloaded in part, or hold files of two exports: what is wrong,
and the way out.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

import distckpt
from distckpt import CheckpointNotFoundError, CorruptCheckpointError, ShardedTensor
from distckpt.megatron.core import CheckpointingException
from tests.support.hf_folders import INDEX, write_indexed, write_plain
from tests.support.hooked_store import hooked_reads

NAMES = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
PAGE = b"<!DOCTYPE html><html><title>403 Forbidden</title></html>"


@pytest.fixture
def folder(tmp_path):
    files = {name: {f"{name[9:11]}.weight": torch.ones(64, 16)} for name in NAMES}
    return write_indexed(tmp_path / "folder", files)


def cut(path):
    os.truncate(path, path.stat().st_size - 100)


def cut_in_header(path):
    os.truncate(path, 20)


def extended(path):
    path.write_bytes(path.read_bytes() + b"0123456789")


def reserved(path):
    path.write_bytes(bytes(path.stat().st_size))


def downloading(path):
    """By aria2, which gives the file its size at first."""
    path.with_name(f"{path.name}.aria2").write_bytes(b"")
    path.write_bytes(path.read_bytes()[:-2048] + bytes(2048))


def copying(path):
    """By rsync."""
    path.rename(path.with_name(f".{path.name}.Xa3f2b"))


def in_another_case(path):
    path.rename(path.with_name(path.name.upper()))


def copied_without_blobs(path):
    """A snapshot of the Hugging Face cache."""
    path.unlink()
    path.symlink_to("../../blobs/4d7a2146")


FAULTS = {
    "empty": (lambda path: path.write_bytes(b""), "has only 0 bytes.*wait for that"),
    "cut": (cut, r"its header says 4\d\d\d bytes, it has 4\d\d\d: it was cut off.*wait for that"),
    "cut in the header": (cut_in_header, r"its header needs \d+ bytes, it has 20: it was cut off"),
    "extended": (extended, r"its header says \d+ bytes, it has \d+: something was added"),
    "reserved": (reserved, "begins with zeros"),
    "downloading": (downloading, r"still being downloaded.*\.safetensors\.aria2.*aria2 has ended"),
    "copying": (copying, r"missing, but model\.safetensors\.index\.json.*there is '\.model-.*3f2b"),
    "case": (in_another_case, "missing.*there is 'MODEL-00002-OF-00002.SAFETENSORS'"),
    "a link": (copied_without_blobs, r"a link to '\.\./\.\./blobs/4d7a2146', which.*`cp -L`"),
    "a pointer": (lambda path: path.write_bytes(POINTER), "a pointer of Git LFS.*git lfs pull"),
    "a page": (lambda path: path.write_bytes(PAGE), "a page of HTML.*download the file again"),
    "a text": (lambda path: path.write_bytes(b"Entry not found"), "with 'Entry not found'"),
    "a pickle": (lambda path: torch.save({}, path), "an archive, such as torch.save writes"),
    "bytes": (lambda path: path.write_bytes(b"\x1f\x8b" * 100), "but with other bytes"),
}


@pytest.mark.parametrize(("spoil", "text"), FAULTS.values(), ids=FAULTS.keys())
def test_a_file_that_is_not_whole(folder, spoil, text):
    spoil(folder / NAMES[1])
    target = torch.zeros(64, 16)
    state = {"w": ShardedTensor.from_rank_offsets("01.weight", target)}
    with pytest.raises(CorruptCheckpointError, match=rf"(?s){folder}/{NAMES[1]}.*{text}"):
        distckpt.load(state, folder)
    assert not target.any()
    assert not distckpt.verify(folder).is_whole


def test_a_single_file_that_is_being_downloaded(folder):
    downloading(folder / NAMES[1])
    with pytest.raises(CorruptCheckpointError, match="still being downloaded"):
        distckpt.open(folder / NAMES[1])
    assert distckpt.open(folder / NAMES[0]).tensors


INDEXES = {
    "a pointer": (POINTER, "is a pointer of Git LFS.*git lfs pull"),
    "a page": (PAGE, "is a page of HTML"),
    "a list": (b'{"weight_map": ["a"]}', "weight_map does not map names of tensors to files"),
    "no map": (b"{}", "weight_map does not map names of tensors to files"),
}


@pytest.mark.parametrize(("content", "text"), INDEXES.values(), ids=INDEXES.keys())
def test_an_index_of_another_kind(folder, content, text):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=f"{folder}/{INDEX}.*{text}"):
        distckpt.open(folder)


def test_an_index_that_is_a_link_to_nothing(folder):
    copied_without_blobs(folder / INDEX)
    with pytest.raises(CorruptCheckpointError, match=f"{INDEX}.*a link to.*`cp -L`"):
        distckpt.open(folder)
    assert not distckpt.verify(folder).is_whole


def test_an_index_that_names_another_file_for_a_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    write_plain(folder / NAMES[1], {f"0{n}.weight": torch.ones(64, 16) for n in (2, 3)})
    index["weight_map"] |= {"02.weight": NAMES[0], "03.weight": NAMES[1]}
    (folder / INDEX).write_text(json.dumps(index))
    text = f"{NAMES[0]}' holds '02.weight', which is not there but in '{NAMES[1]}'"
    with pytest.raises(CorruptCheckpointError, match=text):
        distckpt.open(folder)


OTHERS = {
    "a value": lambda tensor: tensor.index_fill(0, torch.tensor([63]), 2.0),
    "a dtype": lambda tensor: tensor.double(),
    "a shape": lambda tensor: tensor.T.contiguous(),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_a_tensor_in_two_files_with_other_values(folder, other):
    """transformers takes those of the last file, whatever the index says."""
    own = {"01.weight": torch.ones(64, 16), "02.weight": other(torch.ones(64, 16))}
    write_plain(folder / NAMES[0], own)
    text = f"'02.weight' in .*'{NAMES[0]}' holds other values than '{NAMES[1]}'"
    with pytest.raises(CorruptCheckpointError, match=text):
        distckpt.open(folder)


def test_a_tensor_in_two_files_with_equal_values(folder, caplog):
    write_plain(folder / NAMES[0], {f"0{n}.weight": torch.ones(64, 16) for n in (1, 2)})
    assert len(distckpt.open(folder).read_tensors()) == 2
    assert not caplog.messages


CONFIGS = {
    "empty": (lambda path: path.write_bytes(b""), "Restore it from a copy"),
    "a link": (copied_without_blobs, "There is no "),
}


@pytest.mark.parametrize(("spoil", "text"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_configuration_of_another_kind(folder, spoil, text):
    path = folder / "config.json"
    path.write_text("{}")
    spoil(path)
    with pytest.raises(CheckpointingException, match=text) as caught:
        distckpt.load({"w": torch.nn.Linear(2, 2)}, folder, family="auto")
    assert isinstance(caught.value, CheckpointNotFoundError) == path.is_symlink()


# --- Errors in the middle of a load ---------------------------------------------------------------


def read_with(error, location, state):
    """Load when reads of the second file fail; return the message."""

    def before_read(path, start, stop):
        if NAMES[1] in path and start:
            raise error

    with hooked_reads(before_read), pytest.raises(type(error)) as caught:
        distckpt.load(state, f"hooked://{location}")
    return str(caught.value)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_read_that_fails_is_named_with_its_place(folder, code):
    targets = [torch.zeros(64, 16) for _ in NAMES]
    state = {
        key: ShardedTensor.from_rank_offsets(key, target)
        for key, target in zip(("01.weight", "02.weight"), targets, strict=True)
    }
    text = read_with(OSError(code, os.strerror(code)), folder, state)
    size = (folder / NAMES[1]).stat().st_size
    assert f"(bytes {size - 4096} to {size}, from key '02.weight' on)" in text
    assert f"hooked://{folder}/{NAMES[1]}" in text
    assert "Tensors may be partly filled" in text


def test_a_tensor_of_the_checkpoint_alone_is_not_partly_filled(folder):
    opened = distckpt.open(folder)
    (folder / NAMES[1]).unlink()
    with pytest.raises(CheckpointingException) as caught:
        opened.read("02.weight")
    assert "partly filled" not in str(caught.value)
