"""`distckpt inspect`: show the content of a checkpoint and which ranks wrote it."""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import PACKED_PER_ITEM
from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, key_pattern, natural_order, without_numbers
from distckpt._cli import grid
from distckpt._cli.output import Output, count_text, shape_text, size_text
from distckpt._cli.verify import strays_text
from distckpt._commit.conditional_put import stray_files
from distckpt._foreign.opening import open_checkpoint
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

_MAX_WRITERS = 64
_BAR_WIDTH = 30


class Group(NamedTuple):
    """Keys that differ in numbers only and have one dtype and shape; `pattern` shows ranges of numbers."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    num_keys: int
    num_bytes: int
    num_chunks: int


def run(arguments: Namespace, output: Output) -> int:
    """Print the summary of a checkpoint, or the chunks of one key."""
    if arguments.svg and arguments.key is None:
        raise ValueError("--svg draws the chunks of one tensor: name it with --key")
    stored = open_checkpoint(locations.normalize(arguments.path))
    manifest = stored.manifest
    if arguments.key is not None:
        return _show_key(stored, arguments.key, arguments.svg, output)
    groups, files = group_keys(manifest), list_files(manifest)
    facts = summary(stored)
    strays = stray_files(stored.location, {file.name for file in manifest.files})
    lists = {"groups": [group._asdict() for group in groups], "files": files, "writers": list_writers(files)}
    output.json({**facts, **lists, "strays": strays})
    if not output.as_json:
        _show(facts, groups, files, manifest, output)
        if strays:
            output.line(strays_text(strays))
    return 0


# --- The checkpoint ---------------------------------------------------------------------------------------------------


def summary(stored: StoredCheckpoint) -> dict[str, Any]:
    """Count the tensors, objects, chunks and files of a checkpoint."""
    manifest = stored.manifest
    is_tensor = np.array([dtype != OBJECT for dtype in manifest.dtypes], bool)
    of_tensors = is_tensor[manifest.key_ids] if len(manifest.keys) else np.zeros(0, bool)
    items = [
        math.prod(shape) * PACKED_PER_ITEM.get(dtype, 1)
        for shape, dtype in zip(manifest.global_shapes, manifest.dtypes, strict=True)
        if dtype != OBJECT
    ]
    return {
        "location": stored.location,
        "num_tensors": int(is_tensor.sum()),
        "num_elements": sum(items),
        "tensor_bytes": int(manifest.num_bytes[of_tensors].sum()),
        "num_objects": sum(
            dtype == OBJECT and key != COMMON_KEY for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True)
        ),
        "object_bytes": int(manifest.num_bytes[~of_tensors].sum()),
        "num_chunks": len(manifest.key_ids),
        "num_files": len(manifest.files),
        "has_checksums": manifest.has_checksums,
        "tied": manifest.aliases,
    }


def group_keys(manifest: Manifest) -> list[Group]:
    """Group keys that differ in numbers only, such as `layers.0.weight` and `layers.1.weight`."""
    members: dict[tuple[tuple[str, ...], str, tuple[int, ...]], list[int]] = defaultdict(list)
    for key_id in sorted(range(len(manifest.keys)), key=lambda i: natural_order(manifest.keys[i])):
        pattern = without_numbers(manifest.keys[key_id])
        members[pattern, manifest.dtypes[key_id], manifest.global_shapes[key_id]].append(key_id)
    sizes = np.concatenate([[0], np.cumsum(manifest.num_bytes)])
    starts = manifest.key_starts
    return [
        Group(
            key_pattern([manifest.keys[i] for i in ids]),
            dtype,
            shape,
            len(ids),
            int(sum(sizes[starts[i + 1]] - sizes[starts[i]] for i in ids)),
            int(sum(starts[i + 1] - starts[i] for i in ids)),
        )
        for (_, dtype, shape), ids in members.items()
    ]


def list_files(manifest: Manifest) -> list[dict[str, Any]]:
    """List the files, with the rank in the name of each (None without one) and the bytes of its data."""
    data_bytes = np.zeros(len(manifest.files), np.int64)
    np.add.at(data_bytes, manifest.file_ids, manifest.num_bytes)
    return [
        {"name": file.name, "rank": grid.rank_of_file(file.name), "bytes": file.num_bytes, "data_bytes": int(size)}
        for file, size in zip(manifest.files, data_bytes, strict=True)
    ]


def list_writers(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum up files by the rank that wrote them; a file without a rank in its name is listed itself."""
    writers: dict[Any, dict[str, Any]] = {}
    for file in files:
        rank = file["rank"]
        name = file["name"] if rank is None else None
        found = writers.setdefault(
            name if rank is None else rank, {"rank": rank, "file": name, "num_files": 0, "data_bytes": 0}
        )
        found["num_files"] += 1
        found["data_bytes"] += file["data_bytes"]
    return sorted(writers.values(), key=lambda writer: (writer["rank"] is None, writer["rank"] or 0))


