"""Planning a consolidation: which tensors go into which output file, and what they are made of.
Pure functions.
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME, TO_NAME, is_convertible
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, natural_order, summarize_keys
from distckpt._format.hf_names import group_keys_by_bytes, shard_filename
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.codes import check_scales_cast
from distckpt._quantization.formats import (
    FORMATS,
    NOT_QUANTIZED,
    Format,
    quantization_config,
    quantized_as,
    takes,
)
from distckpt._quantization.names import may_be_codes, scales_of
from distckpt._quantization.quantized import QuantizedTensor
from distckpt._rules.rules import (
    MappedTensor,
    Rule,
    TensorInfo,
    apply_rules,
)

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
MAX_FILES = 99_999
"""Names of files have five digits."""


class EncodedPart(NamedTuple):
    """A part of a tensor that is quantized when it is written: codes, scales and so on, see
    `QuantizedTensor`.
    """

    quantized: QuantizedTensor
    role: str


class Change(NamedTuple):
    """What an adapter changes in a tensor: `replacement` takes its place, and `scaling * b @ a` is
    added.

    They are keys, None for nothing; the product is perhaps `transposed`. If the matrices are those
    of `num_experts`, as PEFT has them, the rows of `a` are those of one after another, and the
    columns of `b` take turns; `first_row` is that of the tensor in `b`.
    """

    adapter: StoredCheckpoint
    replacement: str | None = None
    b: str | None = None
    a: str = ""
    scaling: float = 1.0
    transposed: bool = False
    expert: int = 0
    num_experts: int = 0
    first_row: int = 0


class OutputTensor(NamedTuple):
    """A tensor of the export: its name, safetensors dtype, number of elements, size, and what it is
    made of.

    `mapped` is that, or, where this is an encoded part, what the tensor is made of whose part it
    is. It is changed before it is encoded.
    """

    name: str
    dtype: str
    num_elements: int
    num_bytes: int
    mapped: MappedTensor
    encoded: EncodedPart | None = None
    change: Change | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return (
            self.encoded.quantized.parts[self.encoded.role].shape
            if self.encoded
            else self.mapped.shape
        )


class OutputFile(NamedTuple):
    """A file of the export."""

    name: str
    tensors: tuple[OutputTensor, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def matches(key: str, patterns: str | Sequence[str]) -> bool:
    """Tell whether a key matches a pattern: with `*`, `?` or `[` as in file names, else by its
    beginning.

    Patterns behind a `!` name what is left out; if there are no others, all else matches.
    """
    listed = [patterns] if isinstance(patterns, str) else patterns
    wanted = [pattern for pattern in listed if not pattern.startswith("!")]
    is_left_out = any(_fits(key, pattern[1:]) for pattern in listed if pattern.startswith("!"))
    return not is_left_out and (
        (not wanted and len(listed) > 0) or any(_fits(key, pattern) for pattern in wanted)
    )


def _fits(key: str, pattern: str) -> bool:
    return (
        fnmatch.fnmatchcase(key, pattern) if set(pattern) & set("*?[") else key.startswith(pattern)
    )


def check_patterns(keys: object) -> None:
    """Raise TypeError for `keys` that are no pattern, list of patterns, or None."""
    listed = keys if isinstance(keys, Collection) else [keys]
    if keys is not None and not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"keys is a pattern of keys, or a list of them, got {keys!r:.200}.")


def check_all_match(
    names: Collection[str],
    keys: str | Sequence[str] | None = None,
    rename: Iterable[str] = (),
    where: str = "",
) -> None:
    """Refuse patterns and old beginnings that match none of the names; of what is to be left out,
    only warn.

    Raises:
        LoadMismatchError: one matches nothing.
    """
    listed = [keys] if isinstance(keys, str) else keys or ()
    unused = [old for old in rename if not any(name.startswith(old) for name in names)]
    unmatched = [p for p in listed if not any(_fits(name, p.removeprefix("!")) for name in names)]
    unused += [pattern for pattern in unmatched if not pattern.startswith("!")]
    if absent := [pattern[1:] for pattern in unmatched if pattern.startswith("!")]:
        logger.warning(
            "no tensor%s matches %s, which is to be left out", where, ", ".join(map(repr, absent))
        )
    if unused:
        there = summarize_keys(names) if names else "none"
        raise LoadMismatchError(
            f"No tensor{where} matches {', '.join(map(repr, unused))}; there are {there}."
        )


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the beginning of a name: by the first of the old beginnings -> new ones that fits."""
    old = next((old for old in rename if name.startswith(old)), "")
    return rename.get(old, "") + name[len(old) :]


