"""What several workers of pytest-xdist need and only one of them makes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory of this test run, which the first worker that asks for it has filled with
    `make`.
    """
    own = factory.getbasetemp()
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    is_made = directory.with_suffix(".made")
    with open(directory.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            directory.mkdir()
            make(directory)
            is_made.touch()
    return directory
