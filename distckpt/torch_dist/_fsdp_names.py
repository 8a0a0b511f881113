"""Tensors of Megatron Core under Megatron-FSDP's names, and the way back.

Megatron Core's `torch_dist` stacks layers and experts, and has weights in 16 bits beside the 32-bit
ones of the optimizer. Megatron-FSDP's `fsdp_dtensor` has one entry for each parameter, the 32-bit
weights as the model's, and halves of gated linear layers (`weight_w`, `weight_v`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import summarize_keys
from distckpt.rules._mapped import (
    MappedTensor,
    TensorSpec,
    crop_axis,
    drop_axis,
    identity,
    join,
    reshape,
)

Tensors = Mapping[str, TensorSpec]
Mapped = dict[str, MappedTensor]
_States = dict[str, dict[str, str]]
"""Keys of the optimizer's tensors by state and parameter."""

MODEL_PREFIX = "model.module."
STATE_PREFIX = "optimizer.state."
_MAIN_WEIGHTS = ("param", "fp32_param", "master_param")
"""Names of 32-bit weights in the states of Megatron Core's optimizers."""
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_FC1 = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.|experts\.local_experts\.\d+\.)?"
    r"linear_fc1\.(?:weight|bias)\d*$"
)
"""The layers whose halves are apart if they are gated: the list of Megatron Core 0.16 to 0.20."""
_LAYERS = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_EXPERTS = re.compile(r"(.*\.experts)\.experts\.(.+)")
_EXPERT = re.compile(
    r"(.*\.experts)\.(?:local_experts\.(\d+)\.(.+)|(linear_fc\d\.(?:weight|bias))(\d+))"
)
_FUSED = (
    ("query", "key", "value", "z", "beta", "alpha"),
    ("query", "key", "value"),
    ("z", "x", "B", "C", "dt"),
    ("x", "B", "C"),
)
"""Parts that gated delta nets and Mamba mixers fuse, in order."""
_ONE_WAY = {
    "fsdp_dtensor": ("gated", "local_experts", "fuse", "wrappers"),
    "torch_dist": ("expert_parallel", "sizes"),
}
"""Facts that conversions to one format need."""
_NUMBERED = re.compile(r"optimizer\.state\.\d+\.")
_WRAPPERS = re.compile(r"^(?:module\.)+")
_NOT_TRAINED = (".expert_bias", "._extra_state")


@dataclass(frozen=True)
class FsdpNames:
    """Facts about a model that names and shapes do not tell.

    Attributes:
        gated: whether the MLPs are gated (SwiGLU), or the beginnings of the names of modules whose
            MLPs are.
        rename: text in the names of `torch_dist` -> text in those of `fsdp_dtensor`.
        local_experts: whether experts are modules of their own, not one grouped layer.
        expert_parallel: whether Megatron Core has an optimizer of its own for experts.
        fuse: whether gated delta nets and Mamba mixers have one input projection.
        sizes: the end of a fused parameter's name -> its parts and their sizes, for the way back.
        wrappers: how many modules are around the model in names of the optimizer: 3 with
            Float16Module, else 2.
    """

    gated: bool | Sequence[str] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    local_experts: bool = False
    expert_parallel: bool = False
    fuse: bool = False
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    wrappers: int = 3

    def check_direction(self, to: str) -> None:
        """Refuse facts for conversions to the other format."""
        for other, facts in _ONE_WAY.items():
            for fact in facts:
                if other != to and getattr(self, fact) != getattr(FsdpNames, fact, {}):
                    raise CheckpointingException(
                        f"`{fact}` (--{fact.replace('_', '-')}) is for conversions to {other}: "
                        "leave it out."
                    )

    @property
    def prefix(self) -> str:
        """The beginning of names in Megatron-FSDP's optimizer."""
        return "module." * self.wrappers

    def is_gated(self, name: str) -> bool:
        """Whether a parameter is the first layer of a gated MLP."""
        if not _FC1.search(name) or not self.gated:
            return False
        return self.gated is True or any(name.startswith(f"{begin}.") for begin in self.gated)


def _check_moments(weights: Collection[str], states: _States) -> None:
    """Check that Adam has both moments of all parameters."""
    moments = [state for state in ("exp_avg", "exp_avg_sq") if state in states]
    trained: set[str] = set()
    for moment in moments:
        trained.update(states[moment])
    _check_complete(sorted(trained), weights)
    for moment in moments:
        there = {f"{name}.{moment}" for name in states[moment]}
        _check_complete([f"{name}.{moment}" for name in sorted(trained)], there)


