"""Reader of folders of safetensors files that distckpt did not write.

Two kinds: Hugging Face directories (whole tensors, with an index or a single file) and folders of
shards written by torch's `HuggingFaceStorageWriter(save_distributed=True)` or NeMo Automodel (each
entry with its global offset).
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointNotFoundError, CorruptCheckpointError
from distckpt._base.lazy import torch
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._base.threads import NUM_REQUESTS, map_threads
from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest
from distckpt._foreign.directory_faults import (
    CONTROL_SUFFIX,
    check_all_are_there,
    check_copies,
    check_is_downloaded,
    damaged_file,
    damaged_index,
    misplaced_tensor,
    missing_file,
)
from distckpt._foreign.quantization_settings import read_settings, unclear_shapes
from distckpt._format import safetensors_file
from distckpt._format.checksum import checksum
from distckpt._format.code_names import is_shape, may_be_codes
from distckpt._format.foreign_formats import HUGGING_FACE
from distckpt._format.hf_names import (
    INDEX_SUFFIX,
    SUFFIX,
    derive_base_prefix_from_path,
)
from distckpt._format.manifest import MAX_TABLE_BYTES, Manifest, is_manifest_name
from distckpt._format.marker import read_file
from distckpt._format.safetensors_file import Header, ShardFile, read_header
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region, whole
from distckpt._io.read import read_chunks
from distckpt._storage import locations
from distckpt.rules._mapped import TensorSpec

logger = logging.getLogger(__name__)

INDEX_NAME = HUGGING_FACE.marker
_VARIANT_INDEX = re.compile(r".+\.safetensors\.index\.([^.]+)\.json")
_MAX_AXES = 8
_MAX_ELEMENTS = 1 << 62
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of parsing untrusted bytes."""


class HuggingFaceReader(Reader):
    """Reads folders with safetensors files at their top level, and single files."""

    name = HUGGING_FACE.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        if location.endswith(SUFFIX) and locations.isfile(location):
            names = [locations.split(location)[1]]
        else:
            present = locations.names_within(location)
            names = _safetensors_names(present)
            if not names and _index_among(present) is not None:
                # The files that it names lie in folders.
                return marker is None
        # A directory with a manifest but no marker is an incomplete checkpoint.
        return marker is None and not all(map(is_manifest_name, names))

    def manifest(self, location: str) -> Manifest:
        return read_directory(location)

    def is_unchanged(self, stored: StoredCheckpoint) -> bool:
        """Compare the headers; where these do not suffice, the descriptions."""
        described = []
        files = _find_files(stored.location)
        if files.weight_map is None and not any(map(may_be_codes, set(stored.manifest.dtypes))):
            # The look below names what is missing or damaged.
            with contextlib.suppress(OSError, ValueError):
                for name in files.names:
                    path = locations.join(files.folder, name)
                    size, head = safetensors_file.read_header_bytes(path)
                    described.append(ShardFile(name, size, len(head), checksum(head)))
            if described == stored.manifest.files:
                return True
        again = read_directory(stored.location, warns=False)
        return again.to_bytes() == stored.manifest.to_bytes()


class _Files(NamedTuple):
    """The files of a checkpoint.

    Attributes:
        folder: where they lie.
        names: of the files.
        weight_map: from the index, the name of the file that holds each key; None without an index.
        index_name: of the index.
        others: names of files at the top level that the index does not name.
        is_alone: whether a single file was given as the checkpoint.
        warns: whether tensors that the index does not name are logged.
    """

    folder: str
    names: list[str]
    weight_map: dict[str, str] | None = None
    index_name: str = INDEX_NAME
    others: Sequence[str] = ()
    is_alone: bool = False
    warns: bool = True


