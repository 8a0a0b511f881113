"""Run a weight loader on tensors without storage, and record its copies.

A stored tensor is a `Recorded`: a meta tensor goes through the same views as it, so that torch
itself says which elements a view has. Copies are written down instead of made. Operations on real
tensors run as ever, and are watched: an operation that reads memory that should hold stored
elements must be a copy, too.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from distckpt._base.errors import InvalidShardingError
from distckpt._base.messages import summarize_keys
from distckpt._move.loader_memory import Layout, Memory, Read, factored, num_elements

aten = torch.ops.aten

_ALSO_VIEWS = {aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.detach, aten.alias}
_COPIES = {aten.clone, aten._to_copy, aten.contiguous, aten.cat, aten.stack}
_SHAPED_ALIKE = {
    aten.empty_like,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.new_empty,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.new_empty_strided,
}
"""Operations that take nothing but shape and dtype of a tensor."""
_WRITES = {aten.copy_, aten.fill_, aten.zero_}


def _refusing(name: str) -> Any:
    """Make a method that refuses to give values or memory."""

    def refuse(self: Recorded, *_: Any, **__: Any) -> NoReturn:
        self.recording.refuse(name, [self])

    return refuse


class Recorded(torch.Tensor):
    """A stored tensor, or a view or copy of some, without storage."""

    recording: Recording
    memory: Memory
    meta: torch.Tensor

    # Else torch makes `Recorded`s of all results.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, recording: Recording, memory: Memory, meta: torch.Tensor) -> Recorded:
        """Make a tensor that looks like `meta` on the CPU.

        Its storage is on the meta device: torch refuses `parameter.data = recorded`, whose use
        would end the process.
        """
        made: Recorded = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=torch.device("meta"),
            dispatch_device=True,
        )
        made.recording = recording
        made.memory = memory
        made.meta = meta
        recording.alive[id(made)] = made
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        """Name the stored tensors whose elements it has."""
        return f"<recorded {', '.join(self.memory.names())} {tuple(self.shape)} {self.dtype}>"

    # Torch's dispatcher does not see these.
    numpy = _refusing("numpy")
    tolist = _refusing("tolist")
    data_ptr = _refusing("data_ptr")
    untyped_storage = _refusing("untyped_storage")
    __array__ = _refusing("numpy.asarray")
    __dlpack__ = _refusing("from_dlpack")

    def item(self) -> Any:
        """Return a stand-in for a value, which may be filled in."""
        return self.view(()) if self.numel() == 1 else super().item()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Record an operation, also in a thread that the loader has started."""
        recorded = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Recorded))
        return recorded.recording.run(func, args, kwargs or {})


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The record of a loader's operations on stored tensors, while entered.

    Attributes:
        stored: the memories of stored tensors, by name.
        real: the memories of real tensors that the loader has written to.
        before: the values that the loader has replaced by its own, by memory.
        current: the stored tensor that the loader has taken last.
        alive: the recorded tensors that something refers to, by `id`.
        written_by_threads: the real memories that a thread started by the loader has copied stored
            elements to. Later operations of that thread on real tensors are not seen.
        refusal: the first error about an operation that cannot be recorded; the loader may catch
            it.
    """

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored = {key: Memory(shape, dtype, key) for key, (shape, dtype) in specs.items()}
        self.real: dict[tuple[Any, ...], Memory] = {}
        self.before: dict[tuple[Any, ...], Memory] = {}
        self.written_by_threads: list[Memory] = []
        self.current = ""
        self.alive: MutableMapping[int, Recorded] = WeakValueDictionary()
        self.refusal: InvalidShardingError | None = None
        self._kept: set[tuple[Any, Layout]] = set()
        self._lock = threading.RLock()
        self._thread = threading.get_ident()

    def tensors(self) -> Iterator[tuple[str, Recorded]]:
        """Yield the names of stored tensors, each with its stand-in."""
        for key, memory in self.stored.items():
            self.current = key
            meta = torch.empty(memory.shape, dtype=memory.dtype, device="meta")
            yield key, Recorded(self, memory, meta)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Record an operation of the thread that has entered this."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation, or record its copy."""
        if func is torch.ops.prim.device.default and isinstance(args[0], Recorded):
            return torch.device("cpu")
        with self._lock:
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        packet = func.overloadpacket
        if packet in _WRITES:
            return self._write(func, args, kwargs)
        known = list(filter(self._names, _tensors_in((args, kwargs))))
        if not known:
            self._keep(_written(func, args, kwargs))
            return func(*args, **kwargs)
        with self:
            # `reshape`, say: a view, or a view of a copy.
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        if func.is_view or packet in _ALSO_VIEWS:
            return self._view(func, args, kwargs)
        if packet in _SHAPED_ALIKE:
            kwargs = {"device": known[0].device, **kwargs}
            return func(*tree_map(_meta_of, args), **kwargs)
        if packet in _COPIES:
            return self._copy(func, args, kwargs)
        if packet is aten.repeat:
            with self:
                return self._repeat(*args)
        return self.refuse(func, known)

    def _repeat(self, source: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
        """Copy several times along each axis, by views and joins."""
        new_axes = (1,) * (len(repeats) - source.ndim)
        repeated = source.reshape(new_axes + tuple(source.shape))
        for axis, count in enumerate(repeats):
            parts = [repeated] * count or [repeated.narrow(axis, 0, 0)]
            repeated = torch.cat(parts, axis)
        return repeated

    def _view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        source = args[0]
        if not isinstance(source, Recorded):
            return func(*args, **kwargs)
        seen = func(source.meta, *args[1:], **kwargs)
        storage = source.meta.untyped_storage()._cdata
        for view in tree_leaves(seen):
            # Elements must have the same size in both.
            if view.untyped_storage()._cdata != storage or view.itemsize != source.itemsize:
                self.refuse(func, [source])
        return tree_map(lambda meta: Recorded(self, source.memory, meta), seen)

    def _copy(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a new tensor from one or several."""
        sources = _tensors_in(args)
        if any(isinstance(source, Recorded) for source in sources):
            # Without storage, with the layout of a result.
            others = {name: value for name, value in kwargs.items() if name != "device"}
            meta = func(*tree_map(_meta_of, args), **others)
            shape = factored(meta.numel(), meta.stride())
            made = Recorded(self, Memory(shape, meta.dtype), meta)
        else:
            made = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = _parts(func.overloadpacket, made, sources, dim)
        for part, source in zip(parts, sources, strict=True):
            self._note(part, source, func)
        return made

    def _write(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Copy one tensor into another, or fill it."""
        target = args[0]
        value = next(iter(args[1:]), None)
        if func.overloadpacket is aten.zero_ and isinstance(target, Recorded):
            return self._zero(target)
        if isinstance(target, Recorded) and target.memory.key is not None:
            self.refuse(func, [target])
        if not isinstance(target, Recorded) and not isinstance(value, Recorded):
            self._keep([target])
            func(*args, **kwargs)
        if isinstance(value, torch.Tensor) and self._names(value):
            self._note(target, value, func)
        elif isinstance(target, Recorded):
            self.refuse(func, [target])
        else:
            self._memory(target).fill(Layout.of(target))
        return target

    def _zero(self, target: Recorded) -> Recorded:
        """Take zeros instead of a stored tensor.

        Ranks do so where another rank adds it.
        """
        if target.numel() != math.prod(target.memory.shape):
            self.refuse(aten.zero_, [target])
        target.memory = Memory(target.memory.shape, target.memory.dtype)
        target.memory.fill(Layout.of(target.meta))
        return target

    def _note(self, target: torch.Tensor, value: torch.Tensor, func: Any) -> None:
        """Write down that a tensor gets the elements of another one."""
        memory = self._memory(target)
        if not self._names(value):
            if isinstance(target, Recorded):
                self.refuse(func, [target])
            return
        if threading.get_ident() != self._thread and not isinstance(target, Recorded):
            self.written_by_threads.append(memory)
        source = self._memory(value)
        place = Layout.of(_meta_of(target))
        meta = _meta_of(value).expand(target.shape)
        reads = list(source.read(Layout.of(meta), place))
        if not isinstance(value, Recorded):
            memory.fill(place)  # with values that are not stored
        elif num_elements(reads) != target.numel():
            self.refuse(func, [value])
        elif memory.tensor is not None:
            for read in reads:
                if read.stored is None:
                    own = memory.view(read.partner)
                    self._keep([own])
                    own.zero_()
        steps = (("as", value.dtype), ("to", target.dtype), ("as", memory.dtype))
        memory.write(reads, steps)

    def _names(self, tensor: torch.Tensor) -> list[str]:
        """Name the stored tensors with elements in a tensor or its memory."""
        if isinstance(tensor, Recorded):
            return tensor.memory.names() or ["?"]
        memory = self.memory_of(tensor)
        if memory is None:
            return []
        return memory.names()

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """Return the known contents of a real tensor's memory, or None."""
        return self.real.get(identity(tensor))

    def _memory(self, tensor: torch.Tensor) -> Memory:
        if isinstance(tensor, Recorded):
            return tensor.memory
        if tensor.numel() and not tensor.data_ptr():
            raise InvalidShardingError(
                f"The loader puts the stored tensor {self.current!r} into a tensor of shape "
                f"{tuple(tensor.shape)} without memory ({tensor.device}): give the model memory "
                "before recording its loader."
            )
        return _entry(self.real, tensor)

    def _keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy values that the loader is about to replace by its own."""
        for tensor in tensors:
            place = identity(tensor)
            if place[1] and (place, Layout.of(tensor)) not in self._kept:
                # Once, for buffers that are used again and again.
                self._kept.add((place, Layout.of(tensor)))
                before = _entry(self.before, tensor)
                copy = tensor.detach().clone().view(before.dtype)
                later = before.pieces
                before.pieces = []
                kept = Memory(tuple(copy.shape), copy.dtype, tensor=copy)
                before.write([Read(kept, Layout.of(copy), (), Layout.of(tensor))])
                before.pieces += later  # later ones count: the first values do

    def give_back(self, memories: Mapping[tuple[Any, ...], Memory]) -> None:
        """Put back the values before the loader's own, in known places."""
        for place, before in self.before.items():
            memory = memories.get(place, Memory((), before.dtype))
            memory.settle()
            for piece in memory.pieces:
                layout = memory.layout(piece.region)
                for read in before.read(layout, layout):
                    if piece.stored is not None and read.stored is not None:
                        before.view(read.partner).copy_(read.stored.view(read.layout))

    def refuse(self, func: Any, tensors: Sequence[torch.Tensor]) -> NoReturn:
        """Raise an error about an unrecordable call, and remember it."""
        names = []
        for tensor in tensors:
            names.extend(self._names(tensor))
        self.refusal = self.refusal or InvalidShardingError(
            f"The loader calls {func} on the stored tensor {summarize_keys(dict.fromkeys(names))} "
            f"(while it loads {self.current!r}), and only views, conversions and copies can be "
            "recorded. Leave these names out of `metadata`, and give such tensors to the loader "
            "itself after each update."
        )
        raise self.refusal


def _entry(memories: dict[tuple[Any, ...], Memory], tensor: torch.Tensor) -> Memory:
    """Return the memory of a real tensor, a new one where needed."""
    place = identity(tensor)
    if place not in memories:
        size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
        shape = factored(size, tensor.stride())
        memories[place] = Memory(shape, tensor.dtype, tensor=tensor.detach())
    return memories[place]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.is_write:  # `out` is a keyword
            written += [*args[number : number + 1], kwargs.get(argument.name)]
    return _tensors_in(written)


def _tensors_in(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _meta_of(value: Any) -> Any:
    if isinstance(value, Recorded):
        return value.meta
    return value


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that identifies the memory of a real tensor."""
    place = None
    # Subclasses such as DTensor have none of their own.
    with contextlib.suppress(RuntimeError, ValueError):
        place = tensor.untyped_storage().data_ptr()
    return tensor.device, place, tensor.dtype.itemsize


def _parts(
    packet: Any, made: torch.Tensor, sources: Sequence[torch.Tensor], dim: int
) -> list[torch.Tensor]:
    """Return the views of a result, one for each of its sources."""
    meta = _meta_of(made)
    parts: Sequence[torch.Tensor] = [meta]
    if packet is aten.cat:
        parts = meta.split([source.shape[dim] for source in sources], dim)
    elif packet is aten.stack:
        parts = meta.unbind(dim)
    if not isinstance(made, Recorded):
        return list(parts)
    return [Recorded(made.recording, made.memory, part) for part in parts]
