"""Imports, in the process that ranks are forked from, what nearly every rank would import
itself.
"""

import gc

import numpy.ma
import numpy.random
import pytest
import torch._dynamo  # fully_shard imports it
import torch.distributed.checkpoint.state_dict

import distckpt.dcp
import distckpt.hf
import distckpt.manager
import distckpt.modules

__all__ = ["distckpt", "numpy", "pytest", "torch"]

# A garbage collection on a rank would write to every object of this process, and thereby copy its
# memory.
gc.collect()
gc.freeze()