def read_directory(
    location: str, *, require_sharding_info: bool = False, warns: bool = True
) -> Manifest:
    """Read the headers of safetensors files: of a folder, or a single one.

    With `require_sharding_info`, files without the positions of their entries in the global tensors
    are refused. `warns` of tensors that the index does not name.
    """
    directory = _find_files(location)._replace(warns=warns)
    if not directory.names:
        state = f"holds no {SUFFIX} files" if locations.exists(location) else "does not exist"
        raise CheckpointNotFoundError(f"{location!r} {state}.")
    read = _read_files(directory)
    pieces, fields = _pieces_in(directory, read, require_sharding_info)
    if any(map(may_be_codes, {piece.dtype for piece in pieces})):
        fields["quantization"] = read_settings(directory.folder)
    files = [file.file for file in read]
    manifest = build_manifest(HuggingFaceReader.name, directory.folder, pieces, files, fields)
    return _with_shapes(location, manifest)


def _read_files(files: _Files) -> list[_ReadFile]:
    """Read the headers, without variants in another precision."""
    # Storage of a network, which may be at a local path, answers each request after a while.
    read = map_threads(functools.partial(_read_file, files), files.names, NUM_REQUESTS)
    if files.weight_map is None and not files.is_alone:
        return _without_variants(read)
    return read


def _pieces_in(
    files: _Files, read: Sequence[_ReadFile], require_sharding_info: bool
) -> tuple[list[StoredPiece], dict[str, Any]]:
    """Return the pieces that the index names, and fields of the manifest."""
    without_info = [file.file.name for file in read if not file.has_info]
    if without_info and (require_sharding_info or len(without_info) < len(read)):
        path = locations.join(files.folder, without_info[0])
        raise CorruptCheckpointError(
            f"{path!r} does not say where in the global "
            f"tensors its entries lie: it has no {safetensors_file.SHARDING_INFO} in its header "
            "metadata, so it is not a shard of a distributed save. Remove it from the folder, or "
            "name the folder of the shards."
        )
    pieces = []
    for file in read:
        pieces.extend(file.pieces)
    if files.is_alone:
        return pieces, {"is_file": True}
    if files.weight_map is None:
        check_all_are_there(files.folder, without_info)
        return pieces, {}
    fields = _forgotten(files, read, files.weight_map)
    indexed = _indexed(files, pieces, files.weight_map)
    if without_info:
        check_copies(files.folder, indexed, pieces)
    return indexed, fields


def _find_files(location: str) -> _Files:
    if location.endswith(SUFFIX) and locations.isfile(location):
        folder, name = locations.split(location)
        if locations.is_local(location) and locations.exists(location + CONTROL_SUFFIX):
            check_is_downloaded(folder, [name], {name + CONTROL_SUFFIX})
        return _Files(folder, [name], is_alone=True)
    present = locations.names_within(location)
    at_top = _safetensors_names(present)
    check_is_downloaded(location, at_top, set(present))
    index = _index_among(present)
    if index is None:
        return _Files(location, at_top)
    weight_map = _read_index(location, index)
    names = sorted(set(weight_map.values()))
    single = index.removesuffix(".index.json")
    if single in at_top and single not in names:
        raise CorruptCheckpointError(
            f"{location!r} holds {index} and a {single} that is not in it, of two "
            f"exports: remove one of them, or give the location of {single} itself."
        )
    others = [name for name in at_top if name not in names]
    return _Files(location, names, weight_map, index, others)


def _index_among(names: Sequence[str]) -> str | None:
    """Return the name of the index, or None if it is unclear.

    Other programs give it other names.
    """
    if INDEX_NAME in names:
        return INDEX_NAME
    candidates = sorted((name for name in names if name.endswith(INDEX_SUFFIX)), key=len)
    # Those of variants have names such as diffusion_pytorch_model.fp16.safetensors.index.json.
    if not candidates:
        return _index_of_variant(names)
    beginning = candidates[0].removesuffix(INDEX_SUFFIX) + "."
    if all(name.startswith(beginning) for name in candidates):
        return candidates[0]
    return None


def _index_of_variant(names: Sequence[str]) -> str | None:
    """Return the name of an index such as `model.safetensors.index.fp16.json`.

    It counts only where there are files of this variant alone.
    """
    matches = list(filter(None, map(_VARIANT_INDEX.fullmatch, names)))
    if len(matches) != 1:
        return None
    mark = f".{matches[0].group(1)}"
    if not all(mark in name for name in names if name.endswith(SUFFIX)):
        return None
    return matches[0].string


