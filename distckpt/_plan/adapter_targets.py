"""The modules that an adapter of PEFT is for, by PEFT's own rule, compared with those that it has
matrices for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys, without_numbers
from distckpt._plan.peft_names import OF_EXPERTS

FIELDS: dict[str, type] = {
    "target_modules": str, "exclude_modules": str, "modules_to_save": str, "target_parameters": str,
    "layers_pattern": str, "layers_to_transform": int,
}  # fmt: skip
_ALL_LINEAR = "all-linear"
_EXPERT = re.compile(r"(?P<block>(.+\.)?experts)\.(\d+\.)?(?P<leaf>.+)")
_MTP = re.compile(r"(.+\.)?mtp[^.]*\..+")
_LAYER = re.compile(r".*?\.[^.]*\.(?P<number>\d+)\.")


def check_targets(
    location: str,
    config: Mapping[str, Any],
    adapted: Collection[str],
    modules: Collection[str],
    model: Mapping[str, Any] | None = None,
) -> None:
    """Refuse an adapter whose matrices are not for the modules that its configuration names.

    Modules of the export may be absent from the model that was trained: experts that are one
    parameter in memory, and layers that transformers does not load. So a module is missed only
    where the adapter has matrices for the same one of another layer, or none at all for what the
    configuration lists. `model` is the model's configuration.
    """
    said = ", ".join(
        f"{field}={config[field]!r:.300}" for field in FIELDS if config.get(field) is not None
    )
    try:
        others = [module for module in adapted if not is_target(module, config)]
        targets = [module for module in modules if is_target(module, config)]
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
    missing = _missing(
        config.get("target_modules"), targets, adapted, _not_loaded(modules, model or {})
    )
    if missing:
        raise LoadMismatchError(
            f"The adapter {location!r} has no matrices for {summarize_keys(missing)}, which its "
            f"adapter_config.json is for ({said or 'for every layer'}): it is not complete. Save "
            "it again; if it was trained without them, say so there, in exclude_modules or by "
            "full names in target_modules or target_parameters.",
            missing=missing,
        )


def is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is for a module, as PEFT does; experts may be parameters that it
    names.
    """
    if (expert := _EXPERT.fullmatch(module)) and config.get("target_parameters"):
        leaf = next(
            (name for name, parts in OF_EXPERTS.items() if expert["leaf"] in parts), expert["leaf"]
        )
        if ends_with(f"{expert['block']}.{leaf}", config["target_parameters"]):
            return True
    if ends_with(f"{module}.weight", config.get("target_parameters") or ()):
        return True
    targets, excluded = config.get("target_modules"), config.get("exclude_modules") or ()
    if re.fullmatch(excluded, module) if isinstance(excluded, str) else ends_with(module, excluded):
        return False
    if any(
        re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ()
    ):
        return False
    if targets is None:
        return not config.get("target_parameters") and _is_in_layers(module, config)
    if isinstance(targets, str):
        is_named = targets.lower() == _ALL_LINEAR or re.fullmatch(targets, module)
        return bool(is_named) and _is_in_layers(module, config)
    return module in targets or (ends_with(module, targets) and _is_in_layers(module, config))


def _is_in_layers(module: str, config: Mapping[str, Any]) -> bool:
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) and patterns else patterns
    found = [
        re.match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.", module) for pattern in patterns or ()
    ]
    match = next(filter(None, found), None) if patterns else _LAYER.match(module)
    return match is not None and int(match["number"]) in (
        layers if isinstance(layers, list) else [layers]
    )


def _missing(
    listed: str | list[str] | None,
    targets: Collection[str],
    adapted: Collection[str],
    not_loaded: Collection[str],
) -> list[str]:
    """Return the targets that an adapter should have matrices for and has not."""
    if isinstance(listed, str):
        # Of a pattern, the last names of what it matches stand for the list.
        listed = (
            []
            if listed.lower() == _ALL_LINEAR
            else list({name.rpartition(".")[2] for name in targets})
        )
    forms = {without_numbers(module) for module in adapted}
    absent = [
        name for name in listed or () if not any(ends_with(module, [name]) for module in adapted)
    ]
    return [
        module
        for module in targets
        if module not in adapted
        and module not in not_loaded
        and (
            without_numbers(module) in forms
            or (ends_with(module, absent) and not _EXPERT.fullmatch(module))
        )
    ]


def _not_loaded(modules: Collection[str], model: Mapping[str, Any]) -> set[str]:
    """Return the modules that models of transformers do not have: of token prediction, and keys and
    values shared.
    """
    text = inner if isinstance(inner := model.get("text_config"), dict) else model
    sizes = [text.get(name) for name in ("num_hidden_layers", "num_kv_shared_layers")]
    first_shared = (
        sizes[0] - sizes[1] if all(type(size) is int for size in sizes) and sizes[1] else None
    )
    predicting = tuple(
        module.removesuffix("eh_proj") for module in modules if module.endswith(".eh_proj")
    )
    found = set()
    for module in modules:
        layer = _LAYER.match(module)
        is_shared = layer and first_shared is not None and int(layer["number"]) >= first_shared
        is_kv = module.endswith((".self_attn.k_proj", ".self_attn.v_proj"))
        if _MTP.fullmatch(module) or module.startswith(predicting) or (is_shared and is_kv):
            found.add(module)
    return found


def ends_with(module: str, names: Collection[str]) -> bool:
    """Tell whether a module has one of those names, or ends with one."""
    return any(module == name or module.endswith(f".{name}") for name in names)
