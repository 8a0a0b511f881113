"""The rules of a family of models; `distckpt.families` is the public path."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.messages import check_choice, check_path
from distckpt._base.wings import wing
from distckpt._storage import locations
from distckpt.families._blocks import MTP_NAMES, Config, IncompleteConfigError, joined_experts
from distckpt.families._megatron import megatron_rules
from distckpt.families._towers import text_part
from distckpt.families._transformers_names import Shapes, transformers_rules, with_defaults
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Rename, Transpose

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 16 << 20

Source: TypeAlias = Literal["megatron", "transformers"]
"""Program whose names tensors have in memory, or in the checkpoint."""

_MEGATRON_KEY = re.compile(
    # Models of transformers have such layers, too, with decoder.layers.0.mlp.fc1.
    r"(^|\.)(decoder\.layers\.(\d+\.)?(self_attention|mlp)"
    r"|mtp\.layers|embedding\.word_embeddings)\.(?!(fc\d|[qkvo]_proj)\.)"
)

_MAXTEXT = "token_embedder.embedding"
_MTP_KEY = re.compile(r"(?:^|\.)mtp\.layers\.(\d+)\.")


def rules(config: Any, source: Source) -> list[Rule]:
    """Return the rules from names in memory to a Hugging Face directory's.

        rules = distckpt.families.rules("Qwen3-30B-A3B/config.json", source="megatron")
        distckpt.load(model.sharded_state_dict(), "Qwen3-30B-A3B", rules=rules)

    Args:
        config: a configuration of transformers, or the content of a `config.json`, or the path or
            URL of one, or of its directory.
        source: "megatron" for the keys of Megatron Core's `sharded_state_dict`, whether layers and
            experts are stacked or not; "transformers" for the names of a model in memory, which
            differ from the names of `save_pretrained` (`experts.gate_up_proj`, for one).
            transformers knows them, and must be installed.

    Raises:
        CheckpointNotFoundError: there is no `config.json`.
        CheckpointingException: the family is not supported, or the configuration lacks a value or
            contradicts itself.
    """
    check_choice("source", source, ("megatron", "transformers"))
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    values = dict(config) if isinstance(config, Mapping) else read_config(config)
    _check_model_type(values)
    if source == "transformers":
        return transformers_rules(values)
    try:
        return megatron_rules(values)
    except IncompleteConfigError:
        completed = with_defaults(values)
        if completed is None:
            raise
        return megatron_rules(completed)


def _check_model_type(config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("model_type"), str):
        raise CheckpointingException(
            "The configuration does not name its model_type, as those of transformers do: leave "
            "out `family` if the tensors are stored under the names of the model, or give `rules`."
        )


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a `config.json`.

    It is given by its path or URL, or the one of its directory, or of a safetensors file there.
    """
    location = locations.normalize(path)
    if location.endswith(".safetensors"):
        location = locations.split(location)[0]
    if not location.endswith(".json"):
        location = locations.join(location, CONFIG_NAME)
    try:
        content = locations.read_bytes(location, _MAX_CONFIG_BYTES)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"There is no {location!r}: family is 'auto', or the path of a config.json or of its "
            "directory. For other models give `rules`."
        ) from error
    try:
        values = json.loads(content, object_hook=_decode_float)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointingException(
            f"{location!r} is not the JSON of a configuration: {error}. Restore it from a copy."
        ) from error
    if not isinstance(values, dict):
        raise CheckpointingException(
            f"{location!r} holds not a configuration but a {type(values).__name__}."
        )
    return values


def _decode_float(values: dict[str, Any]) -> Any:
    """Undo transformers' form of infinities, `{"__float__": "Infinity"}`."""
    if values.keys() != {"__float__"}:
        return values
    return float(values["__float__"])


def config_for(
    family: str | os.PathLike[str] | None, directory: str | None
) -> dict[str, Any] | None:
    """Read the configuration that `family=` of an operation names, or None.

    Args:
        family: "auto" for the configuration in `directory`; or its path; or None.
        directory: a Hugging Face directory.
    """
    check_path("family", family)
    if family is None:
        return None
    if family != "auto":
        return read_config(family)
    if directory is None:
        raise ValueError(
            "family='auto' reads the config.json of `like`: give it, or the path of a config.json "
            "as family."
        )
    return read_config(directory)


