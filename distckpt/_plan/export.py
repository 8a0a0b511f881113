"""Planning of exports: tensors, their sources, and the files they go to.

All functions here are pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, PACKED_PER_ITEM, TO_NAME, is_convertible
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, natural_order, summarize_keys
from distckpt._format.code_names import (
    are_codes_beside_scales,
    may_be_codes,
    places_of_scales,
    scale_beside,
    scales_of,
)
from distckpt._format.hf_names import (
    BASE_PREFIX,
    SINGLE_NAME,
    SUFFIX,
    group_keys_by_bytes,
    output_filenames,
)
from distckpt._format.safetensors_file import Entry, build_header, layout_order
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.codes import check_scales_cast
from distckpt._plan.selection import check_all_match, check_rename, matches, renamed
from distckpt.rules._mapped import MappedTensor, TensorSpec
from distckpt.rules._rule import Rule
from distckpt.rules._rules import apply_rules

MAX_FILES = 99_999
"""Largest number of files: their names have five digits."""

_ROUTER_BIAS = "e_score_correction_bias"


class OutputTensor(NamedTuple):
    """A tensor of an export.

    Attributes:
        name: name in the export.
        dtype: safetensors name of the dtype in the export.
        shape: shape in the export.
        num_bytes: size in the export.
        mapped: the parts of the checkpoint that make up its values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    mapped: MappedTensor

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class OutputFile:
    """A file of an export."""

    name: str
    tensors: tuple[OutputTensor, ...]

    @cached_property
    def num_bytes(self) -> int:
        """The size of its data."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @cached_property
    def laid_out(self) -> tuple[list[OutputTensor], bytes]:
        """The tensors in the order of the file, and its header."""
        entries = [Entry(t.name, t.dtype, t.shape, t.num_bytes) for t in self.tensors]
        order = layout_order(entries)
        header, _ = build_header([entries[i] for i in order], {"format": "pt"})
        return [self.tensors[i] for i in order], header

    @property
    def file_bytes(self) -> int:
        """The size of the file when it is written."""
        return len(self.laid_out[1]) + self.num_bytes


# --- Names and dtypes -----------------------------------------------------------------------------


def plan_tensors(
    tensors: Mapping[str, TensorSpec],
    rules: Sequence[Rule],
    rename: Mapping[str, str],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    *,
    keep_unmatched: bool = False,
    tied: Collection[str] = (),
) -> list[OutputTensor]:
    """Apply rules to tensors; give each tensor its export name and dtype.

    Args:
        tensors: stored tensors, in natural order.
        rules: changes of names and shapes.
        rename: old prefixes of names after the rules -> new ones; the first that fits counts.
        dtype: dtype of all floating-point tensors of 16 bits and more, or dtypes by pattern of new
            names; other tensors (integers, 8-bit floats) are converted only by a pattern without
            wildcards that is their name.
        keep_unmatched: whether tensors that no rule matches keep name and shape, instead of being
            an error.
        tied: further names, which are not written, that `rename` may fit.

    Raises:
        TypeError: `rename` or `dtype` is of another type.
        LoadMismatchError: a rule, or an old prefix, matches nothing, or no rule matches a tensor.
        CheckpointingException: names are not unique, or are none that a file can have, or a
            conversion makes no sense.
    """
    by_pattern = _dtypes_by_pattern(dtype)
    check_rename(rename)
    ruled = _apply_rules(rules, tensors, keep_unmatched)
    if rename:
        check_all_match({*ruled, *tied}, rename=rename)
    outputs = []
    used = set()
    for original, mapped in ruled.items():
        name = renamed(original, rename)
        target = FROM_NAME[mapped.dtype]
        pattern = _pattern_for(name, by_pattern)
        if pattern is not None:
            used.add(pattern)
            target = _converted(name, target, by_pattern[pattern], is_named=pattern == name)
        num_bytes = math.prod(mapped.shape) * target.itemsize
        outputs.append(OutputTensor(name, TO_NAME[target], mapped.shape, num_bytes, mapped))
    _check_names(outputs)
    _check_patterns_are_used(by_pattern, used, outputs)
    if rules or rename:
        outputs.sort(key=lambda tensor: natural_order(tensor.name))
    return outputs


def _dtypes_by_pattern(
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
) -> Mapping[str, torch.dtype]:
    if dtype is None:
        return {}
    if isinstance(dtype, torch.dtype):
        return {"*": dtype}
    is_dict = isinstance(dtype, Mapping)
    if not is_dict or not all(isinstance(value, torch.dtype) for value in dtype.values()):
        raise TypeError(
            "dtype is a torch.dtype, such as torch.bfloat16, or a dict of them by pattern, got "
            f"{dtype!r}."
        )
    return dtype


def _apply_rules(
    rules: Sequence[Rule], tensors: Mapping[str, TensorSpec], keep_unmatched: bool
) -> dict[str, MappedTensor]:
    try:
        made = apply_rules(rules, tensors, strict=bool(rules) and not keep_unmatched)
    except LoadMismatchError as error:
        if not error.missing:
            raise
        raise LoadMismatchError(
            f"{error} Those that are not of the model (an optimizer's, say) are left out with "
            "`keys`; unmatched='keep' exports them under their own names.",
            missing=error.missing,
        ) from error
    absent: set[str] = set()
    for tensor in made.values():
        absent.update(part.key for part in tensor.parts if part.key not in tensors)
    if absent:
        raise LoadMismatchError(
            f"{summarize_keys(absent)} missing, of an optional Stack: correct its size, or the "
            "checkpoint is incomplete.",
            unexpected=sorted(absent),
        )
    return made


def _pattern_for(name: str, patterns: Iterable[str]) -> str | None:
    for pattern in patterns:
        if name == pattern or matches(name, pattern):
            return pattern
    return None


def _converted(
    name: str,
    stored: torch.dtype,
    requested: torch.dtype,
    is_named: bool,
) -> torch.dtype:
    """Return the dtype of a tensor in an export.

    The tensor's name, or a pattern, converts it to a dtype.
    """
    is_ordinary = stored.is_floating_point and stored.itemsize > 1
    target = stored
    if is_ordinary or is_named:
        target = requested
    has_fractions = target.is_floating_point or target.is_complex
    is_cut = is_ordinary and not is_named and not has_fractions
    if is_cut or not is_convertible(stored, target):
        why = ""
        if is_cut:
            why = " without its fractions, except under a pattern that is its name"
        raise CheckpointingException(
            f"Tensor {name!r} is {stored} and cannot be converted to {target}{why}: give another "
            "dtype for it."
        )
    return target


def _check_names(outputs: Sequence[OutputTensor]) -> None:
    """Refuse duplicate names, and names that no safetensors file can hold."""
    names = [tensor.name for tensor in outputs]
    for tensor in outputs:
        name = tensor.name
        if not name:
            source = summarize_keys(part.key for part in tensor.mapped.parts)
            raise CheckpointingException(
                f"The new name of {source} would be empty: change rename, or the rules."
            )
        if name == "__metadata__" or not _is_text(name):
            raise CheckpointingException(
                f"No safetensors file can hold the name {name!r:.300}: rename it."
            )
    if len(set(names)) < len(names):
        twice = summarize_keys(name for name, count in Counter(names).items() if count > 1)
        raise CheckpointingException(f"Several tensors would get one name: {twice}. Change rename.")


def check_have_axes(outputs: Iterable[OutputTensor]) -> None:
    """Refuse packed tensors without axes.

    Files count their elements along the last axis.
    """
    packed = (tensor for tensor in outputs if tensor.dtype in PACKED_PER_ITEM and not tensor.shape)
    tensor = next(packed, None)
    if tensor is not None:
        raise CheckpointingException(
            f"Tensor {tensor.name!r} is {FROM_NAME[tensor.dtype]} without axes, of which no "
            "safetensors file can hold the two elements: leave it out with `keys`, or save it with "
            "one axis."
        )


def _is_text(name: str) -> bool:
    """Whether a name can be encoded; half a surrogate pair cannot."""
    return name.isascii() or name.encode(errors="ignore").decode() == name


def _check_patterns_are_used(
    patterns: Collection[str], used: Collection[str], outputs: Sequence[OutputTensor]
) -> None:
    unused = {*patterns}.difference(used, "*")
    if unused:
        names = [tensor.name for tensor in outputs]
        raise CheckpointingException(
            f"Of the patterns for dtype, {sorted(unused)} apply to no tensor: none matches"
            f"{did_you_mean(min(unused), names)}, or an earlier pattern does. Expected are names "
            "of the export (after rules and rename), beginnings of them, or patterns with *."
        )


def is_for_all(dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> bool:
    """Whether a dtype is for all tensors, so that codes become values."""
    return isinstance(dtype, torch.dtype) or "*" in (dtype or ())


def keep_precise(output: OutputTensor) -> OutputTensor:
    """Keep router biases, which balance experts, in float32.

    All programs keep them so.
    """
    names = (output.name, *(part.key for part in output.mapped.parts[:1]))
    if output.mapped.dtype != "F32" or not any(name.endswith(_ROUTER_BIAS) for name in names):
        return output
    return output._replace(dtype="F32", num_bytes=4 * output.num_elements)


# --- Codes ----------------------------------------------------------------------------------------


def check_codes(
    stored: StoredCheckpoint, outputs: Sequence[OutputTensor], computed: Collection[str] = ()
) -> None:
    """Refuse outputs that use codes as values, or lack their scales.

    Args:
        stored: the checkpoint.
        outputs: tensors of the export.
        computed: names of outputs that are computed from stored values.

    Raises:
        LoadMismatchError: an output is refused.
    """
    casts: dict[str, torch.dtype] = {}
    for output in outputs:
        if output.name in computed:
            casts |= {part.key: torch.float32 for part in output.mapped.parts}
        elif output.dtype != output.mapped.dtype:
            casts |= {part.key: FROM_NAME[output.dtype] for part in output.mapped.parts}
    check_scales_cast(stored, casts)
    code_outputs = []
    for output in outputs:
        if may_be_codes(output.mapped.dtype):
            code_outputs.append(output)
    if code_outputs:
        _check_scales_are_there(stored, code_outputs, {output.name for output in outputs})


def _check_scales_are_there(
    stored: StoredCheckpoint, code_outputs: Sequence[OutputTensor], names: Collection[str]
) -> None:
    index = stored.manifest.key_index
    unexplained = []
    for output in code_outputs:
        name = output.name
        for part in output.mapped.parts:
            scales = scales_of(part.key, index)
            if len(scales) > len(scales_of(name, names)):
                raise _without_scales(stored, part.key, name, scales)
            if not scales and are_codes_beside_scales(part.key, stored.dtype_name(part.key)):
                unexplained.append((name, part.key))
    if not unexplained:
        return
    places = places_of_scales(names)
    for name, key in unexplained:
        stored_scale = scale_beside(key, stored.manifest.scale_places)
        if stored_scale is not None and scale_beside(name, places) is None:
            raise _without_scales(stored, key, name, [stored_scale])


def _without_scales(
    stored: StoredCheckpoint, key: str, name: str, scales: Sequence[str]
) -> LoadMismatchError:
    return LoadMismatchError(
        f"{key!r} in {stored.location!r} holds codes and would be {name!r}, without its "
        f"scales ({', '.join(map(repr, scales))}): select and rename them together, or "
        "give a dtype for all tensors to write values.",
        unexpected=[key],
    )


# --- Files ----------------------------------------------------------------------------------------


def plan_files(
    outputs: Sequence[OutputTensor], max_file_bytes: int, file_numbers: Mapping[str, int] | None
) -> list[OutputFile]:
    """Divide tensors among files of at most `max_file_bytes`.

    The tensors are in natural order; larger ones have files of their own. With `file_numbers` (name
    -> number of its file, from 1) the tensors go to these files. Names that are not exported are
    ignored there (the index of a model with tied weights lists both).
    """
    if file_numbers is not None:
        numbered = number_files(outputs, file_numbers)
        is_single = len(numbered) == 1 and max(file_numbers[o.name] for o in outputs) == 1
        if is_single:
            return [OutputFile(SINGLE_NAME, numbered[0].tensors)]
        return numbered
    by_name = {}
    sizes = {}
    for tensor in outputs:
        by_name[tensor.name] = tensor
        sizes[tensor.name] = tensor.num_bytes
    groups = group_keys_by_bytes(sizes, max_file_bytes)
    names = output_filenames(BASE_PREFIX, len(groups))
    files = []
    for name, keys in zip(names, groups, strict=True):
        files.append(OutputFile(name, tuple(by_name[key] for key in keys)))
    return files


def number_files(
    outputs: Sequence[OutputTensor], file_numbers: Mapping[str, int], lowest: int = 1
) -> list[OutputFile]:
    """Divide tensors among numbered files, named as torch names them.

    A single file has its number as well.
    """
    _check_numbers([tensor.name for tensor in outputs], file_numbers, lowest)
    groups: dict[int, list[OutputTensor]] = {}
    for tensor in outputs:
        groups.setdefault(file_numbers[tensor.name], []).append(tensor)
    last = max(groups, default=lowest - 1)
    files = []
    for number, tensors in sorted(groups.items()):
        file_name = f"{BASE_PREFIX}-{number:05d}-of-{last:05d}{SUFFIX}"
        files.append(OutputFile(file_name, tuple(tensors)))
    return files


def _check_numbers(names: Sequence[str], file_numbers: Mapping[str, int], lowest: int) -> None:
    """Refuse tensors without a number of a file."""
    unmapped = []
    for name in names:
        if name not in file_numbers:
            unmapped.append(name)
    if unmapped:
        raise CheckpointingException(
            f"The mapping of tensors to files does not name {summarize_keys(unmapped)}"
            f"{did_you_mean(unmapped[0], file_numbers)}: add them, or select other keys."
        )
    for name in names:
        number = file_numbers[name]
        if not isinstance(number, int) or not lowest <= number <= MAX_FILES:
            raise CheckpointingException(
                f"Files are numbered from {lowest} to {MAX_FILES}, got {number!r} for {name!r}."
            )


def assign_files(files: Sequence[OutputFile], num_ranks: int) -> list[list[int]]:
    """Give each file to a rank, balancing the bytes to write.

    The largest file comes first, to the rank with the fewest bytes.
    """
    loads = [0] * num_ranks
    assigned: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(files)), key=lambda i: -files[i].num_bytes):
        rank = loads.index(min(loads))
        loads[rank] += files[index].num_bytes
        assigned[rank].append(index)
    return assigned
