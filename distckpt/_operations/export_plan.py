"""The plan of an export: its tensors, their sources, and its files."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.messages import natural_order, summarize_keys
from distckpt._base.options import ExportOptions
from distckpt._base.wings import wing
from distckpt._checkpoint.model_keys import left_out, warn_of_cut_off, warn_of_others
from distckpt._checkpoint.opening import holds_checkpoint, open_export
from distckpt._format.code_names import CONFIG_NAMES, may_be_codes, scales_of
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import differing
from distckpt._io.extra_files import ExtraFiles, adapt_config, list_extra_files
from distckpt._io.tensor_source import TensorSource
from distckpt._operations.export_request import OpenedSources
from distckpt._plan.decoded import decoded, find, hidden_keys
from distckpt._plan.export import (
    OutputFile,
    OutputTensor,
    check_codes,
    check_have_axes,
    is_for_all,
    keep_precise,
    number_files,
    plan_files,
    plan_tensors,
)
from distckpt._plan.selection import select_tensors
from distckpt._plan.translate import without_ties
from distckpt._quantization.quantized import QuantizedTensor
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.rules._mapped import TensorSpec
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Tie

logger = logging.getLogger(__name__)

_OF_LORA = ".adapter."
"""Part of keys of LoRA of Megatron Bridge."""

Pairs = Sequence[tuple[OutputTensor, OutputTensor]]


@dataclass(frozen=True)
class ExportPlan:
    """The planned content of an export.

    Attributes:
        source: reads the values of its tensors.
        outputs: its tensors, with the regions of stored tensors that they are made of.
        made_of: names of computed tensors -> names of the tensors that they are computed from.
        quantization: the `quantization_config` of the quantized tensors.
        files: its files with tensors.
        selected: the stored tensors that were selected.
        left_out: keys of tensors of optimizers that no pattern of `keys` selects.
        extra_files: its other files; on the coordinator.
    """

    source: TensorSource
    outputs: Sequence[OutputTensor]
    selected: Mapping[str, TensorSpec]
    made_of: Mapping[str, str] = field(default_factory=dict)
    quantization: Mapping[str, Any] | None = None
    files: Sequence[OutputFile] = ()
    left_out: Sequence[str] = ()
    extra_files: ExtraFiles = field(default_factory=ExtraFiles)

    @property
    def dropped(self) -> list[str]:
        """Selected keys that no output uses."""
        used = _stored_keys(self.outputs)
        dropped = []
        for key, info in self.selected.items():
            if 0 not in info.shape and key not in used:
                dropped.append(key)
        return dropped


def stored_source(stored: StoredCheckpoint, options: ExportOptions) -> TensorSource:
    """Return the source of a checkpoint's values.

    Quantized tensors are decoded if options change tensors.
    """
    has_rules = bool(options.rules) or options.family is not None
    changes = options.quantize or options.merge_adapter is not None or is_for_all(options.dtype)
    return TensorSource(decoded(stored) if has_rules or changes else stored)


def plan_export(
    ranks: Ranks, opened: OpenedSources, source: TensorSource, options: ExportOptions
) -> ExportPlan:
    """Plan the export of a source that reads the opened checkpoints.

    An adapter is merged into it. Collective operation: all ranks must call it.

    Raises:
        LoadMismatchError: `keys` or a rule matches nothing, or no rule matches some tensor.
        CheckpointingException: names, dtypes, shapes or extra files are not as they must be.
    """
    with ranks.phase("plan the export"):
        selected = select_tensors(
            source.stored.manifest,
            options.keys,
            # The rules of a family know which names of a tensor files do without.
            options.tied == "write" or options.family is not None,
            hidden_keys(source.stored),
            left_out(source.stored, options.keys),
        )
        model = _model(options, selected)
        pairs, tied_keys = _ties(source.stored, selected, options.rules, model.rules)
    rules = model.rules
    if pairs:
        apart = ranks.decide_json("compare what is tied", lambda: differing(source, pairs))
        if apart and ranks.is_coordinator:
            _warn_of_untied(source.stored, apart)
        rules = [rule for rule in rules if not (isinstance(rule, Tie) and rule.key in apart)]
    with ranks.phase("plan the export"):
        model = replace(model, rules=rules, tied_keys=tied_keys)
        plan = _plan(source, options, selected, model, opened.adapter, ranks.is_coordinator)
        plan = replace(plan, left_out=_left_out(opened.checkpoints, options))
        if ranks.is_coordinator:
            warn_of_cut_off(opened.checkpoints[0], options, plan.selected)
            warn_of_others(opened.checkpoints[0], options, plan.selected)
            if isinstance(options.dtype, torch.dtype):
                _warn_of_codes(source.stored, plan.outputs, options.dtype)
    return plan


def _warn_of_untied(stored: StoredCheckpoint, apart: Sequence[str]) -> None:
    logger.warning(
        "the configuration says that %s %s, of which %s holds other values: all are exported. Set "
        "tie_word_embeddings to false in the config.json of the export, since not all programs "
        "compare them",
        summarize_keys(apart),
        "is tied to another tensor" if len(apart) == 1 else "are tied to other tensors",
        stored.location,
    )


def _plan(
    source: TensorSource,
    options: ExportOptions,
    selected: Mapping[str, TensorSpec],
    model: _Model,
    adapter: StoredCheckpoint | None,
    is_coordinator: bool,
) -> ExportPlan:
    stored = source.stored
    outputs = _outputs(options, selected, model, stored.manifest.aliases)
    plan = _computed(ExportPlan(source, outputs, selected), options, model, adapter)
    check_codes(stored, plan.outputs, plan.made_of)
    check_have_axes(plan.outputs)
    return replace(
        plan,
        files=_files(options, model, outputs, plan, is_coordinator),
        extra_files=_extra_files(options, plan) if is_coordinator else ExtraFiles(),
    )


def _left_out(checkpoints: Iterable[StoredCheckpoint], options: ExportOptions) -> list[str]:
    """Return the optimizers' tensors that are left out, in natural order."""
    keys = set()
    for stored in checkpoints:
        for key in left_out(stored, options.keys):
            if not stored.is_object(key):
                keys.add(key)
    return sorted(keys, key=natural_order)


