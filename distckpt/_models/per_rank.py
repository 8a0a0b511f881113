"""Values of each rank's own, as objects of a state dict."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException
from distckpt._ranks.collectives import Ranks
from distckpt.mapping._base import OpenReplicaId
from distckpt.mapping._wrappers import ShardedObject

logger = logging.getLogger(__name__)

_SAME_ON_ALL = 'PerRank(..., {"all": (0, 1)}) is saved and loaded as one by any number of ranks'


class PerRank:
    """A value that may differ between ranks: it is stored for each of them, and restored under the
    same layout.

        loader = distckpt.PerRank(data_loader, {"dp": (dp_rank, dp_size)})
        state = {"model": model, "loader": loader}

    Under another layout, all ranks get a value that was the same on all ranks, of which there were
    several; where it iterates, with a warning, since equal counts of data that are divided among
    the ranks mean other places among fewer or more of them. Values that differed have no meaning
    there: the value stays as it is, with a warning that names it. `PerRank(value, {"all": (0, 1)})`
    says that the value is the same on all ranks under any layout: one is stored, and the value of a
    single rank is loaded on all.

    Args:
        value: something that `save` can store, or has `state_dict()` and `load_state_dict()`. After
            a load the attribute `value` is the stored one.
        grid: the place that the value depends on: for each axis of the layout (tensor, pipeline,
            data parallel) by name, the position of this rank and the number of positions. Ranks at
            the same position have copies, of which one is stored. Only
            `save(validate_replicas=True)` compares them: without it, copies that differ are lost
            silently. By default every rank has its own value, and the layout is the number of ranks
            and the device meshes of the modules in the same state dict.
    """

    _if_skipped: ClassVar[str] = (
        f"It keeps its value. Where that is the same on all ranks, {_SAME_ON_ALL}."
    )

    def __init__(self, value: Any, grid: Mapping[str, tuple[int, int]] | None = None) -> None:
        for axis, place in (grid or {}).items():
            is_pair = isinstance(place, tuple | list) and len(place) == 2
            is_pair = is_pair and all(isinstance(n, int) for n in place)
            if not is_pair or not 0 <= place[0] < place[1]:
                raise ValueError(
                    f"The place {axis!r} of a PerRank is (position, number of positions), got "
                    f"{place!r}."
                )
        self.value = value
        self.grid = grid

    def state_dict(self) -> Any:
        """Return the value to store."""
        if hasattr(self.value, "load_state_dict"):
            return self.value.state_dict()
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the value from the stored one."""
        if hasattr(self.value, "load_state_dict"):
            self.value.load_state_dict(state_dict)
        else:
            self.value = state_dict


def state_of(node: Any, name: str) -> Any:
    """Return the state of an object.

    CheckpointingException names the object if its `state_dict()` does not work.
    """
    try:
        return node.state_dict()
    except AttributeError as error:
        raise CheckpointingException(
            f"The state_dict() of the {type(node).__name__} at {name!r} failed ({error}): leave it "
            "out of the state dict. The data loaders of accelerate have a state with "
            "DataLoaderConfiguration(use_stateful_dataloader=True) only."
        ) from error


def cell_of(node: Any, key: str, ranks: Ranks, meshes: list[str], loads: bool) -> ShardedObject:
    """Describe the value of this rank as a cell of a grid; for a load, its layout."""
    grid = node.grid if isinstance(node, PerRank) else None
    axes = grid or {"rank": (ranks.rank, ranks.size)}
    layout = list(axes)
    if not grid:
        layout += meshes
    data: dict[str, Any] = {"layout": layout}
    if loads:
        data["is_of_all"] = bool(grid) and all(size == 1 for _, size in axes.values())
    else:
        data["value"] = state_of(node, key)
    offset, shape = zip(*axes.values(), strict=True)
    return ShardedObject(key, data, shape, offset, OpenReplicaId((0, ranks.rank)))


def warn_of_shared(node: Any, cell: ShardedObject) -> None:
    """Warn once of a loader whose state was equal on other ranks."""
    is_main = not any(cell.replica_id)  # type: ignore[arg-type]
    if is_main and _iterates(_value_of(node)):
        logger.warning(
            "%r goes on from the state that was equal on all ranks of another layout. If ranks "
            "divide its elements among them, this is another place, from which some are repeated "
            "or skipped: start it anew, and skip what was used. If all read the same elements, %s.",
            cell.key,
            _SAME_ON_ALL,
        )


def _value_of(node: Any) -> Any:
    if isinstance(node, PerRank):
        return node.value
    return node


def _iterates(value: Any) -> bool:
    return hasattr(value, "load_state_dict") and hasattr(value, "__iter__")


def warn_of_skipped(node: Any, cell: ShardedObject, saved: str, own: str) -> None:
    """Warn once of a value that was saved under another layout."""
    if any(cell.replica_id):  # type: ignore[arg-type]  # Not of rank 0.
        return
    value = _value_of(node)
    consequence = (
        f"The {type(value).__name__} begins with its first element: skip what was used. Where "
        f"all ranks read the same elements, {_SAME_ON_ALL}."
    )
    if not _iterates(value):
        consequence = node._if_skipped
    logger.warning(
        "%r is not restored: each rank has its own, and it was saved under the %s, while "
        "this load has the %s. %s",
        cell.key,
        saved,
        own,
        consequence,
    )


# --- Random state ---------------------------------------------------------------------------------


class RngState(PerRank):
    """State of the random number generators of this process.

    They are those of Python, numpy, torch, and its accelerator.

        state = {"model": model, "rng": distckpt.RngState()}

    A checkpoint has one state for each rank. A load under another layout leaves the generators as
    they are, with a warning, unless those of several ranks were all the same: see `PerRank`, also
    for `grid`.
    """

    _if_skipped = (
        "The random number generators go on from where they are: seed them with other numbers than "
        "at the start, or they repeat what was drawn then."
    )

    def __init__(self, grid: Mapping[str, tuple[int, int]] | None = None) -> None:
        super().__init__(None, grid)

    def state_dict(self) -> dict[str, Any]:
        """Return the states, by library."""
        devices = {name: module.get_rng_state() for name, module in _accelerator().items()}
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
            "devices": devices,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states.

        An accelerator's is set only if this process uses one of the same kind.
        """
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        torch.set_rng_state(state_dict["torch"])
        for name, module in _accelerator().items():
            if name in state_dict["devices"]:
                module.set_rng_state(state_dict["devices"][name])


def _accelerator() -> dict[str, Any]:
    """Return the module of the accelerator in use, by kind."""
    # Torch that is built for an accelerator raises, or names it, on a machine without one.
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    if device is None:
        return {}
    module = torch.get_device_module(device)
    # An accelerator that has not been used yet is not started for this.
    is_used = getattr(module, "is_initialized", bool)()
    return {device.type: module} if is_used else {}
