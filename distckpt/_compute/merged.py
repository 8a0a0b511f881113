"""A view of several checkpoints, whose tensors are weighted sums."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import Manifest
from distckpt._format.marker import names_of_module, note_of_module
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.codes import check_scales_cast
from distckpt._plan.decoded import decoded, hidden_keys
from distckpt._plan.selection import select_tensors


@dataclass(frozen=True)
class MergedView:
    """Several checkpoints as one.

    Attributes:
        stored: describes the sums. It has no chunks: only exports read it.
        terms: the checkpoints, with quantized tensors as values.
    """

    stored: StoredCheckpoint
    terms: Sequence[StoredCheckpoint]


def merged(
    checkpoints: Sequence[StoredCheckpoint],
    keys: str | Sequence[str] | None,
    left_out: Sequence[Set[str]],
    write_tied: bool,
) -> MergedView:
    """Return the view of the tensors that match `keys`.

    They must be in all checkpoints, with the same shapes. `left_out` are further keys to leave out,
    of each checkpoint. Names are tied if they are tied in all checkpoints.

    Raises:
        LoadMismatchError: a tensor is missing in one of the checkpoints, or has another shape
            there.
        CheckpointingException: a tensor has dtypes that cannot be added.
    """
    terms = [decoded(checkpoint) for checkpoint in checkpoints]
    ids = [_select(term, keys, unused) for term, unused in zip(terms, left_out, strict=True)]
    common = []
    for name in ids[0]:
        if all(name in others for others in ids):
            common.append(name)
    _check_all_are_common(terms, ids, common, write_tied)
    aliases = _tied_in_all(common, ids)
    names = []
    for name in common:
        if name not in aliases:
            names.append(name)
    dtypes = []
    shapes = []
    for name in names:
        dtypes.append(_dtype_of_sum(name, terms))
        shapes.append(terms[0].global_shape(name))
    manifest = Manifest(names, dtypes, shapes, ChunkTable.empty(), aliases, has_checksums=False)
    marker = note_of_module(names_of_module(terms[0].marker))
    return MergedView(StoredCheckpoint(terms[0].location, manifest, marker=marker), terms)


def _tied_in_all(names: Sequence[str], ids: Sequence[Mapping[str, int]]) -> dict[str, str]:
    """Return the names that all checkpoints tie to an earlier name."""
    firsts: dict[tuple[int, ...], str] = {}
    aliases = {}
    for name in names:
        first = firsts.setdefault(tuple(own[name] for own in ids), name)
        if first != name:
            aliases[name] = first
    return aliases


def _select(
    stored: StoredCheckpoint, keys: str | Sequence[str] | None, left_out: Set[str]
) -> dict[str, int]:
    """Return the index of each name that matches, tied ones included."""
    tensors = select_tensors(stored.manifest, keys, True, hidden_keys(stored), left_out)
    summed = []
    for key, info in tensors.items():
        if is_summed(FROM_NAME[info.dtype]):
            summed.append(key)
    check_scales_cast(stored, dict.fromkeys(summed, torch.float64))
    manifest = stored.manifest
    names = (*manifest.keys, *manifest.aliases)
    ids = {}
    for name in names:
        if name in tensors:
            ids[name] = manifest.key_index[name]
    return ids


def _check_all_are_common(
    terms: Sequence[StoredCheckpoint],
    ids: Sequence[Mapping[str, int]],
    common: Sequence[str],
    write_tied: bool,
) -> None:
    for term, own in zip(terms, ids, strict=True):
        absent = set(own).difference(common)
        if not write_tied:
            # A name that is only tied to another one may be absent elsewhere, as in Hugging Face
            # directories.
            common_ids = {own[name] for name in common}
            absent = {name for name in absent if own[name] not in common_ids}
        if absent:
            raise _not_found_everywhere(term, [name for name in own if name in absent], terms, ids)


def _not_found_everywhere(
    term: StoredCheckpoint,
    absent: Sequence[str],
    terms: Sequence[StoredCheckpoint],
    ids: Sequence[Mapping[str, int]],
) -> LoadMismatchError:
    lacking = []
    for other, names in zip(terms, ids, strict=True):
        if absent[0] not in names:
            lacking.append(other)
    return LoadMismatchError(
        f"Merging needs the same tensors in all checkpoints: {summarize_keys(absent)} of "
        f"{term.location!r} cannot be found in {lacking[0].location!r}. Leave them out with "
        "`keys`, or convert one of the checkpoints (`consolidate` with rules) so that their names "
        "agree.",
        missing=absent,
    )


def _dtype_of_sum(name: str, terms: Sequence[StoredCheckpoint]) -> str:
    """Return the dtype of a merged tensor, which holds all values.

    8-bit floats next to other dtypes do not count.
    """
    shapes = {}
    dtypes = {}
    for term in terms:
        shapes[term.location] = term.global_shape(name)
        dtypes[term.location] = FROM_NAME[term.dtype_name(name)]
    if len(set(shapes.values())) > 1:
        raise LoadMismatchError(
            f"Key {name!r} has different shapes: {shapes}. Leave it out with `keys`."
        )
    different = set(dtypes.values())
    if len(different) == 1:
        return TO_NAME[different.pop()]
    # Float16 has all values of 8-bit floats.
    wide = {dtype for dtype in different if dtype.itemsize > 1} or {torch.float16}
    of_sum = functools.reduce(torch.promote_types, wide)
    if of_sum not in TO_NAME or not all(map(is_summed, different)):
        raise CheckpointingException(
            f"Key {name!r} has dtypes of which there is no sum: {dtypes}. Leave it out with "
            "`keys`, or convert one of the checkpoints first."
        )
    return TO_NAME[of_sum]
