"""Extra files of an export, such as config and tokenizer.

They are taken over from a directory of the same model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import summarize_keys
from distckpt._format.code_names import (
    CONFIG_NAMES,
    FIELDS,
    configurations_in,
    may_be_codes,
)
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._plan.export import OutputTensor
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_MAX_BYTES = 256 << 20
_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
_INDEX = re.compile(r".+\.index(\.[^.]+)?\.json")
"""Index names, also of variants such as `model.safetensors.index.fp16.json`."""


@dataclass(frozen=True)
class ExtraFiles:
    """Locations of files to copy, and content of files to write."""

    copied: Sequence[str] = ()
    written: Mapping[str, bytes] = field(default_factory=dict)


def list_extra_files(directory: str, with_code: bool) -> list[str]:
    """Return the locations of the files to copy.

    Raises:
        CheckpointingException: a file must not be copied.
    """
    if not locations.isdir(directory):
        raise FileNotFoundError(
            errno.ENOENT,
            "`like` or `extra_files_from` is not a directory to copy extra files from",
            directory,
        )
    names = []
    for name in locations.list_names(directory):
        if _is_beside_weights(name):
            names.append(name)
    if "sharded_backend" in (read_marker(directory) or {}):
        # The marker would make the export a checkpoint, of which nothing else is there.
        names.remove(CONFIG_FNAME)
    if not with_code:
        names = _without_code(names, directory)
    files = []
    for name in names:
        path = locations.join(directory, name)
        if not locations.isdir(path):
            _check(path, directory)
            files.append(path)
    return files


def _without_code(names: Sequence[str], directory: str) -> list[str]:
    """Leave out programs, with a warning."""
    code = []
    for name in names:
        if name.endswith(".py"):
            code.append(name)
    if code:
        left_out = summarize_keys(code)
        logger.warning("%s: left out, as extra_code is not set: %s", directory, left_out)
    return [name for name in names if name not in code]


def _is_beside_weights(name: str) -> bool:
    if name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES):
        return False
    return _INDEX.fullmatch(name) is None


def _check(path: str, directory: str) -> None:
    if locations.is_local(path):
        root = os.path.realpath(directory)
        target = os.path.realpath(path)
        parent, name = os.path.split(os.path.dirname(root))
        # The cache of huggingface_hub has links in snapshots/<commit> to files in blobs.
        allowed = [root, os.path.join(parent, "blobs")] if name == "snapshots" else [root]
        if not any(os.path.commonpath([folder, target]) == folder for folder in allowed):
            raise CheckpointingException(
                f"{path!r} is a link to {target!r}, outside of its directory: if the export may "
                "hold that file, copy it there."
            )
    num_bytes = locations.file_size(path)
    if num_bytes > _MAX_BYTES:
        raise CheckpointingException(
            f"{path!r} has {num_bytes} bytes, more than the {_MAX_BYTES} of an extra file."
        )


def write_extra_files(files: ExtraFiles, target: str) -> None:
    """Copy and write extra files into a directory.

    They replace files that an interrupted attempt has left. Copies on local disks have the modes of
    the originals.
    """
    for path in files.copied:
        copy = locations.join(target, locations.split(path)[1])
        # As `cp` does: at most as open as the original file and the umask allow.
        mode = 0o666
        if locations.is_local(path):
            mode = os.stat(path).st_mode & 0o777
        locations.write_bytes(copy, locations.read_bytes(path, _MAX_BYTES), mode=mode)
    for name, content in files.written.items():
        locations.write_bytes(locations.join(target, name), content)
    locations.sync_directory(target)


def adapt_config(
    paths: Sequence[str],
    outputs: Sequence[OutputTensor],
    quantization: Mapping[str, Any] | None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
) -> ExtraFiles:
    """Adapt the configuration to the exported tensors.

    Args:
        paths: paths of the files to copy.
        outputs: tensors of the export.
        quantization: the `quantization_config` of tensors that are quantized now.
        dtype: dtype of all other tensors, if the caller chose one; else the tensors' common dtype,
            if they have one.

    Raises:
        CheckpointingException: tensors are quantized, and the configuration is not a JSON object.
    """
    by_name = {locations.split(path)[1]: path for path in paths}
    config = _read_config(by_name.get(CONFIG_NAMES[0]), must_be_read=quantization is not None)
    if config is None:
        return ExtraFiles(paths)
    before = json.dumps(config)
    has_codes = quantization is None and any(may_be_codes(output.dtype) for output in outputs)
    if not has_codes:
        by_name.pop(CONFIG_NAMES[1], None)
        _replace_quantization(config, quantization)
    if isinstance(dtype, Mapping):
        dtype = dtype.get("*")
    if dtype is None and not has_codes and quantization is None:
        dtype = _common_dtype(outputs)
    _name_dtype(config, dtype)
    if json.dumps(config) == before:
        return ExtraFiles([*by_name.values()])
    by_name.pop(CONFIG_NAMES[0], None)
    changed = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
    return ExtraFiles([*by_name.values()], {CONFIG_NAMES[0]: changed})


def _read_config(path: str | None, must_be_read: bool) -> dict[str, Any] | None:
    """Read the configuration; an empty one without a path.

    Return None when it is not readable and need not be.
    """
    if path is None:
        return {}
    try:
        return dict(json.loads(locations.read_bytes(path, _MAX_BYTES)))
    except (ValueError, TypeError) as error:
        if not must_be_read:
            return None
        raise CheckpointingException(
            f"{path!r} is no JSON object ({error}): correct it."
        ) from error


def _replace_quantization(config: dict[str, Any], quantization: Mapping[str, Any] | None) -> None:
    """Replace, or remove, a configuration's description of its quantization."""
    for part in configurations_in(config):
        for name in FIELDS:
            part.pop(name, None)
    if quantization is not None:
        config["quantization_config"] = quantization


def _common_dtype(outputs: Sequence[OutputTensor]) -> torch.dtype | None:
    """Return the dtype that all floating-point tensors have in common, or None."""
    names = {output.dtype for output in outputs}
    dtypes = {FROM_NAME[name] for name in names}
    floats = []
    for dtype in dtypes:
        if dtype.is_floating_point:
            floats.append(dtype)
    if len(floats) == 1:
        return floats[0]
    return None


def _name_dtype(config: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Put a dtype into a configuration, wherever it names one."""
    if dtype is None:
        return
    for part in configurations_in(config):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = str(dtype).removeprefix("torch.")
