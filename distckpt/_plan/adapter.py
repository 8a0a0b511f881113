"""Adapters: what one of PEFT changes in the tensors of an export."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from distckpt._base.dtypes import FROM_NAME, is_summed
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, summarize_keys
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.adapter_targets import FIELDS, check_targets, ends_with
from distckpt._plan.export import Change, OutputTensor
from distckpt._plan.peft_names import OF_EXPERTS, PREFIX, names_in_memory

CONFIG_NAME = "adapter_config.json"
_MATRIX = re.compile(r"(.+)\.lora_(embedding_)?([AB])((?:\.default)?(?:\.weight)?)")
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` with which the other weights of the model stay as they are."""
_OTHER_ARITHMETIC = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens", "lora_bias",
    "trainable_token_indices",
)  # fmt: skip


def merge_adapter(
    outputs: Sequence[OutputTensor],
    adapter: StoredCheckpoint,
    config: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    tied: Collection[str] = (),
) -> list[OutputTensor]:
    """Return the outputs with what an adapter changes in them, which has their names or those of
    transformers.

    `config` is the adapter's; `model`, where it is known, that of the model. Of the keys in `tied`,
    other names are not exported.
    """
    _check_config(adapter, config)
    shapes = {output.name: output.shape for output in outputs}
    found = names_in_memory(model, shapes) if model and not _has_modules(shapes, adapter) else {}
    names = {name: found.get(name, name) for name in shapes}
    shapes = {names[name]: shape for name, shape in shapes.items()}
    changes = _changes(adapter, config, shapes)
    _check_saved(adapter, config, changes, shapes)
    unmatched = changes.keys() - shapes.keys()
    if unmatched:
        near = did_you_mean(min(unmatched), list(shapes))
        raise LoadMismatchError(
            f"The adapter {adapter.location!r} changes {summarize_keys(unmatched)}, not tensors "
            f"of the export{near}. Use `rules`, `family` or `rename` so that the export has the "
            "names of the model that the adapter is of, or use merge_and_unload of PEFT.",
            missing=unmatched,
        )
    _check_tied(
        adapter, changes, {names[output.name]: output for output in outputs}, model or {}, tied
    )
    _check_parameters(adapter, config, changes)
    adapted = {
        name.removesuffix(".weight") for name, change in changes.items() if change.b is not None
    }
    matrices = [
        name for name, shape in shapes.items() if len(shape) > 1 and name.endswith(".weight")
    ]
    check_targets(
        adapter.location,
        config,
        adapted,
        [name.removesuffix(".weight") for name in matrices],
        model,
    )
    return [_changed(output, changes.get(names[output.name])) for output in outputs]


def _check_parameters(
    adapter: StoredCheckpoint, config: Mapping[str, Any], changes: Mapping[str, Change]
) -> None:
    """Refuse an adapter without matrices for a parameter that it lists."""
    for wanted in config.get("target_parameters") or ():
        first = OF_EXPERTS.get(wanted.rpartition(".")[2], (wanted,))[0]
        if not any(
            (change.num_experts and f".{first}." in name) or ends_with(name, [wanted])
            for name, change in changes.items()
        ):
            raise CheckpointingException(
                f"The adapter {adapter.location!r} has no tensors for {wanted!r}, of "
                f"target_parameters in its {CONFIG_NAME}: it is not complete, or they are no "
                "experts that can be merged here."
            )


def _has_modules(names: Iterable[str], adapter: StoredCheckpoint) -> bool:
    """Tell whether tensors of those names are the ones that an adapter is for; experts are one
    parameter for it.
    """
    modules = {name.removesuffix(".0.down_proj.weight").removesuffix(".weight") for name in names}
    keys = (
        key.removeprefix(PREFIX).replace(".base_layer", "") for key in adapter.manifest.key_index
    )
    return all(found[1] in modules for key in keys if (found := _MATRIX.fullmatch(key)))


