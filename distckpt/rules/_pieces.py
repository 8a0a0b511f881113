"""Rules that divide tensors, or join several into one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt.rules._mapped import (
    MappedTensor,
    TensorSpec,
    crop_axis,
    drop_axis,
    identity,
    interleave,
    join,
    reshape,
)
from distckpt.rules._rule import (
    Captures,
    OneKeyRule,
    OneNameRule,
    Produced,
    Rule,
    Step,
    check_names,
    check_packed,
    count_wildcards,
    fill_captures,
    fill_name,
    find_matches,
    misfit,
    normalize_axis,
)


@dataclass(frozen=True)
class Unstack(OneKeyRule):
    """Divide a stack into one tensor for each index of an axis.

    The tensors lack that axis.

    Attributes:
        pattern: which tensors.
        to: name of the tensor at index `{i}`.
        axis: the axis of the stack.
        size: the size that the axis must have, where it is known beforehand.
    """

    to: str
    axis: int = 0
    size: int | None = None

    def __post_init__(self) -> None:
        check_names(self, (self.to,), has_index=True)

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        axis = normalize_axis(self, key, tensor, self.axis)
        num = tensor.shape[axis]
        if self.size not in (None, num):
            raise misfit(self, key, tensor, f"axis {axis} should have size {self.size}")
        if num == 0:
            raise misfit(
                self, key, tensor, f"axis {axis} is empty, so nothing would be left of the tensor"
            )
        check_packed(self, key, tensor, moves_last_axis=axis == len(tensor.shape) - 1)
        pieces = [drop_axis(crop_axis(tensor, axis, i, i + 1), axis) for i in range(num)]
        return _name_pieces([fill_name(self.to, captures, i) for i in range(num)], tensor, pieces)


@dataclass(frozen=True)
class Split(OneKeyRule):
    """Cut a tensor into pieces along an axis.

    An example is a fused gate and up projection.

    Attributes:
        pattern: which tensors.
        to: names of the pieces, in the order in which they lie in the tensor.
        axis: the axis to cut.
        sizes: sizes of the pieces along the axis; equal ones when left out.
        groups: the number of equal groups that the axis is divided into first. Every group holds a
            part of each piece, of the given size; a piece is its parts one after another.
    """

    to: tuple[str, ...]
    axis: int = 0
    sizes: tuple[int, ...] | None = None
    groups: int = 1

    def __post_init__(self) -> None:
        check_names(self, self.to)
        if not self.to:
            raise ValueError(f"{self}: name one piece or more")
        if self.sizes is not None and (len(self.sizes) != len(self.to) or min(self.sizes) < 0):
            raise ValueError(f"{self}: give one size, 0 or more, for each name in `to`")
        if self.groups < 1:
            raise ValueError(f"{self}: there is one group or more")

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        axis = normalize_axis(self, key, tensor, self.axis)
        num = tensor.shape[axis]
        sizes = self.sizes or (num // self.groups // len(self.to),) * len(self.to)
        if sum(sizes) * self.groups != num:
            pieces = f"sizes {sizes}" if self.sizes else f"{len(self.to)} equal pieces"
            groups = f" in each of {self.groups} groups" if self.groups > 1 else ""
            raise misfit(self, key, tensor, f"axis {axis} cannot be cut into {pieces}{groups}")
        return _split(self.to, tensor, captures, axis, sizes, self.groups)


@dataclass(frozen=True)
class SplitQKV(OneKeyRule):
    """Divide a fused query-key-value projection along axis 0.

    It may be the weight or the bias. The fused axis runs over key-value groups; a group is its
    `num_heads / num_kv_heads` query heads, then its key head, then its value head, each `head_dim`
    rows (the layout of Megatron).

    Attributes:
        pattern: which tensors.
        to: names of query, key and value.
        num_heads: number of query heads in the whole model.
        num_kv_heads: number of key heads, which divides `num_heads`; both are equal without grouped
            queries.
        head_dim: rows of a head.
    """

    to: tuple[str, str, str]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check_names(self, self.to)
        if (
            len(self.to) != 3
            or self.num_kv_heads < 1
            or self.num_heads % self.num_kv_heads
            or self.head_dim < 1
        ):
            raise ValueError(f"{self}: give three names, and a num_heads that num_kv_heads divides")

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        sizes = (self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim, self.head_dim)
        if tensor.shape[:1] != (self.num_kv_heads * sum(sizes),):
            raise misfit(
                self, key, tensor, f"axis 0 should have size {self.num_kv_heads * sum(sizes)}"
            )
        return _split(self.to, tensor, captures, 0, sizes, self.num_kv_heads)


@dataclass(frozen=True)
class Concat(Rule):
    """Join tensors along an axis.

    Attributes:
        patterns: which tensors, in order; all have the same number of wildcards, which match the
            same text in tensors that belong together.
        to: name of the whole.
        axis: the axis along which the tensors follow one another.
        groups: the number of equal parts that each tensor is cut into, which then take turns:
            `Split` with groups undoes this.
    """

    patterns: tuple[str, ...]
    to: str
    axis: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.patterns, str) or not self.patterns or self.groups < 1:
            raise ValueError(f"{self}: give a tuple of one pattern or more, and one group or more")
        check_names(self, (self.to,))
        if len({count_wildcards(pattern) for pattern in self.patterns}) != 1:
            raise ValueError(f"{self}: all patterns must have the same number of wildcards")

    @property
    def reads(self) -> tuple[str, ...]:
        return self.patterns

    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        matches = []
        for pattern in self.patterns:
            pairs = find_matches(pattern, tensors)
            matches.append({captures: key for key, captures in pairs})
        for captures in dict.fromkeys(itertools.chain(*matches)):
            if not all(captures in keys for keys in matches):
                raise self._incomplete(captures, matches, tensors)
            keys = tuple(matching[captures] for matching in matches)
            joined = self._join(keys, [tensors[key] for key in keys])
            yield Step(keys, ((fill_name(self.to, captures), joined),))

    def _incomplete(
        self,
        captures: Captures,
        matches: Sequence[Mapping[Captures, str]],
        tensors: Mapping[str, MappedTensor],
    ) -> LoadMismatchError:
        pairs = zip(self.patterns, matches, strict=True)
        missing = [
            fill_captures(pattern, captures) for pattern, keys in pairs if captures not in keys
        ]
        present = next(keys[captures] for keys in matches if captures in keys)
        return LoadMismatchError(
            f"{self}: {missing[0]!r} is missing{did_you_mean(missing[0], tensors)}, it belongs to "
            f"{present!r}. Correct the patterns, or the checkpoint is incomplete. A rank that "
            "loads only some of them needs an export under their names.",
            unexpected=missing,
        )

    def _join(self, keys: Sequence[str], tensors: Sequence[MappedTensor]) -> MappedTensor:
        axis = normalize_axis(self, keys[0], tensors[0], self.axis)
        for key, tensor in zip(keys, tensors, strict=True):
            self._check_like(keys[0], tensors[0], key, tensor, axis)
        if self.groups == 1:
            return join(tensors, axis)
        parts = []
        for group in range(self.groups):
            for tensor in tensors:
                size = tensor.shape[axis] // self.groups
                parts.append(crop_axis(tensor, axis, group * size, group * size + size))
        trimmed = tuple(itertools.chain.from_iterable(tensor.trimmed for tensor in tensors))
        return replace(join(parts, axis), trimmed=trimmed)

    def _check_like(
        self, first_key: str, first: MappedTensor, key: str, tensor: MappedTensor, axis: int
    ) -> None:
        shape = list(tensor.shape)
        first_shape = list(first.shape)
        if len(shape) == len(first_shape):
            shape[axis] = first_shape[axis]
        if shape != first_shape:
            why = f"{first_key!r} has shape {first.shape}, other than along axis {axis}"
            raise misfit(self, key, tensor, why)
        if tensor.dtype != first.dtype:
            raise misfit(self, key, tensor, f"{first_key!r} has another dtype, {first.dtype}")
        if tensor.shape[axis] % self.groups:
            why = f"axis {axis} cannot be cut into {self.groups} equal parts"
            raise misfit(self, key, tensor, why)


@dataclass(frozen=True)
class Stack(Rule):
    """Stack tensors along a new axis, undone by `Unstack`.

    The experts of a layer are an example.

    Attributes:
        pattern: which tensors; its last wildcard matches their numbers, from 0 on.
        to: name of the stack, without the last wildcard.
        axis: the new axis.
        size: number of tensors that belong together.
    """

    pattern: str
    to: str
    axis: int
    size: int

    def __post_init__(self) -> None:
        check_names(self, (self.to,))
        last = f"{{{count_wildcards(self.pattern) - 1}}}"
        if not count_wildcards(self.pattern) or last in self.to or self.size < 1:
            raise ValueError(
                f"{self}: the last wildcard stands for the number in the stack, and a stack is not "
                "empty"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.pattern,)

    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        present: dict[Captures, list[str]] = {}
        for key, captures in find_matches(self.pattern, tensors):
            present.setdefault(captures[:-1], []).append(key)
        for captures, stored_keys in present.items():
            keys = [fill_captures(self.pattern, (*captures, str(n))) for n in range(self.size)]
            # A rank loads some of the tensors.
            has_all = self.optional or len(stored_keys) == self.size
            if not has_all or set(stored_keys).difference(keys):
                raise self._incomplete(keys, stored_keys)
            stack = self._stack(keys, tensors)
            yield Step(tuple(stored_keys), ((fill_name(self.to, (*captures, "")), stack),))

    def _incomplete(self, keys: Sequence[str], stored_keys: Sequence[str]) -> LoadMismatchError:
        missing = [key for key in keys if key not in stored_keys]
        return LoadMismatchError(
            f"{self} needs the numbers from 0 to {self.size - 1}: "
            f"{summarize_keys(missing or stored_keys)} {'missing' if missing else 'found'}. The "
            "checkpoint is incomplete, or the rule is for other models.",
            unexpected=missing,
        )

    def _stack(
        self,
        keys: Sequence[str],
        tensors: Mapping[str, MappedTensor],
    ) -> MappedTensor:
        first_key = next(key for key in keys if key in tensors)
        first = tensors[first_key]
        shape = list(first.shape)
        if not -len(shape) <= self.axis + 1 <= len(shape) + 1:
            why = f"a stack of such tensors has no axis {self.axis}"
            raise misfit(self, first_key, first, why)
        axis = self.axis % (len(shape) + 1)
        check_packed(self, first_key, first, moves_last_axis=axis == len(shape))
        shape.insert(axis, 1)
        info = TensorSpec(first.shape, first.dtype)
        pieces = []
        for key in keys:
            # A rank that loads some of the tensors asks for their places in the stack.
            tensor = tensors.get(key) or identity(key, info)
            if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
                why = f"others have shape {first.shape} and dtype {first.dtype}"
                raise misfit(self, key, tensor, why)
            pieces.append(reshape(tensor, shape))
        return join(pieces, axis)


@dataclass(frozen=True)
class Interleave(OneNameRule):
    """Interleave the rows of consecutive pieces.

    The rows of a gate and an up projection are an example.

    Attributes:
        pattern: which tensors.
        to: new name.
        axis: the axis along which they lie.
        num: number of pieces of equal size.
    """

    axis: int = 0
    num: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num < 1:
            raise ValueError(f"{self}: interleave one piece or more")

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        axis = normalize_axis(self, key, tensor, self.axis)
        if tensor.shape[axis] % self.num:
            raise misfit(
                self, key, tensor, f"axis {axis} cannot be cut into {self.num} equal pieces"
            )
        check_packed(self, key, tensor, moves_last_axis=axis == len(tensor.shape) - 1)
        return [(fill_name(self.to, captures), interleave(tensor, axis, self.num))]


def _split(
    names: Sequence[str],
    tensor: MappedTensor,
    captures: Captures,
    axis: int,
    sizes: Sequence[int],
    groups: int,
) -> list[tuple[str, MappedTensor]]:
    """Cut each group of an axis into pieces; join each piece's parts.

    Sizes are given.
    """
    width = sum(sizes)
    pieces = []
    for start, size in zip(itertools.accumulate((0, *sizes[:-1])), sizes, strict=True):
        starts = range(start, groups * width + start, width) if width else (0,)
        pieces.append(
            join([crop_axis(tensor, axis, first, first + size) for first in starts], axis)
        )
    return _name_pieces([fill_name(name, captures) for name in names], tensor, pieces)


def _name_pieces(
    names: Sequence[str], tensor: MappedTensor, pieces: Sequence[MappedTensor]
) -> list[tuple[str, MappedTensor]]:
    """Pair names with the pieces of a tensor.

    The record of its trimmed regions goes to the first of them.
    """
    first = pieces[0]
    if tensor.trimmed:
        first = replace(first, trimmed=tensor.trimmed)
    return list(zip(names, (first, *pieces[1:]), strict=True))
