"""Target modules of a PEFT adapter, by PEFT's own rule.

They are compared with the modules that the adapter has matrices for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys, without_numbers
from distckpt._compute.peft_names import OF_EXPERTS, text_config

FIELDS: dict[str, type] = {
    "target_modules": str,
    "exclude_modules": str,
    "modules_to_save": str,
    "target_parameters": str,
    "layers_pattern": str,
    "layers_to_transform": int,
}
"""List fields of the configuration, with the types of their items."""
_ALL_LINEAR = "all-linear"
_EXPERT = re.compile(r"(?P<block>(.+\.)?experts)\.(\d+\.)?(?P<leaf>.+)")
_MTP = re.compile(r"(.+\.)?mtp[^.]*\..+")
_PREDICTING = "eh_proj"
_KEYS_AND_VALUES = (".self_attn.k_proj", ".self_attn.v_proj")
_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


def check_targets(
    location: str,
    config: Mapping[str, Any],
    adapted: Collection[str],
    modules: Collection[str],
    model: Mapping[str, Any] | None = None,
) -> None:
    """Refuse an adapter whose matrices contradict its configuration's modules.

    Modules of the export may be absent from the model that was trained: experts that are one
    parameter in memory, and layers that transformers does not load. So a module is missed only
    where the adapter has matrices for the same module of another layer, or none at all for a module
    that the configuration lists. `model` is the model's configuration.
    """
    said = _said(config)
    try:
        others = []
        for module in adapted:
            if not is_target(module, config):
                others.append(module)
        targets = []
        for module in modules:
            if is_target(module, config):
                targets.append(module)
    except re.error as error:
        raise CheckpointingException(
            f"The configuration of the adapter {location!r} has a pattern that is none ({error}): "
            f"{said}."
        ) from error
    if others:
        raise LoadMismatchError(
            f"The adapter {location!r} has matrices for {summarize_keys(others)}, which its "
            f"adapter_config.json is not for ({said}): PEFT would leave them out. Correct the "
            "configuration, or save the adapter again.",
            unexpected=others,
        )
    missing = _missing(targets, config.get("target_modules"), adapted, _not_loaded(modules, model))
    if missing:
        raise LoadMismatchError(
            f"The adapter {location!r} has no matrices for {summarize_keys(missing)}, which its "
            f"adapter_config.json is for ({said or 'for every layer'}): it is not complete. Save "
            "it again; if it was trained without them, say so there, in exclude_modules or by "
            "full names in target_modules or target_parameters.",
            missing=missing,
        )


def _said(config: Mapping[str, Any]) -> str:
    """Describe a configuration's fields about modules, for messages."""
    texts = []
    for field in FIELDS:
        value = config.get(field)
        if value is not None:
            texts.append(f"{field}={value!r:.300}")
    return ", ".join(texts)


def is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Whether a configuration targets a module, as PEFT decides.

    Experts may be parameters that it names.
    """
    parameters = config.get("target_parameters") or ()
    if parameters and _is_parameter(module, parameters):
        return True
    if _is_excluded(module, config):
        return False
    targets = config.get("target_modules")
    if isinstance(targets, list) and module in targets:
        return True
    is_named = not parameters
    if targets is not None:
        is_named = str(targets).lower() == _ALL_LINEAR or _fits(module, targets)
    return is_named and _is_in_layers(module, config)


def _fits(module: str, names: str | Collection[str]) -> bool:
    """Whether a module fits a pattern, or one of several names."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return ends_with(module, names)


def _is_parameter(module: str, parameters: Collection[str]) -> bool:
    """Whether a configuration names a module's weight, or its whole parameter."""
    if expert := _EXPERT.fullmatch(module):
        leaf = expert["leaf"]
        wholes = []
        for whole, parts in OF_EXPERTS.items():
            if leaf in parts:
                wholes.append(whole)
        if ends_with(f"{expert['block']}.{next(iter(wholes), leaf)}", parameters):
            return True
    return ends_with(f"{module}.weight", parameters)


def _is_excluded(module: str, config: Mapping[str, Any]) -> bool:
    saved = config.get("modules_to_save") or ()
    is_excluded = _fits(module, config.get("exclude_modules") or ())
    return is_excluded or any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in saved)


def _is_in_layers(module: str, config: Mapping[str, Any]) -> bool:
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    match = _layer_of(module, config.get("layers_pattern"))
    numbers = layers
    if not isinstance(layers, list):
        numbers = [layers]
    return match is not None and int(match["number"]) in numbers


def _layer_of(module: str, patterns: str | list[str] | None) -> re.Match[str] | None:
    """Return a module's match with names of layer lists, or None."""
    if not patterns:
        return _LAYER.match(module)
    for name in [patterns] if isinstance(patterns, str) else patterns:
        if match := re.match(rf"(?:^|.*?\.){name}\.(?P<number>\d+)\.", module):
            return match
    return None


def _missing(
    targets: Sequence[str],
    listed: str | list[str] | None,
    adapted: Collection[str],
    not_loaded: Collection[str],
) -> list[str]:
    """Return the targets for which the adapter lacks matrices."""
    forms = {without_numbers(module) for module in adapted}
    names = []
    for name in _names(listed, targets):
        if not _ends_any(adapted, name):
            names.append(name)
    missing = []
    for module in targets:
        if module in adapted or module in not_loaded:
            continue
        is_absent = ends_with(module, names) and not _EXPERT.fullmatch(module)
        if is_absent or without_numbers(module) in forms:
            missing.append(module)
    return missing


def _names(listed: str | list[str] | None, targets: Collection[str]) -> Collection[str]:
    """Return the names that a configuration lists.

    For a pattern, these are the last names of its matches.
    """
    if not isinstance(listed, str):
        return listed or ()
    if listed.lower() == _ALL_LINEAR:
        return ()
    return {name.rpartition(".")[2] for name in targets}


def _ends_any(modules: Collection[str], name: str) -> bool:
    return any(ends_with(module, [name]) for module in modules)


def _not_loaded(modules: Collection[str], model: Mapping[str, Any] | None) -> set[str]:
    """Return the modules that models of transformers do not have.

    These are modules of token prediction, and shared keys and values.
    """
    not_loaded = _prediction_modules(modules)
    first_shared = _first_shared_layer(model or {})
    if first_shared is not None:
        for module in modules:
            layer = _LAYER.match(module)
            is_shared = layer is not None and int(layer["number"]) >= first_shared
            if is_shared and module.endswith(_KEYS_AND_VALUES):
                not_loaded.add(module)
    return not_loaded


def _prediction_modules(modules: Collection[str]) -> set[str]:
    """Return the modules of token prediction."""
    prefixes = []
    for module in modules:
        if module.endswith(f".{_PREDICTING}"):
            prefixes.append(module.removesuffix(_PREDICTING))
    predicting = set()
    for module in modules:
        if _MTP.fullmatch(module) or module.startswith(tuple(prefixes)):
            predicting.add(module)
    return predicting


def _first_shared_layer(model: Mapping[str, Any]) -> int | None:
    """Return the first layer that shares keys and values with another."""
    text = text_config(model)
    num_layers = text.get("num_hidden_layers")
    num_shared = text.get("num_kv_shared_layers")
    if type(num_layers) is int and type(num_shared) is int and num_shared:
        return max(0, num_layers - num_shared)
    return None


def ends_with(module: str, names: Collection[str]) -> bool:
    """Whether a module has one of those names, or ends with one."""
    return any(module == name or module.endswith(f".{name}") for name in names)
