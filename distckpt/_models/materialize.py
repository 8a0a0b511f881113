"""Memory for modules that were made on the meta device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch

from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import in_huge_pages
from distckpt._base.messages import summarize_keys
from distckpt._models.dtensor import local_part

_Place: TypeAlias = tuple[torch.nn.Module, str]
"""A module, and the name of one of its own parameters or buffers."""


def materialize_module(module: torch.nn.Module, device: Any) -> None:
    """Give a module on the meta device memory; tied parameters stay tied. What a load does not fill
    is computed.

    Buffers that are not in the state dict are computed by the `reset_parameters` of the modules
    that have them.

    Raises:
        CheckpointingException: a module has such buffers and no `reset_parameters`.
    """
    tied_places = _places_on_meta(module)
    if not tied_places:
        return
    resetters = _resetters(module, itertools.chain.from_iterable(tied_places))
    module.to_empty(device=device)
    for (owner, name), *others in tied_places:
        in_huge_pages(local_part(getattr(owner, name)))
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    with torch.no_grad():
        for owner in resetters:
            owner.reset_parameters()  # type: ignore[operator]


def _places_on_meta(module: torch.nn.Module) -> list[list[_Place]]:
    """Return, for each tensor of a module that is on the meta device, all its places."""
    places: dict[int, list[_Place]] = {}
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and tensor.is_meta:
                places.setdefault(id(tensor), []).append((owner, name))
    return list(places.values())


def _resetters(module: torch.nn.Module, places: Iterable[_Place]) -> list[torch.nn.Module]:
    """Return the modules that compute those tensors that no checkpoint holds."""
    unsaved = [place for place in places if place[1] in place[0]._non_persistent_buffers_set]
    paths = {owner: path for path, owner in module.named_modules()}
    helpless = [
        f"{paths[owner]}.{name}".removeprefix(".")
        for owner, name in unsaved
        if not hasattr(owner, "reset_parameters")
    ]
    if helpless:
        raise CheckpointingException(
            f"The buffers {summarize_keys(helpless)} are on the meta device, and no checkpoint "
            "holds them, as they are not persistent: their modules need a method "
            "reset_parameters() that computes them. Or make the module on a device with memory."
        )
    return list(dict.fromkeys(owner for owner, _ in unsaved))
