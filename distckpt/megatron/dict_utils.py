"""Pure functions over nested dicts and lists.

Dicts and lists (and their subclasses) are containers, which these functions walk through.
Everything else is a leaf, tuples included. A *position* is the tuple of dict keys and list indices
that leads to a leaf.
"""

from distckpt._base.public import set_public_home
from distckpt._base.tree import Position, nested_items_iter
from distckpt.megatron._impl.dict_utils import (
    DiffResult,
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_values,
)

__all__ = [
    "DiffResult",
    "Position",
    "dict_list_map_inplace",
    "dict_list_map_outplace",
    "dict_map",
    "dict_map_with_key",
    "diff",
    "extract_matching_values",
    "inspect_types",
    "map_reduce",
    "merge",
    "nested_items_iter",
    "nested_values",
]

set_public_home(globals())
