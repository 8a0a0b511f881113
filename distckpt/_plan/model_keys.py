"""Which keys of a checkpoint are the model's, and which are an optimizer's."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Sequence

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
"""Keys of optimizers where nothing else tells: in Megatron Core, PyTorch, DeepSpeed. `optim` alone
does not, since modules have such names too.
"""
_BEGINNINGS = ("optim", "chained_")
"""Of all keys that `_BY_NAME` matches."""


def optimizer_keys(stored: StoredCheckpoint) -> set[str]:
    """Return the keys of tensors and objects that belong to optimizers, by their settings or by
    their names.
    """
    manifest = stored.manifest
    of_module = set(names_of_module(stored.marker))
    prefixes = _prefixes(manifest)
    states = tuple(prefix for prefix in prefixes if prefix.endswith(_STATES))

    def is_an_optimizers(key: str) -> bool:
        if first_name(key) in of_module and key.startswith(states):
            # The module at `model` has a part of the optimizer's name, with a part `state`.
            return _is_state_of(key, states, manifest.key_index)
        if key.startswith(prefixes):
            return True
        return bool(_BY_NAME.fullmatch(key)) and first_name(key) not in of_module

    # Most checkpoints have many keys, and few that could be an optimizer's.
    beginnings = (*_BEGINNINGS, *prefixes)
    possible = [key for key in manifest.key_index if key.startswith(beginnings)]
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


def left_out(stored: StoredCheckpoint, keys: str | Sequence[str] | None) -> set[str]:
    """Return the keys that an export leaves out although no pattern says so: those of optimizers,
    unless a pattern says what is wanted.

    Raises:
        TypeError: `keys` is neither a pattern nor a list of patterns.
    """
    check_patterns(keys)
    return set() if divided(keys or ())[0] else optimizer_keys(stored)


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
