"""The classes of Megatron Core's `dist_checkpointing.strategies.base`, which are those of
`distckpt.strategies.base`.
"""

from distckpt.strategies.base import *  # noqa: F403
from distckpt.strategies.base import __all__ as __all__
