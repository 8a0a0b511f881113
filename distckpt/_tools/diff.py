"""Differences between two checkpoints, whatever their layouts.

Both are read once, a window of each at a time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.interrupts import operation
from distckpt._base.messages import check_tolerance, natural_order
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.model_keys import optimizer_keys
from distckpt._checkpoint.opening import opened
from distckpt._checkpoint.stored_values import (
    StoredTensor,
    holds_objects,
    object_keys,
    read_encoded,
)
from distckpt._format import codec
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.windows import map_windows
from distckpt._plan.selection import (
    check_all_match,
    check_patterns,
    check_rename,
    matches,
    names_of_tensors,
    renamed,
)
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._tools.tensor_differences import (
    Change,
    TensorDifference,
    compare_window,
    tensor_differences,
)

_NOTHING = ("", None)
_MAX_TEXT = 60
_MAX_BITS = 128


@dataclass(frozen=True)
class ObjectDifference:
    """A place in an object, or in common state, that differs.

    Attributes:
        key: key of the object.
        offset: offset of the part of the object, None when the sides have different parts.
        path: path inside that part, such as `args.lr` or `rng[2]`; empty for the whole.
        where: "both" when the values differ, "a" or "b" when only one side has something there.
        values: the values of A and B there, as short texts; None for nothing, or for a whole
            object.
    """

    key: str
    offset: tuple[int, ...] | None
    path: str
    where: str
    values: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class DiffReport:
    """The differences between two checkpoints.

    Attributes:
        a: location of the first checkpoint.
        b: location of the second checkpoint.
        only_in_a: keys that the second lacks, with the names that they would have there.
        only_in_b: keys that the first lacks.
        tensors: tensors that differ in shape, dtype or value.
        objects: differences in objects and common state.
        objects_compared: False when one side is a folder of safetensors files, which hold none, or
            keys were chosen.
        num_compared: tensors whose values were compared.
        num_bytes: bytes of the compared values, of both checkpoints together.
        seconds: duration of the call.
        optimizer_keys: names of optimizers' tensors among all these names.
    """

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[ObjectDifference, ...]
    objects_compared: bool
    num_compared: int
    num_bytes: int
    seconds: float
    optimizer_keys: frozenset[str] = frozenset()

    @property
    def is_same(self) -> bool:
        """Return True when no difference was found."""
        return not (self.only_in_a or self.only_in_b or self.tensors or self.objects)


@operation
def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    keys: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare two checkpoints: keys, shapes, dtypes, values, objects and common state.


    They may have been saved under different layouts, and either may be anything that `load` reads,
    such as a Hugging Face directory. Each byte is read once, through windows of bounded size;
    objects are in memory whole.

        report = distckpt.diff("checkpoints/step_100", "exports/step_100", keys="!optimizer.")
        assert report.is_same, report.tensors

    Any rank may call, alone.

    Args:
        a: a path or URL.
        b: a path or URL.
        keys: compare these tensors only: a beginning of the keys that A has, a pattern with `*`, or
            a list of such. They are compared with the tensors of B that have their names after
            renaming. Objects and common state are compared when it is None.
        rename: old beginnings of A's keys -> their beginnings in B.
        atol: values differ when they are further apart than `atol + rtol * abs(value in B)`.
        rtol: see `atol`.
        progress: called with the bytes compared so far and the bytes to compare.

    Returns:
        The differences. A difference does not raise.

    Raises:
        CheckpointNotFoundError: there is nothing that can be read.
        CorruptCheckpointError: one of the two is damaged.
        LoadMismatchError: a pattern of `keys` matches nothing on either side, or one of `rename`
            nothing in A.
        TypeError: `rename` is no dict of texts, or a tolerance no number.
        ValueError: a tolerance is negative, or not a number.
    """
    started = time.perf_counter()
    check_arguments(keys, rename, atol, rtol)
    ranks = Ranks.alone()
    location_a = locations.normalize(a)
    location_b = locations.normalize(b)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(opened(ranks, location_a))
        second = stack.enter_context(opened(ranks, location_b))
        compared = plan_diff(first, second, keys, rename or {})
        counter = ProgressCounter(progress, compared.num_bytes)
        compute = functools.partial(compare_window, atol=atol, rtol=rtol)
        windows = map_windows(compared.sides, compute, counter)
        changes = dict(zip(compared.comparable, windows, strict=True))
        return report_of_diff(compared, changes, started)


