"""The marker file of a complete checkpoint. `distckpt.megatron.core` is the public path.

The marker (`metadata.json`) is written last. Without one there is no checkpoint; with one, readers
may rely on everything that it names. It has the fields of Megatron's `CheckpointingConfig` as well
as distckpt's own, so programs for Megatron Core recognize a distckpt checkpoint and vice versa.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._format.checksum import checksum
from distckpt._storage import locations

CONFIG_FNAME = "metadata.json"
BUILT_IN = "safetensors"
"""Backend of the built-in format, in version 1."""

CHECKSUM_VERSION = 2
"""First version of the format whose markers have a checksum."""

_COMMON_BACKEND = "torch"
_CHECKSUM = "checksum"
_NO_DIGITS = "0" * 16
"""Placeholder of the checksum while it is computed."""
_MODULE_NAMES = "module_names"
_MODULE_PREFIXES = "module_prefixes"
_SCHEDULERS = "scheduler_classes"
_MAX_NAMES = 4096
_MAX_MARKER_BYTES = 4 << 20
_MAX_BACKEND_CHARS = 255
_NO_FILE = {errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}
"""Errors for a name that leads to no file. Other errors come from the disk and may be temporary."""


@dataclasses.dataclass
class CheckpointingConfig:
    """The format of a checkpoint, as its marker records it.

    The version counts changes of the format, not of the values that an application stores in it.

    Attributes:
        sharded_backend: name of the format that holds the tensors, such as "safetensors".
        sharded_backend_version: version of that format.
        common_backend: format of common state in Megatron Core before 0.19; distckpt stores it with
            the objects. As its version, it is in a marker only where it is another one.
        common_backend_version: version of that format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = _COMMON_BACKEND
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether a location holds a checkpoint; see `maybe_load_config`.

    It is a directory or URL prefix.
    """
    return maybe_load_config(checkpoint_dir) is not None


def maybe_load_config(checkpoint_dir: str | os.PathLike[str] | None) -> CheckpointingConfig | None:
    """Read the format of a checkpoint from its marker, or None.

    None if there is no marker or no location. Fields that this version does not know are dropped.

    Raises:
        CorruptCheckpointError: the marker is not JSON, lacks `sharded_backend`, or has a field of a
            wrong type.
    """
    if not checkpoint_dir:
        return None
    fields = read_marker(checkpoint_dir)
    if fields is None:
        return None
    return parse_config(fields, checkpoint_dir)


def parse_config(
    fields: Mapping[str, Any], checkpoint_dir: str | os.PathLike[str]
) -> CheckpointingConfig:
    """Return the format that a marker's fields name; see `maybe_load_config`."""
    path = os.path.join(checkpoint_dir, CONFIG_FNAME)
    if "sharded_backend" not in fields:
        raise CorruptCheckpointError(
            f"{path}: the field 'sharded_backend' is missing; this is not the marker of a "
            "distributed checkpoint"
        )
    values = {}
    for field in dataclasses.fields(CheckpointingConfig):
        value = fields.get(field.name, field.default)
        if field.type == "str":
            kind = "a string"
            fits = type(value) is str and len(value) <= _MAX_BACKEND_CHARS
        else:
            kind = "an integer"
            fits = type(value) is int and abs(value) < 2**31
        if not fits:
            raise CorruptCheckpointError(
                f"{path}: {field.name!r} must be {kind}, found {value!r:.100}"
            )
        values[field.name] = value
    return CheckpointingConfig(**values)


def config_fields(config: CheckpointingConfig) -> dict[str, Any]:
    """Return the fields of a marker that name a format."""
    fields = dataclasses.asdict(config)
    if (config.common_backend, config.common_backend_version) == (_COMMON_BACKEND, 1):
        del fields["common_backend"], fields["common_backend_version"]
    return fields


def save_config(
    config: CheckpointingConfig,
    checkpoint_dir: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    durable: bool = True,
) -> None:
    """Write the marker of a checkpoint, in one step.

    Call it last: from then on the location, an existing directory or URL prefix, counts as a
    complete checkpoint.

    Args:
        extra: further JSON fields of the marker; fields of `config` win over fields of the same
            name.
        durable: whether it must have reached the disk on return.
    """
    write_marker(checkpoint_dir, {**(extra or {}), **config_fields(config)}, durable)


