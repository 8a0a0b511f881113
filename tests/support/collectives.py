"""Counting the collectives of torch.distributed that a rank makes."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch.distributed as dist

_NAMES = ("all_gather", "all_reduce", "broadcast", "gather", "scatter", "reduce", "barrier")


@contextmanager
def counted_collectives():
    """Count collectives by name: yields the counter."""
    calls = Counter()

    def counting(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in _NAMES:
            monkeypatch.setattr(dist, name, counting(name, getattr(dist, name)))
        yield calls
