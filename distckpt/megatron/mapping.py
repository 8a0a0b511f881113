"""Megatron Core's `dist_checkpointing.mapping`: the classes of `distckpt.mapping`."""

import logging

from distckpt._base.errors import CheckpointingException as CheckpointingException
from distckpt.mapping import *  # noqa: F403
from distckpt.mapping import __all__ as __all__

logger = logging.getLogger(__name__)
