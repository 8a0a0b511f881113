"""Servers of the files of a host, and checkpoints whose files several places hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import distckpt
from distckpt.manager._tiers._file_server import FileServer, FilesOfHost
from distckpt.manager._tiers._tier_files import Source, TieredFile, TieredFiles
from tests.support.harness import Launch, ask_parent, launched
from tests.support.states import save_checkpoint

TOKEN = b"0123456789abcdef0123456789abcdef"
TIMEOUT = 60.0
"""Seconds that no test waits for."""
SMALL = ("metadata.json", "manifest.safetensors")
"""Files that are held in memory."""


def serve(rank: int, files: Sequence[str]) -> None:
    """On a rank: serve files until the test answers."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    server = FileServer(files, TOKEN)
    ask_parent(server.address)
    server.close()


@contextlib.contextmanager
def serving_process(files: Sequence[str]) -> Iterator[tuple[Launch, FilesOfHost]]:
    """Serve files in another process; give it and a client."""
    with launched(serve, 1, list(files), backend=None) as launch:
        client = FilesOfHost(launch.wait_for_signal(0), TOKEN, TIMEOUT)
        try:
            yield launch, client
        finally:
            client.close()


def read_range(
    files: FilesOfHost | TieredFiles, file: Any, start: int, num_bytes: int
) -> np.ndarray:
    """Return bytes of a file."""
    memory = np.empty(num_bytes, np.uint8)
    files.read_into(file, [memory], start)
    return memory


def numbered_tensors() -> dict[str, torch.Tensor]:
    """Return tensors of which each element is another number."""
    return {f"w{i}": torch.arange(600_000.0).reshape(100, 6000) + i for i in range(4)}


def saved(path: Path) -> list[str]:
    """Save a checkpoint of `numbered_tensors`; return the names of its large files."""
    save_checkpoint(path, numbered_tensors(), axis=1, num_parts=3, step=7)
    paths = [found for found in path.rglob("*") if found.is_file()]
    names = sorted(str(found.relative_to(path)) for found in paths)
    return [name for name in names if name not in SMALL]


def divided(path: Path, names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Copy each file to one of some folders by turns; return the paths in the order of names."""
    copies = []
    for number, name in enumerate(names):
        copy = folders[number % len(folders)] / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path / name, copy)
        copies.append(str(copy))
    return copies


def tiered(
    path: Path, names: Sequence[str], sources: Callable[[int, str], Sequence[Source]]
) -> TieredFiles:
    """Return the files of a checkpoint, with sources by the number and name of a file."""
    files = {}
    for number, name in enumerate(names):
        files[name] = TieredFile((path / name).stat().st_size, sources(number, name))
    return TieredFiles({name: (path / name).read_bytes() for name in SMALL}, files)


def open_things() -> tuple[int, int]:
    """Return the number of threads and of descriptors of this process."""
    return threading.active_count(), psutil.Process().num_fds()


def loads_equal(location: Any) -> bool:
    """Return whether a location loads the numbered tensors."""
    checkpoint = distckpt.open(location)
    expected = numbered_tensors()
    loaded = checkpoint.read_tensors()
    return loaded.keys() == expected.keys() and all(
        torch.equal(loaded[key], expected[key]) for key in expected
    )