def _check_tied(
    adapter: StoredCheckpoint,
    changes: Mapping[str, Change],
    outputs: Mapping[str, OutputTensor],
    model: Mapping[str, Any],
    tied: Collection[str],
) -> None:
    """Refuse what takes the place of an embedding that is the output layer as well, which PEFT
    leaves as it is.
    """
    text = inner if isinstance(inner := model.get("text_config"), dict) else model
    may_be_tied = model.get("tie_word_embeddings", text.get("tie_word_embeddings")) is not False
    shapes = collections.Counter(output.shape for output in outputs.values())
    for name, change in changes.items():
        if change.replacement is None or change.b is not None:
            continue
        shape = outputs[name].shape
        is_only = (
            may_be_tied
            and len(shape) == 2
            and shape[0] == text.get("vocab_size")
            and shapes[shape] == 1
        )
        if is_only or any(part.key in tied for part in outputs[name].mapped.parts):
            raise CheckpointingException(
                f"The adapter {adapter.location!r} has a {name!r} of its own, which is the model's "
                "output layer, too: PEFT leaves that as it was, so both are no longer one tensor. "
                "Export both, with tied='write' from a checkpoint that has both names, or use "
                "merge_and_unload of PEFT. If the model has no output layer, let its config.json "
                "say tie_word_embeddings=false."
            )


def _check_config(adapter: StoredCheckpoint, config: Mapping[str, Any]) -> None:
    """Refuse configurations of other methods, and fields that are not what PEFT writes."""
    unknown = {name: config[name] for name in _OTHER_ARITHMETIC if config.get(name)}
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unknown["init_lora_weights"] = config["init_lora_weights"]
    if config.get("peft_type") != "LORA" or unknown:
        raise CheckpointingException(
            f"The adapter {adapter.location!r} cannot be merged here, since its {CONFIG_NAME} says "
            f"{unknown or {'peft_type': config.get('peft_type')}}: only products of LoRA are added to weights. Use "
            "merge_and_unload of PEFT."
        )
    for field in ("use_rslora", "fan_in_fan_out"):
        if config.get(field) not in (True, False, None):
            text = f"The {CONFIG_NAME} of {adapter.location!r} says {field}={config[field]!r}: write true or false there."
            raise CheckpointingException(text)
    for field, kind in FIELDS.items():
        value = config.get(field)
        is_one = type(value) is kind and field not in ("modules_to_save", "target_parameters")
        if not (
            value is None
            or is_one
            or (isinstance(value, list) and all(type(item) is kind for item in value))
        ):
            text = f"The {CONFIG_NAME} of {adapter.location!r} says {field}={value!r:.200}"
            raise CheckpointingException(f"{text}: write a list of {kind.__name__} there.")


def _check_saved(
    adapter: StoredCheckpoint,
    config: Mapping[str, Any],
    changes: Mapping[str, Change],
    exported: Mapping[str, tuple[int, ...]],
) -> None:
    """Refuse an adapter without tensors, or without those of modules to save that the export
    has.
    """
    listed = config.get("modules_to_save") or ()
    saved = [name for name, change in changes.items() if change.replacement is not None]
    absent = [each for each in listed if not _is_in(each, saved)]
    # PEFT adds names for classifiers, of which a model has one.
    if (
        not changes
        or any(_is_in(each, exported) for each in absent)
        or (listed and len(absent) == len(listed))
    ):
        field, value = (
            ("modules_to_save", absent)
            if changes
            else ("target_modules", config.get("target_modules"))
        )
        raise CheckpointingException(
            f"The adapter {adapter.location!r} has no tensors for {field}={value!r} of its "
            f"{CONFIG_NAME}: the file is not complete."
        )


def _is_in(module: str, names: Iterable[str]) -> bool:
    return any(f".{module}." in f".{name}" for name in names)


def _changes(
    adapter: StoredCheckpoint, config: Mapping[str, Any], exported: Mapping[str, tuple[int, ...]]
) -> dict[str, Change]:
    """Return the changes by the name of the tensor; a matrix without its partner, or of another
    kind, is no name.
    """
    changes: dict[str, Change] = {}
    keys = adapter.manifest.key_index
    for key in keys:
        found = _MATRIX.fullmatch(key)
        partner = found and f"{found[1]}.lora_{found[2] or ''}{'AB'[found[3] == 'A']}{found[4]}"
        if found is None or partner not in keys:
            # PEFT saves the weight itself of an embedding beside its matrices.
            name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
            changes[name] = changes.get(name, Change(adapter))._replace(replacement=key)
        elif found[3] == "B":
            module = found[1].removeprefix(PREFIX)
            block = module.replace(".base_layer", "")
            if config.get("target_parameters") and f"{block}.weight" not in exported:
                changes |= _expert_changes(
                    block, Change(adapter, b=key, a=partner), config, exported
                )
                continue
            weight = f"{module}.weight"
            is_parameter = ends_with(weight, config.get("target_parameters") or ())
            changes[weight] = changes.get(weight, Change(adapter))._replace(
                b=key,
                a=partner,
                scaling=_scaling(
                    weight if is_parameter else module,
                    adapter.global_shape(partner)[0],
                    adapter,
                    config,
                ),
                transposed=bool(found[2] or config.get("fan_in_fan_out")),
            )
    return changes


