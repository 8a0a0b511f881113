"""Memory for modules that were made on the meta device."""

from __future__ import annotations

from typing import Any

import torch

from distckpt._base.errors import CheckpointingException
from distckpt._base.memory import in_huge_pages
from distckpt._base.messages import summarize_keys
from distckpt._models.dtensor import local_part


def materialize_module(module: torch.nn.Module, device: Any) -> None:
    """Give a module on the meta device memory; tied parameters stay tied. What a load does not fill
    is computed.

    Buffers that are not in the state dict are computed by the `reset_parameters` of the modules
    that have them. CheckpointingException when there is none.
    """
    names: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and tensor.is_meta:
                names.setdefault(id(tensor), []).append((owner, name))
    if not names:
        return
    paths = {owner: path for path, owner in module.named_modules()}
    unsaved = [
        place
        for places in names.values()
        for place in places
        if place[1] in place[0]._non_persistent_buffers_set
    ]
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
    module.to_empty(device=device)
    for (owner, name), *others in names.values():
        in_huge_pages(local_part(getattr(owner, name)))
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    with torch.no_grad():
        for owner in dict.fromkeys(owner for owner, _ in unsaved):
            owner.reset_parameters()  # type: ignore[operator]
