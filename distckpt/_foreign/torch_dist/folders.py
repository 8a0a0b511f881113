"""FSDP checkpoints of accelerate and transformers: a folder of DCP for each object.

Models are in `pytorch_model_fsdp_<n>` under `model`, optimizers in `optimizer_<n>` under
`optimizer`. Those with a number other than 0 get it here: `model_1`, `optimizer_1`.
"""

from __future__ import annotations

import re

from distckpt._base.messages import natural_order
from distckpt._foreign.torch_dist.metadata import Metadata, StoredItem, read_metadata
from distckpt._format.foreign_formats import FSDP_FOLDER, TORCH_DIST
from distckpt._storage import locations

_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)", re.ASCII)
_ENTRIES = {"pytorch_model_fsdp": "model", "optimizer": "optimizer"}
_VALUES = re.compile(
    r"((?:scheduler|scaler|dl_state_dict|custom_checkpoint)(?:_\d+)?)\.(?:bin|pt|pkl)", re.ASCII
)
"""Files of values that all ranks share."""


def is_divided(location: str) -> bool:
    """Whether a directory has a folder of DCP for the model."""
    return locations.exists(locations.join(location, FSDP_FOLDER, TORCH_DIST.marker))


def read_folders(location: str) -> Metadata:
    """Read the `.metadata` files of all folders as one, with names of files in folders."""
    united = Metadata([], {}, {})
    for folder in sorted(locations.list_names(location), key=natural_order):
        match = _FOLDER.fullmatch(folder)
        if match is not None:
            own = read_metadata(locations.join(location, folder, TORCH_DIST.marker))
            number = "" if match[2] == "0" else f"_{match[2]}"
            _add(united, own, folder, _ENTRIES[match[1]], number)
    return united


def _add(united: Metadata, own: Metadata, folder: str, entry: str, number: str) -> None:
    """Add what a folder holds, whose names begin with `entry`."""

    def named(name: str) -> str:
        return f"{entry}{number}{name.removeprefix(entry)}"

    def moved(item: StoredItem) -> StoredItem:
        return item._replace(file=f"{folder}/{item.file}")

    for tensor in own.tensors:
        chunks = [(region, moved(item)) for region, item in tensor.chunks]
        united.tensors.append(tensor._replace(key=named(tensor.key), chunks=chunks))
    for name, item in own.objects.items():
        united.objects[named(name)] = moved(item)
        first, *rest = own.paths.get(name, (name,))
        united.paths[named(name)] = (named(str(first)), *rest)


def files_of_values(location: str) -> dict[str, str]:
    """Return the files of values beside the folders, with the entries that they become."""
    files = {}
    for name in locations.list_names(location):
        match = _VALUES.fullmatch(name)
        if match is not None:
            files[name] = match[1]
    return files
