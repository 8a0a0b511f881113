"""Reader of Orbax checkpoints."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._checkpoint.stored_pieces import Reader, StoredPiece, build_manifest
from distckpt._foreign.orbax.arrays import ArrayFile as ArrayFile
from distckpt._foreign.orbax.arrays import OrbaxArrays
from distckpt._foreign.orbax.layout import common_state, is_checkpoint
from distckpt._foreign.seals import Seal
from distckpt._format import codec
from distckpt._format.foreign_formats import ORBAX
from distckpt._format.manifest import Manifest
from distckpt._format.safetensors_file import ShardFile
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._storage import locations


class OrbaxReader(Reader):
    """Reads an item, or the directory of a step with its items."""

    name = ORBAX.name

    def detect(self, location: str, marker: Mapping[str, Any] | None) -> bool:
        return marker is None and is_checkpoint(location)

    def manifest(self, location: str, seal: Seal | None = None) -> Manifest:
        arrays = OrbaxArrays(location, seal)
        num_threads = 1 if locations.is_local(location) else NUM_REQUESTS
        run_threads(arrays.open, arrays.files, num_threads)
        pieces = []
        files = []
        scalars = {}
        for file, leaf in arrays.files.items():
            if leaf.kind == "scalar":
                scalars[leaf.whole_path] = arrays.read_scalar(file)
                continue
            array = arrays.open(file)
            position = 0
            for cell, size in zip(array.cells, array.sizes, strict=True):
                pieces.append(
                    StoredPiece(leaf.key, array.dtype, cell, array.shape, file, position, size)
                )
                position += size
            files.append(ShardFile(file, position, 0, 0))
        # Read here, so that `verify` finds damage in them.
        common = common_state(arrays.layout, scalars, location)
        fields = {"decoded": "", "common": base64.b64encode(codec.encode(common)).decode()}
        return build_manifest(self.name, location, pieces, files, fields)

    def load_common_state(self, stored: StoredCheckpoint) -> Any:
        """Load numbers of Python, strings, empty containers, and items that hold JSON."""
        return codec.decode(base64.b64decode(stored.manifest.notes["common"]))
