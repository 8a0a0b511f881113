"""The state of an optimizer: shards of its tensors, and settings (options of groups, numbers such as `step`).

Parameters with the same options and numbers, which are nearly always all of a group, share one entry:

    {"options": {"lr": 0.001, ...}, "values": {"step": 100.0}, "tensors": ["exp_avg", "exp_avg_sq"], "has_state": True,
     "params": ["embedding.weight", "norm.weight", ...]}

The list of these entries, the settings, is small, and is stored once, as an object. Parameters go by name, so that
the number of groups and their order may change.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from distckpt._base.errors import CheckpointingException, InvalidShardingError, LoadMismatchError
from distckpt._format import codec
from distckpt._format.checksum import checksum
from distckpt._mapping.kinds import is_a
from distckpt._models.dtensor import is_dtensor, local_part, shard_of_dtensor
from distckpt._ranks.collectives import Ranks
from distckpt.dict_utils import nested_values
from distckpt.mapping import ShardedTensor, ShardedTensorFactory

Entry: TypeAlias = dict[str, Any]

_NOT_STORED = ("params", "param_names")
# How to compute, and on which device numbers live: the choice of the program that loads.
_OWN_CHOICE = frozenset({"foreach", "fused", "capturable", "differentiable"})


class ParamState(NamedTuple):
    """The state of one parameter: tensors divided as it is, and numbers or other values.

    Without `has_state` they are blank; the optimizer will make its own at the parameter's first step.
    """

    name: str
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    has_state: bool


def describe(groups: Iterable[tuple[dict[str, Any], Sequence[ParamState]]]) -> list[Entry]:
    """Describe parameter groups, given as `(group, states of its parameters)`."""
    entries: dict[Any, Entry] = {}
    for number, (group, states) in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in _NOT_STORED}
        for state, values in zip(states, _plain_values(states), strict=True):
            values = values if state.has_state else {}
            kind = (number, state.has_state, tuple(state.tensors), repr(values))
            entry: Entry = {"options": options, "values": values, "tensors": sorted(state.tensors)}
            entry |= {"has_state": state.has_state, "params": []}
            entries.setdefault(kind, entry)["params"].append(state.name)
    return list(entries.values())


def _plain_values(states: Sequence[ParamState]) -> list[dict[str, Any]]:
    """Return the values of parameters with Python numbers in place of 0-D tensors."""
    plain = [dict(state.values) for state in states]
    # All of a kind at once, since each transfer from a GPU waits for it.
    scalars: dict[Any, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
    for values in plain:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                local = local_part(value).detach()
                scalars.setdefault((local.device, local.dtype), []).append((values, name, local))
    for found in scalars.values():
        numbers = torch.stack([tensor for _, _, tensor in found]).tolist()
        for (values, name, _), number in zip(found, numbers, strict=True):
            values[name] = number
    return plain


def unite(ranks: Ranks, entries: list[Entry]) -> list[Entry]:
    """Return the entries of all ranks together, the same on each; nothing but a hash is sent where they are the same.

    Where ranks disagree about a parameter, the lowest rank that has a state for it decides, else the lowest.
    """
    if ranks.size == 1:
        return entries
    with ranks.phase("encode the settings of the optimizer"):
        payload = codec.encode(entries)
    digests = ranks.all_gather(f"{checksum(payload):016x}".encode())
    if len(set(digests)) == 1:
        return entries
    is_first = digests.index(digests[ranks.rank]) == ranks.rank
    gathered = ranks.gather(payload if is_first else b"")
    united = b""
    with ranks.phase("unite the settings of the optimizer", decision=True):
        if ranks.is_coordinator:
            lists = [cast(list[Entry], codec.decode(data)) for data in gathered if data]
            united = codec.encode(_merged([entry for entries in lists for entry in entries]))
    return cast(list[Entry], codec.decode(ranks.broadcast(united)))


def _merged(entries: list[Entry]) -> list[Entry]:
    merged: dict[bytes, Entry] = {}
    taken: set[str] = set()
    # The sort is stable: ranks stay in order.
    for entry in sorted(entries, key=lambda entry: not entry["has_state"]):
        kind = codec.encode({**entry, "params": []})
        known = merged.setdefault(kind, {**entry, "params": []})
        known["params"] += [name for name in entry["params"] if name not in taken]
        taken.update(entry["params"])
    return [entry for entry in merged.values() if entry["params"]]


def options_of(entries: Iterable[Entry], names: Sequence[str]) -> dict[str, Any] | None:
    """Return the stored options of a group with these parameters; None when none of them was stored.

    LoadMismatchError when they were in groups with different options.
    """
    wanted = set(names)
    found: dict[bytes, tuple[dict[str, Any], str]] = {}
    for entry in entries:
        name = next((name for name in entry["params"] if name in wanted), None)
        if name is not None:
            found.setdefault(codec.encode(entry["options"]), (entry["options"], name))
    if len(found) > 1:
        (first, name), (second, other) = list(found.values())[:2]
        differing = sorted(key for key in {**first, **second} if repr(first.get(key)) != repr(second.get(key)))
        raise LoadMismatchError(
            f"The parameters {name!r} and {other!r} are in one group of the optimizer, but were saved in groups that "
            f"differ in {differing}. Make the optimizer with the groups it was saved with.",
            unexpected=[name, other],
        )
    return next((options for options, _ in found.values()), None)


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Give a group of an optimizer stored options, in the form (number or tensor) in which it has its own."""
    for name, value in options.items():
        own = group.get(name)
        if name in _OWN_CHOICE and name in group:
            continue
        if isinstance(own, torch.Tensor):
            # In place: captured graphs read this memory.
            own.detach().copy_(torch.as_tensor(value))
        elif isinstance(own, float | int) and isinstance(value, torch.Tensor):
            group[name] = value.item()
        else:
            group[name] = value


