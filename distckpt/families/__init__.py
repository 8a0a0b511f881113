"""Families of models: the rules between their names in memory and the names in their Hugging Face
directories.

The configuration of a model (`config.json`) says which family it is of, and how many layers, heads
and experts it has. `consolidate`, `load` and the command line find the rules by themselves with
`family="auto"`; `rules` returns them, to be looked at, changed or combined with one's own.
"""

from distckpt._base.public import set_public_home
from distckpt.families._config import (
    Source,
    read_config,
    rules,
)

__all__ = [
    "Source",
    "read_config",
    "rules",
]

set_public_home(globals())
