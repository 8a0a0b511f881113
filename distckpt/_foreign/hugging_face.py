"""Folders of safetensors files that others wrote, as manifests: everything that reads chunks reads them too.

Two kinds: Hugging Face directories (whole tensors, with an index or a single file) and folders of shards written by
torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel (each entry with its global offset).
"""

from __future__ import annotations

import json
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._base.messages import did_you_mean, natural_order, summarize_keys
from distckpt._foreign.pieces import StoredPiece, find_fault, find_outside, group_by_key, tabulate, to_manifest
from distckpt._format import safetensors_file
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest, ShardFile, is_manifest_name
from distckpt._format.marker import file_size, read_file
from distckpt._geometry.region import Region
from distckpt._storage import locations

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"

_HEADER_GUESS_BYTES = 1 << 17
_MAX_ELEMENTS = 1 << 62


class Header(NamedTuple):
    """What a file says of itself: its size, that of its header, and the header's content."""

    num_bytes: int
    header_bytes: int
    metadata: dict[str, str]
    entries: list[safetensors_file.StoredEntry]


def holds_safetensors(location: str) -> bool:
    """Tell whether a directory holds safetensors files at its top level (a distckpt manifest is none of them)."""
    names = locations.list_names(location) if locations.isdir(location) else []
    return any(name.endswith(SUFFIX) and not is_manifest_name(name) for name in names)


def read_directory(location: str, *, require_sharding_info: bool = False) -> Manifest:
    """Read the headers of a folder of safetensors files.

    Args:
        location: the folder.
        require_sharding_info: refuse files that do not say where in the global tensors their entries lie.

    Returns:
        A manifest without checksums.

    Raises:
        CorruptCheckpointError: a file is damaged or missing, or the pieces of a tensor overlap, leave gaps or differ
            in dtype; naming file and key.
    """
    weight_map = _read_index(location)
    names = _safetensors_names(location) if weight_map is None else sorted(set(weight_map.values()))
    files: dict[str, ShardFile] = {}
    pieces: list[StoredPiece] = []
    with_info: list[str] = []
    without_info: list[str] = []
    for name in names:
        files[name], has_info, found = _read_file(location, name)
        pieces.extend(found)
        (with_info if has_info else without_info).append(name)
    if without_info and (with_info or require_sharding_info):
        raise CorruptCheckpointError(
            f"{locations.join(location, without_info[0])!r} does not say where in the global tensors its entries lie: "
            f"it has no {safetensors_file.SHARDING_INFO} in its header metadata, so it is no shard of a distributed "
            "save. Remove it from the folder, or name the folder of the shards."
        )
    if weight_map is not None:
        pieces = _indexed(location, pieces, weight_map)
    return _to_manifest(location, files, pieces)


def _safetensors_names(location: str) -> list[str]:
    present = locations.list_names(location) if locations.isdir(location) else []
    names = [name for name in present if name.endswith(SUFFIX)]
    if not names:
        raise CheckpointNotFoundError(f"{location!r} holds no {SUFFIX} files.")
    return sorted(names, key=natural_order)


def _read_index(location: str) -> dict[str, str] | None:
    """Return key -> file name from the index, None when there is no index."""
    path = locations.join(location, INDEX_NAME)
    try:
        weight_map = json.loads(read_file(path, MAX_TABLE_BYTES))["weight_map"]
        names = [str(name) for name in weight_map.values()]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"The index {path!r} is damaged ({error}): restore it from a copy.") from error
    bad = [name for name in names if not name.endswith(SUFFIX) or not locations.is_inner_name(name, max_parts=1)]
    if bad or not names:
        raise CorruptCheckpointError(
            f"The index {path!r} names {bad[0]!r:.300}, which is no safetensors file beside it."
            if bad
            else f"The index {path!r} names no tensors: whatever wrote it found none. Make the export again."
        )
    return dict(weight_map)


