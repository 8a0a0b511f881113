"""FSDP checkpoints of accelerate and transformers: one folder per object.

DCP writes each folder. Models are in `pytorch_model_fsdp_<n>` under `model`, optimizers in
`optimizer_<n>` under `optimizer`. Those with a number other than 0 get it here: `model_1`,
`optimizer_1`.
"""

from __future__ import annotations

import re

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import natural_order
from distckpt._foreign.torch_dist.metadata import Metadata, StoredItem, read_metadata
from distckpt._format.foreign_formats import TORCH_DIST
from distckpt._storage import locations

_FIRST = "pytorch_model_fsdp_0"
_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)", re.ASCII)
_ENTRIES = {"pytorch_model_fsdp": "model", "optimizer": "optimizer"}
_VALUES = re.compile(
    r"((?:scheduler|scaler|dl_state_dict|custom_checkpoint)(?:_\d+)?)\.(?:bin|pt|pkl)", re.ASCII
)
"""Files of values that all ranks share."""
_OF_A_RANK = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank\d+\.bin", re.ASCII)


def is_divided(location: str) -> bool:
    """Whether there is a folder per object, or a file per rank."""
    names = locations.names_within(location)
    if _FIRST in names:
        return locations.exists(locations.join(location, _FIRST, TORCH_DIST.marker))
    return any(map(_OF_A_RANK.fullmatch, names))


def read_folders(location: str) -> Metadata:
    """Read the `.metadata` files of all folders as one."""
    united = Metadata([], {}, {})
    for folder in sorted(locations.list_names(location), key=natural_order):
        if _OF_A_RANK.fullmatch(folder):
            raise CheckpointingException(
                f"{location!r} holds files that each rank saved alone ({folder!r}), as accelerate "
                "does with use_dcp=False and LOCAL_STATE_DICT. They do not say how tensors are "
                "divided: load them with accelerate on as many ranks, and save again with "
                "SHARDED_STATE_DICT and use_dcp=True."
            )
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
    """Return the entries of values, by the names of their files."""
    files = {}
    for name in locations.list_names(location):
        match = _VALUES.fullmatch(name)
        if match is not None:
            files[name] = match[1]
    return files
