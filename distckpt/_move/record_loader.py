"""Recording of an engine's weight loader as a sharded state dict."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from distckpt._base.dtypes import flat_bytes, is_lossless_cast
from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt._geometry.region import Region
from distckpt._models.bound_state import BoundState, named_tensors, place_of
from distckpt._move.loader_memory import (
    Layout,
    Memory,
    Piece,
    Step,
    boxes,
    num_elements,
    overlaps,
)
from distckpt._move.recorder import Recorded, Recording, identity
from distckpt._operations.checkpoint import open as open_checkpoint
from distckpt.mapping._base import OpenReplicaId, ReplicaId
from distckpt.mapping._sharded_tensor import ShardedTensor

logger = logging.getLogger(__name__)

Specs: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


class LoaderTarget(BoundState):
    """A sharded state dict of the tensors that a weight loader fills.

    See `record_loader`.

    Attributes:
        unused: names of stored tensors that the loader put nowhere, such as tables that the model
            computes itself.
        unfilled: the number of elements without a value, for each parameter and persistent buffer
            of the model that the loader did not fill.
        specs: the shapes and dtypes that the loader was recorded with, by name.
    """

    unused: frozenset[str]
    unfilled: Mapping[str, int]
    specs: Specs

    def places(self) -> dict[str, str]:
        """Name the tensor of the model that each shard lies in.

        Shards in other memory are left out: buffers that the loader copies through. Where the
        model is not known, all memory counts, without a name.
        """
        if self.module is None:
            return dict.fromkeys(self, "")
        owners: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
        for name, tensor in _all_tensors(self.module):
            owners.setdefault(identity(tensor)[:2], []).append((tensor.data_ptr(), name))
        places = {}
        for name, shard in self.items():
            assert shard.data is not None
            tensors = owners.get(identity(shard.data)[:2])
            if tensors:
                first = shard.data.data_ptr()
                places[name] = max(tensors, key=lambda own: (own[0] <= first, own[0]))[1]
        return places


def _all_tensors(root: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, buffers and further tensors of modules."""
    for prefix, part in root.named_modules():
        for owner in _tensor_dicts(part):
            for name, value in owner.items():
                if isinstance(value, torch.Tensor):
                    yield f"{prefix}.{name}".lstrip("."), value


def record_loader(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    metadata: Any,
    *,
    module: torch.nn.Module | None = None,
) -> LoaderTarget:
    """Describe a weight loader's places for stored tensors, without model code.

    The loader runs once on tensors that have names, shapes and dtypes and no storage. The parts
    that it copies, and their places, become a sharded state dict, whose keys are the stored names
    and whose data are views of the model's own memory: filling that state dict has the effect of
    the loader.

        target = distckpt.record_loader(model.load_weights, "exports/qwen3")
        distckpt.load(target, "exports/qwen3", allow_dtype_cast=True)

    The loader may take views (`narrow`, `chunk`, slices, `t`, `view`, ...), convert, join and copy,
    in any order; threads that it starts may copy into parameters of the model. Computed values
    cannot be described. Values that it writes itself, such as zeros behind the rows of a padded
    vocabulary, it writes in this call; all other values of a model in use stay. The state dict
    holds as long as the parameters keep their memory: record again when they were moved or
    replaced. Later uses raise an error if they were.

    Any rank may call, alone.

    Args:
        load_weights: called once with an iterable of `(name, tensor)`, as vLLM and SGLang call that
            method of a model.
        metadata: the names, shapes and dtypes that stored tensors have: `{name: (shape, dtype)}`,
            objects with the attributes `name` (or `key`), `shape` and `dtype`, an opened checkpoint
            (`distckpt.open(path, as_stored=True)` where it is quantized), or the path of one.
        module: module whose parameters and persistent buffers the loader should fill. None for the
            object that `load_weights` is a method of.

    Returns:
        The state dict, with `unused` and `unfilled`, which are also logged.

    Raises:
        InvalidShardingError: the loader computes a value from a stored tensor, which the error
            names, or the model has no memory yet.
    """
    specs = _specs_of(metadata)
    recording = Recording(specs)
    own = getattr(load_weights, "__self__", None)
    module = module or (own if isinstance(own, torch.nn.Module) else None)
    try:
        with _tensors_kept(module, recording):
            with recording:
                _run(load_weights, recording)
            recording.give_back(recording.real)
        _refuse_kept(recording)
        tensors = dict(named_tensors(module))
        _refuse_copies_of_threads(tensors.values(), recording)
        target = LoaderTarget(_state_of(recording))
    except BaseException:
        recording.give_back(recording.before)
        raise
    target.module = module
    filled = {}
    for name, tensor in tensors.items():
        if recording.memory_of(tensor) is not None:
            filled[name] = tensor.detach()
    target.memory = filled
    target.specs = specs
    target.unused = frozenset(recording.stored) - {shard.key for shard in target.values()}
    target.unfilled = _unfilled(tensors, recording)
    _log(target)
    return target