def read_header(path: str) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ValueError: it is not whole.
    """
    size = file_size(path)
    head = locations.read_range(path, 0, min(size, _HEADER_GUESS_BYTES))
    header_bytes = safetensors_file.header_length(head, size)
    if header_bytes > len(head):
        head += locations.read_range(path, len(head), header_bytes)
    return Header(size, header_bytes, *safetensors_file.parse_header(head[:header_bytes], size))


def _read_file(location: str, name: str) -> tuple[ShardFile, bool, list[StoredPiece]]:
    path = locations.join(location, name)
    try:
        size, header_bytes, metadata, entries = read_header(path)
        info = (
            json.loads(metadata[safetensors_file.SHARDING_INFO]) if safetensors_file.SHARDING_INFO in metadata else None
        )
        shapes = json.loads(metadata.get(safetensors_file.GLOBAL_SHAPES, "{}"))
        pieces = []
        for entry in entries:
            offset = (0,) * len(entry.shape) if info is None else _counts(entry, info[entry.name]["saved_offsets"])
            shape = _counts(entry, shapes[entry.name]) if entry.name in shapes else None
            shape = entry.shape if info is None else shape
            region = Region(offset, entry.shape)
            pieces.append(StoredPiece(entry.name, entry.dtype, region, shape, name, entry.first_byte, entry.num_bytes))
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing, but {INDEX_NAME} names it: restore it, or finish copying the directory."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path!r} is not a complete safetensors file ({type(error).__name__}: {error}): restore it from a copy."
        ) from error
    return ShardFile(name, size, header_bytes, 0), info is not None, pieces


def _counts(entry: safetensors_file.StoredEntry, values: Any) -> tuple[int, ...]:
    """Check an offset or a shape that stands in the metadata, which is not trusted."""
    if type(values) is list and len(values) == len(entry.shape):
        for number in values:
            if type(number) is not int or not 0 <= number < _MAX_ELEMENTS:
                break
        else:
            return tuple(values)
    raise ValueError(f"offset or global shape {values!s:.99} of {entry.name!r:.99} do not fit its shape {entry.shape}")


def _indexed(location: str, pieces: Sequence[StoredPiece], weight_map: Mapping[str, str]) -> list[StoredPiece]:
    kept = [piece for piece in pieces if weight_map.get(piece.key) == piece.file]
    absent = sorted(set(weight_map) - {piece.key for piece in kept})
    if absent:
        in_file = [piece.key for piece in pieces if piece.file == weight_map[absent[0]]]
        raise CorruptCheckpointError(
            f"{locations.join(location, INDEX_NAME)!r} says that {weight_map[absent[0]]!r} holds {absent[0]!r}, which "
            f"is not there{did_you_mean(absent[0], in_file)}: file and index are of different exports."
        )
    if len(kept) < len(pieces):
        ignored = summarize_keys(piece.key for piece in pieces if weight_map.get(piece.key) != piece.file)
        logger.warning("%s: not in the index and therefore ignored: %s", location, ignored)
    return kept


def _to_manifest(location: str, files: Mapping[str, ShardFile], pieces: Sequence[StoredPiece]) -> Manifest:
    groups = group_by_key(pieces)
    table = tabulate(groups, [_global_shape(location, group) for group in groups.values()])
    outside = find_outside(table)
    if outside is not None:
        raise CorruptCheckpointError(
            f"Key {outside.key!r} in {location!r}: {outside.region} in {outside.file!r} lies outside of the global "
            f"shape {outside.global_shape} that the file names: it is damaged. Restore it from a copy."
        )
    found = find_fault(location, table)
    if found is not None:
        key_id, fault = found
        _raise_fault(location, groups[table.keys[key_id]], table.shapes[key_id], fault.element)
    return to_manifest(table, list(files.values()))


def _global_shape(location: str, pieces: Sequence[StoredPiece]) -> tuple[int, ...]:
    first = pieces[0]
    for other in pieces[1:]:
        same_kind = (other.dtype, len(other.region.shape)) == (first.dtype, len(first.region.shape))
        if not same_kind or other.global_shape != first.global_shape:
            raise CorruptCheckpointError(
                f"Key {first.key!r} in {location!r} is {_kind(first)} in {first.file!r} and {_kind(other)} in "
                f"{other.file!r}, which do not fit together: the files are of different saves. Remove those that do "
                "not belong here."
            )
    # Not stored by torch and Automodel: as far as the pieces reach.
    ends = [tuple(map(operator.add, *piece.region)) for piece in pieces]
    reached = tuple(map(max, zip(*ends, strict=True))) if len(ends) > 1 else ends[0]
    if math.prod([n + 1 for n in reached]) > _MAX_ELEMENTS:
        farthest = max(zip(ends, pieces, strict=True), key=lambda pair: max(pair[0]))[1]
        raise CorruptCheckpointError(
            f"Key {first.key!r} in {location!r} would have the global shape {reached}: its offset "
            f"{farthest.region.offset} in {farthest.file!r} is damaged. Restore the file from a copy."
        )
    if first.global_shape is not None and math.prod([n + 1 for n in first.global_shape]) > _MAX_ELEMENTS:
        raise CorruptCheckpointError(
            f"Key {first.key!r} in {location!r} has the global shape {first.global_shape} in {first.file!r}, which is "
            "damaged. Restore the file from a copy."
        )
    return reached if first.global_shape is None else first.global_shape


def _kind(piece: StoredPiece) -> str:
    whole = "" if piece.global_shape is None else f" of {piece.global_shape}"
    return f"{piece.dtype} {piece.region.shape}{whole}"


def _raise_fault(
    location: str, pieces: Sequence[StoredPiece], shape: tuple[int, ...], element: tuple[int, ...]
) -> None:
    def holds(region: Region) -> bool:
        return all(o <= e < o + n for o, n, e in zip(region.offset, region.shape, element, strict=True))

    name = f"Key {pieces[0].key!r} (global shape {shape}) in {location!r}"
    holders = [piece for piece in pieces if holds(piece.region)]
    if holders:
        places = " and ".join(f"{piece.region} in {piece.file!r}" for piece in holders[:3])
        raise CorruptCheckpointError(
            f"{name}: element {element} is in several files: {places}. Some are of an earlier save; remove those."
        )
    found = ", ".join(f"{piece.region} in {piece.file!r}" for piece in pieces[:6])
    raise CorruptCheckpointError(
        f"{name}: element {element} is in no file. A shard file is missing or not visible yet; there are {found}."
    )