def check_arguments(
    keys: str | Sequence[str] | None,
    rename: Mapping[str, str] | None,
    atol: float,
    rtol: float,
) -> None:
    """Check arguments of `diff`.

    Raises:
        TypeError: one is of a wrong type.
        ValueError: a tolerance is negative, or not a number.
    """
    check_patterns(keys)
    check_rename(rename)
    check_tolerance("atol", atol)
    check_tolerance("rtol", rtol)


@dataclass(frozen=True)
class Compared:
    """The tensors of two checkpoints that are compared.

    Attributes:
        first: the checkpoint A.
        second: the checkpoint B.
        tensors_a: tensors of A, by the names that they have in B.
        tensors_b: tensors of B.
        has_keys: whether only some keys were chosen.
    """

    first: StoredCheckpoint
    second: StoredCheckpoint
    tensors_a: _Tensors
    tensors_b: _Tensors
    has_keys: bool

    @functools.cached_property
    def pairs(self) -> dict[str, tuple[StoredTensor, StoredTensor]]:
        """The tensors that both checkpoints have."""
        common = sorted(self.tensors_a.keys() & self.tensors_b.keys(), key=natural_order)
        return {key: (self.tensors_a[key], self.tensors_b[key]) for key in common}

    @functools.cached_property
    def comparable(self) -> dict[str, tuple[StoredTensor, StoredTensor]]:
        """Common tensors whose values can be compared."""
        comparable = {}
        for key, (x, y) in self.pairs.items():
            if x.shape == y.shape:
                comparable[key] = (x, y)
        return comparable

    @property
    def sides(self) -> list[tuple[StoredTensor, ...]]:
        """The comparable tensors of A, and of B."""
        return list(zip(*self.comparable.values(), strict=True)) or [(), ()]

    @property
    def num_bytes(self) -> int:
        """The size of the comparable tensors of both."""
        return sum(x.num_bytes + y.num_bytes for x, y in self.comparable.values())


def plan_diff(
    first: StoredCheckpoint,
    second: StoredCheckpoint,
    keys: str | Sequence[str] | None,
    rename: Mapping[str, str],
) -> Compared:
    """Select the tensors of two checkpoints to compare.

    Raises:
        LoadMismatchError: a pattern matches nothing.
    """
    back = {new: old for old, new in rename.items()}
    names_in_a = {name: name for name in names_of_tensors(first.manifest)}
    names_of_b = {name: renamed(name, back) for name in names_of_tensors(second.manifest)}
    tensors_a = _chosen(first, names_in_a, keys, rename)
    tensors_b = _chosen(second, names_of_b, keys, {})
    if keys is not None and not (tensors_a or tensors_b):
        raise LoadMismatchError(
            f"No tensor of {first.location!r} or {second.location!r} matches {keys!r}."
        )
    check_all_match(names_in_a, rename=rename, where=f" of {first.location!r}")
    check_all_match({*names_in_a, *(names_of_b[name] for name in tensors_b)}, keys)
    return Compared(first, second, tensors_a, tensors_b, keys is not None)


