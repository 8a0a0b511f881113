"""Faults of directories of safetensors files: incomplete copies, files of two exports."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence, Set

from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.messages import did_you_mean
from distckpt._checkpoint.stored_pieces import StoredPiece
from distckpt._format.foreign_formats import HUGGING_FACE
from distckpt._format.hf_names import SINGLE_NAME
from distckpt._storage import locations

_NUMBERED = re.compile(r"(.*-)\d+(-of-0*(\d+)\.safetensors)", re.ASCII)
CONTROL_SUFFIX = ".aria2"
"""Ending of the file beside one that aria2 is downloading.

That one has its full size from the beginning.
"""
_COMPARED_BYTES = 8 << 20
_HEAD_BYTES = 64
_OTHER_CONTENTS = {
    b"version https://git-lfs": (
        "a pointer of Git LFS, not the file itself: run `git lfs pull` where it was cloned, or "
        "download the file"
    ),
    b"<": "a page of HTML or XML, perhaps the answer of a proxy or store: download the file again",
    b"PK\x03\x04": "an archive, such as torch.save writes: convert it to safetensors",
}
"""Descriptions and ways out by the first bytes of a file."""


def check_is_downloaded(folder: str, names: Sequence[str], present: Set[str]) -> None:
    """Refuse files whose download has not ended.

    They hold zeros where bytes are to come. `present` are the names in the folder.
    """
    for name in names:
        if name + CONTROL_SUFFIX in present:
            path = locations.join(folder, name)
            raise CorruptCheckpointError(
                f"{path!r} is still being downloaded, since {name + CONTROL_SUFFIX!r} is beside "
                "it: wait until aria2 has ended, or start it again (it goes on where it was)."
            )


def check_all_are_there(location: str, names: Sequence[str]) -> None:
    """Refuse a directory without an index that is not one whole checkpoint.

    It may lack one of its numbered files, or hold more than one checkpoint.
    """
    others = [name for name in names if name != SINGLE_NAME]
    if others and SINGLE_NAME in names:
        raise CorruptCheckpointError(
            f"{location!r} holds {SINGLE_NAME}, which is a whole checkpoint, and other files such "
            f"as {others[0]!r}, but no {HUGGING_FACE.marker} says what belongs together: give "
            "the location of the file to read, or move the others elsewhere."
        )
    matches = filter(None, map(_NUMBERED.fullmatch, names))
    for (start, end, total), count in Counter(match.groups() for match in matches).items():
        if count < int(total):
            raise CorruptCheckpointError(
                f"{location!r} holds {count} of the {total} files {f'{start}*{end}'!r}: copy the "
                "others, and their index, or give the location of one file to read that alone."
            )


def check_copies(
    folder: str, indexed: Sequence[StoredPiece], pieces: Sequence[StoredPiece]
) -> None:
    """Refuse a tensor with other values in a second file.

    Other readers may take the values of the second file.
    """
    if len(indexed) == len(pieces):
        return
    by_key = {piece.key: piece for piece in indexed}
    for piece in pieces:
        first = by_key.get(piece.key, piece)
        if first.file != piece.file and not _are_equal(folder, first, piece):
            raise CorruptCheckpointError(
                f"Key {piece.key!r} in {folder!r}: {piece.file!r} holds other values than "
                f"{first.file!r}, the file that the index names. One of them is of an earlier "
                "export: copy or export the directory anew."
            )


def _are_equal(folder: str, first: StoredPiece, second: StoredPiece) -> bool:
    """Compare two whole tensors in files, a few bytes at a time."""
    if (first.dtype, first.region) != (second.dtype, second.region):
        return False
    for start in range(0, first.num_bytes, _COMPARED_BYTES):
        contents = []
        for piece in (first, second):
            path = locations.join(folder, piece.file)
            stop = min(start + _COMPARED_BYTES, piece.num_bytes)
            place = (piece.first_byte + start, piece.first_byte + stop)
            contents.append(locations.read_range(path, *place))
        if contents[0] != contents[1]:
            return False
    return True


def missing_file(folder: str, name: str, index: str = "") -> CorruptCheckpointError:
    """Return the error about a missing file or target of a link."""
    path = locations.join(folder, name)
    names_it = f", but {index} names it" if index else ""
    link = ""
    way_out = "finish copying or downloading the directory, or restore the file"
    if locations.is_local(path) and os.path.islink(path):
        link = f" (a link to {os.readlink(path)!r}, which is not there)"
        way_out = "finish the download, or copy what links point to as well (`cp -L`, `rsync -L`)"
    return CorruptCheckpointError(
        f"{path!r} is missing{link}{names_it}{_part_beside(path)}: {way_out}."
    )


def _part_beside(path: str) -> str:
    """Name a file that may become the missing one."""
    folder, name = locations.split(path)
    for other in locations.names_within(folder):
        if name.lower() in other.lower() and other != name:
            return f" (there is {other!r})"
    return ""


def damaged_file(path: str, error: Exception) -> CorruptCheckpointError:
    """Return the error about a file that is no whole safetensors file."""
    other = _other_content(locations.read_range(path, 0, _HEAD_BYTES))
    if other:
        return CorruptCheckpointError(f"{path!r} is {other}.")
    fault = str(error)
    if not isinstance(error, ValueError):
        fault = f"{type(error).__name__}: {error}"
    return CorruptCheckpointError(
        f"{path!r} is not a complete safetensors file ({fault}): if it is still being copied or "
        "downloaded, wait for that; else restore it from a copy."
    )


def damaged_index(path: str, content: bytes, error: Exception) -> CorruptCheckpointError:
    """Return the error about an index that cannot be read."""
    other = _other_content(content)
    if other:
        return CorruptCheckpointError(f"The index {path!r} is {other}.")
    fault = str(error)
    if not isinstance(error, ValueError):
        fault = f"its weight_map does not map names of tensors to files: {error}"
    return CorruptCheckpointError(
        f"The index {path!r} is damaged ({fault}): restore it from a copy."
    )


def _other_content(content: bytes) -> str:
    """Describe content of another kind, with the way out."""
    for start, text in _OTHER_CONTENTS.items():
        if content.startswith(start):
            return text
    return ""


def misplaced_tensor(
    index: str, key: str, file: str, pieces: Sequence[StoredPiece]
) -> CorruptCheckpointError:
    """Return the error about a tensor that its indexed file lacks."""
    others = [piece.file for piece in pieces if piece.key == key]
    hint = f" but in {others[0]!r}" if others else ""
    if not others:
        hint = did_you_mean(key, [piece.key for piece in pieces if piece.file == file])
    return CorruptCheckpointError(
        f"{index!r} says that {file!r} holds {key!r}, which is not there{hint}: file and index are "
        "of different exports. Copy or export the directory anew."
    )
