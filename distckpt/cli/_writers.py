"""The ranks that wrote the files of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from distckpt._format.manifest import Manifest
from distckpt.cli._output import count_text


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a file, or None."""
    pattern = r"(?:.*/)?(?:shard|rank)-(\d+)(?:-model-\d+-of-\d+)?\.(?:safetensors|checksums)"
    match = re.fullmatch(pattern, name)
    if match:
        return int(match[1]) - 1
    return None


def owner_of(rank: int | None, file: str) -> str:
    """Return a name for the writer of a file: its rank, or the file itself."""
    if rank is None:
        return file
    return f"rank {rank}"


def list_files(manifest: Manifest) -> list[dict[str, Any]]:
    """List the files with their size and the rank in their name."""
    rows = []
    for file, size in zip(manifest.files, manifest.sums.bytes_in_files, strict=True):
        rows.append(
            {
                "name": file.name,
                "rank": rank_of_file(file.name),
                "bytes": file.num_bytes,
                "data_bytes": int(size),
            }
        )
    return rows


def list_writers(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up files by the rank that wrote them.

    A file without a rank in its name stands for itself.
    """
    writers: dict[Any, dict[str, Any]] = {}
    for file in files:
        rank = file["rank"]
        name = None
        if rank is None:
            name = file["name"]
        writer = writers.setdefault(
            name if rank is None else rank,
            {"rank": rank, "file": name, "num_files": 0, "data_bytes": 0},
        )
        writer["num_files"] += 1
        writer["data_bytes"] += file["data_bytes"]
    return sorted(writers.values(), key=_order)


def _order(writer: dict[str, Any]) -> tuple[bool, int]:
    return writer["rank"] is None, writer["rank"] or 0


def balance_text(writers: Sequence[dict[str, Any]]) -> str:
    """Compare the bytes of ranks in a sentence; an empty string for fewer than two."""
    sizes = []
    for writer in writers:
        if writer["rank"] is not None:
            sizes.append(writer["data_bytes"])
    if len(sizes) < 2 or not sum(sizes):
        return ""
    ratio = max(sizes) * len(sizes) / sum(sizes)
    return f"{count_text(len(sizes), 'rank')} wrote; the largest share is {ratio:.3f} x the mean"
