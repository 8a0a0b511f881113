"""Megatron Core's `dist_checkpointing.optimizer`: the functions of `distckpt.optimizer`."""

import logging

from distckpt._models.optimizer.read import KEEP_VARS_HINT as KEEP_VARS_HINT
from distckpt.optimizer import *  # noqa: F403
from distckpt.optimizer import __all__ as __all__

logger = logging.getLogger(__name__)
