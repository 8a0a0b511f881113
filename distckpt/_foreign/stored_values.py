"""Parts of a checkpoint, whoever wrote it, read by one process for itself: regions of tensors, and objects."""

from __future__ import annotations

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._foreign.torch_dist.load import load_common_state, load_objects
from distckpt._format import codec
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._geometry.region import Region
from distckpt._io.read import read_chunks, read_copies
from distckpt._plan.load import Request, plan_load
from distckpt._state.common_state import COMMON_KEY


def read_region(location: str, manifest: Manifest, key: str, region: Region) -> torch.Tensor:
    """Read a region of a tensor, and nothing else of it.

    Raises:
        CorruptCheckpointError: a file is damaged.
        LoadMismatchError: the region was not saved completely.
    """
    key_id = manifest.key_index[key]
    values = torch.empty(region.shape, dtype=FROM_NAME[manifest.dtypes[key_id]])
    copies = plan_load(manifest, [Request(key, manifest.global_shapes[key_id], region)], location)
    read_copies(location, manifest, copies, [values], "read")
    return values


def object_keys(manifest: Manifest) -> list[str]:
    """Return the keys of all objects, common state included."""
    return [key for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True) if dtype == OBJECT]


def read_encoded(location: str, manifest: Manifest, key: str, verify: str) -> dict[tuple[int, ...], bytes]:
    """Read the cells of an object.

    Args:
        location: of the checkpoint.
        manifest: of the checkpoint.
        key: of the object.
        verify: as in `distckpt.load`.

    Returns:
        For the offset of each cell what `_codec.decode` takes.

    Raises:
        CorruptCheckpointError: a cell is damaged.
        UnsupportedObjectError: others wrote the checkpoint, and a cell is of a class that is not read from pickles.
    """
    rows = manifest.chunk_rows(manifest.key_index[key])
    chunks = {manifest.chunk_region(row).offset: row for row in range(rows.start, rows.stop)}
    if manifest.origin is None:
        return dict(zip(chunks, read_chunks(location, manifest, list(chunks.values()), verify), strict=True))
    if key == COMMON_KEY:
        return {(0,): codec.encode(load_common_state(location, manifest))}
    names = {str(offset): offset for offset in chunks}
    loaded = load_objects(location, manifest, {str(offset): row for offset, row in chunks.items()})
    return {names[name]: codec.encode(value) for name, value in loaded.items()}
