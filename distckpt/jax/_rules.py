"""Rules between names of MaxText and of Hugging Face directories, for exports."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from distckpt._base.errors import CheckpointingException
from distckpt._base.messages import check_choice
from distckpt._geometry.region import Region
from distckpt.families._config import read_config, rules_for
from distckpt.families._transformers_names import Shapes
from distckpt.jax._maxtext import EMBEDDING, LOGITS, MaxTextModel
from distckpt.rules._mapped import MappedTensor, TensorSpec, identity
from distckpt.rules._rule import Rule
from distckpt.rules._rules import Assemble, Drop, Tie, Trim, invert

Layout: TypeAlias = Literal["jax", "jax-layers"]
"""Names of MaxText, with layers stacked or not."""

_ROOT = re.compile(rf"(.*\.)?{re.escape(EMBEDDING)}(\.value)?")
_STATES = re.compile(r"(^|\.)(opt_state|mu|nu|count|step|optimizer|\w*rngs|nnx_aux)(\.|$)")
"""Keys of optax, counters and random states."""
_STACK = re.compile(r"decoder\.(\w*layers|layers_remainder)\.")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def to_maxtext(config: Any, layout: Layout = "jax") -> list[Rule]:
    """Return the rules from a Hugging Face directory to MaxText.

    Names begin with `params.`, as the variables of flax do.

    Args:
        config: a configuration of transformers, the content of a `config.json`, or its path.
        layout: "jax" stacks layers along axis 1, as with `scan_layers=true`; "jax-layers" does not.

    Raises:
        CheckpointingException: MaxText has no such model.
    """
    check_choice("layout", layout, ("jax", "jax-layers"))
    model = MaxTextModel(_values(config))
    rules: list[Rule] = []
    for number in range(model.num_layers, model.num_layers + model.num_extra):
        # MaxText keeps layers for multi-token prediction elsewhere.
        rules.append(Drop(f"model.layers.{number}.**", optional=True))
    tensors = model.tensors(is_stacked=layout == "jax")
    named = {f"params.{name}": tensor for name, tensor in tensors.items()}
    return [*rules, *_assemble(model, named)]


def _assemble(model: MaxTextModel, tensors: Mapping[str, MappedTensor]) -> list[Rule]:
    """Return the rules that make tensors of a Hugging Face directory's."""
    assemble = Assemble(tensors, _sources(tensors))
    if not model.is_tied:
        return [assemble]
    return [Tie(_VOCABULARY[1], _VOCABULARY[0], optional=True), assemble]