def _expert_changes(
    block: str, change: Change, config: Mapping[str, Any], exported: Mapping[str, tuple[int, ...]]
) -> dict[str, Change]:
    """Return the changes of experts, of which PEFT has the matrices of all in one; their shapes
    tell for what.
    """
    num = next(
        number
        for number in itertools.count()
        if f"{block}.{number}.down_proj.weight" not in exported
    )
    if num == 0:
        raise CheckpointingException(
            f"The adapter {change.adapter.location!r} has matrices for {block!r}, and the export "
            "has no gate_proj, up_proj and down_proj of each expert there: merge it with "
            "merge_and_unload of PEFT."
        )
    b, (inner, columns) = (
        change.adapter.global_shape(change.b or ""),
        change.adapter.global_shape(change.a),
    )
    for parameter, names in OF_EXPERTS.items():
        shape = exported[f"{block}.0.{names[0]}.weight"]
        if (*b, columns, inner % num) == (shape[0] * len(names), inner, shape[1], 0):
            version = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version")))
            if b[0] == columns and (version is None or tuple(map(int, version.groups())) < (0, 19)):
                raise CheckpointingException(
                    f"The matrices of {block!r} for {parameter} fit either way, and PEFT before "
                    f"0.19 had them transposed. The {CONFIG_NAME} of {change.adapter.location!r} "
                    "must say a peft_version of 0.19 or newer."
                )
            scaling = _scaling(f"{block}.{parameter}", inner // num, change.adapter, config)
            return {
                f"{block}.{number}.{name}.weight": change._replace(
                    scaling=scaling, first_row=index * shape[0], expert=number, num_experts=num
                )
                for index, name in enumerate(names)
                for number in range(num)
            }
    raise CheckpointingException(
        f"The adapter {change.adapter.location!r} has matrices of shapes {b} and "
        f"{(inner, columns)} for {block!r}, and the export {num} experts with projections of other "
        "shapes: it is of another model."
    )


def _scaling(module: str, rank: int, adapter: StoredCheckpoint, config: Mapping[str, Any]) -> float:
    """Return the factor of a product: as PEFT does, by the first patterns that the module
    matches.
    """
    fields: dict[str, Any] = {
        name: config.get(name) for name in ("r", "rank_pattern", "lora_alpha", "alpha_pattern")
    }
    try:
        r, alpha = (
            next(
                (
                    v
                    for p, v in (fields[patterns] or {}).items()
                    if re.match(rf"(.*\.)?({p})$", module)
                ),
                fields[name],
            )
            for name, patterns in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
        )
        scaling: float = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if r == rank and math.isfinite(scaling):
            return scaling
    except (re.error, AttributeError, TypeError, ArithmeticError):
        pass
    raise CheckpointingException(
        f"The {CONFIG_NAME} of the adapter {adapter.location!r} contradicts its matrices of rank "
        f"{rank} for {module!r}, or does not say how to scale them: {fields}. Correct it."
    )


def _changed(output: OutputTensor, change: Change | None) -> OutputTensor:
    if change is None:
        return output
    shapes = set()
    if change.replacement is not None:
        shapes.add(change.adapter.global_shape(change.replacement))
    if change.num_experts:
        shapes.add(output.shape)
    elif change.b is not None:
        (*rows, rank), (inner, *columns) = (
            change.adapter.global_shape(change.b),
            change.adapter.global_shape(change.a),
        )
        shape = (*rows, *columns) if rank == inner else (*rows, rank, inner, *columns)
        shapes.add(shape[::-1] if change.transposed else shape)
    if shapes != {output.shape} or not is_summed(FROM_NAME[output.mapped.dtype]):
        raise CheckpointingException(
            f"The adapter {change.adapter.location!r} is for {output.name!r} of shape "
            f"{' or '.join(map(str, shapes))}, and the export has {output.mapped.dtype} of "
            f"{output.shape}: it is of another model."
        )
    return output._replace(change=change)
