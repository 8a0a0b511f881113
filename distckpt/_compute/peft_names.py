"""PEFT's names and layout for LoRA of Megatron Bridge."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt.families import _config as families
from distckpt.families._blocks import Config
from distckpt.rules._mapped import (
    MappedTensor,
    TensorSpec,
    crop_axis,
    drop_axis,
    identity,
    interleave,
    join,
)
from distckpt.rules._pieces import SplitQKV
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, apply_rules

_IN = ".linear_in.weight"
_OUT = ".linear_out.weight"
_BRIDGE = re.compile(
    r"(?P<module>.+)\.adapter(?:\.adapter_(?P<part>q|k|v|gate|up))?\.linear_out\.weight"
)
_READ_HIDDEN = (
    "linear_qkv",
    "linear_fc1",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_kv_down_proj",
    "in_proj",
)
_WRITE_HIDDEN = ("linear_proj", "linear_fc2", "out_proj")
_EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>.+)")
OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Joined parameters of experts in transformers, with their parts, in PEFT's order."""
PREFIX = "base_model.model."

logger = logging.getLogger(__name__)


class Pair(NamedTuple):
    """LoRA's matrices for a Hugging Face module; their product is `b @ a`."""

    a: MappedTensor
    b: MappedTensor


class _Module(NamedTuple):
    """A module of Megatron with LoRA.

    Attributes:
        name: name of the module.
        keys: prefixes of its matrices' keys, by part of the module ("q", "gate"); None stands for
            the whole module.
    """

    name: str
    keys: Mapping[str | None, str]


# --- Names in memory ------------------------------------------------------------------------------


