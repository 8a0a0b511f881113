"""Content at the place of a save: saves to replace, and other files.

Files of saves are replaced by a new one; files of other programs stay.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable

from distckpt._base.errors import CheckpointExistsError, CorruptCheckpointError
from distckpt._commit import hidden_directories
from distckpt._format.foreign_formats import MARKED_CHECKPOINTS, ORBAX, SEAL_NAME, ForeignFormat
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._storage import locations

_NONCE = "[0-9a-f]{16}"
_FOLDER = re.compile(rf"(?:tensors|objects)(?:-{_NONCE})?")
_FILE = re.compile(
    rf"{CONFIG_FNAME}|manifest(?:-{_NONCE})?\.safetensors"
    rf"|\.(?:{CONFIG_FNAME}|manifest\S*)\.{_NONCE}"
)
_CONTENT = re.compile(
    r"shard-\d+-model-\d+-of-\d+\.safetensors|rank-\d+\.(?:safetensors|checksums)"
    r"|chunks-\d+\.safetensors"
)


def replaced_names(location: str) -> Callable[[str], bool]:
    """Return whether names in a local directory are replaced by a checkpoint.

    These are the names of saves. A checkpoint of another format is replaced with everything that is
    in its directory: readers would find two.
    """
    try:
        marker = read_marker(location)
    except CorruptCheckpointError:
        marker = None
    is_ours = marker is not None and isinstance(marker.get("manifest"), dict)
    if not is_ours and (marker is not None or _foreign_format_in(location) is not None):
        return lambda name: True
    return lambda name: _FOLDER.fullmatch(name) is not None or _FILE.fullmatch(name) is not None


def _foreign_format_in(location: str) -> ForeignFormat | None:
    """Return the format of another program's checkpoint in a local directory."""
    for known in MARKED_CHECKPOINTS:
        if locations.exists(locations.join(location, known.marker)):
            return known
    return None


def is_all_foreign(location: str) -> bool:
    """Return whether a local directory holds another program's checkpoint and nothing else."""
    known = _foreign_format_in(location)
    if known is None:
        return False
    return all(name.endswith((*known.names, SEAL_NAME)) for name in names_in(location))


def others_in(location: str) -> list[str]:
    """Return the names in a directory that a new checkpoint keeps."""
    is_replaced = replaced_names(location)
    return [name for name in names_in(location) if not is_replaced(name)]


def names_in(location: str) -> list[str]:
    """Return the names in a directory.

    There are none if it is not there, or another program has just moved it.
    """
    try:
        return locations.list_names(location)
    except FileNotFoundError:
        return []


def check_replaceable(location: str) -> None:
    """Refuse a local directory that cannot be replaced in one step."""
    if not locations.is_local(location) or not locations.isdir(location):
        return
    for point in _mount_points_within(location):
        inner = os.path.relpath(point, location)
        reason = f"{inner!r} in it is a mount point"
        if inner == ".":
            reason = "it is a mount point"
        raise refused(location, reason)
    if _is_in_use(location):
        raise refused(location, "it is the current directory, or above it")
    for name in others_in(location):
        marker = locations.join(location, name, CONFIG_FNAME)
        if locations.exists(marker) or hidden_directories.parse(name) is not None:
            raise refused(location, f"it holds other checkpoints ({name!r})")


def prepare_to_replace(location: str, directory: str) -> None:
    """Give a new local directory the access rights of its predecessor.

    They are set before data is in it. No one may read more than before. A directory that the file
    system will not rename is refused.
    """
    if _is_on_overlay(location):
        _check_movable(location, directory)
    locations.take_over_access(location, directory)


def _check_movable(location: str, directory: str) -> None:
    """Refuse a directory of a lower layer of an overlay.

    A rename fails for that before it fails for a target that is not empty.
    """
    probe = locations.join(directory, ".probe")
    os.makedirs(locations.join(probe, "not_empty"))
    try:
        os.rename(location, probe)
    except OSError as error:
        if error.errno == errno.EXDEV:
            reason = (
                "it comes from a lower layer of an overlay file system (an image), which renames "
                "no such directory"
            )
            raise refused(location, reason) from error
    else:
        os.rename(probe, location)
    finally:
        locations.remove_tree(probe)


def check_content(location: str, overwrite: bool) -> None:
    """Refuse a local directory whose folders hold foreign files.

    Without `overwrite`, also one with a checkpoint of another program.
    """
    foreign = None if overwrite else _foreign_format_in(location)
    if foreign is not None:
        raise refused(
            location,
            f"it holds a checkpoint of {foreign.program} ({foreign.marker!r}); overwrite=True "
            "replaces that",
        )
    if replaced_names(location)(""):
        return  # another format, which is replaced with all that is there
    for name in filter(_FOLDER.fullmatch, names_in(location)):
        path = locations.join(location, name)
        try:
            content = names_in(path)
        except NotADirectoryError:
            content = ["no directory"]
        strange = next((file for file in content if not _CONTENT.fullmatch(file)), None)
        if strange is not None:
            raise refused(location, f"{name!r} in it holds what no save has written ({strange!r})")


def check_no_model(location: str) -> None:
    """Refuse a directory with files of Hugging Face or Orbax, a store also with those of torch.

    A checkpoint would hide them.
    """
    # Imported when it is needed: the content is looked at only where there is one.
    from distckpt._format.hf_names import is_model_name

    names = names_in(location)
    found = [(name, "Hugging Face model") for name in filter(is_model_name, names)]
    found += [(name, "checkpoint of Orbax") for name in names if name in ORBAX.names]
    if not locations.is_local(location):
        # A local one would be replaced, see `check_content`.
        for known in MARKED_CHECKPOINTS:
            if known.marker in names:
                found.append((known.marker, f"checkpoint of {known.program}"))
    if found:
        name, kind = found[0]
        raise CheckpointExistsError(
            f"{location!r} holds a {kind} ({name!r}), of which distckpt.load would "
            "find nothing any more beside a checkpoint: save to a directory of its own, or pass "
            "overwrite=True, which leaves the files of it there."
        )


def _is_in_use(location: str) -> bool:
    try:
        current = os.getcwd()
    except FileNotFoundError:
        return False
    return f"{current}/".startswith(f"{location}/")


def refused(location: str, reason: str) -> CheckpointExistsError:
    """Return the error about a directory that must not be replaced."""
    return CheckpointExistsError(
        f"The directory {location!r} cannot be replaced by a new one: {reason}. Nothing there was "
        f"changed. Write to a directory of its own, such as {locations.join(location, 'step_1')!r}."
    )


def _mount_points_within(path: str) -> list[str]:
    """Return the mount points at or below a local path.

    The system may not list all of them.
    """
    points = [point for point, _ in _mounts()]
    if not points and os.path.ismount(path):
        return [path]
    return sorted(point for point in points if _is_within(point, path))


def _is_on_overlay(path: str) -> bool:
    """Return whether a local path is on an overlay.

    An overlay is a file system of several layers; the system may not list it.
    """
    above = []
    for index, (point, kind) in enumerate(_mounts()):
        if _is_within(path, point):
            above.append((len(point), index, kind))
    return "overlay" in max(above, default=(0, 0, ""))[2]


def _is_within(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _mounts() -> list[tuple[str, str]]:
    """Return this process's mount points with the types of file systems.

    The list is empty if they are unknown.
    """
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            fields = [line.split(b" ") for line in file]
    except OSError:
        return []
    mounts = []
    for field in fields:
        point = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field[4])
        kind = field[field.index(b"-") + 1].decode()
        mounts.append((os.fsdecode(point), kind))
    return mounts
