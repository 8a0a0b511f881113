"""Planning a consolidation: which tensors go into which output file, and what they are made of. Pure functions."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_convertible
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, natural_order, summarize_keys
from distckpt._format.hf_names import group_keys_by_bytes, shard_filename
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.codes import check_scales_cast
from distckpt.rules import MappedTensor, Rule, TensorInfo, apply_rules

SINGLE_FILE = "model.safetensors"
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
MAX_FILES = 99_999
"""Names of files have five digits."""


class OutputTensor(NamedTuple):
    """A tensor of the export: its name, safetensors dtype, number of elements, size, and what it is made of."""

    name: str
    dtype: str
    num_elements: int
    num_bytes: int
    mapped: MappedTensor


class OutputFile(NamedTuple):
    """A file of the export."""

    name: str
    tensors: tuple[OutputTensor, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def matches(key: str, patterns: str | Sequence[str]) -> bool:
    """Tell whether a key matches a pattern: with `*`, `?` or `[` as in file names, else by its beginning."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(key, p) if set(p) & set("*?[") else key.startswith(p) for p in listed)


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the beginning of a name: by the first of the old beginnings -> new ones that fits."""
    old = next((old for old in rename if name.startswith(old)), "")
    return rename.get(old, "") + name[len(old) :]


def select_tensors(manifest: Manifest, keys: str | Sequence[str] | None, write_tied: bool) -> dict[str, TensorInfo]:
    """Return the stored tensors that match; of tied ones only the first that does, unless all are to be written."""
    names = [*manifest.keys, *manifest.aliases]
    key_index = manifest.key_index
    chosen: dict[str, TensorInfo] = {}
    taken: set[int] = set()
    for name in names:
        key_id = key_index[name]
        is_wanted = manifest.dtypes[key_id] != OBJECT and (keys is None or matches(name, keys))
        if is_wanted and (write_tied or key_id not in taken):
            chosen[name] = TensorInfo(manifest.global_shapes[key_id], manifest.dtypes[key_id])
            taken.add(key_id)
    if not chosen:
        raise LoadMismatchError(f"No tensor matches {keys!r}; there are {summarize_keys(names)}.")
    return {name: chosen[name] for name in sorted(chosen, key=natural_order)}


def plan_tensors(
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule],
    rename: Mapping[str, str],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    *,
    keep_unmatched: bool = False,
) -> list[OutputTensor]:
    """Apply rules to tensors in natural order, then give each its name and dtype in the output.

    `rename` maps old beginnings of names to new ones; the first that fits counts. `dtype` is for all floating point
    tensors of 16 bits and more, or by pattern of output names; other tensors (integers, 8-bit floats) are converted
    only by a pattern without wildcards that is their name. Once there are rules, all tensors must match one, except
    with `keep_unmatched`.
    """
    outputs: list[OutputTensor] = []
    used: set[str] = set()
    by_pattern = {"*": dtype} if isinstance(dtype, torch.dtype) else dict(dtype or {})
    for original, mapped in _apply_rules(rules, tensors, keep_unmatched).items():
        name, pattern = renamed(original, rename), None
        if by_pattern:
            pattern = next((p for p in by_pattern if name == p or matches(name, p)), None)
        stored = FROM_NAME[mapped.dtype]
        target = stored
        if pattern is not None:
            used.add(pattern)
            is_ordinary = stored.is_floating_point and stored.itemsize > 1
            target = by_pattern[pattern] if is_ordinary or pattern == name else stored
            if not is_convertible(stored, target):
                raise CheckpointingException(
                    f"Tensor {name!r} is {stored} and cannot be converted to {target}: give another dtype for it."
                )
        count = math.prod(mapped.shape)
        outputs.append(OutputTensor(name, TO_NAME[target], count, count * target.itemsize, mapped))
    names = [tensor.name for tensor in outputs]
    no_text = [name for name in names if name.encode(errors="ignore").decode() != name]
    if no_text:
        raise CheckpointingException(f"No safetensors file can hold the name {no_text[0]!r:.300}: rename it.")
    if len(set(names)) < len(names):
        twice = summarize_keys(name for name in set(names) if names.count(name) > 1)
        raise CheckpointingException(f"Several tensors would get one name: {twice}. Change rename.")
    unused = set(by_pattern) - used - {"*"}
    if unused:
        raise CheckpointingException(
            f"Of the patterns for dtype, {sorted(unused)} apply to no tensor: none matches, or an earlier pattern does."
        )
    return sorted(outputs, key=lambda tensor: natural_order(tensor.name)) if rules or rename else outputs


def check_casts(stored: StoredCheckpoint, outputs: Sequence[OutputTensor]) -> None:
    """Refuse outputs in which codes of quantised tensors are converted as if they were values."""
    casts = {
        part.key: FROM_NAME[output.dtype]
        for output in outputs
        if output.dtype != output.mapped.dtype
        for part in output.mapped.parts
    }
    check_scales_cast(stored, casts)


def _apply_rules(
    rules: Sequence[Rule], tensors: Mapping[str, TensorInfo], keep_unmatched: bool
) -> dict[str, MappedTensor]:
    try:
        return apply_rules(rules, tensors, strict=bool(rules) and not keep_unmatched)
    except LoadMismatchError as error:
        if not error.missing:
            raise
        raise LoadMismatchError(
            f"{error} Those that are not of the model (an optimizer's, say) are left out with `keys`; "
            "unmatched='keep' exports them under their own names.",
            missing=error.missing,
        ) from error


def plan_files(
    outputs: Sequence[OutputTensor], max_file_bytes: int, file_numbers: Mapping[str, int] | None
) -> list[OutputFile]:
    """Divide tensors, in natural order, among files of at most `max_file_bytes`; larger ones have files of their own.

    Or by `file_numbers`: name -> number of its file, from 1. Names that are not exported are ignored there (the index
    of a model with tied weights lists both).
    """
    by_name = {tensor.name: tensor for tensor in outputs}
    if file_numbers is None:
        groups = group_keys_by_bytes({tensor.name: tensor.num_bytes for tensor in outputs}, max_file_bytes)
    else:
        unmapped = [name for name in by_name if name not in file_numbers]
        if unmapped:
            raise CheckpointingException(
                f"The mapping of tensors to files does not name {summarize_keys(unmapped)}"
                f"{did_you_mean(unmapped[0], file_numbers)}: add them, or select other keys."
            )
        for name in by_name:
            number = file_numbers[name]
            if not isinstance(number, int) or not 1 <= number <= MAX_FILES:
                raise CheckpointingException(f"Files are numbered from 1 to {MAX_FILES}, got {number!r} for {name!r}.")
        groups = [[] for _ in range(max(file_numbers[name] for name in by_name))]
        for name in by_name:
            groups[file_numbers[name] - 1].append(name)
    if len(groups) == 1:
        return [OutputFile(SINGLE_FILE, tuple(by_name[name] for name in groups[0]))]
    return [
        OutputFile(shard_filename("model", number, len(groups)), tuple(by_name[name] for name in names))
        for number, names in enumerate(groups, start=1)
        if names
    ]


def assign_files(files: Sequence[OutputFile], num_ranks: int) -> list[list[int]]:
    """Give each file to a rank, the largest first to the rank with the least to write."""
    loads = [0] * num_ranks
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(files)), key=lambda i: -files[i].num_bytes):
        rank = loads.index(min(loads))
        loads[rank] += files[index].num_bytes
        assigned[rank].append(index)
    return assigned