def make_sharded_optimizer_tensor(
    model_param: ShardedTensor | ShardedTensorFactory, optim_param: torch.Tensor, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Wrap an optimizer tensor the way the parameter that it belongs to is wrapped.

    Args:
        model_param: shard or factory of the parameter.
        optim_param: tensor of the shape of the parameter's shard (1-D if that is flat), of any dtype.
        prefix: put before the parameter's key, with a dot between them.

    Returns:
        A shard or factory like `model_param`, of the new key, with `optim_param` as its data.

    Raises:
        InvalidShardingError: the shapes differ.
    """
    data = local_part(optim_param)
    key = f"{prefix}.{model_param.key}"
    if is_a(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def param_name(shard: ShardedTensor | ShardedTensorFactory) -> str:
    """Name a parameter, whatever the layout: by its key and, where layers share that, its place among them."""
    part: Any = shard
    if isinstance(shard, ShardedTensorFactory):
        part = next((s for s in nested_values([shard.build()]) if isinstance(s, ShardedTensor)), None)
    if part is None or not part.prepend_axis_num:
        return shard.key
    return f"{shard.key}[{','.join(map(str, part.global_offset[: part.prepend_axis_num]))}]"


def state_shard(
    shard: ShardedTensor | ShardedTensorFactory, param: torch.Tensor, tensor: torch.Tensor, name: str, prefix: str
) -> ShardedTensor | ShardedTensorFactory:
    """Describe a tensor in the state of a parameter, given the parameter's shard; it has the key `<prefix>.<key>`."""
    form = (tuple(tensor.shape), getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
    if form == (tuple(param.shape), getattr(param, "device_mesh", None), getattr(param, "placements", None)):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    if isinstance(shard, ShardedTensor) and shard.flattened_range is None:
        if is_dtensor(tensor) and is_dtensor(param):
            outer = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
            outer = outer[: max(0, len(outer) - param.device_mesh.ndim)]  # type: ignore[attr-defined]
            num_prepended = shard.prepend_axis_num
            place = [(axis, shard.global_offset[axis], shard.global_shape[axis]) for axis in range(num_prepended)]
            if shard.global_shape[num_prepended:] == tuple(param.shape):
                return shard_of_dtensor(f"{prefix}.{shard.key}", tensor, place, num_prepended, outer)
        elif not is_dtensor(tensor) and (found := _reduced(shard, tensor, prefix)) is not None:
            return found
    if tuple(local_part(tensor).shape) == tuple(local_part(param).shape):
        return make_sharded_optimizer_tensor(shard, tensor, prefix)
    raise InvalidShardingError(
        f"The optimizer's {name!r} for the parameter {shard.key!r} has shape {tuple(tensor.shape)}, the parameter "
        f"{tuple(param.shape)}, of which this rank has a part: how it is divided is unknown. Keep it in a shape "
        "with size 1 along the axes that it lacks, or make a ShardedTensor of it yourself."
    )


def _reduced(shard: ShardedTensor, tensor: torch.Tensor, prefix: str) -> ShardedTensor | None:
    """Describe a tensor that lacks some axes of a parameter's part (has size 1 there); None when it is none."""
    num_prepended, shape = shard.prepend_axis_num, tuple(tensor.shape)
    if shape == shard.local_shape:
        return None
    sizes, offset = shard.global_shape[num_prepended:], shard.global_offset[num_prepended:]
    parts = shard.axis_fragmentations and shard.axis_fragmentations[num_prepended:]
    pairs = zip(shape, shard.local_shape, strict=False)
    if shard.local_shape == sizes:
        place = [(size, 0, 1) for size in shape]
    elif parts is None or len(shape) != len(sizes) or any(n not in (1, m) for n, m in pairs):
        return None
    else:
        # Where the parameter is divided along an axis that is missing here, each part has a value of its own.
        place = [
            (size, start, count) if n == local else (count, start // local, count)
            for n, local, size, start, count in zip(shape, shard.local_shape, sizes, offset, parts, strict=True)
        ]
    prepended = shard.global_shape[:num_prepended]
    return replace(
        shard,
        key=f"{prefix}.{shard.key}",
        data=tensor,
        dtype=tensor.dtype,
        local_shape=shape,
        global_shape=prepended + tuple(size for size, _, _ in place),
        global_offset=shard.global_offset[:num_prepended] + tuple(start for _, start, _ in place),
        axis_fragmentations=prepended + tuple(count for _, _, count in place),
    )


class BlankStates:
    """Makes the states that an optimizer will keep; it tries a step once for all parameters of one kind.

    The `step` of the optimizer must need no closure. Neither the optimizer nor its parameters are changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._prototypes: dict[Any, dict[str, Any]] = {}

    def make(self, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
        """Return what the optimizer would keep for a parameter of a group, by name, with zeros in place of the values.

        Numbers and 0-D tensors are those after a first step. CheckpointingException when the optimizer cannot make a
        step with gradients of zero.
        """
        mesh, placements = getattr(param, "device_mesh", None), getattr(param, "placements", None)
        kind = (id(group), tuple(param.shape), param.stride(), param.dtype, param.device, mesh, placements)
        if kind not in self._prototypes:
            self._prototypes[kind] = _state_after_a_step(self._optimizer, group, param)
        return {name: _blank(value) for name, value in self._prototypes[kind].items()}


def _blank(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros_like(value) if value.ndim else value.clone()


def _state_after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    # On a stand-in: even with gradients and learning rate of zero, a step may change a parameter (0 / 0 with eps=0).
    stand_in = torch.zeros_like(param).detach().requires_grad_()
    stand_in.grad = torch.zeros_like(stand_in)
    # Not copy.copy, which leaves attributes of subclasses behind.
    shadow: Any = object.__new__(type(optimizer))
    shadow.__dict__.update(vars(optimizer))
    # Learning rate schedulers replace `step` by one that is bound to the optimizer itself, and hooks count steps.
    shadow.__dict__.pop("step", None)
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    shadow.state, shadow.param_groups = defaultdict(dict), [{**group, "params": [stand_in]}]
    try:
        shadow.step()
    except Exception as error:
        raise CheckpointingException(
            f"{type(optimizer).__name__} does not show what it keeps for a parameter of shape {tuple(param.shape)}: a "
            f"step with gradients of zero failed ({type(error).__name__}: {error}). Have it make a step of its own "
            "before calling sharded_optimizer_state_dict, for saving and for loading."
        ) from error
    return dict(shadow.state[stand_in])
