"""`distckpt inspect`: show the content of a checkpoint and the ranks that wrote it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from distckpt._base.errors import LoadMismatchError
from distckpt._base.messages import did_you_mean, other_prefix
from distckpt._checkpoint import consistent_read
from distckpt._commit.conditional_put import stray_files
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import Region
from distckpt._operations.file_checks import Problem, check_files
from distckpt.cli import _grid as grid
from distckpt.cli._grid import balance_text, list_files, list_writers, owner_of
from distckpt.cli._groups import Group, group_keys, tree_lines
from distckpt.cli._output import BOLD, RED, Output, count_text, shape_text, size_text
from distckpt.cli._selection import opened_at
from distckpt.cli._summary import objects_text, save_text, summarize
from distckpt.cli._verify import list_problems, strays_text

_MAX_WRITERS = 64
_NUM_THREADS = 8
_BAR_WIDTH = 30


def run(arguments: Namespace, output: Output) -> int:
    """Print the summary of a checkpoint, or the chunks of one key.

    Return 1 if files are missing or damaged.
    """
    with opened_at(arguments.path) as stored:
        file_ids = range(len(stored.manifest.files))
        problems = check_files(stored, file_ids, _NUM_THREADS)
        consistent_read.check_files(stored)
        if problems:
            consistent_read.check_is_there(stored)
            count = count_text(len(problems), "problem")
            output.line(f"DAMAGED ({count}): what follows is what was saved", RED)
            list_problems(problems, output)
            output.line()
        if arguments.key is not None:
            _show_key(stored, arguments.key, problems, output)
        else:
            _show_all(stored, arguments, problems, output)
    return int(bool(problems))


def _show_all(
    stored: StoredCheckpoint, arguments: Namespace, problems: Sequence[Problem], output: Output
) -> None:
    manifest = stored.manifest
    groups = group_keys(manifest, is_merging=not arguments.tree)
    files = list_files(manifest)
    writers = list_writers(files)
    facts = summarize(stored)
    strays = stray_files(stored.location, {file.name for file in manifest.files})
    output.json(
        {
            **facts,
            "groups": list(map(vars, groups)),
            "files": files,
            "writers": writers,
            "strays": strays,
            "problems": list(map(vars, problems)),
        }
    )
    if arguments.html:
        # Imported only for this option, which is rare.
        from distckpt._pages.page import write_inspect_page

        write_inspect_page(arguments.html, stored, facts, problems)
        output.message(f"wrote {arguments.html}")
    elif not output.as_json:
        lines = tree_lines(groups, arguments.depth, is_by_size=arguments.sort == "size")
        _show(facts, lines, writers, output)
        if strays:
            output.line(strays_text(strays))


# --- The checkpoint -------------------------------------------------------------------------------


def _show(
    facts: dict[str, Any],
    lines: Sequence[tuple[str, Group]],
    writers: Sequence[dict[str, Any]],
    output: Output,
) -> None:
    output.line(facts["location"], BOLD)
    output.line(save_text(facts))
    tensors, elements, chunks, num_files = (
        count_text(facts[f"num_{noun}s"], noun) for noun in ("tensor", "element", "chunk", "file")
    )
    output.line(
        f"{tensors}, {elements}, {size_text(facts['tensor_bytes'])}; {chunks} in {num_files}"
    )
    if objects := objects_text(facts):
        output.line(objects)
    output.line()
    rows = []
    swatches: list[Sequence[int]] = []
    for label, group in lines:
        # The total of a module has no shape, and no swatches.
        shape = shape_text(group.shape) if group.dtype else ""
        counts = (str(group.num_keys), str(group.num_chunks), size_text(group.num_bytes))
        rows.append([label, shape, group.dtype, *counts])
        swatches.append(group.ranks)
    heads = ["key", "shape", "dtype", "keys", "chunks", "size"]
    output.table(heads, rows, num_text=3, drop="chunks keys dtype shape", swatches=swatches)
    for alias, key in facts["tied"].items():
        output.line(f"{alias} is tied to {key}")
    output.line()
    _show_writers(writers, output)


def _show_writers(writers: Sequence[dict[str, Any]], output: Output) -> None:
    """Draw a bar for the bytes of each rank.

    A file whose name contains no rank has a bar of its own. A single writer is only named.
    """
    if len(writers) == 1:
        output.line(_only_writer(writers[0]))
        return
    shown = writers[:_MAX_WRITERS]
    largest = max((writer["data_bytes"] for writer in writers), default=0) or 1
    bar = "#"
    if output.in_color and output.draws_blocks:
        bar = "\u2588"
    rows = []
    swatches: list[list[int]] = []
    for writer in shown:
        owner = owner_of(writer["rank"], writer["file"])
        length = round(_BAR_WIDTH * writer["data_bytes"] / largest)
        size = size_text(writer["data_bytes"])
        rows.append([owner, bar * length, str(writer["num_files"]), size])
        swatches.append([] if writer["rank"] is None else [writer["rank"]])
    heads = ["owner", "share", "files", "data"]
    output.table(heads, rows, num_text=2, drop="files share", swatches=swatches)
    if len(writers) > len(shown):
        output.line(f"... and {len(writers) - len(shown)} more (all with --json)")
    if balance := balance_text(writers):
        output.line(balance)


def _only_writer(writer: dict[str, Any]) -> str:
    owner = owner_of(writer["rank"], writer["file"])
    if writer["rank"] is None:
        return f"all in {owner}"
    return f"all written by {owner}"


# --- One key --------------------------------------------------------------------------------------


def _show_key(
    stored: StoredCheckpoint, key: str, problems: Sequence[Problem], output: Output
) -> None:
    known = stored.manifest.key_index
    if key not in known:
        near = did_you_mean(key, known) or other_prefix([key], known)
        raise LoadMismatchError(f"{stored.location!r} has no key {key!r}{near}")
    shape = stored.global_shape(key)
    dtype = stored.dtype_name(key)
    stored_key = stored.manifest.keys[known[key]]
    chunks = grid.chunks_of(stored, key)
    facts = {"key": key, "stored_as": stored_key, "dtype": dtype, "shape": shape}
    chunk_fields = list(map(vars, chunks))
    output.json({**facts, "chunks": chunk_fields, "problems": list(map(vars, problems))})
    tied = ""
    if stored_key != key:
        tied = f", tied to {stored_key}"
    output.line(f"{key}: {shape_text(shape)} {dtype}, {count_text(len(chunks), 'chunk')}{tied}")
    rows = []
    for c in chunks:
        region = str(Region(c.offset, c.shape))
        rows.append([region, c.owner, c.file, f"{c.first_byte:,}", f"{c.num_bytes:,}"])
    heads = ["region", "owner", "file", "begins", "bytes"]
    output.table(heads, rows, num_text=3, drop="begins bytes owner")
    if not output.as_json:
        _draw(shape, chunks, output)


def _draw(shape: tuple[int, ...], chunks: Sequence[grid.Chunk], output: Output) -> None:
    axes = grid.drawn_axes(shape, chunks)
    if axes is None:
        output.line("(no picture: this tensor is divided along more than two axes, or is empty)")
        return
    output.line()
    output.picture(grid.text_picture(shape, chunks, axes, output.in_color))
