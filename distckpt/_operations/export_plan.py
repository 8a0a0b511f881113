"""The plan of an export: which tensors it holds, what they are made of, and which files they go
to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from distckpt._base.dtypes import FROM_NAME
from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.messages import check_choice, summarize_keys
from distckpt._foreign import hugging_face
from distckpt._format.marker import CONFIG_FNAME
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.adapter import CONFIG_NAME, merge_adapter
from distckpt._plan.codes import CONFIG_NAMES
from distckpt._plan.decoded import decoded, find, hidden_keys
from distckpt._plan.export import (
    OutputTensor,
    check_codes,
    is_for_all,
    keep_precise,
    plan_tensors,
    quantize_outputs,
    select_tensors,
)
from distckpt._plan.peft_names import with_peft_names
from distckpt._quantization.formats import FORMATS
from distckpt._rules.families import config_for, read_config, rules_for
from distckpt._rules.rules import Rule, TensorInfo, Tie
from distckpt._storage import locations

logger = logging.getLogger(__name__)

_MAX_PROBED = 100
"""So many entries of a directory that is no adapter are looked at, for adapters in them."""


class Selection(NamedTuple):
    """What is exported, and as what: arguments of `consolidate`, which describes them."""

    keys: str | Sequence[str] | None = None
    rules: Sequence[Rule] = ()
    family: str | os.PathLike[str] | None = None
    rename: Mapping[str, str] | None = None
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
    quantize: str | Mapping[str, str] | None = None
    tied: Literal["drop", "write"] = "drop"
    unmatched: Literal["error", "keep"] = "error"
    like: str | os.PathLike[str] | None = None

    @property
    def formats(self) -> dict[str, str]:
        """Formats of quantised tensors by pattern; the empty one is for what models usually
        quantise.
        """
        return {"": self.quantize} if isinstance(self.quantize, str) else dict(self.quantize or {})

    def check(self) -> None:
        """Raise ValueError for an argument that is none of its choices."""
        check_choice("tied", self.tied, ("drop", "write"))
        check_choice("unmatched", self.unmatched, ("error", "keep"))
        for name in self.formats.values():
            check_choice("quantize", name, tuple(FORMATS))
            for dtype in (FORMATS[name].codes_dtype, FORMATS[name].scale_dtype):
                if dtype not in FROM_NAME:
                    raise ValueError(
                        f"quantize={name!r} needs the dtype {dtype}, which torch "
                        f"{torch.__version__} lacks."
                    )


class ExportPlan(NamedTuple):
    """What an export will hold.

    Attributes:
        stored: the view of the checkpoint to read.
        tensors: the tensors of it that were selected.
        outputs: the tensors of the export, with the regions that they are made of.
        numbers: of the files that tensors go to by name, where they were given.
        quantization: the `quantization_config` of what is quantised.
        tied: tensors that are stored and left out, with those of which the configuration says that
            they are the same.
    """

    stored: StoredCheckpoint
    tensors: Mapping[str, TensorInfo]
    outputs: list[OutputTensor]
    numbers: Mapping[str, int] | None
    quantization: Mapping[str, Any] | None
    tied: Sequence[tuple[OutputTensor, OutputTensor]]

    @property
    def left_out(self) -> list[str]:
        """Keys that were selected and of which nothing is exported."""
        used = {part.key for output in self.outputs for part in output.mapped.parts}
        return [
            key for key, info in self.tensors.items() if key not in used and 0 not in info.shape
        ]


def plan_export(
    stored: StoredCheckpoint,
    selection: Selection,
    is_speaker: bool = True,
    adapter: StoredCheckpoint | None = None,
) -> ExportPlan:
    """Decide what is exported, with an adapter merged into it."""
    keys, rules, family, rename, dtype, _, tied, unmatched, like = selection
    formats = selection.formats
    if rules or family is not None or formats or is_for_all(dtype) or adapter is not None:
        stored = decoded(stored)
    tensors = select_tensors(stored.manifest, keys, tied == "write", hidden_keys(stored))
    reference, directory = None, None
    if like is not None:
        directory = locations.normalize(like)
        reference = StoredCheckpoint(directory, hugging_face.read_directory(directory))
    config = config_for(family, directory)
    made = rules_for(config, tensors, reference and reference.manifest.shapes_by_key)
    stored_twice = _stored_twice(stored, tensors, rules, made)
    rules = [*rules, *with_peft_names(made, tensors, config)]
    outputs = plan_tensors(
        tensors,
        rules,
        rename or {},
        dtype,
        keep_unmatched=unmatched == "keep",
        tied=stored.manifest.aliases,
    )
    if family is not None and isinstance(dtype, torch.dtype):
        outputs = [keep_precise(output) for output in outputs]
    if adapter is not None:
        settings = read_config(locations.join(adapter.location, CONFIG_NAME))
        model = config or _config_beside(directory or stored.location)
        shared = () if tied == "write" else set(stored.manifest.aliases.values())
        outputs = merge_adapter(outputs, adapter, settings, model, shared)
    quantization: Mapping[str, Any] | None = None
    values = outputs
    if formats:
        outputs, quantization = quantize_outputs(
            outputs, formats, set(find(reference)) if reference else None
        )
    check_codes(stored, outputs)
    numbers = None if reference is None else _file_numbers(reference, values, outputs, is_speaker)
    return ExportPlan(stored, tensors, outputs, numbers, quantization, stored_twice)


def _stored_twice(
    stored: StoredCheckpoint,
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule],
    made: Sequence[Rule],
) -> list[tuple[OutputTensor, OutputTensor]]:
    """Return tensors under both of their names, where `made` takes them for one and a checkpoint
    holds two.

    `rules` are those that come before.
    """
    ties = [rule for rule in made if isinstance(rule, Tie)]
    named = (
        {each.name: each for each in plan_tensors(tensors, rules, {}, None, keep_unmatched=True)}
        if ties
        else {}
    )
    pairs = [
        (named[tie.key], named[tie.to]) for tie in ties if tie.key in named and tie.to in named
    ]
    index = stored.manifest.key_index
    return [
        pair
        for pair in pairs
        if len({index[part.key] for each in pair for part in each.mapped.parts}) > 1
    ]


def check_is_adapter(location: str) -> None:
    """Refuse what is there and lacks the files of an adapter."""
    names = locations.list_names(location) if locations.isdir(location) else []
    has_tensors = CONFIG_FNAME in names or any(name.endswith(hugging_face.SUFFIX) for name in names)
    if (has_tensors and CONFIG_NAME in names) or not locations.exists(location):
        return
    lacks = [] if has_tensors else ["adapter_model.safetensors"]
    lacks += [] if CONFIG_NAME in names else [CONFIG_NAME]
    advice = "give the directory that save_pretrained of PEFT wrote"
    inside = [
        name
        for name in names[:_MAX_PROBED]
        if locations.exists(locations.join(location, name, CONFIG_NAME))
    ]
    if inside:
        advice = f"give one of the adapters in it, {', '.join(map(repr, inside))}"
    elif "adapter_model.bin" in names:
        advice = "adapter_model.bin is a pickle, which can run code: open it with PEFT and save it as safetensors"
    raise CheckpointNotFoundError(
        f"{location!r} is no adapter of PEFT, it has no {' and no '.join(lacks)}: {advice}."
    )


def _config_beside(directory: str) -> dict[str, Any] | None:
    """Read the configuration of a model in a directory, None where there is none."""
    path = locations.join(directory, CONFIG_NAMES[0])
    return read_config(path) if locations.exists(path) else None


def _file_numbers(
    stored: StoredCheckpoint,
    values: Sequence[OutputTensor],
    outputs: Sequence[OutputTensor],
    is_speaker: bool,
) -> dict[str, int]:
    """Number the files of a reference directory, after checking that it holds tensors of the same
    shapes.

    Where the reference or the export is quantised and the other is not, codes and scales go where
    the values are. The export's `values` are those before they are quantised.
    """
    reference, like = stored.manifest, stored.location
    numbers = {
        key: int(reference.file_ids[reference.chunk_rows(key_id).start]) + 1
        for key, key_id in reference.key_index.items()
    }
    quantized = find(stored)
    numbers = {key: numbers[each.parts["codes"].key] for key, each in quantized.items()} | numbers
    name_of = {id(tensor.mapped): tensor.name for tensor in values}
    for tensor in outputs:
        if tensor.name not in numbers and name_of[id(tensor.mapped)] in numbers:
            numbers[tensor.name] = numbers[name_of[id(tensor.mapped)]]
    exported = {tensor.name for tensor in (*values, *outputs)}
    exported |= {key for name, each in quantized.items() if name in exported for key in each.keys}
    absent = set(reference.keys) - exported
    if absent and is_speaker:
        logger.warning("%s holds tensors that are not exported: %s", like, summarize_keys(absent))
    for tensor in values:
        each, expected = quantized.get(tensor.name), reference.shapes_by_key.get(tensor.name)
        if each is not None and (
            expected is None or tensor.mapped.dtype != stored.dtype_name(tensor.name)
        ):
            expected = each.model_shape
        if expected not in (None, tensor.shape):
            raise CheckpointingException(
                f"Tensor {tensor.name!r} would be exported with shape {tensor.shape}; in {like!r} "
                f"it has {expected}. A shard may be missing, or rules are needed."
            )
    return numbers
