"""Adapters: what one of PEFT changes in the tensors of an export, and PEFT's names for those of Megatron Bridge."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distckpt._base.dtypes import FROM_NAME, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.mapped import MappedTensor, TensorInfo, crop_axis, drop_axis, identity
from distckpt._plan.export import Change, OutputTensor
from distckpt.rules import Assemble, Rule, apply_rules

CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])((?:\.default)?(?:\.weight)?)")
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which the other weights of the model stay as they are."""
_OTHER_ARITHMETIC = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "lora_bias",
    "trainable_token_indices",
)  # fmt: skip
_IN, _OUT = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


def with_peft_names(rules: Sequence[Rule], tensors: Mapping[str, TensorInfo]) -> Sequence[Rule]:
    """Return the rules for LoRA of Megatron Bridge, where that is exported, given those for the weights it is for."""
    modules = [key.removesuffix(_OUT) for key in tensors if key.endswith(_OUT)]
    pairs = {module: (tensors[module + _IN], tensors[module + _OUT]) for module in modules if module + _IN in tensors}
    if not pairs:
        return rules
    if unequal := [m + _OUT for m, (a, b) in pairs.items() if a.shape[-2:-1] != b.shape[-1:]]:
        raise LoadMismatchError(f"The ranks of {summarize_keys(unequal)} differ from those of linear_in.weight.")
    weights = {f"{m}.weight": TensorInfo((*b.shape[:-1], a.shape[-1]), b.dtype) for m, (a, b) in pairs.items()}
    rules = [replace(rule, optional=True, count=None) for rule in rules]
    made: dict[str, MappedTensor] = {}
    for name, weight in apply_rules(rules, weights, strict=True).items():
        module, stem = weight.parts[0].key.removesuffix(".weight"), _PREFIX + name.removesuffix("weight")
        a, b = pairs[module]
        # The rows of the second matrix become those of the weight; of stacked layers, the first is that of the layer.
        rows = crop_axis(weight, 1, 0, b.shape[-1])
        parts = tuple(part._replace(key=module + _OUT) for part in rows.parts)
        made[f"{stem}lora_B.weight"] = replace(rows, parts=parts)
        matrix = identity(module + _IN, a)
        for index in weight.parts[0].source.offset[:-2]:
            matrix = drop_axis(crop_axis(matrix, 0, index, index + 1), 0)
        made[f"{stem}lora_A.weight"] = matrix
    return [Assemble(made, {key: tensors[key].shape for module in pairs for key in (module + _IN, module + _OUT)})]


def merge_adapter(
    outputs: Sequence[OutputTensor], adapter: StoredCheckpoint, config: Mapping[str, Any]
) -> list[OutputTensor]:
    """Return the outputs with what an adapter, which has their names, changes in them."""
    unknown = {name: config[name] for name in _OTHER_ARITHMETIC if config.get(name)}
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if config.get("peft_type") != "LORA" or unknown:
        raise CheckpointingException(
            f"The adapter {adapter.location!r} cannot be merged here, since its {CONFIG_NAME} says "
            f"{unknown or {'peft_type': config.get('peft_type')}}: only products of LoRA are added to weights. Use "
            "merge_and_unload of PEFT."
        )
    changes = _changes(adapter, config)
    # Of modules to save, PEFT adds names for classifiers of which a model has one.
    for field, part in (("target_modules", "b"), ("modules_to_save", "replacement")):
        names = [name for name, change in changes.items() if getattr(change, part) is not None]
        listed = wanted if isinstance(wanted := config.get(field), list) else []
        if not changes or (listed and not any(f".{each}." in f".{name}." for each in listed for name in names)):
            what = f"no tensors for {field}={wanted!r} of its {CONFIG_NAME}"
            raise CheckpointingException(f"The adapter {adapter.location!r} has {what}: the file is not complete.")
    unmatched = changes.keys() - {output.name for output in outputs}
    if unmatched:
        near = did_you_mean(min(unmatched), [output.name for output in outputs])
        raise LoadMismatchError(
            f"The adapter {adapter.location!r} changes {summarize_keys(unmatched)}, not tensors of the export{near}. "
            "Use `rules`, `family` or `rename` so that the export has the names of the model that the adapter is of.",
            missing=unmatched,
        )
    return [_changed(output, changes.get(output.name)) for output in outputs]


def _changes(adapter: StoredCheckpoint, config: Mapping[str, Any]) -> dict[str, Change]:
    """Return the changes by the name of the tensor; a matrix without its partner, or of another kind, is no name."""
    changes: dict[str, Change] = {}
    keys = adapter.manifest.key_index
    for key in keys:
        found = _MATRIX.fullmatch(key)
        partner = found and f"{found[1]}.lora_{found[2] or ''}{'AB'[found[3] == 'A']}{found[4]}"
        if found is None or partner not in keys:
            # PEFT saves the weight itself of an embedding beside its matrices.
            name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
            changes[name] = changes.get(name, Change(adapter))._replace(replacement=key)
        elif found[3] == "B":
            module = found[1].removeprefix(_PREFIX)
            changes[f"{module}.weight"] = changes.get(f"{module}.weight", Change(adapter))._replace(
                b=key,
                a=partner,
                scaling=_scaling(module, adapter.global_shape(partner)[0], adapter, config),
                transposed=bool(found[2] or config.get("fan_in_fan_out")),
            )
    return changes


def _scaling(module: str, rank: int, adapter: StoredCheckpoint, config: Mapping[str, Any]) -> float:
    """Return the factor of a product: as PEFT does, by the first patterns that the module matches."""
    fields: dict[str, Any] = {name: config.get(name) for name in ("r", "rank_pattern", "lora_alpha", "alpha_pattern")}
    try:
        r, alpha = (
            next((v for p, v in (fields[patterns] or {}).items() if re.match(rf"(.*\.)?({p})$", module)), fields[name])
            for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
        )
        scaling: float = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if r == rank and math.isfinite(scaling):
            return scaling
    except (re.error, AttributeError, TypeError, ArithmeticError):
        pass
    raise CheckpointingException(
        f"The {CONFIG_NAME} of the adapter {adapter.location!r} contradicts its matrices of rank {rank} for "
        f"{module!r}, or does not say how to scale them: {fields}. Correct it."
    )


def _changed(output: OutputTensor, change: Change | None) -> OutputTensor:
    if change is None:
        return output
    shapes = set()
    if change.replacement is not None:
        shapes.add(change.adapter.global_shape(change.replacement))
    if change.b is not None:
        (*rows, rank), (inner, *columns) = change.adapter.global_shape(change.b), change.adapter.global_shape(change.a)
        shape = (*rows, *columns) if rank == inner else (*rows, rank, inner, *columns)
        shapes.add(shape[::-1] if change.transposed else shape)
    if shapes != {output.shape} or not is_summed(FROM_NAME[output.mapped.dtype]):
        raise CheckpointingException(
            f"The adapter {change.adapter.location!r} is for {output.name!r} of shape {' or '.join(map(str, shapes))}, "
            f"and the export has {output.mapped.dtype} of {output.shape}: it is of another model."
        )
    return output._replace(change=change)
