"""Rules for whole tensors, the application of rules, and its inverse.

`distckpt.rules` is the public path.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from distckpt._base.errors import InvalidShardingError, LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._geometry.region import Region, TilingFault, find_tiling_faults, regions_to_arrays
from distckpt.rules._mapped import (
    MappedTensor,
    RegionCopy,
    TensorSpec,
    add,
    check_inside,
    compose,
    identity,
    inverse_part,
    permute,
    single_rows,
    trim_axis,
)
from distckpt.rules._rule import (
    Captures,
    OneKeyRule,
    OneNameRule,
    Produced,
    Rule,
    Step,
    check_packed,
    fill_name,
    misfit,
    normalize_axis,
)


@dataclass(frozen=True)
class Rename(OneNameRule):
    """Give a tensor another name.

    Attributes:
        pattern: which tensors.
        to: new name.
        shape: the shape that they must have, where it is known beforehand; None for any size of an
            axis.
    """

    shape: tuple[int | None, ...] | None = field(default=None, repr=False)

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        if self.shape is not None and not _has_shape(tensor, self.shape):
            raise misfit(self, key, tensor, f"it should have shape {self.shape}")
        return [(fill_name(self.to, captures), tensor)]


def _has_shape(tensor: MappedTensor, shape: Sequence[int | None]) -> bool:
    if len(shape) != len(tensor.shape):
        return False
    return all(size in (None, num) for size, num in zip(shape, tensor.shape, strict=True))


@dataclass(frozen=True)
class Transpose(OneNameRule):
    """Put the axes of a tensor in another order.

    Attributes:
        pattern: which tensors.
        to: new name.
        order: axis `j` of the result is axis `order[j]` of the tensor.
    """

    order: tuple[int, ...] = (1, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(f"{self}: `order` must name every axis from 0 on once")

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        if len(self.order) != len(tensor.shape):
            raise misfit(self, key, tensor, f"it should have {len(self.order)} axes")
        check_packed(self, key, tensor, moves_last_axis=self.order[-1:] != (len(self.order) - 1,))
        return [(fill_name(self.to, captures), permute(tensor, self.order))]


@dataclass(frozen=True)
class Copy(OneNameRule):
    """Give tensors a second name, under which they are exported too.

    A load reads the first only. Later rules must leave the copies alone.

    Attributes:
        pattern: which tensors; they keep their names.
        to: name of the copy.
    """

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        return [(key, tensor), (fill_name(self.to, captures), replace(tensor, is_copy=True))]


@dataclass(frozen=True)
class Drop(OneKeyRule):
    """Leave tensors out; they are missing on the way back, too."""

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        return []


@dataclass(frozen=True)
class Trim(OneKeyRule):
    """Cut padding off the end of an axis.

    An example is the padding of a vocabulary. The way back fills in zeros.

    Attributes:
        pattern: which tensors; they keep their names.
        axis: the padded axis.
        size: its size without the padding.
        is_vocabulary: whether the axis must be padded as a vocabulary is, to the next multiple of a
            power of two: more rows than that are not padding.
    """

    axis: int
    size: int
    is_vocabulary: bool = field(default=False, repr=False)

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        axis = normalize_axis(self, key, tensor, self.axis)
        if not 0 <= self.size <= tensor.shape[axis]:
            raise misfit(self, key, tensor, f"axis {axis} cannot be trimmed to size {self.size}")
        num = tensor.shape[axis]
        if self.is_vocabulary and num - self.size >= (multiple := num & -num) > 0:
            why = (
                f"padding to a multiple of {multiple} adds fewer than the {num - self.size} rows "
                f"after {self.size}. If they are padding, cut them off by a Trim before these rules"
            )
            raise misfit(self, key, tensor, why)
        return [(key, trim_axis(tensor, axis, self.size))]


@dataclass(frozen=True)
class Add(OneKeyRule):
    """Add a number to all elements of a tensor.

    It is for weights that two programs understand differently (a norm that counts from 1, say).

    Attributes:
        pattern: which tensors; they keep their names.
        value: the number, which the way back subtracts.
    """

    value: float

    def convert(self, key: str, tensor: MappedTensor, captures: Captures) -> Produced:
        if tensor.dtype not in ("F64", "F32", "F16", "BF16"):
            raise misfit(
                self, key, tensor, "numbers are added to floating point tensors of 16 bits and more"
            )
        return [(key, add(tensor, self.value))]


@dataclass(frozen=True)
class Assemble(Rule):
    """Make tensors of regions of other tensors, listed one by one.

    The conversion of another program comes down to this.

    Attributes:
        tensors: the new tensors by name; they get the dtypes of their sources.
        sources: shapes of the source tensors.
    """

    tensors: Mapping[str, MappedTensor] = field(repr=False)
    sources: Mapping[str, tuple[int, ...]] = field(repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.sources)

    @cached_property
    def _groups(self) -> list[tuple[list[str], list[str]]]:
        """Sources and new tensors that belong together.

        One tensor is made of several sources, or several tensors of one.
        """
        groups: dict[str, tuple[list[str], list[str]]] = {}
        for key in self.sources:
            groups[key] = ([key], [])
        for name, mapped in self.tensors.items():
            # An empty tensor has no parts: it comes with the first source.
            keys = [part.key for part in mapped.parts] or list(self.sources)[:1]
            group = groups[keys[0]]
            for key in keys:
                other = groups[key]
                if other is not group:
                    group[0].extend(other[0])
                    group[1].extend(other[1])
                    groups.update(dict.fromkeys(other[0], group))
            group[1].append(name)
        return list({id(group): group for group in groups.values()}.values())

    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        for keys, names in self._groups:
            missing = [key for key in keys if key not in tensors]
            if len(missing) == len(keys) and self.optional:
                continue
            if missing:
                raise LoadMismatchError(
                    f"{summarize_keys(missing)} {'is' if len(missing) == 1 else 'are'} missing"
                    f"{did_you_mean(missing[0], tensors)}: {summarize_keys(names)} should be made "
                    f"of {summarize_keys(keys)}. The checkpoint is incomplete, or of another "
                    "model. A rank that loads only some of them needs an export under their names.",
                    unexpected=missing,
                )
            dtype = self._check_sources(keys, tensors)
            produced = []
            for name in names:
                produced.append((name, compose(self.tensors[name], tensors, dtype)))
            yield Step(tuple(keys), tuple(produced))

    def _check_sources(self, keys: list[str], tensors: Mapping[str, MappedTensor]) -> str:
        """Check the tensors that belong together; return their dtype."""
        for key in keys:
            if tensors[key].shape != self.sources[key]:
                raise misfit(self, key, tensors[key], f"shape {self.sources[key]} is expected")
        dtypes = {tensors[key].dtype for key in keys}
        if len(dtypes) > 1:
            why = f"with it, {summarize_keys(keys[1:])} have {dtypes}"
            raise misfit(self, keys[0], tensors[keys[0]], why)
        return dtypes.pop()


@dataclass(frozen=True)
class Tie(Rule):
    """Take two names for the same tensor, of which one is stored.

    Tied embeddings are an example.

    Attributes:
        key: the name that is left out of an export, and that a load fills with the other tensor.
        to: the name that is stored.
    """

    key: str
    to: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.key,)

    def steps(self, tensors: Mapping[str, MappedTensor]) -> Iterator[Step]:
        if self.key in tensors:
            produced: tuple[tuple[str, MappedTensor], ...] = ()
            if self.to not in tensors:
                produced = ((self.to, tensors[self.key]),)
            yield Step((self.key,), produced)


def check_rules(rules: object) -> None:
    """Check an argument that takes rules.

    Raises:
        TypeError: it is no list or tuple of rules.
    """
    rules = rules if isinstance(rules, list | tuple) else [rules]
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"rules is a list of rules, see distckpt.rules, got {rule!r:.100}")


def apply_rules(
    rules: Iterable[Rule], tensors: Mapping[str, TensorSpec], *, strict: bool = False
) -> dict[str, MappedTensor]:
    """Apply rules, in order, to the tensors of a checkpoint.

    Args:
        rules: the changes; each applies to the results of the earlier ones.
        tensors: the tensors of the checkpoint, by key.
        strict: whether every tensor must be matched by a rule. Otherwise tensors that are not
            matched keep name and shape.

    Returns:
        The new tensors by name.

    Raises:
        LoadMismatchError: a rule that is not optional matches nothing, or not as often as its
            `count` says; a member of a `Concat` is missing; or, if `strict`, no rule matches some
            tensor (`missing` names them).
        InvalidShardingError: a rule does not fit the shape or dtype of a tensor, consumes a tensor
            twice, or makes a name that is there already.
    """
    current = {key: identity(key, info) for key, info in tensors.items()}
    origins: dict[str, tuple[Rule, Step]] = {}
    for rule in rules:
        _apply(rule, current, origins)
    untouched = [key for key in current if key not in origins]
    if strict and untouched:
        raise LoadMismatchError(
            f"No rule matches {summarize_keys(untouched)}: add rules for them (`Drop` to leave "
            "them out).",
            missing=untouched,
        )
    return current


def invert(
    mapped: Mapping[str, MappedTensor], tensors: Mapping[str, TensorSpec]
) -> dict[str, MappedTensor]:
    """Invert a mapping: from targets to source tensors.

    `apply_rules` made the targets of the source tensors `tensors`.

    Returns:
        Source tensors by key; the parts refer to names of targets. Trimmed regions are padding.
        Keys without elements in any target (they were dropped) are left out.

    Raises:
        InvalidShardingError: some elements of a source tensor, not all, are in no target, or some
            are in several; or `tensors` are not the tensors that were mapped.
    """
    parts: defaultdict[str, list[RegionCopy]] = defaultdict(list)
    padding: defaultdict[str, list[Region]] = defaultdict(list)
    for name, tensor in mapped.items():
        if tensor.is_copy:
            continue
        for part in tensor.parts:
            parts[part.key].append(inverse_part(name, part))
        for key, region in tensor.trimmed:
            padding[key].append(region)
    unknown = (parts.keys() | padding.keys()) - tensors.keys()
    if unknown:
        raise InvalidShardingError(
            f"The mapping reads {summarize_keys(unknown)}, which `tensors` does not name: give the "
            "tensors that the rules were applied to."
        )
    inverse = {}
    for key, info in tensors.items():
        if key in parts or key in padding or 0 in info.shape:
            inverse[key] = MappedTensor(
                tuple(info.shape),
                info.dtype,
                tuple(sorted(parts[key], key=lambda part: part.target.offset)),
                padding=tuple(sorted(padding[key])),
            )
    _check_tiled(inverse)
    return inverse


def _check_tiled(mapped: Mapping[str, MappedTensor]) -> None:
    by_ndim: defaultdict[int, list[str]] = defaultdict(list)
    for key, tensor in mapped.items():
        by_ndim[len(tensor.shape)].append(key)
    for ndim, keys in by_ndim.items():
        regions = [_regions(key, mapped[key]) for key in keys]
        offsets, shapes = regions_to_arrays(list(itertools.chain(*regions)), ndim)
        ids = np.repeat(np.arange(len(keys)), [len(inside) for inside in regions])
        global_shapes = np.array([mapped[key].shape for key in keys], np.int64)
        faults = find_tiling_faults(ids, offsets, shapes, global_shapes.reshape(len(keys), ndim))
        if faults:
            raise _not_tiled(keys[faults[0].tensor], faults[0])


def _regions(key: str, mapped: MappedTensor) -> list[Region]:
    """Return the regions of a target: of its parts and its padding."""
    regions = [*(part.target for part in single_rows(mapped)), *mapped.padding]
    for region in regions:
        check_inside(region, mapped.shape, key)
    return regions


def _not_tiled(key: str, fault: TilingFault) -> InvalidShardingError:
    where = f"Element {fault.element} of {key!r}"
    if fault.num_covers > 1:
        return InvalidShardingError(
            f"{where} is in {fault.num_covers} places of the targets, so the way back is "
            "ambiguous: leave all but one out of the mapping."
        )
    return InvalidShardingError(
        f"{where} is in no target, so there is no way back: a rule dropped a piece of the tensor. "
        "Cut padding off with `Trim`, whose inverse fills in zeros, and drop whole tensors only."
    )


def matched_rules(rules: Iterable[Rule], tensors: Mapping[str, TensorSpec]) -> list[bool]:
    """Return whether each rule, applied in order, matches some tensor."""
    current = {key: identity(key, info) for key, info in tensors.items()}
    origins: dict[str, tuple[Rule, Step]] = {}
    matched = []
    for rule in rules:
        lenient = replace(rule, optional=True, count=None)
        matched.append(next(iter(lenient.steps(current)), None) is not None)
        _apply(lenient, current, origins)
    return matched


def _apply(
    rule: Rule, tensors: dict[str, MappedTensor], origins: dict[str, tuple[Rule, Step]]
) -> None:
    """Apply one rule in place.

    `origins` holds the rule and step of each tensor that a rule made.
    """
    steps = list(rule.steps(tensors))
    _check_count(rule, steps, tensors)
    consumed: dict[str, Step] = {}
    for step in steps:
        for key in step.consumed:
            if key in consumed:
                raise InvalidShardingError(
                    f"{rule} uses {key!r} twice, for {_made_by(consumed[key])} and for "
                    f"{_made_by(step)}: make the patterns narrower."
                )
            consumed[key] = step
            del tensors[key]
            origins.pop(key, None)
    for step in steps:
        for name, tensor in step.produced:
            if name in tensors:
                earlier = _origin(*origins[name]) if name in origins else "it is in the checkpoint"
                raise InvalidShardingError(
                    f"Two tensors would be named {name!r}: {earlier}, and {_origin(rule, step)}. "
                    "Give one of them another name, or drop it."
                )
            tensors[name] = tensor
            origins[name] = rule, step


def _check_count(
    rule: Rule,
    steps: Sequence[Step],
    tensors: Mapping[str, MappedTensor],
) -> None:
    if not steps and not rule.optional:
        hints = (did_you_mean(pattern, tensors) for pattern in rule.reads)
        raise LoadMismatchError(
            f"{rule} matches no tensor{next(filter(None, hints), '')}. Correct the pattern, or set "
            "optional=True if the tensor may be absent.",
            unexpected=rule.reads,
        )
    if steps and rule.count not in (None, len(steps)):
        consumed = itertools.chain.from_iterable(step.consumed for step in steps)
        raise LoadMismatchError(
            f"{rule} should match {rule.count} times and matches {len(steps)} times, "
            f"{summarize_keys(consumed)}: the checkpoint is "
            "incomplete, or the rule is for another model.",
            unexpected=rule.reads,
        )


def _made_by(step: Step) -> str:
    return ", ".join(repr(name) for name, _ in step.produced[:3]) or "nothing"


def _origin(rule: Rule, step: Step) -> str:
    return f"{rule} makes it of {', '.join(map(repr, step.consumed))}"