def _sources(tensors: Mapping[str, MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that others are made of."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in itertools.chain(*(tensor.parts for tensor in tensors.values())):
        ends = tuple(map(operator.add, *part.source))
        shapes[part.key] = tuple(map(max, shapes.get(part.key, ends), ends))
    return shapes


def _stored(
    config: Any, shapes: Shapes
) -> tuple[MaxTextModel, dict[str, str], dict[str, MappedTensor]]:
    """Return the model, stored keys by name, and tensors by key."""
    names = _names_of(shapes)
    model = MaxTextModel(_values(config), shapes[names[EMBEDDING]][0])
    if model.is_tied and LOGITS in names:
        raise CheckpointingException(
            f"The configuration ties the output layer to the embedding, and {names[LOGITS]!r} is "
            "an output layer: set tie_word_embeddings to false in it."
        )
    is_stacked = any(map(_STACK.match, names))
    root = names[EMBEDDING].partition(EMBEDDING)[0]
    tensors = {}
    for name, tensor in model.tensors(is_stacked=is_stacked, axis=_axis(names, shapes)).items():
        tensors[names.get(name, root + name)] = tensor
    return model, names, tensors


def from_maxtext(config: Any, shapes: Shapes) -> list[Rule]:
    """Return the rules from MaxText to a Hugging Face directory.

    Layers may be stacked or not, names those of linen or nnx. The state of optimizers is left out.

    Args:
        config: a configuration of transformers, the content of a `config.json`, or its path.
        shapes: shapes of the stored tensors by key.

    Raises:
        CheckpointingException: MaxText has no such model, or the tensors are of another one.
    """
    model, names, tensors = _stored(config, shapes)
    rules: list[Rule] = []
    for key in shapes:
        if _STATES.search(key):
            rules.append(Drop(key))
    for axis, name in enumerate((EMBEDDING, LOGITS)):
        if name in names:
            rules.append(Trim(names[name], axis, model.num_rows, is_vocabulary=True))
    sources = {key: tensor.shape for key, tensor in tensors.items()}
    return [*rules, Assemble(_inverse(tensors, model.vocab_size), sources)]


def rules_of(
    config: dict[str, Any] | None,
    keys: Any,
    on_disk: Shapes | None,
    layout: Layout | None,
) -> list[Rule]:
    """Return the rules for names of MaxText, see `rules_for`."""
    if config is None:
        raise CheckpointingException(
            f"layout={layout!r} needs `family`: the path of the model's config.json or of its "
            "directory. For other models, pass `rules` without `layout`."
        )
    is_maxtext = any(map(_ROOT.fullmatch, keys))
    if layout is None and is_maxtext:
        return from_maxtext(config, {key: spec.shape for key, spec in keys.items()})
    if layout is None:
        return _load_rules(config, keys, on_disk or {})
    if is_maxtext:
        raise CheckpointingException(
            f"layout={layout!r} is for a Hugging Face directory, or names of transformers or "
            "Megatron Core: the checkpoint has MaxText's names already. To stack its layers or "
            "take them apart, export it to a Hugging Face directory first, without `layout`."
        )
    rules = to_maxtext(config, layout)
    if set(keys).issuperset(rules[-1].reads):
        # Of a Hugging Face directory, where names of transformers in memory may differ.
        return rules
    return [*rules_for(config, keys, on_disk), *rules]


def _load_rules(config: Any, keys: Collection[str], shapes: Shapes) -> list[Rule]:
    model, names, tensors = _stored(config, shapes)
    for key in names.values():
        # Modules are refused that lack what the checkpoint has, such as a bias.
        if key not in tensors and 0 not in shapes[key]:
            tensors[key] = identity(key, TensorSpec(shapes[key], "F32"))
    rules = _assemble(model, tensors)
    if {*rules[-1].reads, *_VOCABULARY}.issuperset(keys):
        return rules
    return [*rules_for(config, keys), *rules]


def _values(config: Any) -> dict[str, Any]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return dict(config) if isinstance(config, Mapping) else read_config(config)


def _names_of(keys: Iterable[str]) -> dict[str, str]:
    """Return keys of a model by name, as in linen without prefixes."""
    parameters = [key for key in keys if not _STATES.search(key)]
    roots = []
    for key in parameters:
        match = _ROOT.fullmatch(key)
        if match is not None:
            roots.append(match[1] or "")
    if len(roots) != 1:
        raise CheckpointingException(
            f"The checkpoint has {len(roots)} tensors {EMBEDDING!r}, {sorted(roots)[:5]}: select "
            "one model of MaxText with `keys`."
        )
    names = {}
    for key in parameters:
        if key.startswith(roots[0]):
            name = key.removeprefix(roots[0]).removesuffix(".value")
            # nnx has lists of layers.
            names[re.sub(r"layers\.(\d+)\.", r"layers_\1.", name)] = key
    return names


def _axis(names: Mapping[str, str], shapes: Shapes) -> int:
    """Return the axis of the layers, MaxText's `param_scan_axis`."""
    width = shapes[names[EMBEDDING]][1]
    for name, key in names.items():
        shape = shapes[key]
        if name.endswith("self_attention_layer_norm.scale") and len(shape) == 2:
            return 0 if shape[0] != width == shape[1] else 1
    return 1


def _inverse(tensors: Mapping[str, MappedTensor], num_rows: int) -> dict[str, MappedTensor]:
    """Return the tensors that others are made of.

    Embedding and output layer get `num_rows` rows.
    """
    sources = {key: TensorSpec(shape, "F32") for key, shape in _sources(tensors).items()}
    inverse = invert(tensors, sources)
    for key in _VOCABULARY:
        if key in inverse and inverse[key].shape[0] < num_rows:
            # Rows that MaxText does without, as in Gemma 3.
            rows, width = inverse[key].shape
            gap = Region((rows, 0), (num_rows - rows, width))
            inverse[key] = replace(inverse[key], shape=(num_rows, width), padding=(gap,))
    return inverse
