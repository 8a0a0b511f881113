"""Reader of Orbax checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distckpt._base.errors import CorruptCheckpointError
from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest
from distckpt._foreign.orbax.arrays import ArrayFile, OrbaxArrays
from distckpt._foreign.orbax.layout import is_checkpoint, tree_of
from distckpt._format.foreign_formats import ORBAX
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint


def at(location: str) -> ArrayFile:
    """Return the interface to the URL of an array."""
    return ArrayFile(location)


class OrbaxReader(Reader):
    """Reads an item, or the directory of a step with its items."""

    name = ORBAX.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        return marker is None and is_checkpoint(location)

    def manifest(self, location: str) -> Manifest:
        arrays = OrbaxArrays(location)
        pieces = []
        files = []
        for file, (item, leaf) in arrays.files.items():
            if leaf.kind != "array":
                continue
            key = item.prefix + leaf.name
            array = arrays.open(file)
            position = 0
            for cell, size in zip(array.cells, array.sizes, strict=True):
                piece = StoredPiece(key, array.dtype, cell, array.shape, file, position, size)
                pieces.append(piece)
                position += size
            files.append(ShardFile(file, position, 0, 0))
        return build_manifest(self.name, location, pieces, files, {"decoded": True})

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load numbers of Python, strings, empty containers, and items that hold JSON."""
        arrays = OrbaxArrays(stored.location)
        values = {}
        for item in arrays.layout.items:
            start = (item.name,) * bool(item.prefix)
            for leaf in item.leaves:
                if leaf.kind == "value":
                    values[(*start, *leaf.path)] = leaf.value
        for file, (item, leaf) in arrays.files.items():
            if leaf.kind == "scalar":
                start = (item.name,) * bool(item.prefix)
                values[(*start, *leaf.path)] = arrays.read_scalar(file)
        common = tree_of(values, stored.location)
        for name, value in arrays.layout.values.items():
            if name in common:
                raise CorruptCheckpointError(
                    f"{stored.location!r} has an item {name!r}, and its tree an entry of this "
                    "name: give the directory of one item."
                )
            common[name] = value
        return common
