"""A checkpoint and a request for it, each of which has keys that the other lacks."""

from __future__ import annotations

import torch

import distckpt
from distckpt import ShardedObject, ShardedTensor

MISSING = {"left", "left/o"}
UNEXPECTED = {"new", "new/o", "new.2"}


def tensor(key, value=1.0, shape=(4,), **kwargs):
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, float(value)), **kwargs)


def obj(key, data=None, count=1, index=0):
    return ShardedObject(key, data, (count,), (index,))


def save_one_sided(path):
    """Save tensors `a` and `left`, objects `o` and `left/o`."""
    state = {
        "a": tensor("a"),
        "left": tensor("left"),
        "o": obj("o", 1),
        "lo": obj("left/o", 2),
        "step": 3,
    }
    distckpt.save(state, path)
    return path


def asked_for():
    return {
        "list": [tensor("new", 0), tensor("a", 0)],
        "nested": {"deep": {"new": obj("new/o")}},
        "o": obj("o"),
        "new": tensor("new.2", 0),
    }


def described_state():
    """Return a state of two sharded tensors, an object in two parts, and a number."""
    halves = torch.zeros(2, 3, dtype=torch.bfloat16)
    return {
        "w": ShardedTensor.from_rank_offsets("w", halves, (0, 1, 2)),
        "v": ShardedTensor.from_rank_offsets("w", halves.clone(), (0, 0, 2)),
        "stack": ShardedTensor.from_rank_offsets(
            "stack", torch.zeros(3), (0, 0, 1), prepend_axis_num=1
        ),
        "o": obj("o", 1, 2, 0),
        "p": obj("o", 2, 2, 1),
        "step": 1,
    }
