"""The ways to save and load that are compared on object stores, all through fsspec."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import torch.distributed as dist

from contest.contestants import (
    ACROSS,
    SAVE,
    WARM,
    Contestant,
    Tensors,
    ours,
    random_bytes,
    torch_contestant,
)
from contest.state import State, local_bytes


def store_contestants(left_out: dict[str, str]) -> Iterator[Contestant]:
    """Yield every contestant that can save to a URL.

    Args:
        left_out: gets the names of the others, and why they cannot.
    """
    yield from ours()
    try:
        yield _torch()
    except ImportError as error:
        left_out["DCP FsspecWriter"] = f"cannot be imported: {error}"
    yield Contestant(
        "raw pipe_file / cat_file", dict, _put, _get, False, (SAVE, WARM, ACROSS), _get_alone
    )


def _torch() -> Contestant:
    files: Any = importlib.import_module("torch.distributed.checkpoint._fsspec_filesystem")
    return torch_contestant("DCP FsspecWriter", files.FsspecWriter, files.FsspecReader)


# --- As many bytes and nothing else: one object for each rank, by the functions of the backend ----


def _put(state: State, url: str) -> None:
    files, place = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{place}/{dist.get_rank()}", _content(local_bytes(state)))


@functools.cache
def _content(num_bytes: int) -> bytes:
    """Return what is put. Made once, in the round that does not count."""
    block = random_bytes().tobytes()
    return b"".join([*[block] * (num_bytes // len(block)), block[: num_bytes % len(block)]])


def _get(state: State, url: str) -> None:
    """Get as many bytes of the rank's object as fill its tensors."""
    _get_bytes(url, dist.get_rank(), local_bytes(state))


def _get_alone(tensors: Tensors, url: str, group: Any) -> None:
    """Get the objects of all ranks, all at the same time."""
    num_ranks = dist.get_world_size()
    share = -(
        -sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) // num_ranks
    )
    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(lambda rank: _get_bytes(url, rank, share), range(num_ranks)))


def _get_bytes(url: str, rank: int, num_bytes: int) -> None:
    files, place = fsspec.core.url_to_fs(url)
    got = len(files.cat_file(f"{place}/{rank}", start=0, end=num_bytes))
    if got != num_bytes:
        raise OSError(f"{got} of {num_bytes} bytes were read")
