"""PEFT's names and layout for LoRA of Megatron Bridge."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._rules import families
from distckpt._rules.blocks import Config
from distckpt._rules.mapped import (
    MappedTensor,
    TensorInfo,
    crop_axis,
    drop_axis,
    identity,
    interleave,
    join,
)
from distckpt._rules.on_disk import forms_on_disk
from distckpt._rules.rules import (
    Assemble,
    Rule,
    SplitQKV,
    apply_rules,
)

_IN, _OUT = ".linear_in.weight", ".linear_out.weight"
_BRIDGE = re.compile(r"(.+)\.adapter(?:\.adapter_(q|k|v|gate|up))?\.linear_out\.weight")
_READ_HIDDEN = (
    "linear_qkv",
    "linear_fc1",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_kv_down_proj",
    "in_proj",
)
_WRITE_HIDDEN = ("linear_proj", "linear_fc2", "out_proj")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What transformers has for all experts of a layer, in the order in which PEFT wraps it, and what
it is made of.
"""
PREFIX = "base_model.model."

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """Both matrices of LoRA for a module of the Hugging Face model; the product is `b @ a`."""

    a: MappedTensor
    b: MappedTensor


def names_in_memory(
    model: Mapping[str, Any], on_disk: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return the names that a model of transformers has in memory for tensors of a directory, by
    those on disk.

    Pieces of experts are named as if each expert were a module, with parts named as in
    `OF_EXPERTS`. `on_disk` has the shapes of what the directory holds.
    """
    try:
        assembled = families.rules(model, "transformers")[-1]
    except CheckpointingException as error:
        logger.warning("names in memory are not known: %s", error)
        return {}
    assert isinstance(assembled, Assemble)
    names = {}
    for name, mapped in assembled.tensors.items():
        part = mapped.parts[0] if len(mapped.parts) == 1 else None
        if part and part.order == tuple(range(len(part.order))):
            block, _, leaf = part.key.rpartition(".")
            if mapped.shape == assembled.sources[part.key]:
                names[name] = part.key
            elif leaf in OF_EXPERTS and len(part.order) == 3:
                expert, row, _ = part.source.offset
                names[name] = f"{block}.{expert}.{OF_EXPERTS[leaf][row // mapped.shape[0]]}.weight"
    forms = forms_on_disk(Config(model), on_disk)
    renamed = apply_rules(
        forms, {name: TensorInfo(assembled.tensors[name].shape, "F32") for name in names}
    )
    return {
        new: names[mapped.parts[0].key] for new, mapped in renamed.items() if len(mapped.parts) == 1
    }


def with_peft_names(
    rules: Sequence[Rule],
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any] | None = None,
) -> Sequence[Rule]:
    """Return the rules for LoRA of Megatron Bridge, where that is exported, given those for the
    weights it is for.
    """
    found = {key: match for key in tensors if (match := _BRIDGE.fullmatch(key))}
    found = {key: match for key, match in found.items() if key.removesuffix(_OUT) + _IN in tensors}
    if not found:
        return rules
    pairs: dict[str, Pair] = {}
    for module in dict.fromkeys(match[1] for match in found.values()):
        keys = {
            match[2]: key.removesuffix(_OUT) for key, match in found.items() if match[1] == module
        }
        for key in keys.values():
            _check_widths(
                key, module, tensors[key + _IN].shape, tensors[key + _OUT].shape, config or {}
            )
        pairs |= _pairs(module, keys, rules, tensors)
    own = names_in_memory(config, {}) if config and "vision_config" in config else {}
    own = {name.removesuffix(".weight"): to.removesuffix(".weight") for name, to in own.items()}
    joined = _with_wrapped_experts({own.get(name, name): pair for name, pair in pairs.items()})
    made = {f"{PREFIX}{name}.lora_A.weight": pair.a for name, pair in joined.items()}
    made |= {f"{PREFIX}{name}.lora_B.weight": pair.b for name, pair in joined.items()}
    used = [key for out in found for key in (out, out.removesuffix(_OUT) + _IN)]
    return [Assemble(made, {key: tensors[key].shape for key in used})]


def _check_widths(
    key: str, module: str, a: tuple[int, ...], b: tuple[int, ...], config: Mapping[str, Any]
) -> None:
    """Refuse matrices that do not fit each other, or the configuration."""
    if a[-2:-1] != b[-1:]:
        raise LoadMismatchError(
            f"The ranks of {key + _OUT!r} and linear_in.weight beside it differ: {b} and {a}."
        )
    hidden = (config.get("text_config") or config).get("hidden_size")
    leaf = module.rpartition(".")[2]
    size = {**dict.fromkeys(_READ_HIDDEN, a[-1]), **dict.fromkeys(_WRITE_HIDDEN, b[-2])}.get(
        leaf, hidden
    )
    is_other = (".experts." in module and config.get("moe_latent_size")) or module.startswith(
        "vision_"
    )
    if hidden is not None and size != hidden and not is_other:
        raise LoadMismatchError(
            f"{key!r} has matrices of shapes {a} and {b}, for a model whose hidden states have "
            f"{size} numbers; the configuration says hidden_size {hidden}: it is of another model."
        )


def _pairs(
    module: str,
    keys: Mapping[str | None, str],
    rules: Sequence[Rule],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Pair]:
    """Return the pairs by names of Hugging Face for a module of Megatron, with one adapter or one
    for each part.
    """
    first = keys.get(None) or next(iter(keys.values()))
    a_info, b_info = tensors[first + _IN], tensors[first + _OUT]
    rows = b_info.shape[-2]
    if None not in keys:
        split = next((rule for rule in rules if isinstance(rule, SplitQKV)), None)
        if "linear_qkv" in module and split is None:
            raise CheckpointingException(
                f"Parts of {module!r} are not known: its family has no plain q, k and v."
            )
        is_qkv = split is not None and "linear_qkv" in module
        rows = (
            (split.num_heads + 2 * split.num_kv_heads) * split.head_dim
            if split and is_qkv
            else 2 * rows
        )
    weight = TensorInfo((*b_info.shape[:-2], rows, a_info.shape[-1]), b_info.dtype)
    rules = [replace(rule, optional=True, count=None) for rule in rules]
    pairs: dict[str, Pair] = {}
    used: set[str | None] = set()
    for name, mapped in apply_rules(rules, {f"{module}.weight": weight}, strict=True).items():
        is_transposed = any(part.order[-1] != len(part.order) - 1 for part in mapped.parts)
        if is_transposed or mapped.shape[1:] != a_info.shape[-1:] or not name.endswith(".weight"):
            raise CheckpointingException(
                f"LoRA of {module!r} is for {name!r}, for which no layout of PEFT is known. Merge "
                "it in Megatron."
            )
        name = name.removesuffix(".weight")
        part = None if None in keys else name.rpartition(".")[2].removesuffix("_proj")
        if part not in keys:
            continue
        place = mapped.parts[0].source.offset[:-2]
        a, b = (_inside(keys[part] + end, tensors[keys[part] + end], place) for end in (_IN, _OUT))
        if part is None:
            # The rows of the second matrix become those of the weight.
            rows_of = crop_axis(mapped, 1, 0, a.shape[0])
            b = replace(
                rows_of, parts=tuple(p._replace(key=keys[part] + _OUT) for p in rows_of.parts)
            )
        elif b.shape[0] != mapped.shape[0]:
            raise LoadMismatchError(
                f"{keys[part] + _OUT!r} has {b.shape[0]} rows; {name!r} has {mapped.shape[0]}."
            )
        pairs[name] = Pair(a, b)
        used.add(part)
    if used != keys.keys():
        raise CheckpointingException(
            f"LoRA of {', '.join(keys.values())} has no place in {module!r}: it would be lost."
        )
    return pairs


def _inside(key: str, info: TensorInfo, place: Sequence[int]) -> MappedTensor:
    """Return the matrix of a layer and expert, of stacked ones."""
    matrix = identity(key, info)
    for index in place:
        matrix = drop_axis(crop_axis(matrix, 0, index, index + 1), 0)
    return matrix


def _with_wrapped_experts(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Join the pairs of all experts of a layer, as PEFT has them for a parameter of three axes."""
    joined = {name: pair for name, pair in pairs.items() if not _EXPERT.fullmatch(name)}
    blocks: dict[str, dict[str, dict[int, Pair]]] = {}
    for name, pair in pairs.items():
        if found := _EXPERT.fullmatch(name):
            blocks.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = pair
    for block, parts in blocks.items():
        wrapped = [names for names in OF_EXPERTS.values() if parts.keys() >= set(names)]
        if {name for names in wrapped for name in names} != parts.keys():
            raise CheckpointingException(
                f"LoRA for {block!r} changes {', '.join(sorted(parts))}. PEFT's layout is known "
                "for gate_proj and up_proj together, and for down_proj."
            )
        for depth, names in enumerate(reversed(wrapped)):
            first, *_ = of_parts = [
                [parts[name][number] for number in sorted(parts[name])] for name in names
            ]
            b = [
                join([pair.b for pair in of_expert], 0) for of_expert in zip(*of_parts, strict=True)
            ]
            pair = Pair(join([pair.a for pair in first], 0), interleave(join(b, 1), 1, len(b)))
            joined[block + ".base_layer" * depth] = pair
    return joined