def _safetensors_names(present: Sequence[str]) -> list[str]:
    names = sorted((name for name in present if name.endswith(SUFFIX)), key=natural_order)
    # Mistral's own format lies beside the one of transformers, with the same tensors.
    return [name for name in names if not name.startswith("consolidated")] or names


def _with_shapes(location: str, manifest: Manifest) -> Manifest:
    """Note the shapes stored with packed codes that do not show them."""
    if "I32" not in manifest.dtypes:
        return manifest
    settings = manifest.quantization or {}
    columns = zip(manifest.keys, manifest.global_shapes, manifest.dtypes, strict=True)
    tensors = {key: TensorSpec(shape, dtype) for key, shape, dtype in columns}
    # Integers of any shape may have such a name.
    keys = []
    for key in unclear_shapes(tensors, settings):
        if tensors[key].dtype in ("I32", "I64") and math.prod(tensors[key].shape) <= _MAX_AXES:
            keys.append(key)
    if not keys:
        return manifest
    shapes = _read_shapes(StoredCheckpoint(location, manifest), keys)
    manifest.quantization = {"blocks": [], "num_bits": [], **settings, "shapes": shapes}
    manifest.origin = {**manifest.notes, "quantization": manifest.quantization}
    return manifest


def _read_shapes(stored: StoredCheckpoint, keys: Sequence[str]) -> dict[str, list[int]]:
    """Read the shapes in some tensors; skip tensors that hold none."""
    chunks: list[int] = []
    for key in keys:
        chunks.extend(stored.chunks_of(key))
    shapes: dict[str, list[int]] = {}
    for key, content in zip(keys, read_chunks(stored, chunks), strict=True):
        dtype = FROM_NAME[stored.dtype_name(key)]
        shape = torch.frombuffer(bytearray(content), dtype=dtype).tolist()
        if is_shape(shape):
            shapes[key] = shape
    return shapes


def _read_index(location: str, index: str) -> dict[str, str]:
    """Return the file of each key, from the index."""
    path = locations.join(location, index)
    try:
        content = read_file(path, MAX_TABLE_BYTES)
    except FileNotFoundError as error:
        raise missing_file(location, index) from error
    try:
        weight_map = safetensors_file.parse_json(content)["weight_map"]
        names = set(map(str, weight_map.values()))
    except _MALFORMED as error:
        raise damaged_index(path, content, error) from error
    for name in names:
        if not name.endswith(SUFFIX) or not locations.is_inner_name(name, max_parts=4):
            raise CorruptCheckpointError(
                f"The index {path!r} names {name!r:.300}, which is not a safetensors file beside "
                "it, nor in a folder there."
            )
    if not names:
        raise CorruptCheckpointError(
            f"The index {path!r} names no tensors: whatever wrote it found none. Make the export "
            "again."
        )
    return dict(weight_map)


class _ReadFile(NamedTuple):
    """A file by its header: its pieces, and whether it gives their positions."""

    file: ShardFile
    has_info: bool
    pieces: list[StoredPiece]


def _read_file(files: _Files, name: str) -> _ReadFile:
    path = locations.join(files.folder, name)
    try:
        header = read_header(path)
        has_info = safetensors_file.SHARDING_INFO in header.metadata
        pieces = _pieces_of_file(name, header, has_info)
    except FileNotFoundError as error:
        index = files.index_name if files.weight_map is not None else ""
        raise missing_file(files.folder, name, index) from error
    except _MALFORMED as error:
        raise damaged_file(path, error) from error
    file = ShardFile(name, header.num_bytes, header.header_bytes, header.checksum)
    return _ReadFile(file, has_info, pieces)


def _without_variants(files: Sequence[_ReadFile]) -> list[_ReadFile]:
    """Leave out files with the same tensors in another precision.

    `diffusion_pytorch_model.fp16.safetensors` is an example.
    """
    keys: dict[str, set[str]] = {}
    for file in files:
        stem = derive_base_prefix_from_path(file.file.name)
        keys.setdefault(stem, set()).update(piece.key for piece in file.pieces)
    variants = set()
    for stem in keys:
        plain = stem.rpartition(".")[0]
        if plain in keys and keys[stem] <= keys[plain]:
            variants.add(stem)
    full_files = []
    for file in files:
        if derive_base_prefix_from_path(file.file.name) not in variants:
            full_files.append(file)
    return full_files