def _check_facts(parameters: Collection[str], names: FsdpNames) -> None:
    """Check that texts among the facts are in names of Megatron-FSDP's parameters."""
    halves = [f".{name.removeprefix(MODEL_PREFIX)}" for name in parameters if name.endswith("_w")]
    begins = names.gated if isinstance(names.gated, Sequence) else ()
    unknown = []
    for option, texts, among in (
        ("rename", names.rename.values(), parameters),
        ("sizes", names.sizes, parameters),
        ("gated", [f".{begin}." for begin in begins], halves),
    ):
        for text in texts:
            if not any(text in name for name in among):
                unknown.append(f"{text!r} of `{option}`")
    if unknown:
        raise LoadMismatchError(
            f"No name of Megatron-FSDP's parameters has {', '.join(unknown)}: correct it, or "
            f"leave it out. There are {summarize_keys(parameters)}."
        )


# --- To Megatron-FSDP -----------------------------------------------------------------------------


def fsdp_tensors(tensors: Tensors, names: FsdpNames) -> tuple[Mapped, dict[str, int]]:
    """Return the tensors of `fsdp_dtensor`.

    The second dict has the number of axes of each trained parameter.

    Raises:
        CheckpointingException: the optimizer's state is in buckets, or names collide.
    """
    weights, states = _states_of(tensors)
    for state in _MAIN_WEIGHTS:
        weights |= states.pop(state, {})
    _check_moments(weights, states)
    result: Mapped = {}
    for name, mapped in _parameters(tensors, weights, names):
        _add(result, MODEL_PREFIX + name, mapped)
    _check_facts(result, names)
    trained: set[str] = set()
    for state, keys in states.items():
        for name, mapped in _parameters(tensors, keys, names):
            trained.add(name)
            _add(result, f"{STATE_PREFIX}{names.prefix}{name}.{state}", mapped)
    if not trained:
        for key in result:
            if not key.endswith(_NOT_TRAINED):
                trained.add(key.removeprefix(MODEL_PREFIX))
    num_axes = {}
    for name in sorted(trained):
        num_axes[_unsplit(name)] = len(result[MODEL_PREFIX + name].shape)
    return result, num_axes


def _check_prefixes(tensors: Collection[str]) -> None:
    """Refuse names that are not those of Megatron Core."""
    if any(key.startswith(MODEL_PREFIX) for key in tensors):
        raise CheckpointingException(
            "The checkpoint has Megatron-FSDP's names already: its tensors begin with "
            f"{MODEL_PREFIX!r}."
        )
    if prefixed := [key for key in tensors if key.startswith(("model.", "module."))]:
        raise CheckpointingException(
            f"{summarize_keys(prefixed)}: Megatron Core's names do not begin with 'model.' or "
            "'module.'. Take that off (distckpt.reshard with rules=[Rename('module.**', '{0}')]), "
            "and convert the result."
        )


def _states_of(tensors: Collection[str]) -> tuple[dict[str, str], _States]:
    """Return the keys of weights by parameter, and those of the optimizer."""
    _check_prefixes(tensors)
    weights: dict[str, str] = {}
    states: _States = defaultdict(dict)
    buckets = []
    for key in tensors:
        match = _STATE.fullmatch(key)
        if _BUCKETS.match(key):
            buckets.append(key)
        elif match is not None:
            states[match[1]][match[2]] = key
        elif not key.startswith("rng_state"):
            weights[key] = key
    if buckets:
        raise CheckpointingException(
            f"{summarize_keys(buckets)} are the optimizer's buckets, which do not say where a "
            "parameter begins (distrib_optim_sharding_type dp_reshardable). Save once with "
            "--dist-ckpt-optim-fully-reshardable, or convert without the optimizer."
        )
    return weights, states


def is_weight(key: str) -> bool:
    """Whether a tensor has weights of the model, of any precision."""
    match = _STATE.fullmatch(key)
    if match is not None:
        return match[1] in _MAIN_WEIGHTS
    return not key.startswith("optimizer.") and not _BUCKETS.match(key)


def _add(result: Mapped, name: str, mapped: MappedTensor) -> None:
    if name in result:
        raise CheckpointingException(
            f"Several tensors would be {name!r}: change the names that `rename` makes."
        )
    result[name] = mapped