def _warn_of_codes(
    stored: StoredCheckpoint, outputs: Iterable[OutputTensor], requested: torch.dtype
) -> None:
    """Warn of tensors that stay codes though all get another dtype."""
    index = stored.manifest.key_index
    codes = []
    for output in outputs:
        has_scales = any(scales_of(part.key, index) for part in output.mapped.parts)
        if has_scales and may_be_codes(output.dtype):
            codes.append(output.name)
    if codes:
        logger.warning(
            "no values in %s are made of codes in %s, in a form that distckpt does not decode. "
            "These are exported as they are stored: %s",
            requested,
            stored.location,
            summarize_keys(codes),
        )


def _files(
    options: ExportOptions,
    model: _Model,
    values: Sequence[OutputTensor],
    plan: ExportPlan,
    logs_warnings: bool,
) -> list[OutputFile]:
    """Divide the tensors of an export among files.

    `values` are the tensors before they are quantized.
    """
    numbers = None
    if model.reference is not None:
        numbers = _file_numbers(model.reference, values, plan, logs_warnings)
        last = max(numbers.values(), default=1)
        for tensor in values:
            if all(part.key in model.tied_keys for part in tensor.mapped.parts):
                numbers.setdefault(tensor.name, last)
    elif options.fqn_to_index_mapping is not None:
        mapping = options.fqn_to_index_mapping
        names = {tensor.name for tensor in plan.outputs}
        absent = set(mapping).difference(names, plan.source.stored.manifest.aliases)
        if absent and logs_warnings:
            text = "fqn_to_index_mapping names tensors that are not exported: %s"
            logger.warning(text, summarize_keys(absent))
        return number_files(plan.outputs, mapping)
    return plan_files(plan.outputs, options.max_file_bytes, numbers)


