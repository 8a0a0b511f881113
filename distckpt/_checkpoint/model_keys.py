"""The keys of a checkpoint's model, and of its optimizers."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

from distckpt._base.messages import summarize_keys
from distckpt._base.options import ExportOptions
from distckpt._base.tree import dotted, leaves
from distckpt._checkpoint.opening import find_reader
from distckpt._checkpoint.stored_values import load_common_state
from distckpt._format.foreign_formats import is_export
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.marker import first_name, names_of_module, prefixes_of_modules
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._plan.selection import check_patterns, divided, matches

logger = logging.getLogger(__name__)

_SETTINGS = ".settings"
_STATES = ".state."
_STATE = (
    r"(?:states?|step|settings|groups|param_groups|param_state|distributed|sum|prev|exp_inf|"
    r"row_var|col_var|\w*(?:avg|momentum|master|fp32)\w*)"
)
_BY_NAME = re.compile(
    rf"(?:chained_\d+\.)?optim[a-z]*\.(?:optimizer\.)?(?:{_STATE}(?:\..*)?|.*\.{_STATE})"
)
"""Keys of optimizers where nothing else tells: in Megatron Core, or without parameter groups.
`optim` alone does not tell, since modules have such names too.
"""


def optimizer_keys(stored: StoredCheckpoint) -> set[str]:
    """Return the keys of tensors and objects that belong to optimizers.

    An optimizer is known by its settings; in a state dict of PyTorch, by its parameter groups in
    the common state; in another program's, where nothing else tells, by its name.
    """
    keys = _saved_with_settings(stored)
    others = [key for key in stored.manifest.key_index if key not in keys]
    candidates: set[str] = set()
    for key in others:
        candidates.update(_before("state", key))
    if candidates:
        for beginning in candidates & parameter_groups(names_of_values(stored)):
            keys |= _keys_of(beginning, others)
    return keys | _named_as_optimizers(stored, others)


def _saved_with_settings(stored: StoredCheckpoint) -> set[str]:
    """Return the keys of optimizers that were saved as objects."""
    manifest = stored.manifest
    module_names = set(names_of_module(stored.marker))
    prefixes = _prefixes(manifest)
    states = tuple(prefix for prefix in prefixes if prefix.endswith(_STATES))

    keys: set[str] = set()
    for key in manifest.key_index:
        # The module at `model` may have a part of the optimizer's name, with a part `state`.
        is_unclear = first_name(key) in module_names and key.startswith(states)
        if is_unclear and not _is_state_of(key, states, manifest.key_index):
            continue
        if key.startswith(prefixes):
            keys.add(key)
    return keys


def _is_state_of(key: str, states: Iterable[str], keys: Container[str]) -> bool:
    """Return whether a key consists of PREFIX, state and a tensor's key.

    The tensor must be stored.
    """
    for prefix in states:
        if key.startswith(prefix) and key.removeprefix(prefix).partition(".")[2] in keys:
            return True
    return False


def _prefixes(manifest: Manifest) -> tuple[str, ...]:
    """Return the beginnings of keys of optimizers saved with their settings."""
    prefixes: list[str] = []
    for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True):
        if dtype == OBJECT and key.endswith(_SETTINGS):
            name = key.removesuffix(_SETTINGS)
            prefixes += [name + _STATES, name + _SETTINGS]
    return tuple(prefixes)


def parameter_groups(names: Iterable[str]) -> set[str]:
    """Return the prefixes of optimizers' state dicts.

    They come before the values of `param_groups`. A state dict of PyTorch also has
    `state.<parameter>.<state>`. Tensors alone tell nothing, since modules may have these names too.
    """
    prefixes: set[str] = set()
    for name in names:
        for prefix in _before("param_groups", name):
            if _is_option(name[len(prefix) + len("param_groups.") :]):
                prefixes.add(prefix)
    return prefixes


def _is_option(name: str) -> bool:
    """Return whether a value below `param_groups` belongs to an optimizer.

    Groups are a list, where each has `params`, or there is an entry for each parameter.
    """
    first, *others = name.split(".")
    # The parts of an nn.Sequential are called by numbers too.
    if first.isdecimal() and len(others) < 2:
        return others == ["params"]
    return "_extra_state" not in (first, *others)


def _before(part: str, name: str) -> Iterator[str]:
    """Yield the text before a part of a dotted name.

    It includes the dot.
    """
    padded = f".{name}"
    place = 0
    while (place := padded.find(f".{part}.", place) + 1) > 0:
        yield padded[1:place]


def names_of_values(stored: StoredCheckpoint) -> Iterable[str]:
    """Return the dotted paths of the values in the common state.

    The manifest and distckpt's own format tell them; other formats do not.
    """
    if find_reader(stored) is None:
        return (dotted(path) for path, _ in leaves(load_common_state(stored)))
    # Of the foreign formats, only PyTorch's has the state dicts of optimizers.
    paths = (stored.manifest.origin or {}).get("paths") or ()
    return map(dotted, paths)


def _keys_of(beginning: str, keys: Iterable[str]) -> set[str]:
    """Return the keys of an optimizer with parameter groups."""
    state = f"{beginning}state."
    own = [key for key in keys if key.startswith((state, f"{beginning}param_groups."))]
    # A module may have the optimizer's name: an entry that has a state itself is a parameter.
    parameters = {key.removeprefix(state).rpartition(".")[0] for key in own}
    return set(own) - parameters


def _named_as_optimizers(stored: StoredCheckpoint, keys: Iterable[str]) -> set[str]:
    """Return the keys with an optimizer's name, where nothing else tells."""
    origin = stored.manifest.origin or {}
    if is_export(origin.get("format")) or "paths" in origin:
        # A model alone; or PyTorch's state dict, in which an optimizer has parameter groups.
        return set()
    module_names = names_of_module(stored.marker)
    prefixes = tuple(prefixes_of_modules(stored.marker))
    named: set[str] = set()
    for key in keys:
        if first_name(key) in module_names or key.startswith(prefixes):
            continue
        if _BY_NAME.fullmatch(key):
            named.add(key)
    return named


