"""What verbs spend that go through all chunks of a checkpoint, up to where they read tensors."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from measure import peak_memory_bytes

from distckpt._base.options import ExportOptions
from distckpt._checkpoint.opening import open_checkpoint
from distckpt._format.stored_checkpoint import StoredCheckpoint, fetch_checksums
from distckpt._geometry.region import whole
from distckpt._io.export import output_file
from distckpt._operations.export_plan import plan_export, stored_source
from distckpt._operations.export_request import OpenedSources
from distckpt._operations.file_checks import Problem, list_blocks, units_of_blocks
from distckpt._operations.verify import open_or_describe
from distckpt._plan.layout import checksum_file_name
from distckpt._plan.load import Request, plan_load
from distckpt._ranks.collectives import Ranks
from distckpt._tools.diff import plan_diff
from distckpt._tools.reshard import tensor_file
from distckpt._tools.reshard_plan import ReshardRequest, plan_reshard
from distckpt.cli._grid import list_files, list_writers
from distckpt.cli._groups import group_keys
from distckpt.cli._summary import summarize

FILE_BYTES = 5 << 30
RESHARDED_RANKS = 8
_THREADS = 8


def measure_verbs(folder: str, marker: dict[str, Any], num_blocks: list[int]) -> dict[str, Any]:
    """Return what verbs spend on a checkpoint of zeros, of which the manifest is there.

    Args:
        folder: with the manifest and its parts.
        marker: the fields that name the manifest.
        num_blocks: of each rank.
    """
    for rank, count in enumerate(num_blocks):
        Path(folder, checksum_file_name(rank)).write_bytes(bytes(8 * count))
    fields = {"sharded_backend": "safetensors", "sharded_backend_version": 1, **marker}
    Path(folder, "metadata.json").write_text(json.dumps({**fields, "checksum": None}))
    figures = {}
    for verb in VERBS:
        # In a process of its own: memory that another has left behind would not count.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            figures |= pool.submit(_measure, verb, folder).result()
    return figures


def _measure(verb: str, folder: str) -> dict[str, Any]:
    started = time.process_time()
    peak = peak_memory_bytes(lambda: VERBS[verb](folder))
    return {
        f"{verb}, s": time.process_time() - started,
        f"{verb}, memory, MB": peak / 1e6,
    }


def _verify(folder: str) -> None:
    stored = open_or_describe(folder, None)
    assert not isinstance(stored, Problem), stored.message
    for file_ids in stored.manifest.ranges_of_files():
        blocks = list_blocks(stored, file_ids, _THREADS, keeps_checksums=False)
        assert sum(1 for _ in units_of_blocks(blocks, folder))


def _consolidate(folder: str) -> None:
    stored = _opened(folder)
    options = ExportOptions(max_file_bytes=FILE_BYTES)
    source = stored_source(stored, options)
    plan = plan_export(Ranks.alone(), OpenedSources([stored]), source, options)
    for file in plan.files:
        output_file(source, file, file.name, {})
    _begin_to_read(source.stored)


def _reshard(folder: str) -> None:
    request = ReshardRequest(folder, f"{folder}-resharded", RESHARDED_RANKS, common_state={})
    plan = plan_reshard(Ranks.alone(), _opened(folder), request)
    for file in plan.layout.all_files:
        if file.name not in plan.layout.objects:
            tensor_file(plan.stored, plan, file, {})
    _begin_to_read(plan.stored)


def _diff(folder: str) -> None:
    first, second = _opened(folder), _opened(folder)
    assert plan_diff(first, second, None, {}).comparable
    _begin_to_read(first)
    _begin_to_read(second)


def _inspect(folder: str) -> None:
    stored = _opened(folder)
    assert group_keys(stored.manifest)
    assert list_writers(list_files(stored.manifest))
    assert summarize(stored)["tensor_bytes"]


def _opened(folder: str) -> StoredCheckpoint:
    return open_checkpoint(Ranks.alone(), folder)


def _begin_to_read(stored: StoredCheckpoint) -> None:
    """Do what comes before the first bytes of a tensor that all ranks have written."""
    manifest = stored.manifest
    request = Request(manifest.keys[0], manifest.global_shapes[0], whole(manifest.global_shapes[0]))
    assert plan_load(stored, [request])
    rows = manifest.chunk_rows(0)
    fetch_checksums(stored, manifest.file_ids[rows])


VERBS: dict[str, Callable[[str], None]] = {
    "verify": _verify,
    "consolidate": _consolidate,
    "reshard": _reshard,
    "diff": _diff,
    "inspect": _inspect,
}