# --- The model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """Facts about the model that is exported.

    Attributes:
        reference: the directory that the export follows.
        config: the configuration of the family.
        rules: the rules of the family.
        tied_keys: keys of stored tensors that the rules tie to other tensors; they may have either
            name in the reference.
    """

    reference: StoredCheckpoint | None
    config: dict[str, Any] | None
    rules: Sequence[Rule]
    tied_keys: Collection[str] = ()


def _model(options: ExportOptions, selected: Mapping[str, TensorSpec]) -> _Model:
    reference = None
    if options.like is not None:
        directory = locations.normalize(options.like)
        _check_is_no_checkpoint(directory)
        reference = open_export(directory)
    if options.family is None and options.layout is None:
        return _Model(reference, None, ())
    location = None
    shapes = None
    if reference is not None:
        location = reference.location
        shapes = reference.manifest.shapes_by_key
    from distckpt.families._config import config_for, rules_for

    config = config_for(options.family, location)
    rules = rules_for(config, selected, shapes, options.layout)
    if options.layout is not None:
        return _Model(None, config, rules)
    if shapes is not None:
        shapes_of_selected = {key: spec.shape for key, spec in selected.items()}
        rules = without_ties(options.rules, rules, shapes_of_selected, shapes)
    return _Model(reference, config, rules)


def _check_is_no_checkpoint(directory: str) -> None:
    """Refuse a reference directory that is a checkpoint, or does not exist."""
    if holds_checkpoint(directory):
        raise CheckpointingException(
            f"like is a Hugging Face directory, and {directory!r} is a checkpoint: give the "
            "directory of a model, or an export of that checkpoint by `consolidate`."
        )
    if not locations.exists(directory):
        raise CheckpointNotFoundError(
            f"like is a Hugging Face directory, and {directory!r} does not exist."
        )


# --- Tensors --------------------------------------------------------------------------------------


def _outputs(
    options: ExportOptions,
    selected: Mapping[str, TensorSpec],
    model: _Model,
    aliases: Mapping[str, str],
) -> list[OutputTensor]:
    """Return the tensors of the export with their stored values."""
    model_rules = model.rules
    if any(_OF_LORA in key for key in selected):
        model_rules = wing("computed").rules_of_adapters(model_rules, selected, model.config)
    outputs = plan_tensors(
        selected,
        [*options.rules, *model_rules],
        options.rename or {},
        options.dtype,
        keep_unmatched=options.unmatched == "keep",
        tied=aliases,
    )
    if options.family is not None and isinstance(options.dtype, torch.dtype):
        return [keep_precise(output) for output in outputs]
    return outputs


def _computed(
    plan: ExportPlan,
    options: ExportOptions,
    model: _Model,
    adapter: StoredCheckpoint | None,
) -> ExportPlan:
    """Put sources that compute values around the source of stored values."""
    if adapter is not None:
        stored = plan.source.stored
        config = model.config
        path = locations.join((model.reference or stored).location, CONFIG_NAMES[0])
        if not config and locations.exists(path):
            from distckpt.families._config import read_config

            config = read_config(path)
        tied = set(stored.manifest.aliases.values()) if options.tied == "drop" else set()
        plan = wing("computed").adapted(plan, adapter, config, tied)
    if options.quantize:
        plan = wing("computed").quantized(plan, options.quantize, model.reference)
    return plan


def _ties(
    stored: StoredCheckpoint,
    selected: Mapping[str, TensorSpec],
    rules: Sequence[Rule],
    model_rules: Sequence[Rule],
) -> tuple[Pairs, set[str]]:
    """Find tensors that the model ties and the checkpoint holds twice.

    Return them in pairs, and the keys of all tensors that rules of the model tie. `rules` come
    before the rules of the model.
    """
    ties = [rule for rule in model_rules if isinstance(rule, Tie)]
    if not ties:
        return (), set()
    before = itertools.takewhile(lambda rule: not isinstance(rule, Tie), model_rules)
    outputs = plan_tensors(selected, [*rules, *before], {}, None, keep_unmatched=True)
    named = {output.name: output for output in outputs}
    pairs = []
    keys: set[str] = set()
    for tie in ties:
        pair = []
        for name in (tie.key, tie.to):
            if name in named:
                pair.append(named[name])
        pair_keys = _stored_keys(pair)
        keys |= pair_keys
        if len(pair) == 2 and len(set(map(stored.manifest.key_index.get, pair_keys))) > 1:
            pairs.append((pair[0], pair[1]))
    return pairs, keys


def _stored_keys(outputs: Iterable[OutputTensor]) -> set[str]:
    """Return the keys that outputs are read from."""
    keys = set()
    for output in outputs:
        for part in output.mapped.parts:
            keys.add(part.key)
    return keys


# --- A directory that the export is to be like ----------------------------------------------------


def _file_numbers(
    reference: StoredCheckpoint,
    values: Sequence[OutputTensor],
    plan: ExportPlan,
    logs_warnings: bool,
) -> dict[str, int]:
    """Number the files as in a reference directory.

    Shapes of the tensors are compared with the reference. Where the reference or the export is
    quantized and the other is not, codes and scales go to the files of their values. `values` are
    the tensors before they are quantized.
    """
    quantized = find(reference)
    numbers = _numbers_of(reference, quantized)
    for tensor in plan.outputs:
        origin = plan.made_of.get(tensor.name)
        if tensor.name not in numbers and origin in numbers:
            numbers[tensor.name] = numbers[origin]
    if logs_warnings:
        names = {tensor.name for tensor in (*values, *plan.outputs)}
        _warn_of_absent(reference, quantized, names)
    for tensor in values:
        expected = _expected_shape(reference, quantized, tensor)
        if expected not in (None, tensor.shape):
            raise CheckpointingException(
                f"Tensor {tensor.name!r} would be exported with shape {tensor.shape}; in "
                f"{reference.location!r} it has {expected}. A shard may be missing, or rules are "
                "needed."
            )
    return numbers


def _numbers_of(
    reference: StoredCheckpoint, quantized: Mapping[str, QuantizedTensor]
) -> dict[str, int]:
    """Return the file number of each tensor, also of quantized tensors' values."""
    manifest = reference.manifest
    numbers = {}
    for key, key_id in manifest.key_index.items():
        numbers[key] = int(manifest.file_ids[manifest.chunk_rows(key_id).start]) + 1
    return {key: numbers[tensor.parts["codes"].key] for key, tensor in quantized.items()} | numbers


