"""Reader of folders of safetensors files that distckpt did not write.

Two kinds: Hugging Face directories (whole tensors, with an index or a single file) and folders of
shards written by torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel (each
entry with its global offset).
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._base.messages import did_you_mean, natural_order, summarize_keys
from distckpt._checkpoint.reader import Reader
from distckpt._checkpoint.stored_pieces import StoredPiece, build_manifest
from distckpt._format import safetensors_file
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest, ShardFile, is_manifest_name
from distckpt._format.marker import read_file
from distckpt._format.read_header import read_header
from distckpt._geometry.region import Region, whole
from distckpt._plan.codes import CONFIG_NAMES
from distckpt._quantization.detect import settings_of
from distckpt._quantization.names import may_be_codes
from distckpt._storage import locations

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
SINGLE_NAME = "model.safetensors"

_NUMBERED = re.compile(r"(.*-)\d+(-of-0*(\d+)\.safetensors)", re.ASCII)
_MAX_CONFIG_BYTES = 64 << 20
_MAX_ELEMENTS = 1 << 62


class HuggingFaceReader(Reader):
    """Reads folders with safetensors files at their top level, and single files."""

    name = "huggingface"

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        names = (
            [locations.split(location)[1]]
            if is_single_file(location)
            else _safetensors_names(location)
        )
        # A directory with a manifest but no marker is an incomplete checkpoint.
        return marker is None and not all(map(is_manifest_name, names))

    def manifest(self, location: str) -> Manifest:
        return read_directory(location)


def is_single_file(location: str) -> bool:
    """Tell whether a location is a safetensors file, not a directory."""
    return (
        location.endswith(SUFFIX) and locations.exists(location) and not locations.isdir(location)
    )


def read_directory(location: str, *, require_sharding_info: bool = False) -> Manifest:
    """Read the headers of a folder of safetensors files, or of a single one.

    With `require_sharding_info`, files without the positions of their entries in the global tensors
    are refused.
    """
    fields: dict[str, Any] = {}
    weight_map = None
    if is_single_file(location):
        fields["is_file"] = True
        location, only = locations.split(location)
        names = [only]
    else:
        weight_map = _read_index(location)
        names = (
            _safetensors_names(location) if weight_map is None else sorted(set(weight_map.values()))
        )
        if (
            weight_map
            and SINGLE_NAME not in names
            and locations.exists(locations.join(location, SINGLE_NAME))
        ):
            raise CorruptCheckpointError(
                f"{location!r} holds {INDEX_NAME} and a {SINGLE_NAME} that is not in it, of two "
                f"exports: remove one of them, or give the location of {SINGLE_NAME} itself."
            )
    if not names:
        raise CheckpointNotFoundError(f"{location!r} holds no {SUFFIX} files.")
    files: list[ShardFile] = []
    pieces: list[StoredPiece] = []
    without_info: list[str] = []
    for name in names:
        file, has_info, found = _read_file(location, name)
        files.append(file)
        pieces.extend(found)
        if not has_info:
            without_info.append(name)
    if without_info and (require_sharding_info or len(without_info) < len(names)):
        raise CorruptCheckpointError(
            f"{locations.join(location, without_info[0])!r} does not say where in the global "
            f"tensors its entries lie: it has no {safetensors_file.SHARDING_INFO} in its header "
            "metadata, so it is no shard of a distributed save. Remove it from the folder, or "
            "name the folder of the shards."
        )
    if weight_map is None and not fields:
        _check_all_are_there(location, without_info)
    if weight_map is not None:
        pieces = _indexed(location, pieces, weight_map)
    if any(may_be_codes(piece.dtype) for piece in pieces):
        fields["quantization"] = _read_quantization(location)
    return build_manifest(HuggingFaceReader.name, location, pieces, files, fields)


def _check_all_are_there(location: str, names: Sequence[str]) -> None:
    """Refuse a directory without an index where one of the files that are numbered in their names
    is missing.
    """
    matches = filter(None, map(_NUMBERED.fullmatch, names))
    for (start, end, total), there in Counter(match.groups() for match in matches).items():
        if there < int(total):
            raise CorruptCheckpointError(
                f"{location!r} holds {there} of the {total} files {f'{start}*{end}'!r}: copy the "
                f"others, and {INDEX_NAME}, or give the location of one file to read that alone."
            )


def _read_quantization(location: str) -> dict[str, Any] | None:
    """Return what the files beside the tensors say about quantised ones, see `settings_of`; None
    for nothing.
    """
    configs = {}
    for name in CONFIG_NAMES:
        path = locations.join(location, name)
        try:
            # Not as strict as for headers: models have infinite limits in their configurations.
            config = json.loads(read_file(path, _MAX_CONFIG_BYTES))
        except FileNotFoundError:
            continue
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"{path!r} is damaged ({error}): restore it from a copy."
            ) from error
        configs[name] = config if isinstance(config, dict) else {}
    return settings_of(configs)


def _safetensors_names(location: str) -> list[str]:
    present = locations.list_names(location) if locations.isdir(location) else []
    return sorted((name for name in present if name.endswith(SUFFIX)), key=natural_order)


def _read_index(location: str) -> dict[str, str] | None:
    """Return key -> file name from the index, None when there is no index."""
    path = locations.join(location, INDEX_NAME)
    try:
        weight_map = safetensors_file.parse_json(read_file(path, MAX_TABLE_BYTES))["weight_map"]
        names = [str(name) for name in weight_map.values()]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"The index {path!r} is damaged ({error}): restore it from a copy."
        ) from error
    bad = [
        name
        for name in names
        if not name.endswith(SUFFIX) or not locations.is_inner_name(name, max_parts=1)
    ]
    if bad or not names:
        raise CorruptCheckpointError(
            f"The index {path!r} names {bad[0]!r:.300}, which is no safetensors file beside it."
            if bad
            else f"The index {path!r} names no tensors: whatever wrote it found none. Make the export again."
        )
    return dict(weight_map)


def _read_file(location: str, name: str) -> tuple[ShardFile, bool, list[StoredPiece]]:
    path = locations.join(location, name)
    try:
        header = read_header(path)
        metadata = header.metadata
        has_info = safetensors_file.SHARDING_INFO in metadata
        info = json.loads(metadata[safetensors_file.SHARDING_INFO]) if has_info else {}
        shapes = json.loads(metadata.get(safetensors_file.GLOBAL_SHAPES, "{}"))
        pieces = []
        for entry in header.entries:
            if has_info:
                region = Region(_counts(entry, info[entry.name]["saved_offsets"]), entry.shape)
                shape = _counts(entry, shapes[entry.name]) if entry.name in shapes else None
            else:
                region, shape = whole(entry.shape), entry.shape
            pieces.append(
                StoredPiece(
                    entry.name, entry.dtype, region, shape, name, entry.first_byte, entry.num_bytes
                )
            )
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{path!r} is missing, but {INDEX_NAME} names it: restore it, or finish copying the "
            "directory."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path!r} is not a complete safetensors file ({type(error).__name__}: {error}): "
            "restore it from a copy."
        ) from error
    return ShardFile(name, header.num_bytes, header.header_bytes, 0), has_info, pieces


def _counts(entry: safetensors_file.Entry, values: Any) -> tuple[int, ...]:
    """Check an offset or a shape that stands in the metadata, which is not trusted."""
    is_fitting = type(values) is list and len(values) == len(entry.shape)
    if is_fitting and all(type(number) is int and 0 <= number < _MAX_ELEMENTS for number in values):
        return tuple(values)
    raise ValueError(
        f"offset or global shape {values!s:.99} of {entry.name!r:.99} do not fit its shape "
        f"{entry.shape}"
    )


def _indexed(
    location: str, pieces: Sequence[StoredPiece], weight_map: Mapping[str, str]
) -> list[StoredPiece]:
    """Leave out the pieces that the index does not name, with a warning; all that it names must be
    there.
    """
    kept = [piece for piece in pieces if weight_map.get(piece.key) == piece.file]
    absent = sorted(set(weight_map) - {piece.key for piece in kept})
    if absent:
        in_file = [piece.key for piece in pieces if piece.file == weight_map[absent[0]]]
        raise CorruptCheckpointError(
            f"{locations.join(location, INDEX_NAME)!r} says that {weight_map[absent[0]]!r} holds "
            f"{absent[0]!r}, which is not there{did_you_mean(absent[0], in_file)}: file and index "
            "are of different exports."
        )
    if len(kept) < len(pieces):
        ignored = summarize_keys(
            piece.key for piece in pieces if weight_map.get(piece.key) != piece.file
        )
        logger.warning("%s: not in the index and therefore ignored: %s", location, ignored)
    return kept