@contextlib.contextmanager
def _tensors_kept(module: torch.nn.Module | None, recording: Recording) -> Iterator[None]:
    """Give modules back the tensors that a loader replaces, and refuse it.

    Functions tell nothing of the modules that they fill: all of this process are watched.
    """
    # `gc` does not list a frozen module.
    modules = [] if module is None else list(module.modules())
    modules += [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    saved = []
    for part in modules:
        for owner in _tensor_dicts(part):
            tensors = [pair for pair in owner.items() if isinstance(pair[1], torch.Tensor)]
            before = {name: (tensor, _alias(tensor)) for name, tensor in tensors}
            saved.append((type(part).__name__, owner, before))
    try:
        yield
    finally:
        replaced = list(_restore(saved, recording))
    if replaced:
        raise InvalidShardingError(
            f"The loader replaces {summarize_keys(replaced)} instead of copying into the memory "
            "that the model has: there is nothing to record, and the model is as it was. Let the "
            "loader copy (`parameter.data.copy_(tensor)`), or leave such tensors out of `metadata`."
        )


def _tensor_dicts(part: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the dicts in which a module has tensors."""
    own = vars(part)
    return [own, own.get("_parameters", {}), own.get("_buffers", {})]


def _alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return another tensor of the same memory, if it has some."""
    with contextlib.suppress(Exception):  # not yet initialized, or a subclass
        return tensor.detach()
    return None


def _restore(
    saved: Iterable[tuple[str, dict[str, Any], dict[str, Any]]], recording: Recording
) -> Iterator[str]:
    """Put replaced tensors of modules back, and name them."""
    for kind, owner, before in saved:
        for name, value in list(owner.items()):
            tensor, alias = before.get(name, (None, None))
            if not _is_replaced(value, alias, recording):
                continue
            owner[name] = tensor
            if tensor is None:
                del owner[name]
            elif alias is not None:
                tensor.data = alias
            yield f"{kind}.{name}"


def _is_replaced(value: Any, alias: torch.Tensor | None, recording: Recording) -> bool:
    if isinstance(value, Recorded) or alias is None or not isinstance(value, torch.Tensor):
        return isinstance(value, Recorded)
    memory = recording.memory_of(value)
    if memory is None or not memory.names() or place_of(value) == place_of(alias):
        return False
    kinds = {(each.dtype, each.shape, each.device) for each in (value, alias)}
    # An equal one, such as a weight that the loader makes contiguous, leaves the model as it was.
    return len(kinds) > 1 or not torch.equal(flat_bytes(value), flat_bytes(alias))


def _run(load_weights: Callable[..., Any], recording: Recording) -> None:
    try:
        load_weights(recording.tensors())
    except InvalidShardingError:
        raise
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # Torch's refusal of an operation that a tensor without storage cannot do.
        raise InvalidShardingError(
            f"The loader fails while it loads the stored tensor {recording.current!r} without "
            f"storage: {str(error).rstrip('.')}. If it needs the values of that tensor, leave the "
            "name out of `metadata`, and give such tensors to the loader itself after each update."
        ) from error
    if recording.refusal is not None:
        # The loader has caught it, and has gone on without that tensor.
        raise recording.refusal


def _refuse_kept(recording: Recording) -> None:
    """Refuse a loader that keeps stored tensors, to use them later."""
    if recording.alive:
        gc.collect()
    names: list[str] = []
    for tensor in list(recording.alive.values()):
        names += tensor.memory.names()
    if names:
        raise InvalidShardingError(
            f"The loader keeps the stored tensor {summarize_keys(names)} after it has returned, in "
            "an attribute, a list or a running thread, so that a later use of it would not be "
            "recorded. Let it copy into memory of the model; if it needs the tensor itself, leave "
            "the name out of `metadata`, and give it to the loader after each update."
        )


def _refuse_copies_of_threads(tensors: Iterable[torch.Tensor], recording: Recording) -> None:
    """Refuse copies of stored tensors in memory of threads.

    It is not known whether the threads have copied them on.
    """
    module_memories = [recording.memory_of(tensor) for tensor in tensors]
    for memory in recording.written_by_threads:
        if memory not in module_memories:
            raise InvalidShardingError(
                f"The loader copies the stored tensor {summarize_keys(memory.names())} in a thread "
                "of its own, into memory that is no parameter or persistent buffer of the model, "
                "and what the thread does with it afterwards is not recorded. Let threads copy "
                "straight into parameters (pass module= where `load_weights` is no method of the "
                "model), or load in one thread while the loader is recorded."
            )


def _specs_of(metadata: Any) -> Specs:
    if isinstance(metadata, str | os.PathLike):
        metadata = open_checkpoint(metadata, as_stored=True)
    tensors = getattr(metadata, "tensors", metadata)
    entries = tensors.items() if isinstance(tensors, Mapping) else ((None, e) for e in tensors)
    specs: Specs = {}
    for name, entry in entries:
        if isinstance(entry, tuple) and len(entry) == 2:
            shape, dtype = entry
        else:
            shape = entry.shape
            dtype = entry.dtype
        specs[name or getattr(entry, "name", None) or entry.key] = (tuple(shape), dtype)
    return specs


def _state_of(recording: Recording) -> Iterator[tuple[str, ShardedTensor]]:
    """Describe the recorded copies as shards, under different names."""
    places_by_key: dict[str, list[tuple[Region, torch.Tensor]]] = {}
    for memory in recording.real.values():
        memory.settle()
        for piece in memory.pieces:
            if piece.stored is not None:
                places = places_by_key.setdefault(str(piece.stored.key), [])
                places.extend(_places(memory, piece, piece.stored))
    for key, places in places_by_key.items():
        whole = recording.stored[key].shape
        copies = {max(pair) for pair in overlaps([region for region, _ in places])}
        for number, ((offset, shape), data) in enumerate(places):
            name = f"{key}#{number}" if number else key
            replica_id: ReplicaId = OpenReplicaId((0,))
            if number in copies:
                replica_id = (1, number)
            yield name, ShardedTensor(key, data, data.dtype, shape, whole, offset, None, replica_id)


def _places(memory: Memory, piece: Piece, stored: Memory) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield the regions of a stored tensor with their memory."""
    assert memory.tensor is not None
    tensor = _typed(memory.tensor, stored, piece.steps)
    for region, view in boxes(stored.shape, piece.layout, memory.layout(piece.region)):
        yield region, tensor.as_strided(view.shape, view.strides, view.offset)


def _typed(tensor: torch.Tensor, stored: Memory, steps: Iterable[Step]) -> torch.Tensor:
    """Return a memory as a tensor of the dtype to load.

    InvalidShardingError where one conversion differs from the loader's conversions.
    """
    dtypes = [stored.dtype]
    kinds = set()
    for kind, dtype in steps:
        if dtype != dtypes[-1]:
            kinds.add(kind)
            dtypes.append(dtype)
    if kinds == {"as"}:
        return tensor.view(stored.dtype)
    are_exact = all(is_lossless_cast(stored.dtype, dtype) for dtype in dtypes[1:-1])
    if "as" in kinds or not are_exact:
        raise InvalidShardingError(
            f"The loader converts the stored tensor {stored.key!r} in several steps "
            f"({' -> '.join(map(str, dtypes))}), which one conversion does not equal. Leave the "
            "name out of `metadata`, and give this tensor to the loader itself after each update."
        )
    return tensor


def _unfilled(tensors: Mapping[str, torch.Tensor], recording: Recording) -> dict[str, int]:
    """Count the elements of parameters that the loader did not write."""
    missing = {}
    for name, tensor in tensors.items():
        num = tensor.numel()
        memory = recording.memory_of(tensor)
        if memory is not None:
            view = Layout.of(tensor)
            num -= num_elements(memory.read(view, view))
        if num > 0:
            missing[name] = num
    return missing


def _log(target: LoaderTarget) -> None:
    if target.unused:
        logger.info("the loader puts nowhere: %s", summarize_keys(sorted(target.unused)))
    if target.unfilled:
        logger.warning(
            "the loader leaves elements of %s as they are: nothing that fills its target changes "
            "them",
            summarize_keys(sorted(target.unfilled)),
        )
