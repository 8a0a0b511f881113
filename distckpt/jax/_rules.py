"""Rules between names of MaxText and names of Hugging Face directories, for exports."""

from __future__ import annotations

import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_choice
from distckpt._geometry.region import Region
from distckpt.families._config import Shapes, read_config, rules_for
from distckpt.jax._maxtext import EMBEDDING, LOGITS, MaxTextModel
from distckpt.rules._mapped import MappedTensor, RegionCopy, inverse_part
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, Drop, Tie, Trim

Layout: TypeAlias = Literal["jax", "jax-layers"]
"""MaxText's names, with layers stacked as in a scan, or each under a name of its own."""

_ROOT = re.compile(rf"(.*?){re.escape(EMBEDDING)}(\.value)?")
_STATES = re.compile(r"(^|\.)(opt_state|mu|nu|count|step|optimizer|\w*rngs)(\.|$)")
"""Keys of optax, counters and random states."""
_STACK = re.compile(r"decoder\.(\w*layers|layers_remainder)\.")


def to_maxtext(config: Any, layout: Layout = "jax") -> list[Rule]:
    """Return the rules from names of a Hugging Face directory to those of MaxText.

    Names begin with `params.`, as the variables of flax do.

    Args:
        config: content of a `config.json`, or its path or the one of its directory.
        layout: "jax" stacks layers along axis 1, as with `scan_layers=true`; "jax-layers" does not.
    """
    check_choice("layout", layout, ("jax", "jax-layers"))
    values = _values(config)
    model = MaxTextModel(values)
    tensors = model.tensors(is_stacked=layout == "jax")
    named = {f"params.{name}": tensor for name, tensor in tensors.items()}
    parts = itertools.chain(*(tensor.parts for tensor in tensors.values()))
    sources = _shapes((part.key, part.source) for part in parts)
    extra: list[Rule] = []
    for number in range(values.get("num_nextn_predict_layers") or 0):
        # MaxText keeps layers for multi-token prediction elsewhere.
        extra.append(Drop(f"model.layers.{model.num_layers + number}.**", optional=True))
    return [*extra, Assemble(named, sources)]


def from_maxtext(config: Any, shapes: Shapes) -> list[Rule]:
    """Return the rules from names of MaxText to those of a Hugging Face directory.

    Layers may be stacked or not, of linen or nnx. Optimizers are left out.

    Args:
        config: content of a `config.json`, or its path or the one of its directory.
        shapes: shapes of the stored tensors by key.
    """
    names = _names_of(shapes)
    rows = shapes[names[EMBEDDING]][0]
    values = _values(config)
    model = MaxTextModel(values, min(rows, values["vocab_size"]))
    if model.is_tied and LOGITS in names:
        raise CheckpointingException(
            f"The configuration ties the output layer to the embedding, and {names[LOGITS]!r} is "
            "an output layer: set tie_word_embeddings to false in it."
        )
    is_stacked = any(map(_STACK.match, names))
    tensors = model.tensors(is_stacked=is_stacked, axis=_axis_of(names, shapes, model))
    sources = {}
    for name, tensor in tensors.items():
        sources[names.get(name, name)] = tensor.shape
    rules: list[Rule] = []
    for key in shapes:
        if _STATES.search(key):
            rules.append(Drop(key))
    for name, axis in ((EMBEDDING, 0), (LOGITS, 1)):
        if name in names:
            key = names[name]
            rules.append(Trim(key, axis, model.num_rows, is_vocabulary=True))
    inverse = _inverse(tensors, names)
    return [*rules, Assemble(_padded(inverse, values["vocab_size"]), sources)]


def export_rules(
    config: dict[str, Any] | None,
    selected: Mapping[str, Any],
    on_disk: Shapes | None,
    layout: Layout | None,
) -> list[Rule]:
    """Return the rules for `layout` and `family` of an export."""
    if config is None:
        raise CheckpointingException(
            f"layout={layout!r} needs `family`: the path of the model's config.json or of its "
            "directory. For other models, pass `rules` without `layout`."
        )
    shapes = {key: spec.shape for key, spec in selected.items()}
    if is_maxtext(shapes):
        if layout is not None:
            raise CheckpointingException("The checkpoint has MaxText's names: leave out `layout`.")
        return from_maxtext(config, shapes)
    rules = to_maxtext(config, layout or "jax")
    assemble = rules[-1]
    assert isinstance(assemble, Assemble)
    if shapes.keys() >= set(assemble.reads):
        # Of a Hugging Face directory, where names of transformers in memory may differ.
        if f"params.{LOGITS}" not in assemble.tensors:
            rules.insert(0, Tie("lm_head.weight", "model.embed_tokens.weight", optional=True))
        return rules
    return [*rules_for(config, selected, on_disk), *rules]


def is_maxtext(keys: Iterable[str]) -> bool:
    """Whether tensors are named as in MaxText."""
    return any(_ROOT.fullmatch(key) for key in keys)


def _values(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    return dict(config) if isinstance(config, Mapping) else read_config(config)


def _names_of(keys: Iterable[str]) -> dict[str, str]:
    """Return the keys of a model by their names in linen, without prefixes."""
    roots = []
    for key in keys:
        match = _ROOT.fullmatch(key)
        if match is not None and not _STATES.search(key):
            roots.append(match[1])
    if len(roots) != 1:
        raise CheckpointingException(
            f"The checkpoint has {len(roots)} tensors {EMBEDDING!r}, {sorted(roots)[:5]}: select "
            "one model with `keys`."
        )
    names = {}
    for key in keys:
        if key.startswith(roots[0]) and not _STATES.search(key):
            name = key.removeprefix(roots[0]).removesuffix(".value")
            # nnx has lists of layers.
            names[re.sub(r"layers\.(\d+)\.", r"layers_\1.", name)] = key
    return names


def _axis_of(names: Mapping[str, str], shapes: Shapes, model: MaxTextModel) -> int:
    """Return the axis of the layers: `param_scan_axis` of MaxText is 1 unless it is set."""
    for name, tensor in model.tensors(is_stacked=True, axis=0).items():
        if len(tensor.shape) == 2 and name.endswith("norm.scale") and name in names:
            is_first = shapes[names[name]] == tensor.shape and tensor.shape[0] != tensor.shape[1]
            return 0 if is_first else 1
    return 1


def _inverse(
    tensors: Mapping[str, MappedTensor], names: Mapping[str, str]
) -> dict[str, MappedTensor]:
    """Return the tensors of a Hugging Face directory, made of MaxText's."""
    parts: defaultdict[str, list[RegionCopy]] = defaultdict(list)
    for name, tensor in tensors.items():
        for part in tensor.parts:
            parts[part.key].append(inverse_part(names.get(name, name), part))
    inverse = {}
    for key, pieces in parts.items():
        shape = _shapes((key, piece.target) for piece in pieces)[key]
        inverse[key] = MappedTensor(shape, "F32", tuple(pieces))
    return inverse


def _shapes(regions: Iterable[tuple[str, Region]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that regions tile, by key."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, region in regions:
        ends = tuple(map(operator.add, *region))
        shapes[key] = tuple(map(max, shapes.get(key, ends), ends))
    return shapes


def _padded(tensors: dict[str, MappedTensor], rows: int) -> dict[str, MappedTensor]:
    """Fill the rows of a vocabulary that MaxText does without with zeros."""
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape[0] < rows:
            missing = (rows - tensor.shape[0], tensor.shape[1])
            gap = Region((tensor.shape[0], 0), missing)
            tensors[name] = replace(tensor, shape=(rows, tensor.shape[1]), padding=(gap,))
    return tensors
