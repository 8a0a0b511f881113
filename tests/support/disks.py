"""Disks and limits that saves run into."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of this size, where the test may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Keep a directory from being renamed or changed, where the test may."""
    try:
        changed = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no chattr")
    if changed.returncode:
        pytest.skip(f"cannot make a directory immutable: {changed.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


@contextmanager
def limited(kind: int, soft_limit: int) -> Iterator[None]:
    """Lower a limit that the system puts on this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft_limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
