"""Imports, in the process that ranks are forked from, what nearly every rank would import itself:
what tests import at the top counts, since a rank imports the module that its function is in.
"""

import gc

import boto3.s3.inject
import fsspec
import hypothesis
import numpy.ma
import numpy.random
import psutil
import pytest
import safetensors.torch
import torch._dynamo  # fully_shard imports it
import torch.distributed.checkpoint.state_dict

import distckpt.cli
import distckpt.dcp
import distckpt.engines
import distckpt.hf
import distckpt.manager._tiers._tiers
import distckpt.modules
import distckpt.torch_dist
from tests.support import (
    after_crash,
    collectives,
    disks,
    exchanges,
    harness,
    hf_folders,
    layouts,
    lost_hosts,
    rank_calls,
    s3_server,
    scenarios,
    stopping,
)

__all__ = [
    "after_crash",
    "boto3",
    "collectives",
    "disks",
    "distckpt",
    "exchanges",
    "fsspec",
    "harness",
    "hf_folders",
    "hypothesis",
    "layouts",
    "lost_hosts",
    "numpy",
    "psutil",
    "pytest",
    "rank_calls",
    "s3_server",
    "safetensors",
    "scenarios",
    "stopping",
    "torch",
]

# A garbage collection on a rank would write to every object of this process, and thereby copy its
# memory.
gc.collect()
gc.freeze()