def select_tensors(
    manifest: Manifest,
    keys: str | Sequence[str] | None,
    write_tied: bool,
    hidden: Set[str] = frozenset(),
) -> dict[str, TensorInfo]:
    """Return the stored tensors that match; of tied ones only the first that does, unless all are
    to be written.

    `hidden` ones are left out.
    """
    check_patterns(keys)
    names = [name for name in (*manifest.keys, *manifest.aliases) if name not in hidden]
    key_index = manifest.key_index
    chosen: dict[str, TensorInfo] = {}
    taken: set[int] = set()
    for name in names:
        key_id = key_index[name]
        is_wanted = manifest.dtypes[key_id] != OBJECT and (keys is None or matches(name, keys))
        if is_wanted and (write_tied or key_id not in taken):
            chosen[name] = TensorInfo(manifest.global_shapes[key_id], manifest.dtypes[key_id])
            taken.add(key_id)
    if chosen and keys is not None:
        check_all_match(
            {name for name, key_id in key_index.items() if manifest.dtypes[key_id] != OBJECT}, keys
        )
    if not chosen:
        there = summarize_keys(name for name in names if manifest.dtypes[key_index[name]] != OBJECT)
        raise LoadMismatchError(f"No tensor matches {keys!r}; there are {there or 'none'}.")
    return {name: chosen[name] for name in sorted(chosen, key=natural_order)}


def plan_tensors(
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule],
    rename: Mapping[str, str],
    dtype: torch.dtype | Mapping[str, torch.dtype] | None,
    *,
    keep_unmatched: bool = False,
    tied: Collection[str] = (),
) -> list[OutputTensor]:
    """Apply rules to tensors in natural order, then give each its name and dtype in the output.

    `rename` maps old beginnings of names to new ones; the first that fits counts. `dtype` is for
    all floating point tensors of 16 bits and more, or by pattern of output names; other tensors
    (integers, 8-bit floats) are converted only by a pattern without wildcards that is their name.
    Once there are rules, all tensors must match one, except with `keep_unmatched`. Of `rename`,
    each must fit something, if only one of the `tied` names that are not written.
    """
    outputs: list[OutputTensor] = []
    used: set[str] = set()
    by_pattern = {"*": dtype} if isinstance(dtype, torch.dtype) else {} if dtype is None else dtype
    if not isinstance(by_pattern, Mapping) or not all(
        isinstance(d, torch.dtype) for d in by_pattern.values()
    ):
        raise TypeError(
            "dtype is a torch.dtype, such as torch.bfloat16, or a dict of them by pattern, got "
            f"{dtype!r}."
        )
    if not isinstance(rename, Mapping) or not all(
        isinstance(name, str) for pair in rename.items() for name in pair
    ):
        raise TypeError(
            f"rename is a dict of old beginnings of names -> new ones, got {rename!r:.200}."
        )
    ruled = _apply_rules(rules, tensors, keep_unmatched)
    check_all_match({*ruled, *tied}, rename=rename)
    for original, mapped in ruled.items():
        name, pattern = renamed(original, rename), None
        if by_pattern:
            pattern = next((p for p in by_pattern if name == p or matches(name, p)), None)
        if not name:
            source = summarize_keys(part.key for part in mapped.parts)
            raise CheckpointingException(
                f"The new name of {source} would be empty: change rename, or the rules."
            )
        target = FROM_NAME[mapped.dtype]
        if pattern is not None:
            used.add(pattern)
            target = _converted(name, target, by_pattern[pattern], is_named=pattern == name)
        count = math.prod(mapped.shape)
        outputs.append(OutputTensor(name, TO_NAME[target], count, count * target.itemsize, mapped))
    names = [tensor.name for tensor in outputs]
    no_text = [
        name
        for name in names
        if name.encode(errors="ignore").decode() != name or name == "__metadata__"
    ]
    if no_text:
        raise CheckpointingException(
            f"No safetensors file can hold the name {no_text[0]!r:.300}: rename it."
        )
    if len(set(names)) < len(names):
        twice = summarize_keys(name for name in set(names) if names.count(name) > 1)
        raise CheckpointingException(f"Several tensors would get one name: {twice}. Change rename.")
    unused = set(by_pattern) - used - {"*"}
    if unused:
        raise CheckpointingException(
            f"Of the patterns for dtype, {sorted(unused)} apply to no tensor: none matches"
            f"{did_you_mean(min(unused), names)}, or an earlier pattern does. Expected are names "
            "of the export (after rules and rename), beginnings of them, or patterns with *."
        )
    return (
        sorted(outputs, key=lambda tensor: natural_order(tensor.name))
        if rules or rename
        else outputs
    )


