"""Memory for modules that were made on the meta device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from distckpt._base.dtypes import flat_bytes
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.memory import in_huge_pages
from distckpt._base.messages import summarize_keys
from distckpt._models.dtensor import local_part
from distckpt._state.shards import Shard
from distckpt.mapping._sharded_tensor import ShardedTensor

_Place: TypeAlias = tuple[torch.nn.Module, str]
"""A module, and the name of its own parameter or buffer."""


class Made(NamedTuple):
    """A place that got memory, and its meta tensor before."""

    owner: torch.nn.Module
    name: str
    on_meta: torch.Tensor


def materialize_module(module: torch.nn.Module, device: Any) -> list[Made]:
    """Give a module on the meta device memory; tied parameters stay tied.

    Returns the places without values.

    Buffers that are not in the state dict are computed: by the `reset_parameters` of the module
    that has them, or by the `_init_weights` of the nearest module around it, as transformers does.

    Raises:
        CheckpointingException: neither computes some of them.
        ValueError: the device is the meta device.
    """
    tied_places = _places_on_meta(module)
    if not tied_places:
        return []
    if torch.device(device).type == "meta":
        raise ValueError(
            "materialize='meta' gives no memory: give a device that has some, as 'cpu'"
        )
    # Before the parameters have memory: initializing these would take longer than loading them. On
    # this device, even where the caller's default is the meta device.
    with torch.device(device):
        _compute_unsaved(module, tied_places, device)
    made = []
    for owner, name in itertools.chain.from_iterable(tied_places):
        tensor = getattr(owner, name)
        if tensor.is_meta:
            made.append(Made(owner, name, tensor))

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.to(device)
        if type(tensor) is torch.nn.Parameter and tensor.is_contiguous():
            # empty_like runs in Python for the meta device.
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    module._apply(with_memory)  # type: ignore[no-untyped-call]
    for (owner, name), *others in tied_places:
        in_huge_pages(local_part(getattr(owner, name)))
        for other, other_name in others:
            setattr(other, other_name, getattr(owner, name))
    return made


def keys_without_values(
    shards: Iterable[Shard], absent: Collection[str], made: Sequence[Made]
) -> list[str]:
    """Return the absent keys of shards whose memory has no values yet."""
    addresses = set()
    for place in made:
        addresses.add(_address(local_part(getattr(place.owner, place.name))))
    # An empty tensor has none.
    addresses.discard(0)
    keys = []
    for shard in shards:
        if not isinstance(shard, ShardedTensor) or shard.key not in absent:
            continue
        if shard.data is not None and _address(shard.data) in addresses:
            keys.append(shard.key)
    return sorted(keys)


def error_without_values(keys: Collection[str], location: str) -> LoadMismatchError:
    """Return the error about memory for which a checkpoint holds no values."""
    return LoadMismatchError(
        f"materialize= has no values for {summarize_keys(keys)}, of which the checkpoint "
        f"{location!r} holds none: make the module on a device with memory, where it "
        "initializes them, or give these tensors memory and values before the load.",
        unexpected=keys,
    )


def put_back(made: Sequence[Made]) -> None:
    """Put tensors on the meta device back after a failed load.

    Their memory has no values.
    """
    for place in made:
        setattr(place.owner, place.name, place.on_meta)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compute_unsaved(
    module: torch.nn.Module, tied_places: Sequence[Sequence[_Place]], device: Any
) -> None:
    """Compute the buffers that no checkpoint holds; on failure, change nothing."""
    unsaved = _unsaved_buffers(tied_places)
    if not unsaved:
        return
    paths = {owner: path for path, owner in module.named_modules()}
    left: list[str] = []
    failed: list[Exception] = []
    for owner, buffers in unsaved.items():
        for name, buffer in buffers.items():
            memory = torch.empty_like(buffer, device=device, memory_format=torch.contiguous_format)
            setattr(owner, name, memory)
        names = _left_by_all(owner, list(buffers), _initializers(paths, owner), failed)
        left += (f"{paths[owner]}.{name}".removeprefix(".") for name in names)
    if left:
        for owner, buffers in unsaved.items():
            for name, buffer in buffers.items():
                setattr(owner, name, buffer)
        why = ""
        if failed:
            why = f" ({type(failed[0]).__name__}: {failed[0]})"
        raise CheckpointingException(
            f"The buffers {summarize_keys(left)} are on the meta device, and no checkpoint holds "
            "them, as they are not persistent: their modules need a method reset_parameters() that "
            f"computes them, or a module around them one _init_weights(module) that does{why}. Or "
            "make the module on a device with memory."
        )


def _unsaved_buffers(
    tied_places: Sequence[Sequence[_Place]],
) -> dict[torch.nn.Module, dict[str, torch.Tensor]]:
    """Return buffers outside of the state dict, by module and name."""
    unsaved: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
    for owner, name in itertools.chain.from_iterable(tied_places):
        if name in owner._non_persistent_buffers_set:
            unsaved.setdefault(owner, {})[name] = owner.get_buffer(name)
    return unsaved


def _left_by_all(
    owner: torch.nn.Module,
    names: Sequence[str],
    initializers: Iterable[Callable[[], object]],
    failed: list[Exception],
) -> Sequence[str]:
    """Return buffers of a module that no function computes; note errors."""
    for initialize in initializers:
        try:
            names = _not_computed(owner, names, initialize)
        except Exception as error:  # of any class: the next function may do without
            failed.append(error)
        if not names:
            break
    return names


def _initializers(
    paths: Mapping[torch.nn.Module, str], owner: torch.nn.Module
) -> Iterator[Callable[[], object]]:
    """Yield functions that may compute a module's buffers, the nearest first."""
    if hasattr(owner, "reset_parameters"):
        yield owner.reset_parameters  # type: ignore[misc]
    for around in (owner, *_around(paths, owner)):
        initialize = getattr(around, "_init_weights", None)
        if callable(initialize):
            yield partial(initialize, owner)
            # Falcon-H1 computes the buffers of its layers with its own.
            yield from (partial(initialize, other) for other in _around(paths, owner))


def _around(paths: Mapping[torch.nn.Module, str], owner: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules around one, the nearest first."""
    own = paths[owner]
    around = []
    for other, path in paths.items():
        if other is not owner and (not path or own.startswith(f"{path}.")):
            around.append(other)
    return around[::-1]


def _not_computed(
    owner: torch.nn.Module, names: Sequence[str], initialize: Callable[[], object]
) -> list[str]:
    """Return the buffers of a module that a function does not compute.

    Their values after the call depend on those before it: NaN, or zeros.
    """
    state = torch.get_rng_state()
    values = []
    for mark in (255, 0):
        torch.set_rng_state(state)
        for name in names:
            buffer = local_part(owner.get_buffer(name))
            is_bool = buffer.dtype is torch.bool
            flat_bytes(buffer).fill_(min(mark, 1) if is_bool else mark)
        with torch.no_grad():
            initialize()
        computed = {}
        for name in names:
            buffer = local_part(owner.get_buffer(name))
            computed[name] = flat_bytes(buffer).clone()
        values.append(computed)
    marked, zeroed = values
    return [name for name in names if not torch.equal(marked[name], zeroed[name])]


def _places_on_meta(module: torch.nn.Module) -> list[list[_Place]]:
    """Return the places of each tensor on the meta device."""
    places: dict[int, list[_Place]] = {}
    for owner in module.modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None and tensor.is_meta:
                places.setdefault(id(tensor), []).append((owner, name))
    return list(places.values())
