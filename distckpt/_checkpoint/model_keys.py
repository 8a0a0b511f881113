"""The keys of a checkpoint that belong to its model, and those of its optimizers."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from distckpt._base.tree import dotted, leaves
from distckpt._checkpoint.opening import find_reader
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.foreign_formats import is_export
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.marker import first_name, names_of_module
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.selection import check_patterns, divided, matches

_SETTINGS, _STATES = ".settings", ".state."
_STATE = (
    r"(?:states?|step|settings|groups|param_groups|param_state|distributed|sum|prev|exp_inf|"
    r"row_var|col_var|\w*(?:avg|momentum|master|fp32)\w*)"
)
_BY_NAME = re.compile(
    rf"(?:chained_\d+\.)?optim[a-z]*\.(?:optimizer\.)?(?:{_STATE}(?:\..*)?|.*\.{_STATE})"
)
"""Keys of optimizers where nothing else tells: in Megatron Core, or without parameter groups.
`optim` alone does not, since modules have such names too.
"""


def optimizer_keys(stored: StoredCheckpoint) -> set[str]:
    """Return the keys of tensors and objects that belong to optimizers.

    An optimizer is known by its settings; one that PyTorch's state dict holds, by its parameter
    groups in the common state; one of another program, where nothing else tells, by its name.
    """
    found = _saved_with_settings(stored)
    others = [key for key in stored.manifest.key_index if key not in found]
    possible = {beginning for key in others for beginning in _before("state", key)}
    for beginning in possible & parameter_groups(names_of_values(stored)) if possible else ():
        found |= _keys_of(beginning, others)
    return found | _named_as_optimizers(stored, others)


def _saved_with_settings(stored: StoredCheckpoint) -> set[str]:
    """Return the keys of optimizers that were saved as objects."""
    manifest = stored.manifest
    of_module = set(names_of_module(stored.marker))
    prefixes = _prefixes(manifest)
    states = tuple(prefix for prefix in prefixes if prefix.endswith(_STATES))

    def is_an_optimizers(key: str) -> bool:
        if first_name(key) in of_module and key.startswith(states):
            # The module at `model` has a part of the optimizer's name, with a part `state`.
            return _is_state_of(key, states, manifest.key_index)
        return True

    possible = [key for key in manifest.key_index if key.startswith(prefixes)]
    return {key for key in possible if is_an_optimizers(key)}


def _is_state_of(key: str, states: Iterable[str], keys: Container[str]) -> bool:
    """Tell whether a key is PREFIX, the name of a state, and the key of a tensor that is stored."""
    rests = (key.removeprefix(prefix) for prefix in states if key.startswith(prefix))
    return any(rest.partition(".")[2] in keys for rest in rests)


def _prefixes(manifest: Manifest) -> tuple[str, ...]:
    """Return what the keys of optimizers begin with that were saved with their settings."""
    settings = (
        key for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True) if dtype == OBJECT
    )
    names = [key.removesuffix(_SETTINGS) for key in settings if key.endswith(_SETTINGS)]
    ends = (_STATES, _SETTINGS)
    return tuple(name + end for name in names for end in ends)


def parameter_groups(names: Iterable[str]) -> set[str]:
    """Return the prefixes of optimizers' state dicts: those before the values of `param_groups`.

    A state dict of PyTorch has `state.<parameter>.<state>` beside. Tensors alone tell nothing,
    since modules may have these names too.
    """
    return {
        prefix
        for name in names
        for prefix in _before("param_groups", name)
        if _is_option(name[len(prefix) + len("param_groups.") :])
    }


def _is_option(name: str) -> bool:
    """Tell whether a value below `param_groups` is one of an optimizer's.

    Groups are a list, where each has `params`, or there is an entry for each parameter.
    """
    first, *others = name.split(".")
    # The parts of an nn.Sequential are called by numbers too.
    if first.isdecimal() and len(others) < 2:
        return others == ["params"]
    return "_extra_state" not in (first, *others)


def _before(part: str, name: str) -> Iterator[str]:
    """Yield what comes before a part of a dotted name, with the dot behind it."""
    padded, place = f".{name}", 0
    while (place := padded.find(f".{part}.", place) + 1) > 0:
        yield padded[1:place]


def names_of_values(stored: StoredCheckpoint) -> Iterable[str]:
    """Return the dotted paths of the values in the common state, as far as the manifest and
    distckpt's own format tell.
    """
    if find_reader(stored) is None:
        return (dotted(path) for path, _ in leaves(load_common_state(stored)))
    # Of the formats of others, only that of PyTorch has the state dicts of optimizers.
    paths = (stored.manifest.origin or {}).get("paths") or ()
    return map(dotted, paths)


def _keys_of(beginning: str, keys: Iterable[str]) -> set[str]:
    """Return the keys of an optimizer with parameter groups."""
    state = f"{beginning}state."
    own = [key for key in keys if key.startswith((state, f"{beginning}param_groups."))]
    # A module may be called as the optimizer is: what has a state itself is a parameter.
    parameters = {key.removeprefix(state).rpartition(".")[0] for key in own}
    return set(own) - parameters


def _named_as_optimizers(stored: StoredCheckpoint, keys: Iterable[str]) -> set[str]:
    """Return the keys that have a name of an optimizer, where nothing else tells."""
    origin = stored.manifest.origin or {}
    if is_export(origin.get("format")) or "paths" in origin:
        # A model alone; or PyTorch's state dict, in which an optimizer has parameter groups.
        return set()
    of_module = names_of_module(stored.marker)
    named = (key for key in keys if _BY_NAME.fullmatch(key))
    return {key for key in named if first_name(key) not in of_module}


def left_out(stored: StoredCheckpoint, keys: str | Sequence[str] | None) -> set[str]:
    """Return the keys that an export leaves out although no pattern says so: those of optimizers,
    unless a pattern says what is wanted.

    Raises:
        TypeError: `keys` is neither a pattern nor a list of patterns.
    """
    check_patterns(keys)
    return set() if divided(keys or ())[0] else optimizer_keys(stored)


def beside_model(
    stored: StoredCheckpoint, keys: str | Sequence[str] | None, selected: Collection[str]
) -> list[str]:
    """Selected tensors of other entries than `model`, where no pattern asks for them."""
    names = set(names_of_module(stored.marker))
    if not names or divided(keys or ())[0]:
        return []
    return [key for key in selected if first_name(key) not in names]


def cut_off(
    stored: StoredCheckpoint, keys: str | Sequence[str] | None, selected: Collection[str]
) -> list[str]:
    """Return the tensors of the module at `model` that a prefix leaves out, although it is the
    first name of others of that module: `model.` leaves out `lm_head.weight`.
    """
    names = names_of_module(stored.marker)
    wanted, unwanted = divided(keys or ())
    firsts = {pattern.rstrip("*").rstrip(".") for pattern in wanted}
    if not firsts.intersection(names):
        return []
    absent = set(names).difference(map(first_name, selected))
    others = stored.manifest.key_index.keys() - optimizer_keys(stored)
    return [key for key in others if first_name(key) in absent and not matches(key, unwanted)]