def _converted(name: str, stored: torch.dtype, wanted: torch.dtype, is_named: bool) -> torch.dtype:
    """Return the dtype of a tensor in an export, which its name or another pattern converts to a
    wanted one.
    """
    is_ordinary = stored.is_floating_point and stored.itemsize > 1
    target = wanted if is_ordinary or is_named else stored
    is_cut = is_ordinary and not is_named and not (target.is_floating_point or target.is_complex)
    if is_cut or not is_convertible(stored, target):
        why = " without its fractions, except under a pattern that is its name" if is_cut else ""
        raise CheckpointingException(
            f"Tensor {name!r} is {stored} and cannot be converted to {target}{why}: give another "
            "dtype for it."
        )
    return target


def is_for_all(dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> bool:
    """Tell whether a dtype is given for all tensors, so that those stored as codes are exported as
    values.
    """
    return isinstance(dtype, torch.dtype) or "*" in (dtype or ())


def keep_precise(output: OutputTensor) -> OutputTensor:
    """Leave a tensor in float32 that all programs keep so: the bias by which routers balance their
    experts.
    """
    if output.mapped.dtype != "F32" or not output.name.endswith("e_score_correction_bias"):
        return output
    return output._replace(dtype="F32", num_bytes=4 * output.num_elements)


def check_codes(stored: StoredCheckpoint, outputs: Sequence[OutputTensor]) -> None:
    """Refuse outputs in which codes of quantized tensors are converted as if they were values, or
    lack their scales.
    """
    casts = {
        part.key: torch.float32 if output.encoded or output.change else FROM_NAME[output.dtype]
        for output in outputs
        if output.encoded or output.change or output.dtype != output.mapped.dtype
        for part in output.mapped.parts
    }
    check_scales_cast(stored, casts)
    index, names = stored.manifest.key_index, {output.name for output in outputs}
    for output in (output for output in outputs if may_be_codes(output.mapped.dtype)):
        for part in output.mapped.parts:
            scales = scales_of(part.key, index)
            if len(scales) > len(scales_of(output.name, names)):
                raise LoadMismatchError(
                    f"{part.key!r} in {stored.location!r} holds codes and would be "
                    f"{output.name!r}, without its scales ({', '.join(map(repr, scales))}): "
                    "select and rename them together, or give a dtype for all tensors to write "
                    "values.",
                    unexpected=[part.key],
                )


def _apply_rules(
    rules: Sequence[Rule], tensors: Mapping[str, TensorInfo], keep_unmatched: bool
) -> dict[str, MappedTensor]:
    try:
        return apply_rules(rules, tensors, strict=bool(rules) and not keep_unmatched)
    except LoadMismatchError as error:
        if not error.missing:
            raise
        raise LoadMismatchError(
            f"{error} Those that are not of the model (an optimizer's, say) are left out with "
            "`keys`; unmatched='keep' exports them under their own names.",
            missing=error.missing,
        ) from error


def quantize_outputs(
    outputs: Sequence[OutputTensor], formats: Mapping[str, str], model: Set[str] | None = None
) -> tuple[list[OutputTensor], dict[str, Any]]:
    """Replace tensors by the parts of their quantized form.

    Args:
        outputs: tensors of the export.
        formats: pattern of names -> name of a format; the first that matches counts. With the
            pattern "", the format is for those tensors that models usually quantize.
        model: names of the tensors to quantize, where a model says them.

    Returns:
        The outputs, and the `quantization_config` of the model.
    """
    result: list[OutputTensor] = []
    kept: list[str] = []
    used: dict[str, Format] = {}
    for output in outputs:
        name, shape = output.name, output.mapped.shape
        pattern = next(
            (p for p in formats if p and matches(name, p)), "" if "" in formats else None
        )
        form = FORMATS[formats[pattern]] if pattern is not None else None
        if pattern == "" and (name not in model if model else matches(name, NOT_QUANTIZED)):
            form = None
        is_float = (
            FROM_NAME[output.mapped.dtype].is_floating_point
            and FROM_NAME[output.mapped.dtype].itemsize > 1
        )
        if form is None or not is_float or not takes(form, name, shape):
            result.append(output)
            kept += [name] if len(shape) == 2 and name.endswith(".weight") else []
            continue
        used[formats[pattern or ""]] = form
        quantized = quantized_as(form, name, shape, output.dtype)
        for role, part in quantized.parts.items():
            count = math.prod(part.shape)
            num_bytes = count * FROM_NAME[part.dtype].itemsize
            encoded = EncodedPart(quantized, role)
            result.append(
                OutputTensor(
                    part.key, part.dtype, count, num_bytes, output.mapped, encoded, output.change
                )
            )
    unused = sorted(set(formats.values()) - used.keys())
    if unused:
        raise CheckpointingException(
            f"No tensor can be quantized to {unused}: no name matches, or shapes do not fit. "
            "Formats other than mxfp4 are for weights with two axes named '*.weight' (4-bit ones "
            "with whole groups of columns), mxfp4 for '*.experts.*_proj' with three, as "
            "transformers has them in memory for gpt-oss."
        )
    config = quantization_config(list(used.values()), kept)
    if config is None:
        raise CheckpointingException(
            f"No config.json can describe {sorted(used)} in one model: choose one of them."
        )
    twice = [name for name, count in Counter(tensor.name for tensor in result).items() if count > 1]
    if twice:
        raise CheckpointingException(
            f"{twice[0]!r} is in the checkpoint, and quantizing makes another: rename it."
        )
    return result, config


def plan_files(
    outputs: Sequence[OutputTensor], max_file_bytes: int, file_numbers: Mapping[str, int] | None
) -> list[OutputFile]:
    """Divide tensors, in natural order, among files of at most `max_file_bytes`; larger ones have
    files of their own.

    Or by `file_numbers`: name -> number of its file, from 1. Names that are not exported are
    ignored there (the index of a model with tied weights lists both).
    """
    by_name = {tensor.name: tensor for tensor in outputs}
    if file_numbers is None:
        groups = group_keys_by_bytes(
            {tensor.name: tensor.num_bytes for tensor in outputs}, max_file_bytes
        )
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
                raise CheckpointingException(
                    f"Files are numbered from 1 to {MAX_FILES}, got {number!r} for {name!r}."
                )
        groups = [[] for _ in range(max(file_numbers[name] for name in by_name))]
        for name in by_name:
            groups[file_numbers[name] - 1].append(name)
    if len(groups) == 1:
        return [OutputFile(SINGLE_FILE, tuple(by_name[name] for name in groups[0]))]
    return [
        OutputFile(
            shard_filename("model", number, len(groups)), tuple(by_name[name] for name in names)
        )
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