def rules_for(
    config: dict[str, Any] | None,
    keys: Collection[str],
    on_disk: Shapes | None = None,
    layout: str | None = None,
) -> list[Rule]:
    """Return the rules for `family=` of an operation, if it is given.

    The names of the tensors tell the source.

    Args:
        config: the configuration; it is changed to fit the checkpoint.
        keys: keys of the tensors in memory or in the checkpoint; in an export, with their shapes.
        on_disk: shapes of the tensors in the Hugging Face directory, by name.
        layout: names of MaxText to export.
    """
    if layout is not None or any(_MAXTEXT in key for key in (*keys, *(on_disk or ()))):
        rules_of_maxtext: list[Rule] = wing("jax").rules_of(config, keys, on_disk, layout)
        return rules_of_maxtext
    if config is None:
        return []
    is_megatron = any(map(_MEGATRON_KEY.search, keys))
    source: Source = "megatron" if is_megatron else "transformers"
    logger.info("rules for model_type %s, tensors named as in %s", config.get("model_type"), source)
    if not is_megatron:
        _check_model_type(config)
        return transformers_rules(config, keys, on_disk)
    _count_token_prediction(config, keys)
    return [*rules(config, source), *forms_on_disk(Config(config), on_disk or {})]


def _count_token_prediction(config: dict[str, Any], keys: Iterable[str]) -> None:
    """Set the number of multi-token prediction layers in the configuration.

    Often such layers are not trained.
    """
    numbers = []
    for key in keys:
        if match := _MTP_KEY.search(key):
            numbers.append(int(match[1]))
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        has_number = any(part.get(name) is not None for name in MTP_NAMES)
        if not (numbers and has_number):
            part[MTP_NAMES[0]] = max(numbers, default=-1) + 1


# --- Forms of directories that `save_pretrained` does not write -----------------------------------


_FUSED = re.compile(r"((?:.+\.)?layers\.)\d+(\..+)\.experts\.gate_up_proj")
_TOWER = "vision_tower.vision_model."


def forms_on_disk(config: Config, shapes: Shapes) -> list[Rule]:
    """Return the rules from the form of `save_pretrained` to a directory's.

    The shapes of the directory's tensors are given by name.
    """
    rules: list[Rule] = []
    fused: dict[str, str] = {}
    for name in shapes:
        if match := _FUSED.fullmatch(name):
            fused[f"{match[1]}*{match[2]}"] = name
    for block, name in fused.items():
        rules += joined_experts(block, shapes[name][0])
        if config("model_type") == "qwen3_vl_moe" and _are_transposed(config, name, shapes):
            for part in ("gate_up_proj", "down_proj"):
                old = f"{block}.experts.{part}"
                aside = f"{old}.transposed"
                rules.append(
                    Transpose(old, aside.replace("*", "{0}"), order=(0, 2, 1), optional=True)
                )
                rules.append(Rename(aside, old.replace("*", "{0}"), optional=True))
    if any(name.startswith(_TOWER) for name in shapes):
        parts = ("embeddings", "pre_layrnorm", "encoder", "post_layernorm")
        for part in parts:
            rules.append(Rename(f"vision_tower.{part}.**", f"{_TOWER}{part}.{{0}}", optional=True))
    return rules


def _are_transposed(
    config: Config,
    name: str,
    shapes: Shapes,
) -> bool:
    """Return whether experts are stored as the model was published.

    At least one of both matrices is not square.
    """
    text = text_part(config, "")
    hidden = text.number_of("hidden_size", most=1 << 32)
    inner = text.number_of("moe_intermediate_size", most=1 << 32)
    down = shapes.get(name.replace("gate_up_proj", "down_proj"))
    return (shapes[name][1:], down and down[1:]) == ((hidden, 2 * inner), (inner, hidden))
