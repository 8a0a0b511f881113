"""Hugging Face checkpoints: names of files, index, and division among files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

from distckpt._format.foreign_formats import HUGGING_FACE

BASE_PREFIX = "model"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_NAME = BASE_PREFIX + SUFFIX
INDEX_NAME = HUGGING_FACE.marker
ADAPTER_NAME = "adapter_model.safetensors"

_FILE_NAME_END = re.compile(r"(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?\Z")


def shard_filename(base_prefix: str, idx: int, total: int) -> str:
    """Return the name of file `idx` of `total`, counted from 1.

    An example is `model-00001-of-00004.safetensors`. `base_prefix` comes before the numbers, and
    may begin with a directory or URL.

    Raises:
        ValueError: there is no such file.
    """
    if not 1 <= idx <= total:
        raise ValueError(f"there is no file {idx} of {total}: files are counted from 1")
    return f"{base_prefix}-{idx:05d}-of-{total:05d}{SUFFIX}"


def index_filename(base_prefix: str) -> str:
    """Return the name of the index of several files, such as `model.safetensors.index.json`."""
    return f"{base_prefix}{INDEX_SUFFIX}"


def output_filenames(base_prefix: str, total: int) -> list[str]:
    """Return the names of all output files, in order.

    A single file has no number and no index.
    """
    if total == 1:
        return [base_prefix + SUFFIX]
    return [shard_filename(base_prefix, idx, total) for idx in range(1, total + 1)]


def derive_base_prefix_from_path(path_str: str | os.PathLike[str]) -> str:
    """Return the common beginning of the names of a model's files.

    `/x/model.safetensors`, `/x/model.safetensors.index.json` and
    `/x/model-00001-of-00004.safetensors` (with any number of digits) all give `/x/model`; other
    paths are returned as they are.
    """
    return _FILE_NAME_END.sub("", os.fspath(path_str))


def belongs_to_export(name: str) -> bool:
    """Return whether an export of a model may have this file name.

    It is of a file of tensors or of its index.
    """
    return derive_base_prefix_from_path(name) == BASE_PREFIX != name


def is_model_name(name: str) -> bool:
    """Return whether a file holds or lists tensors of a model.

    The model may be an adapter of PEFT.
    """
    return belongs_to_export(name) or name == ADAPTER_NAME


def group_keys_by_bytes(num_bytes: Mapping[str, int], max_file_bytes: int) -> list[list[str]]:
    """Divide tensors of known sizes among output files, in their order.

    Return the keys of each file. Its tensors have at most the given size; a larger tensor gets a
    file of its own.
    """
    return fill_files([([key], size) for key, size in num_bytes.items()], max_file_bytes)


def fill_files(units: Iterable[tuple[list[str], int]], max_file_bytes: int) -> list[list[str]]:
    """Fill files with units of keys, each given with its size.

    A unit that does not fit begins the next file.
    """
    if max_file_bytes <= 0:
        raise ValueError(f"the size of a file must be positive, not {max_file_bytes} bytes")
    files: list[list[str]] = []
    room = -1
    for keys, size in units:
        if size > room:
            files.append([])
            room = max_file_bytes
        files[-1].extend(keys)
        room -= size
    return files


def index_json(
    weight_map: Mapping[str, str],
    total_bytes: int,
    total_parameters: int,
) -> bytes:
    """Return the content of the index file, as Hugging Face writes it.

    It is the same byte for byte. `weight_map` has the name of the file that holds each key;
    `total_parameters` counts elements.
    """
    metadata = {"total_parameters": total_parameters, "total_size": total_bytes}
    text = json.dumps(
        {"metadata": metadata, "weight_map": dict(weight_map)}, indent=2, sort_keys=True
    )
    return (text + "\n").encode()