def _parameters(
    tensors: Tensors, keys: Mapping[str, str], names: FsdpNames
) -> Iterator[tuple[str, MappedTensor]]:
    """Yield parameters, of tensors by their names in Megatron Core."""
    apart = {name: identity(key, tensors[key]) for name, key in keys.items()}
    apart = dict(_unstacked(apart, _LAYERS, "{0}.{i}.{1}"))
    text = "{0}.local_experts.{i}.{1}" if names.local_experts else "{0}.{1}{i}"
    apart = dict(_unstacked(apart, _EXPERTS, text))
    if names.fuse:
        apart = _fused(apart)
    for name, mapped in apart.items():
        for old, new in names.rename.items():
            name = name.replace(old, new)
        if names.is_gated(name):
            half, odd = divmod(mapped.shape[0], 2)
            if odd:
                raise CheckpointingException(
                    f"{name!r} of shape {mapped.shape} is no gated layer: it has no two halves."
                )
            yield f"{name}_w", crop_axis(mapped, 0, 0, half)
            yield f"{name}_v", crop_axis(mapped, 0, half, 2 * half)
        else:
            yield name, mapped


def _unstacked(
    tensors: Mapped, pattern: re.Pattern[str], text: str
) -> Iterator[tuple[str, MappedTensor]]:
    """Yield tensors, those that match taken apart along their first axis."""
    for name, mapped in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            yield name, mapped
            continue
        if not mapped.shape:
            raise CheckpointingException(f"{name!r} has no axis of layers or experts.")
        for i in range(mapped.shape[0]):
            piece = drop_axis(crop_axis(mapped, 0, i, i + 1), 0)
            yield text.format(*match.groups(), i=i), piece


def _fused(tensors: Mapped) -> Mapped:
    """Join the parts of fused projections."""
    groups: dict[str, dict[str, MappedTensor]] = defaultdict(dict)
    for name, mapped in tensors.items():
        stem, _, part = name.rpartition(".")
        groups[stem][part] = mapped
    result: Mapped = {}
    for stem, parts in groups.items():
        order = next((order for order in _FUSED if set(order) == parts.keys()), None)
        if order is not None:
            result[stem] = join([parts[part] for part in order], 0)
            continue
        for part, mapped in parts.items():
            result[f"{stem}.{part}" if stem else part] = mapped
    return result


def _unsplit(name: str) -> str:
    """Return the name of the whole parameter of a half."""
    is_half = name.endswith(("_w", "_v")) and _FC1.search(name[:-2])
    return name[:-2] if is_half else name


# --- From Megatron-FSDP ---------------------------------------------------------------------------


def core_tensors(tensors: Tensors, names: FsdpNames) -> Mapped:
    """Return the tensors of `torch_dist`, made of those of `fsdp_dtensor`.

    Raises:
        LoadMismatchError: half of a layer, an expert or a layer is missing.
        CheckpointingException: the tensors are not Megatron-FSDP's.
    """
    weights, states = _states_of_fsdp(tensors)
    _check_facts(weights, names)
    _check_moments(weights, states)
    result = _core_names(tensors, weights, names)
    if states:
        trained: set[str] = set()
        for keys in states.values():
            trained.update(map(_unsplit, keys))
        main = {}
        for name, key in weights.items():
            if _unsplit(name) in trained:
                main[name] = key
        states["param"] = main
    for state, keys in states.items():
        for name, mapped in _core_names(tensors, keys, names).items():
            result[f"{STATE_PREFIX}{state}.{name}"] = mapped
    return result


def _states_of_fsdp(tensors: Iterable[str]) -> tuple[dict[str, str], _States]:
    """Return the keys of weights by parameter, and those of the optimizer."""
    weights: dict[str, str] = {}
    states: _States = defaultdict(dict)
    other = []
    for key in tensors:
        if key.startswith(MODEL_PREFIX):
            weights[key.removeprefix(MODEL_PREFIX)] = key
        elif key.startswith(f"{STATE_PREFIX}module."):
            name, _, state = key.removeprefix(STATE_PREFIX).rpartition(".")
            states[state][_WRAPPERS.sub("", name)] = key
        elif not key.startswith(("rng_state.", "rerun_state_machine.")):
            other.append(key)
    if any(map(_NUMBERED.match, other)):
        raise CheckpointingException(
            "The optimizer has numbers in place of names: fully_shard of Megatron-FSDP saved it "
            "outside Megatron-LM. Convert without it (--without-optimizer), or put model and "
            "optimizer into distckpt.load({'model': model, 'optimizer': optimizer}, path)."
        )
    if other or not weights:
        what = summarize_keys(other) if other else "No key"
        raise CheckpointingException(
            f"{what} of the checkpoint: names of Megatron-FSDP in Megatron-LM begin with "
            f"{MODEL_PREFIX!r} and '{STATE_PREFIX}module.'. Checkpoints of models in several "
            "chunks (model0, model1), or of another program, are converted by rules of your own."
        )
    return weights, states


