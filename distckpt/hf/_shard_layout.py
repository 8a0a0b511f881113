"""Division of tensors among output files, by their sizes and modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distckpt._base.dtypes import estimate_array_nbytes
from distckpt._base.messages import natural_order
from distckpt._format.hf_names import fill_files, group_keys_by_bytes


def group_keys_by_shard_size(
    flat_state: Mapping[str, Any], max_shard_size_bytes: int
) -> list[list[str]]:
    """Divide tensors among output files in their order.

    Return the keys of each file.

    Args:
        flat_state: tensors, or anything else that `estimate_array_nbytes` takes, by key.
        max_shard_size_bytes: the tensors of a file have at most this size; a larger tensor gets a
            file of its own.

    Raises:
        ValueError: `max_shard_size_bytes` is not positive.
    """
    return group_keys_by_bytes(
        {k: estimate_array_nbytes(x) for k, x in flat_state.items()}, max_shard_size_bytes
    )


def optimize_shard_layout(state: Mapping[str, Any], max_shard_size_bytes: int) -> list[list[str]]:
    """Divide tensors among output files so that modules stay together.

    Few files are read for a module then. Keys are ordered with `layers.2` before `layers.10`. A
    numbered module such as `model.layers.3` stays together, and elsewhere the parameters of one
    module such as `model.embed_tokens`. A module that is larger than a file is divided at the next
    numbers within it (`experts.0`, `experts.1`), then into its innermost modules, then into single
    tensors.

    Keys have dots between their parts. Arguments and result are the same as for
    `group_keys_by_shard_size`.
    """
    num_bytes = {key: estimate_array_nbytes(state[key]) for key in sorted(state, key=natural_order)}
    return fill_files(
        _modules(list(num_bytes), num_bytes, max_shard_size_bytes, 0), max_shard_size_bytes
    )


def _modules(
    keys: Sequence[str], num_bytes: Mapping[str, int], limit: int, level: int
) -> Iterator[tuple[list[str], int]]:
    """Yield groups of keys and their sizes, by a module around them.

    It is the `level`-th of the modules. Groups above the limit are divided at the next level.
    """
    groups: dict[str, list[str]] = {}
    for key in keys:
        around = _modules_around(key)
        groups.setdefault(around[min(level, len(around) - 1)], []).append(key)
    for members in groups.values():
        size = sum(num_bytes[key] for key in members)
        if size <= limit or len(members) == 1:
            yield members, size
        else:
            yield from _modules(members, num_bytes, limit, level + 1)


def _modules_around(key: str) -> list[str]:
    """Return the units that hold a key, outermost first.

    They are numbered modules, its own module, the key alone.
    """
    parts = key.split(".")
    units = []
    for end in range(1, len(parts)):
        if parts[end - 1].isdigit() or end == len(parts) - 1:
            units.append(".".join(parts[:end]) + ".")
    return [*units, key]
