"""What lies in a checkpoint directory, seen without distckpt, and damage to it."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distckpt._io import write


def header_of(file: Path) -> tuple[int, dict[str, Any]]:
    """Return how many bytes come before the data of a safetensors file, and its header."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return 8 + length, json.loads(content[8 : 8 + length])


def data_bytes_by_rank(checkpoint: Path) -> Counter[int]:
    """Count the bytes of tensor data (file sizes without headers) that each rank has written."""
    totals: Counter[int] = Counter()
    for file in (checkpoint / "tensors").iterdir():
        rank = (
            int(re.fullmatch(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors", file.name)[1]) - 1
        )
        totals[rank] += file.stat().st_size - header_of(file)[0]
    return totals


def entries_of(checkpoint: Path, key: str) -> dict[int, list[list[int]]]:
    """Return the shapes under which each rank has stored parts of a key."""
    found: dict[int, list[list[int]]] = {}
    for file in sorted((checkpoint / "tensors").iterdir()):
        entry = header_of(file)[1].get(key)
        if entry is not None:
            found.setdefault(int(file.name[6:11]) - 1, []).append(entry["shape"])
    return found


def tree_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content; empty directories are listed, too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"(directory)"
        for path in sorted(folder.rglob("*"))
    }


def flip(file: Path, position: int, bits: int = 1) -> None:
    """Flip some bits of a byte of a file."""
    content = bytearray(file.read_bytes())
    content[position] ^= bits
    file.write_bytes(content)


def flip_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on flip a bit of what this process saves, before its checksum is computed."""
    correct = write._bytes_of

    def fill(*args):
        buffers = [np.array(buffer) for buffer in correct(*args)]
        buffers[0].reshape(-1)[3] ^= 4
        return buffers

    monkeypatch.setattr(write, "_bytes_of", fill)