def _pieces_of_file(file: str, header: Header, has_info: bool) -> list[StoredPiece]:
    """Return the pieces of a file.

    They are whole tensors, or with `has_info` shards at the positions that its metadata has.
    """
    info: Any = {}
    shapes: Any = {}
    if has_info:
        info = json.loads(header.metadata[safetensors_file.SHARDING_INFO])
        shapes = json.loads(header.metadata.get(safetensors_file.GLOBAL_SHAPES, "{}"))
    pieces = []
    region_of = functools.cache(whole)
    for entry in header.entries:
        name, dtype, shape, num_bytes, first_byte = entry
        region = region_of(shape)
        global_shape: tuple[int, ...] | None = shape
        if has_info:
            region = Region(_counts(entry, info[name]["saved_offsets"]), shape)
            global_shape = None
            if name in shapes:
                global_shape = _counts(entry, shapes[name])
        pieces.append(StoredPiece(name, dtype, region, global_shape, file, first_byte, num_bytes))
    return pieces


def _counts(entry: safetensors_file.Entry, values: Any) -> tuple[int, ...]:
    """Check and return an offset or a shape from untrusted metadata."""
    is_fitting = type(values) is list and len(values) == len(entry.shape)
    # In JSON, true is no number.
    are_integers = is_fitting and {int}.issuperset(map(type, values))
    if are_integers and 0 <= min(values, default=0) <= max(values, default=0) < _MAX_ELEMENTS:
        return tuple(values)
    raise ValueError(
        f"offset or global shape {values!s:.99} of {entry.name!r:.99} do not fit its shape "
        f"{entry.shape}"
    )


def _indexed(
    files: _Files, pieces: Sequence[StoredPiece], weight_map: Mapping[str, str]
) -> list[StoredPiece]:
    """Return the pieces that the index names; all must exist."""
    indexed_pieces = []
    for piece in pieces:
        if weight_map.get(piece.key) == piece.file:
            indexed_pieces.append(piece)
    absent = sorted(set(weight_map) - {piece.key for piece in indexed_pieces})
    if absent:
        index = locations.join(files.folder, files.index_name)
        raise misplaced_tensor(index, absent[0], weight_map[absent[0]], pieces)
    return indexed_pieces


def _forgotten(
    files: _Files, read: Sequence[_ReadFile], weight_map: Mapping[str, str]
) -> dict[str, Any]:
    """Return the tensors that the index does not name, as a field.

    A warning lists them. They are looked for in the files that the index names, and in files with
    similar names.
    """
    by_name = {}
    for file in read:
        by_name[file.file.name] = _unnamed(file.pieces, weight_map)
    beginnings = tuple(f"{derive_base_prefix_from_path(name)}-" for name in files.names)
    for name in files.others:
        if name.startswith(beginnings):
            by_name[name] = _keys_of_other(files, name, weight_map)
    forgotten = {}
    for name, keys in by_name.items():
        if not keys:
            continue
        forgotten[name] = keys
        if files.warns:
            logger.warning(
                "%s: not in the index and therefore ignored: %s, in %r. Add them to %s if they "
                "belong to the model",
                files.folder,
                summarize_keys(keys),
                name,
                files.index_name,
            )
    return {"forgotten": forgotten} if forgotten else {}


def _keys_of_other(files: _Files, name: str, weight_map: Mapping[str, str]) -> list[str]:
    """Return the tensors that only a file outside the index has."""
    try:
        pieces = _read_file(files, name).pieces
    except CorruptCheckpointError as error:
        if files.warns:
            logger.warning("not in the index %s and therefore ignored: %s", files.index_name, error)
        return []
    return _unnamed(pieces, weight_map)


def _unnamed(pieces: Iterable[StoredPiece], weight_map: Mapping[str, str]) -> list[str]:
    return [piece.key for piece in pieces if piece.key not in weight_map]