def report_of_diff(
    compared: Compared,
    changes: Mapping[str, Sequence[Change | None]],
    started: float,
) -> DiffReport:
    """Return the report, given the changes in windows of comparable tensors.

    Objects, which are not compared in windows, are compared here. The duration counts from
    `started`, a time of `time.perf_counter`.
    """
    first = compared.first
    second = compared.second
    names_a = compared.tensors_a.keys()
    names_b = compared.tensors_b.keys()
    has_objects = holds_objects(first) and holds_objects(second)
    objects_compared = not compared.has_keys and has_objects
    names_of_optimizers: set[str] = set()
    for stored, tensors in ((first, compared.tensors_a), (second, compared.tensors_b)):
        keys = optimizer_keys(stored)
        names_of_optimizers.update(name for name, tensor in tensors.items() if tensor.key in keys)
    return DiffReport(
        first.location,
        second.location,
        only_in_a=tuple(sorted(names_a - names_b, key=natural_order)),
        only_in_b=tuple(sorted(names_b - names_a, key=natural_order)),
        tensors=tuple(tensor_differences(compared.pairs, changes)),
        objects=tuple(_diff_objects(first, second)) if objects_compared else (),
        objects_compared=objects_compared,
        num_compared=len(compared.comparable),
        num_bytes=compared.num_bytes,
        seconds=time.perf_counter() - started,
        optimizer_keys=frozenset(names_of_optimizers),
    )


_Tensors: TypeAlias = dict[str, StoredTensor]
"""Tensors by their names in B."""


def _chosen(
    stored: StoredCheckpoint,
    names_in_a: Mapping[str, str],
    keys: str | Sequence[str] | None,
    rename: Mapping[str, str],
) -> _Tensors:
    """Return the tensors of one side that match, by new names.

    Their names in A are matched.
    """
    tensors: _Tensors = {}
    for name, name_in_a in names_in_a.items():
        if keys is not None and not matches(name_in_a, keys):
            continue
        new = renamed(name, rename)
        if new in tensors:
            raise CheckpointingException(
                f"{name!r} and {tensors[new].key!r} would both be {new!r}: change rename."
            )
        tensors[new] = StoredTensor(stored, name)
    return tensors


# --- Objects --------------------------------------------------------------------------------------


def _diff_objects(a: StoredCheckpoint, b: StoredCheckpoint) -> Iterator[ObjectDifference]:
    keys_a = set(object_keys(a))
    keys_b = set(object_keys(b))
    for key in sorted(keys_a | keys_b, key=natural_order):
        if (where := _where(key, keys_a, keys_b)) != "both":
            yield ObjectDifference(key, None, "", where)
            continue
        cells_a = read_encoded(a, key)
        cells_b = read_encoded(b, key)
        for offset in sorted(cells_a | cells_b):
            if (where := _where(offset, cells_a, cells_b)) != "both":
                yield ObjectDifference(key, offset, "", where)
            elif cells_a[offset] != cells_b[offset]:
                yield from _diff_leaves(key, offset, cells_a[offset], cells_b[offset])


def _where(name: Any, a: Container[Any], b: Container[Any]) -> str:
    if name in a and name in b:
        return "both"
    if name in a:
        return "a"
    return "b"


def _diff_leaves(
    key: str, offset: tuple[int, ...], left: bytes, right: bytes
) -> Iterator[ObjectDifference]:
    """Compare two encoded objects."""
    a, b = (codec.leaves(codec.decode(blob, placeholders=True)) for blob in (left, right))
    for path in a | b:
        if a.get(path, _NOTHING)[0] != b.get(path, _NOTHING)[0]:
            texts = (_text_at(path, a), _text_at(path, b))
            yield ObjectDifference(key, offset, path, _where(path, a, b), texts)


def _text_at(path: str, leaves: Mapping[str, tuple[Any, Any]]) -> str | None:
    return _short_text(leaves[path][1]) if path in leaves else None


def _short_text(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float | str | dict | list):
        text = repr(value[:_MAX_TEXT] if isinstance(value, str) else value)
        if len(text) > _MAX_TEXT:
            return f"{text[: _MAX_TEXT - 3]}..."
        return text
    kind = type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"<{dtype} {kind} of shape {tuple(value.shape)}>"
    return f"<{kind}>"