def names_in_memory(
    model: Mapping[str, Any], on_disk: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return transformers' names in memory for a directory's tensors.

    The keys are the names on disk.

    Pieces of experts are named as if each expert were a module, with parts named as in
    `OF_EXPERTS`. `on_disk` has the shapes of the directory's tensors.
    """
    try:
        assembled = families.rules(model, "transformers")[-1]
    except CheckpointingException as error:
        logger.warning("names in memory are not known: %s", error)
        return {}
    assert isinstance(assembled, Assemble)
    names = {}
    infos = {}
    for name, mapped in assembled.tensors.items():
        in_memory = _name_in_memory(mapped, assembled.sources)
        if in_memory is not None:
            names[name] = in_memory
            infos[name] = TensorSpec(mapped.shape, "F32")
    renamed = apply_rules(families.forms_on_disk(Config(model), on_disk), infos)
    stored = {}
    for new, mapped in renamed.items():
        if len(mapped.parts) == 1:
            stored[new] = names[mapped.parts[0].key]
    return stored


def _name_in_memory(mapped: MappedTensor, sources: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return a tensor's name in memory, or its expert piece's name."""
    if len(mapped.parts) != 1:
        return None
    part = mapped.parts[0]
    if part.order != tuple(range(len(part.order))):
        return None
    if mapped.shape == sources[part.key]:
        return part.key
    block, _, leaf = part.key.rpartition(".")
    if leaf not in OF_EXPERTS or len(part.order) != 3:
        return None
    expert, row, _ = part.source.offset
    return f"{block}.{expert}.{OF_EXPERTS[leaf][row // mapped.shape[0]]}.weight"


# --- LoRA of Megatron Bridge ----------------------------------------------------------------------


def with_peft_names(
    rules: Sequence[Rule],
    tensors: Mapping[str, TensorSpec],
    config: Mapping[str, Any] | None,
) -> Sequence[Rule]:
    """Return the rules for exporting LoRA of Megatron Bridge.

    `rules` are for the weights that LoRA changes; they stay if there is no LoRA.

    Raises:
        LoadMismatchError: matrices do not fit each other, or the configuration.
        CheckpointingException: no layout of PEFT is known for them.
    """
    modules = _modules_with_lora(tensors)
    if not modules:
        return rules
    pairs: dict[str, Pair] = {}
    for module in modules:
        _check_widths(module, tensors, config or {})
        pairs |= _pairs(module, rules, tensors)
    made = {}
    for name, pair in _with_wrapped_experts(_in_memory(pairs, config)).items():
        made[f"{PREFIX}{name}.lora_A.weight"] = pair.a
        made[f"{PREFIX}{name}.lora_B.weight"] = pair.b
    used = []
    for module in modules:
        for stem in module.keys.values():
            used += [stem + _OUT, stem + _IN]
    return [Assemble(made, {key: tensors[key].shape for key in used})]


def _modules_with_lora(tensors: Mapping[str, TensorSpec]) -> list[_Module]:
    modules: dict[str, dict[str | None, str]] = {}
    for key in tensors:
        match = _BRIDGE.fullmatch(key)
        stem = key.removesuffix(_OUT)
        if match and stem + _IN in tensors:
            modules.setdefault(match["module"], {})[match["part"]] = stem
    return [_Module(name, keys) for name, keys in modules.items()]


def _in_memory(pairs: dict[str, Pair], config: Mapping[str, Any] | None) -> dict[str, Pair]:
    """Give modules of vision models their names in memory."""
    if not config or "vision_config" not in config:
        return pairs
    names = names_in_memory(config, {})
    renamed = {}
    for name, pair in pairs.items():
        weight = f"{name}.weight"
        renamed[names.get(weight, weight).removesuffix(".weight")] = pair
    return renamed


def _check_widths(
    module: _Module, tensors: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> None:
    """Refuse matrices that do not fit each other, or the configuration."""
    hidden = _hidden_size(module, config)
    leaf = module.name.rpartition(".")[2]
    for key in module.keys.values():
        a = tensors[key + _IN].shape
        b = tensors[key + _OUT].shape
        if a[-2:-1] != b[-1:]:
            raise LoadMismatchError(
                f"The ranks of {key + _OUT!r} and linear_in.weight beside it differ: {b} and {a}."
            )
        size = hidden
        if leaf in _READ_HIDDEN:
            size = a[-1]
        elif leaf in _WRITE_HIDDEN:
            size = b[-2]
        if hidden is not None and size != hidden:
            raise LoadMismatchError(
                f"{key!r} has matrices of shapes {a} and {b}, for a model whose hidden states "
                f"have {size} numbers; the configuration says hidden_size {hidden}: it is of "
                "another model."
            )


def _hidden_size(module: _Module, config: Mapping[str, Any]) -> int | None:
    """Return the hidden size of a module, or None if unknown."""
    is_latent = ".experts." in module.name and config.get("moe_latent_size")
    if is_latent or module.name.startswith("vision_"):
        return None
    size: int | None = text_config(config).get("hidden_size")
    return size


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a model's configuration about its language model."""
    inner = config.get("text_config")
    if isinstance(inner, dict):
        return inner
    return config


def _pairs(
    module: _Module, rules: Sequence[Rule], tensors: Mapping[str, TensorSpec]
) -> dict[str, Pair]:
    """Return a Megatron module's pairs by Hugging Face name.

    The module has one adapter, or one for each part.
    """
    optional = [replace(rule, optional=True, count=None) for rule in rules]
    weight = _weight_of(module, rules, tensors)
    pairs: dict[str, Pair] = {}
    used: set[str | None] = set()
    for name, mapped in apply_rules(
        optional, {f"{module.name}.weight": weight}, strict=True
    ).items():
        _check_is_plain(module, name, mapped, weight)
        name = name.removesuffix(".weight")
        part = None
        if None not in module.keys:
            part = name.rpartition(".")[2].removesuffix("_proj")
        if part in module.keys:
            pairs[name] = _pair(module.keys[part], name, mapped, tensors, part is None)
            used.add(part)
    if used != module.keys.keys():
        raise CheckpointingException(
            f"LoRA of {', '.join(module.keys.values())} has no place in {module.name!r}: it would "
            "be lost."
        )
    return pairs


def _weight_of(
    module: _Module, rules: Sequence[Rule], tensors: Mapping[str, TensorSpec]
) -> TensorSpec:
    """Describe the weight that LoRA is for."""
    first = module.keys.get(None) or next(iter(module.keys.values()))
    a = tensors[first + _IN]
    b = tensors[first + _OUT]
    rows = b.shape[-2]
    if None not in module.keys:
        rows = _rows_of_qkv(module, rules) if "linear_qkv" in module.name else 2 * rows
    return TensorSpec((*b.shape[:-2], rows, a.shape[-1]), b.dtype)


def _rows_of_qkv(module: _Module, rules: Sequence[Rule]) -> int:
    for rule in rules:
        if isinstance(rule, SplitQKV):
            return (rule.num_heads + 2 * rule.num_kv_heads) * rule.head_dim
    raise CheckpointingException(
        f"Parts of {module.name!r} are not known: its family has no plain q, k and v."
    )


def _check_is_plain(
    module: _Module,
    name: str,
    mapped: MappedTensor,
    weight: TensorSpec,
) -> None:
    """Refuse weights other than linear ones with the module's columns."""
    is_transposed = any(part.order[-1] != len(part.order) - 1 for part in mapped.parts)
    is_linear = name.endswith(".weight") and mapped.shape[1:] == weight.shape[-1:]
    if is_transposed or not is_linear:
        raise CheckpointingException(
            f"LoRA of {module.name!r} is for {name!r}, for which no layout of PEFT is known. Merge "
            "it in Megatron."
        )


def _pair(
    key: str,
    name: str,
    mapped: MappedTensor,
    tensors: Mapping[str, TensorSpec],
    is_whole: bool,
) -> Pair:
    """Return the matrices for a weight of the Hugging Face model.

    `mapped` maps the weight to the module's weight.
    """
    place = mapped.parts[0].source.offset[:-2]
    a, b = (_inside(key + end, tensors[key + end], place) for end in (_IN, _OUT))
    if is_whole:
        # The rows of the second matrix become the rows of the weight.
        rows = crop_axis(mapped, 1, 0, a.shape[0])
        b = replace(rows, parts=tuple(part._replace(key=key + _OUT) for part in rows.parts))
    elif b.shape[0] != mapped.shape[0]:
        raise LoadMismatchError(
            f"{key + _OUT!r} has {b.shape[0]} rows; {name!r} has {mapped.shape[0]}."
        )
    return Pair(a, b)


def _inside(key: str, info: TensorSpec, place: Sequence[int]) -> MappedTensor:
    """Return the matrix of one layer and expert from a stack."""
    matrix = identity(key, info)
    for index in place:
        matrix = drop_axis(crop_axis(matrix, 0, index, index + 1), 0)
    return matrix


def _with_wrapped_experts(pairs: Mapping[str, Pair]) -> dict[str, Pair]:
    """Join the pairs of a layer's experts, as PEFT has them.

    PEFT's parameter for all experts has three axes.
    """
    joined: dict[str, Pair] = {}
    blocks: dict[str, dict[str, dict[int, Pair]]] = {}
    for name, pair in pairs.items():
        if expert := _EXPERT.fullmatch(name):
            block = blocks.setdefault(expert["block"], {})
            block.setdefault(expert["leaf"], {})[int(expert["expert"])] = pair
        else:
            joined[name] = pair
    for name, parts in blocks.items():
        for depth, names in enumerate(reversed(_wrapped(name, parts))):
            joined[name + ".base_layer" * depth] = _joined([parts[part] for part in names])
    return joined


def _wrapped(block: str, parts: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Return the part names of each parameter of a block of experts."""
    wrapped = []
    for names in OF_EXPERTS.values():
        if parts.keys() >= set(names):
            wrapped.append(names)
    if set(itertools.chain.from_iterable(wrapped)) != parts.keys():
        raise CheckpointingException(
            f"LoRA for {block!r} changes {', '.join(sorted(parts))}. PEFT's layout is known for "
            "gate_proj and up_proj together, and for down_proj."
        )
    return wrapped


def _joined(parts: Sequence[Mapping[int, Pair]]) -> Pair:
    """Join all experts' pairs; `parts` have them by expert number."""
    a = []
    b = []
    for number in sorted({*parts[0], *parts[-1]}):
        a.append(parts[0][number].a)
        b.append(join([part[number].b for part in parts], 0))
    return Pair(join(a, 0), interleave(join(b, 1), 1, len(b)))