def left_out(stored: StoredCheckpoint, keys: str | Sequence[str] | None) -> set[str]:
    """Return the keys that an export leaves out without a pattern.

    They are the optimizers' keys, unless a pattern selects keys.

    Raises:
        TypeError: `keys` is neither a pattern nor a list of patterns.
    """
    check_patterns(keys)
    wanted, _ = divided(keys or ())
    if wanted:
        return set()
    return optimizer_keys(stored)


def warn_of_cut_off(
    stored: StoredCheckpoint, options: ExportOptions, selected: Collection[str]
) -> None:
    """Warn of tensors of the model that a prefix leaves out.

    The prefix is the first name of other tensors of that module: `model.` leaves out
    `lm_head.weight`.
    """
    names = names_of_module(stored.marker)
    wanted, unwanted = divided(options.keys or ())
    firsts = {pattern.rstrip("*").rstrip(".") for pattern in wanted}
    if not firsts.intersection(names):
        return
    outside = set(names).difference(map(first_name, selected))
    absent = []
    for key in stored.manifest.key_index.keys() - optimizer_keys(stored):
        if first_name(key) in outside and not matches(key, unwanted):
            absent.append(key)
    if absent:
        logger.warning(
            "keys=%r leaves out a part of the model that was saved: %s. Without `keys`, the whole "
            "model is exported.",
            options.keys,
            summarize_keys(absent),
        )


def warn_of_others(
    stored: StoredCheckpoint, options: ExportOptions, selected: Collection[str]
) -> None:
    """Warn of tensors that were saved with the model, such as averages."""
    names = set(names_of_module(stored.marker))
    wanted, _ = divided(options.keys or ())
    if not names or wanted:
        return
    others = [key for key in selected if first_name(key) not in names]
    if others:
        entry = others[0].partition(".")[0]
        logger.warning(
            "tensors that were saved beside the model are exported with it: %s. keys='!%s.*' "
            "leaves them out; keys='%s.*' with rename={'%s.': ''} exports them in its place.",
            summarize_keys(others),
            *(entry, entry, entry),
        )