def _core_names(tensors: Tensors, keys: Mapping[str, str], names: FsdpNames) -> Mapped:
    parts: dict[str, Mapped] = defaultdict(dict)
    for name, key in keys.items():
        parts[_unsplit(name)][name] = identity(key, tensors[key])
    result: Mapped = {}
    for name, halves in parts.items():
        mapped = halves.get(name)
        if mapped is None:
            both = [f"{name}_w", f"{name}_v"]
            _check_complete(both, halves)
            mapped = join([halves[half] for half in both], 0)
        for old, new in names.rename.items():
            name = name.replace(new, old)
        _add(result, name, mapped)
    return _stacked_layers(_stacked_experts(_divided(result, names.sizes)))


def _check_complete(wanted: Iterable[str], there: Collection[str]) -> None:
    missing = [name for name in wanted if name not in there]
    if missing:
        raise LoadMismatchError(
            f"{summarize_keys(missing)} are missing beside the others of their kind: the "
            "checkpoint is incomplete.",
            missing=missing,
        )


def _divided(tensors: Mapped, sizes: Mapping[str, Mapping[str, int]]) -> Mapped:
    """Take fused projections apart."""
    result: Mapped = {}
    for name, mapped in tensors.items():
        parts = next((sizes[end] for end in sizes if name.endswith(end)), None)
        if parts is None:
            if name.endswith((".in_proj.weight", ".conv1d.weight", ".conv1d.bias")):
                raise CheckpointingException(
                    f"{name!r} of shape {mapped.shape} holds several projections, whose sizes it "
                    "does not tell: pass sizes={'in_proj.weight': {'query': ..., ...}, ...}, in "
                    "their order."
                )
            result[name] = mapped
            continue
        if sum(parts.values()) != mapped.shape[0]:
            raise CheckpointingException(
                f"{name!r} has {mapped.shape[0]} rows, and the sizes of its parts add up to "
                f"{sum(parts.values())}: correct `sizes`."
            )
        start = 0
        for part, size in parts.items():
            result[f"{name}.{part}"] = crop_axis(mapped, 0, start, start + size)
            start += size
    return result


def _stacked_experts(tensors: Mapped) -> Mapped:
    result: Mapped = {}
    groups: dict[str, dict[int, MappedTensor]] = defaultdict(dict)
    for name, mapped in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            result[name] = mapped
        else:
            number = int(match[2] or match[5])
            groups[f"{match[1]}.experts.{match[3] or match[4]}"][number] = mapped
    for name, experts in groups.items():
        result[name] = _stacked(name, experts)
    return result


def _stacked_layers(tensors: Mapped) -> Mapped:
    """Stack layers of one kind, as Megatron Core does; others keep their numbers."""
    result: Mapped = {}
    blocks: dict[str, dict[str, dict[int, MappedTensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, mapped in tensors.items():
        match = re.fullmatch(r"(.*?\.layers)\.(\d+)\.(.+)", name)
        if match is None or re.search(r"(?:^|\.)mtp\.layers$", match[1]):
            result[name] = mapped
        else:
            blocks[match[1]][match[3]][int(match[2])] = mapped
    for block, kinds in blocks.items():
        are_alike = _are_alike(kinds.values())
        for rest, layers in kinds.items():
            if are_alike:
                result[f"{block}.{rest}"] = _stacked(f"{block}.{rest}", layers)
                continue
            for number, mapped in layers.items():
                result[f"{block}.{number}.{rest}"] = mapped
    return result


def _are_alike(kinds: Collection[Mapping[int, MappedTensor]]) -> bool:
    """Return whether all layers have tensors of the same names and shapes."""
    numbers: set[int] = set()
    for layers in kinds:
        numbers.update(layers)
    for layers in kinds:
        shapes = {(mapped.shape, mapped.dtype) for mapped in layers.values()}
        if layers.keys() != numbers or len(shapes) > 1:
            return False
    return True


def _stacked(name: str, pieces: Mapping[int, MappedTensor]) -> MappedTensor:
    _check_complete(
        [f"{name} {number}" for number in range(max(pieces) + 1)],
        [f"{name} {number}" for number in pieces],
    )
    stacked = []
    for number in sorted(pieces):
        stacked.append(reshape(pieces[number], (1, *pieces[number].shape)))
    return join(stacked, 0)