def _show(
    facts: dict[str, Any], groups: list[Group], files: list[dict[str, Any]], manifest: Manifest, output: Output
) -> None:
    output.line(f"{facts['location']}")
    tensors, elements, objects, chunks, num_files = (
        count_text(facts[f"num_{noun}s"], noun) for noun in ("tensor", "element", "object", "chunk", "file")
    )
    output.line(
        f"{tensors}, {elements}, {size_text(facts['tensor_bytes'])}; "
        f"{objects} and common state, {size_text(facts['object_bytes'])}; {chunks} in {num_files}"
        + ("" if facts["has_checksums"] else "; no checksums")
    )
    output.line()
    rows = [
        [label, *(_group_cells(group) if group else ("",) * 5)]
        for label, group in _tree([(_segments(g.pattern), g) for g in groups if g.pattern != COMMON_KEY])
    ]
    output.table(["key", "shape", "dtype", "keys", "chunks", "size"], rows, num_text=3)
    for alias, key in facts["tied"].items():
        output.line(f"{alias} is tied to {key}")
    output.line()
    _show_writers(list_writers(files), output)


def _show_writers(writers: list[dict[str, Any]], output: Output) -> None:
    """Draw a bar for the bytes of each rank, or of each file whose name contains no rank."""
    largest = max((writer["data_bytes"] for writer in writers), default=0) or 1
    bar = "\u2588" if output.in_colour else "#"
    shown = [
        [
            writer["file"] if writer["rank"] is None else f"rank {writer['rank']}",
            bar * round(_BAR_WIDTH * writer["data_bytes"] / largest),
            str(writer["num_files"]),
            size_text(writer["data_bytes"]),
        ]
        for writer in writers[:_MAX_WRITERS]
    ]
    output.table(["owner", "share", "files", "data"], shown, num_text=2)
    if len(writers) > _MAX_WRITERS:
        output.line(f"... and {len(writers) - _MAX_WRITERS} more (all with --json)")
    sizes = [writer["data_bytes"] for writer in writers if writer["rank"] is not None]
    if sum(sizes):
        ratio = max(sizes) * len(sizes) / sum(sizes)
        output.line(f"{count_text(len(sizes), 'rank')} wrote; the largest share is {ratio:.3f} x the mean")


def _group_cells(group: Group) -> tuple[str, ...]:
    shape = shape_text(group.shape)
    return shape, group.dtype, str(group.num_keys), str(group.num_chunks), size_text(group.num_bytes)


def _tree(
    members: Sequence[tuple[list[str], Group]], depth: int = 0, parent: str = ""
) -> Iterator[tuple[str, Group | None]]:
    """Yield the lines of a tree of patterns, given in segments; inner lines have no group."""
    by_first: dict[str, list[tuple[list[str], Group]]] = defaultdict(list)
    for (first, *rest), group in members:
        by_first[first].append((rest, group))
    for first, below in by_first.items():
        leaves = [group for rest, group in below if not rest]
        deeper = [(rest, group) for rest, group in below if rest]
        for group in leaves:
            yield "  " * depth + parent + first, group
        if not leaves and len({rest[0] for rest, _ in deeper}) == 1:
            # A single branch continues on the same line.
            yield from _tree(deeper, depth, f"{parent}{first}.")
        elif deeper:
            if not leaves:
                yield "  " * depth + parent + first, None
            yield from _tree(deeper, depth + 1)


def _segments(pattern: str) -> list[str]:
    # A range of numbers, {0..3}, is not split.
    return re.split(r"(?<!\.)\.(?!\.)", pattern)


# --- One key ----------------------------------------------------------------------------------------------------------


def _show_key(stored: StoredCheckpoint, key: str, svg: str | None, output: Output) -> int:
    known = stored.manifest.key_index
    if key not in known:
        raise LoadMismatchError(f"{stored.location!r} has no key {key!r}{did_you_mean(key, known)}")
    shape, dtype, stored_key = stored.global_shape(key), stored.dtype_name(key), stored.manifest.keys[known[key]]
    chunks = grid.chunks_of(stored, key)
    facts = {"key": key, "stored_as": stored_key, "dtype": dtype, "shape": shape}
    output.json({**facts, "chunks": [chunk._asdict() for chunk in chunks]})
    tied = "" if stored_key == key else f", tied to {stored_key}"
    output.line(f"{key}: {shape_text(shape)} {dtype}, {count_text(len(chunks), 'chunk')}{tied}")
    rows = [
        [grid.region_text(chunk), chunk.owner, chunk.file, f"{chunk.first_byte:,}", f"{chunk.num_bytes:,}"]
        for chunk in chunks
    ]
    output.table(["region", "owner", "file", "first byte", "bytes"], rows, num_text=3)
    axes = grid.drawn_axes(shape, chunks)
    if not output.as_json:
        if axes is None:
            output.line("(no picture: this tensor is divided along more than two axes, or is empty)")
        else:
            output.line()
            output.picture(grid.text_picture(shape, chunks, axes, output.in_colour))
    if svg is not None:
        if axes is None:
            raise ValueError(f"key {key!r} is divided along more than two axes or is empty: it cannot be drawn")
        with open(svg, "w", encoding="utf-8") as file:
            file.write(grid.svg_picture(f"{key}  {shape_text(shape)} {dtype}", shape, chunks, axes))
        output.message(f"wrote {svg}")
    return 0