def read_marker(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Read all fields of a marker except its checksum, as JSON.

    None if there is no marker.

    Raises:
        CorruptCheckpointError: the marker is not a JSON object, or does not match its checksum.
    """
    path = _marker_path(checkpoint_dir)
    try:
        # The marker's own name is short: if a name is too long, it is the path that the caller
        # gave.
        with _judging(path, _NO_FILE - {errno.ENAMETOOLONG}):
            content = locations.read_bytes(path, _MAX_MARKER_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path}: not valid JSON ({error}); restore the file or use another checkpoint"
        ) from error
    if not isinstance(fields, dict):
        raise CorruptCheckpointError(
            f"{path}: expected a JSON object, found {type(fields).__name__}"
        )
    if not _matches_checksum(content, fields):
        raise CorruptCheckpointError(
            f"{path}: the content does not match the checksum in it: the file was damaged or "
            "edited. Restore it from a copy, or load another checkpoint. If it was edited on "
            f'purpose, set "{_CHECKSUM}" to null.'
        )
    fields.pop(_CHECKSUM, None)
    return fields


def marker_of(location: str) -> dict[str, Any] | None:
    """Return the marker, to compare it with another, or None.

    None when there is none that can be read.
    """
    try:
        return read_marker(location)
    except (CheckpointingException, OSError):
        return None


def replaced(location: str) -> CheckpointingException:
    """Return the error that a checkpoint was replaced while it was read."""
    return CheckpointingException(
        f"{location!r} was replaced after it was opened: what was read is given up. Try again."
    )


def _matches_checksum(content: bytes, fields: Mapping[str, Any]) -> bool:
    """Return whether a marker has the right checksum, or needs none.

    It needs none if it is older, was written by another program, or says so.
    """
    if _CHECKSUM not in fields:
        version = fields.get("format_version")
        return not (isinstance(version, int) and version >= CHECKSUM_VERSION)
    digits = fields[_CHECKSUM]
    if not isinstance(digits, str) or not digits:
        return digits is None
    before, _, after = content.rpartition(digits.encode(errors="replace"))
    return digits == f"{checksum(before + _NO_DIGITS.encode() + after):016x}"


def first_name(key: str) -> str:
    """Return the first name in a key, `#` for a layer's number."""
    first = key.partition(".")[0]
    if first.isdigit():
        return "#"
    return first


def note_of_objects(
    names: Sequence[str], prefixes: Sequence[str], schedulers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields about modules and schedulers.

    They are the first names in the keys of `model`, the prefixes of other modules, and the classes
    of schedulers by place in the state dict. A field is left out if it is empty or too long.
    """
    fields: dict[str, Any] = {
        _MODULE_NAMES: list(names),
        _MODULE_PREFIXES: list(prefixes),
        _SCHEDULERS: dict(schedulers),
    }
    return {field: values for field, values in fields.items() if 0 < len(values) <= _MAX_NAMES}


def names_of_module(marker: Mapping[str, Any]) -> list[str]:
    """Return the first names in the keys of the saved `model`.

    The list is empty if they are unknown.
    """
    return _texts_in(marker, _MODULE_NAMES)


def prefixes_of_modules(marker: Mapping[str, Any]) -> list[str]:
    """Return the known prefixes of modules elsewhere than at `model`."""
    return _texts_in(marker, _MODULE_PREFIXES)


def _texts_in(marker: Mapping[str, Any], field: str) -> list[str]:
    texts = marker.get(field)
    if not isinstance(texts, list):
        return []
    return [text for text in texts if isinstance(text, str)]


def schedulers_of(marker: Mapping[str, Any]) -> dict[str, str]:
    """Return the known classes of the saved schedulers by place."""
    classes = marker.get(_SCHEDULERS)
    if not isinstance(classes, dict):
        return {}
    return {place: name for place, name in classes.items() if isinstance(name, str)}


def file_size(path: str) -> int:
    """Return the size of a file of an untrusted checkpoint.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: something else than a file is there.
    """
    with _judging(path):
        return locations.file_size(path)


def read_file(path: str, max_bytes: int) -> bytes:
    """Read a whole file of an untrusted checkpoint, up to `max_bytes`.

    Raises:
        FileNotFoundError: nothing is there.
        CorruptCheckpointError: something else than a file is there, or a larger file.
    """
    with _judging(path):
        return locations.read_bytes(path, max_bytes)


@contextlib.contextmanager
def _judging(path: str, no_file: Set[int] = _NO_FILE) -> Iterator[None]:
    """Report errors as damage if no checkpoint file is at `path`."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptCheckpointError(
                f"{path!r} has {error.strerror}, which no such file has. Restore it from a copy, "
                "or load another checkpoint."
            ) from error
        if error.errno in no_file and locations.is_local(path):
            raise CorruptCheckpointError(
                f"{path!r} is no file ({error.strerror}): restore it from a copy, or load another "
                "checkpoint."
            ) from error
        raise


def write_marker(
    checkpoint_dir: str | os.PathLike[str], fields: Mapping[str, Any], durable: bool = True
) -> None:
    """Write the marker of a checkpoint from raw fields, in one step.

    See `save_config`.

    Raises:
        TypeError: a field holds a value that JSON cannot hold; nothing is written then.
    """
    content = encode_marker(fields)
    locations.write_bytes(_marker_path(checkpoint_dir), content, durable)


def encode_marker(fields: Mapping[str, Any]) -> bytes:
    """Return the content of a marker, with a checksum at the end.

    It is the checksum of all other bytes, as the last field. With only Megatron's fields it has no
    checksum, as Megatron's reader accepts no other fields.
    """
    named = {name: value for name, value in fields.items() if name != _CHECKSUM}
    if named.keys() <= CheckpointingConfig.__dataclass_fields__.keys():
        return (json.dumps(named, indent=1) + "\n").encode()
    content = json.dumps({**named, _CHECKSUM: _NO_DIGITS}, indent=1) + "\n"
    before, _, after = content.rpartition(_NO_DIGITS)
    return f"{before}{checksum(content.encode()):016x}{after}".encode()


def _marker_path(checkpoint_dir: str | os.PathLike[str]) -> str:
    return locations.join(locations.normalize(checkpoint_dir), CONFIG_FNAME)
