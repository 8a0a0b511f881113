"""The keys of a checkpoint as groups and as a tree."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from distckpt._base.messages import key_pattern, natural_order, without_numbers
from distckpt._format.manifest import Manifest
from distckpt._geometry.region import IntArray
from distckpt._state.common_state import COMMON_KEY
from distckpt.cli._grid import rank_of_file


@dataclass(frozen=True)
class Group:
    """Keys that differ in numbers only, with one dtype and shape.

    It may be a module instead, whose tensors have several: then dtype and shape are empty.

    Attributes:
        pattern: the keys, with ranges of numbers.
        dtype: the safetensors name of their dtype.
        shape: their shape.
        num_keys: their number.
        num_bytes: the size of their data.
        num_chunks: the number of pieces they are stored in.
        ranks: the ranks that wrote them, in order.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    num_keys: int
    num_bytes: int
    num_chunks: int
    ranks: tuple[int, ...] = ()


def group_keys(manifest: Manifest, is_merging: bool = True) -> list[Group]:
    """Group keys that differ in numbers only: `layers.0.weight` and `layers.1.weight`.

    Without merging, return each key as a group.
    """
    members: dict[tuple[object, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for key_id in sorted(range(len(manifest.keys)), key=lambda i: natural_order(manifest.keys[i])):
        key = manifest.keys[key_id]
        pattern = without_numbers(key) if is_merging else key
        members[pattern, manifest.dtypes[key_id], manifest.global_shapes[key_id]].append(key_id)
    sizes = manifest.sums.bytes_of_keys
    counts = np.diff(manifest.key_starts)
    ranks = _ranks_of_groups(manifest, list(members.values()))
    groups = []
    for ((_, dtype, shape), ids), group_ranks in zip(members.items(), ranks, strict=True):
        groups.append(
            Group(
                pattern=key_pattern([manifest.keys[i] for i in ids]),
                dtype=dtype,
                shape=shape,
                num_keys=len(ids),
                num_bytes=int(sizes[ids].sum()),
                num_chunks=int(counts[ids].sum()),
                ranks=group_ranks,
            )
        )
    return groups


def _ranks_of_groups(
    manifest: Manifest, members: Sequence[Sequence[int]]
) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that wrote each group of keys.

    Equal ones are one tuple: thousands of ranks write each of thousands of keys.
    """
    group_of = np.zeros(len(manifest.keys), np.int64)
    num_files = len(manifest.files)
    for group, ids in enumerate(members):
        group_of[ids] = group
    ranks_by_group: list[IntArray] = [np.zeros(0, np.int64)] * len(members)
    known: dict[bytes, IntArray] = {}
    for chunks in manifest.chunks.parts():
        pairs = group_of[chunks.key_ids] * num_files + chunks.file_ids
        # They are nearly sorted, which np.unique makes no use of.
        pairs.sort(kind="stable")
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]
        starts = np.flatnonzero(np.diff(pairs // num_files, prepend=-1))
        for section in np.split(pairs, starts)[1:]:
            group = int(section[0]) // num_files
            file_ids = section % num_files
            if len(ranks_by_group[group]):
                file_ids = np.union1d(ranks_by_group[group], file_ids)
            ranks_by_group[group] = known.setdefault(file_ids.tobytes(), file_ids)
    ranks = [rank_of_file(file.name) for file in manifest.files]
    tuples = {}
    for key, ids_of_files in known.items():
        tuples[key] = tuple(sorted({ranks[i] for i in ids_of_files.tolist()} - {None}))
    return (tuples.get(section.tobytes(), ()) for section in ranks_by_group)


# --- The tree -------------------------------------------------------------------------------------


_Members: TypeAlias = list[tuple[list[str], Group]]
"""Groups, each with the rest of its segments below a name."""


def tree_lines(
    groups: Sequence[Group], depth: int | None, is_by_size: bool
) -> list[tuple[str, Group]]:
    """Return the lines of a tree of modules, down to `depth` levels.

    Each has its total.
    """
    members = []
    for group in groups:
        if group.pattern != COMMON_KEY:
            # A range of numbers, {0..3}, is not split.
            segments = re.split(r"(?<!\.)\.(?!\.)", group.pattern)
            members.append((segments, group))
    return list(_tree(members, depth or sys.maxsize, is_by_size))


def _tree(
    members: _Members, depth: int, is_by_size: bool, level: int = 0, parent: str = ""
) -> Iterator[tuple[str, Group]]:
    for name, below in _branches(members, is_by_size):
        label = "  " * level + parent + name
        deeper: _Members = []
        is_module = True
        for rest, group in below:
            if rest:
                deeper.append((rest, group))
            else:
                is_module = False
                yield label, group
        if is_module and len({rest[0] for rest, _ in deeper}) == 1:
            # A single branch continues on the same line.
            yield from _tree(deeper, depth, is_by_size, level, f"{parent}{name}.")
            continue
        if is_module:
            yield label, _total(name, below)
        if level + 1 < depth:
            yield from _tree(deeper, depth, is_by_size, level + 1)


def _branches(members: _Members, is_by_size: bool) -> list[tuple[str, _Members]]:
    below: dict[str, _Members] = defaultdict(list)
    for (first, *rest), group in members:
        below[first].append((rest, group))
    branches = list(below.items())
    if is_by_size:
        branches.sort(key=lambda branch: -_total(*branch).num_bytes)
    return branches


def _total(name: str, members: _Members) -> Group:
    """Return the module of all groups below a name."""
    groups = [group for _, group in members]
    return Group(
        pattern=name,
        dtype="",
        shape=(),
        num_keys=sum(group.num_keys for group in groups),
        num_bytes=sum(group.num_bytes for group in groups),
        num_chunks=sum(group.num_chunks for group in groups),
    )
