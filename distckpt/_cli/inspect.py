"""`distckpt inspect`: show the content of a checkpoint and which ranks wrote it."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from distckpt._base.dtypes import PACKED_PER_ITEM
from distckpt._base.errors import CheckpointingException, LoadMismatchError
from distckpt._base.messages import did_you_mean, key_pattern, natural_order, without_numbers
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._checkpoint.stored_values import holds_objects, load_common_state
from distckpt._cli import grid
from distckpt._cli.cat import plain
from distckpt._cli.grid import balance_text, list_files, list_writers, rank_of_file
from distckpt._cli.ls import time_text
from distckpt._cli.output import BOLD, Output, count_text, finite, shape_text, size_text
from distckpt._cli.page import write_page
from distckpt._cli.verify import strays_text
from distckpt._commit.conditional_put import stray_files
from distckpt._format.manifest import OBJECT, Manifest
from distckpt._format.marker import CONFIG_FNAME, read_marker
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._state.common_state import COMMON_KEY
from distckpt._storage import locations

_MAX_WRITERS = 64
_BAR_WIDTH = 30
_MAX_NAMES = 12


class Group(NamedTuple):
    """Keys that differ in numbers only and have one dtype and shape; `pattern` shows ranges of
    numbers.

    Of a module, whose tensors have several, dtype and shape are empty.
    """

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    num_keys: int
    num_bytes: int
    num_chunks: int
    ranks: frozenset[int] = frozenset()


def run(arguments: Namespace, output: Output) -> int:
    """Print the summary of a checkpoint, or the chunks of one key."""
    stored = open_checkpoint(locations.normalize(arguments.path))
    manifest = stored.manifest
    if arguments.key is not None:
        return _show_key(stored, arguments.key, output)
    groups, files = group_keys(manifest, is_merging=not arguments.tree), list_files(manifest)
    facts = summary(stored)
    strays = stray_files(stored.location, {file.name for file in manifest.files})
    listed = [{**group._asdict(), "ranks": sorted(group.ranks)} for group in groups]
    output.json(
        {
            **facts,
            "groups": listed,
            "files": files,
            "writers": list_writers(files),
            "strays": strays,
        }
    )
    if arguments.html:
        _write_page(arguments.html, stored, facts)
        output.message(f"wrote {arguments.html}")
    elif not output.as_json:
        _show(facts, _lines(groups, arguments.depth, arguments.sort == "size"), files, output)
        if strays:
            output.line(strays_text(strays))
    return 0


# --- The checkpoint -------------------------------------------------------------------------------


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
            dtype == OBJECT and key != COMMON_KEY
            for key, dtype in zip(manifest.keys, manifest.dtypes, strict=True)
        ),
        "object_bytes": int(manifest.num_bytes[~of_tensors].sum()),
        "num_chunks": len(manifest.key_ids),
        "num_files": len(manifest.files),
        "has_checksums": manifest.has_checksums,
        "tied": manifest.aliases,
        **_of_the_save(stored),
    }


def _of_the_save(stored: StoredCheckpoint) -> dict[str, Any]:
    """Return what the marker and common state say: when, which step, which format, the names in
    common state.
    """
    path = locations.join(stored.location, CONFIG_FNAME)
    marker = (read_marker(stored.location) if stored.manifest.origin is None else None) or {}
    note = marker.get("manager")
    names: list[str] = []
    with contextlib.suppress(CheckpointingException, OSError):
        names = [str(name) for name in load_common_state(stored)] if holds_objects(stored) else []
    return {
        "saved_at": locations.modified_time(path) if marker else None,
        "step": note.get("step") if isinstance(note, dict) else None,
        "format": (stored.manifest.origin or {}).get("format")
        or f"distckpt {marker.get('format_version', 1)}",
        "common_state": names,
    }


def group_keys(manifest: Manifest, is_merging: bool = True) -> list[Group]:
    """Group keys that differ in numbers only, such as `layers.0.weight` and `layers.1.weight`,
    unless told not to.
    """
    members: dict[tuple[object, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for key_id in sorted(range(len(manifest.keys)), key=lambda i: natural_order(manifest.keys[i])):
        key = manifest.keys[key_id]
        pattern = without_numbers(key) if is_merging else key
        members[pattern, manifest.dtypes[key_id], manifest.global_shapes[key_id]].append(key_id)
    sizes = np.concatenate([[0], np.cumsum(manifest.num_bytes)])
    starts = manifest.key_starts
    ranks = [rank_of_file(file.name) for file in manifest.files]
    file_ids = manifest.file_ids.tolist()

    def ranks_of(ids: Sequence[int]) -> frozenset[int]:
        found = {ranks[file_ids[row]] for i in ids for row in range(starts[i], starts[i + 1])}
        return frozenset(rank for rank in found if rank is not None)

    return [
        Group(
            key_pattern([manifest.keys[i] for i in ids]),
            dtype,
            shape,
            len(ids),
            int(sum(sizes[starts[i + 1]] - sizes[starts[i]] for i in ids)),
            int(sum(starts[i + 1] - starts[i] for i in ids)),
            ranks_of(ids),
        )
        for (_, dtype, shape), ids in members.items()
    ]


def _of_save_text(facts: dict[str, Any]) -> str:
    parts = ["" if facts["step"] is None else f"step {facts['step']}", f"format {facts['format']}"]
    if (written := facts["saved_at"]) is not None:
        # Of a copy this is when the copy was made, so it is not called the time of the save.
        zone = time.strftime("UTC%z", time.localtime(written)).removesuffix("+0000")
        parts.append(f"{CONFIG_FNAME} written {time_text(written)} {zone}")
    return ", ".join(filter(None, [*parts, "" if facts["has_checksums"] else "no checksums"]))


def _write_page(path: str, stored: StoredCheckpoint, facts: dict[str, Any]) -> None:
    ranks = sum(writer["rank"] is not None for writer in list_writers(list_files(stored.manifest)))
    written = f", written by {count_text(ranks, 'rank')}" if ranks else ""
    tiles = [
        count_text(facts["num_tensors"], "tensor").split(" "),
        (_count_in_words(facts["num_elements"]), "elements"),
        (size_text(facts["tensor_bytes"]), "of tensors"),
        (count_text(facts["num_files"], "file") + written).split(" ", 1),
    ]
    names = {key: key for key in stored.manifest.key_index if not stored.is_object(key)}
    values = plain(load_common_state(stored)) if facts["common_state"] else {}
    common = json.dumps(finite(values), indent=2, ensure_ascii=False) if values else ""
    lines = [
        ("", text)
        for text in (facts["location"], _of_save_text(facts), _objects_text(facts))
        if text
    ]
    name = stored.location.rstrip("/").rpartition("/")[2]
    write_page(
        path, stored, names, {"title": name, "lines": lines, "common": common, "tiles": tiles}
    )


def _count_in_words(number: int) -> str:
    for name, unit in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,}"


def _objects_text(facts: dict[str, Any]) -> str:
    """Count the objects and name what is in common state, in one line; empty where there is
    neither.
    """
    if not facts["object_bytes"]:
        return ""
    names = facts["common_state"]
    more = f", ... ({len(names)})" if len(names) > _MAX_NAMES else ""
    common = f"common state ({', '.join(names[:_MAX_NAMES])}{more})" if names else ""
    parts = [count_text(facts["num_objects"], "object") if facts["num_objects"] else "", common]
    return f"{' and '.join(filter(None, parts))}, {size_text(facts['object_bytes'])}"


def _show(
    facts: dict[str, Any], lines: Sequence[tuple[str, Group]], files: Any, output: Output
) -> None:
    output.line(facts["location"], BOLD)
    output.line(_of_save_text(facts))
    tensors, elements, chunks, num_files = (
        count_text(facts[f"num_{noun}s"], noun) for noun in ("tensor", "element", "chunk", "file")
    )
    output.line(
        f"{tensors}, {elements}, {size_text(facts['tensor_bytes'])}; {chunks} in {num_files}"
    )
    if objects := _objects_text(facts):
        output.line(objects)
    output.line()
    rows = [[label, *_group_cells(group)] for label, group in lines]
    swatches = [sorted(group.ranks) if group.dtype else [] for _, group in lines]
    heads = ["key", "shape", "dtype", "keys", "chunks", "size"]
    output.table(heads, rows, num_text=3, drop="chunks keys dtype shape", swatches=swatches)
    for alias, key in facts["tied"].items():
        output.line(f"{alias} is tied to {key}")
    output.line()
    _show_writers(list_writers(files), output)


def _show_writers(writers: list[dict[str, Any]], output: Output) -> None:
    """Draw a bar for the bytes of each rank, or of each file whose name contains no rank; one alone
    is named.
    """
    if len(writers) == 1:
        rank = writers[0]["rank"]
        output.line(
            f"all in {writers[0]['file']}" if rank is None else f"all written by rank {rank}"
        )
        return
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
    swatches = [
        [] if writer["rank"] is None else [writer["rank"]] for writer in writers[:_MAX_WRITERS]
    ]
    output.table(
        ["owner", "share", "files", "data"],
        shown,
        num_text=2,
        drop="files share",
        swatches=swatches,
    )
    if len(writers) > _MAX_WRITERS:
        output.line(f"... and {len(writers) - _MAX_WRITERS} more (all with --json)")
    if balance := balance_text(writers):
        output.line(balance)


def _group_cells(group: Group) -> tuple[str, ...]:
    shape = shape_text(group.shape) if group.dtype else ""
    return (
        shape,
        group.dtype,
        str(group.num_keys),
        str(group.num_chunks),
        size_text(group.num_bytes),
    )


def _lines(groups: Sequence[Group], depth: int | None, is_by_size: bool) -> list[tuple[str, Group]]:
    """Return the lines of a tree of modules, each with its total."""
    members = [(_segments(group.pattern), group) for group in groups if group.pattern != COMMON_KEY]
    return list(_tree(members, depth or sys.maxsize, is_by_size))


def _tree(
    members: Sequence[tuple[list[str], Group]],
    depth: int,
    is_by_size: bool,
    level: int = 0,
    parent: str = "",
) -> Iterator[tuple[str, Group]]:
    """Yield the lines of a tree of patterns, given in segments, down to `depth` levels."""
    by_first: dict[str, list[tuple[list[str], Group]]] = defaultdict(list)
    for (first, *rest), group in members:
        by_first[first].append((rest, group))
    branches = [
        (first, below, _total(first, [group for _, group in below]))
        for first, below in by_first.items()
    ]
    for first, below, total in (
        sorted(branches, key=lambda branch: -branch[2].num_bytes) if is_by_size else branches
    ):
        leaves = [group for rest, group in below if not rest]
        deeper = [(rest, group) for rest, group in below if rest]
        for group in leaves:
            yield "  " * level + parent + first, group
        if not leaves and len({rest[0] for rest, _ in deeper}) == 1:
            # A single branch continues on the same line.
            yield from _tree(deeper, depth, is_by_size, level, f"{parent}{first}.")
        elif deeper:
            if not leaves:
                yield "  " * level + parent + first, total
            if level + 1 < depth:
                yield from _tree(deeper, depth, is_by_size, level + 1)


def _total(name: str, groups: Sequence[Group]) -> Group:
    counts = (
        sum(getattr(group, field) for group in groups)
        for field in ("num_keys", "num_bytes", "num_chunks")
    )
    return Group(name, "", (), *counts)


def _segments(pattern: str) -> list[str]:
    # A range of numbers, {0..3}, is not split.
    return re.split(r"(?<!\.)\.(?!\.)", pattern)


# --- One key --------------------------------------------------------------------------------------


def _show_key(stored: StoredCheckpoint, key: str, output: Output) -> int:
    known = stored.manifest.key_index
    if key not in known:
        raise LoadMismatchError(f"{stored.location!r} has no key {key!r}{did_you_mean(key, known)}")
    shape, dtype, stored_key = (
        stored.global_shape(key),
        stored.dtype_name(key),
        stored.manifest.keys[known[key]],
    )
    chunks = grid.chunks_of(stored, key)
    facts = {"key": key, "stored_as": stored_key, "dtype": dtype, "shape": shape}
    output.json({**facts, "chunks": [chunk._asdict() for chunk in chunks]})
    tied = "" if stored_key == key else f", tied to {stored_key}"
    output.line(f"{key}: {shape_text(shape)} {dtype}, {count_text(len(chunks), 'chunk')}{tied}")
    rows = [
        [str(Region(c.offset, c.shape)), c.owner, c.file, f"{c.first_byte:,}", f"{c.num_bytes:,}"]
        for c in chunks
    ]
    output.table(["region", "owner", "file", "first byte", "bytes"], rows, num_text=3)
    axes = grid.drawn_axes(shape, chunks)
    if not output.as_json:
        if axes is None:
            output.line(
                "(no picture: this tensor is divided along more than two axes, or is empty)"
            )
        else:
            output.line()
            output.picture(grid.text_picture(shape, chunks, axes, output.in_colour))
    return 0