def _warn_of_absent(
    reference: StoredCheckpoint, quantized: Mapping[str, QuantizedTensor], names: Collection[str]
) -> None:
    """Warn of tensors of the reference directory that are not exported."""
    absent = set(reference.manifest.keys).difference(names)
    for name, tensor in quantized.items():
        if name in names:
            absent.difference_update(tensor.keys)
    if absent:
        where = reference.location
        logger.warning("%s holds tensors that are not exported: %s", where, summarize_keys(absent))


def _expected_shape(
    reference: StoredCheckpoint, quantized: Mapping[str, QuantizedTensor], tensor: OutputTensor
) -> tuple[int, ...] | None:
    """Return the shape of a tensor in the reference directory.

    It is the shape of the values, unless the tensor has the reference's codes.
    """
    shape = reference.manifest.shapes_by_key.get(tensor.name)
    if tensor.name not in quantized:
        return shape
    is_code = shape is not None and tensor.mapped.dtype == reference.dtype_name(tensor.name)
    if is_code:
        return shape
    return quantized[tensor.name].model_shape


# --- Other files ----------------------------------------------------------------------------------


def _extra_files(options: ExportOptions, plan: ExportPlan) -> ExtraFiles:
    """Choose the extra files: a directory's, with a configuration for the export."""
    directory = options.extra_files_from
    if directory is None and options.family is not None:
        directory = options.like
    taken = []
    if directory is not None:
        taken = list_extra_files(locations.normalize(directory), options.extra_code)
    return adapt_config(taken, plan.outputs, plan.quantization, options.dtype)
