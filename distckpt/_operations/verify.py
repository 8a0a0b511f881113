"""Verification of a checkpoint: compare the files with the save.

Nothing is changed.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from distckpt._base.errors import CheckpointingException, CheckpointNotFoundError
from distckpt._base.interrupts import operation
from distckpt._base.messages import check_choice, check_count
from distckpt._base.options import Progress
from distckpt._base.threads import ProgressCounter
from distckpt._base.wings import wing
from distckpt._checkpoint.consistent_read import ReadAttempt, read_attempts
from distckpt._checkpoint.opening import identify, open_checkpoint
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._commit.conditional_put import stray_files
from distckpt._format.foreign_formats import SEAL_NAME
from distckpt._format.manifest import FINGERPRINTS, NO_FINGERPRINT, Manifest, is_manifest_name
from distckpt._format.marker import CONFIG_FNAME
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._operations.file_checks import (
    Problem,
    check_files,
    check_units,
    describe_blocks,
    list_blocks,
    not_in,
    units_of_blocks,
)
from distckpt._ranks.collectives import PhaseTimer, Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.mapping._wrappers import ShardedStateDict


@dataclass(frozen=True)
class VerifyReport:
    """The state of a checkpoint, as `verify` found it.

    Attributes:
        location: location of the checkpoint.
        mode: "fast", "full", or "live" for a comparison with tensors in memory.
        problems: all problems; empty for a whole checkpoint.
        has_checksums: False for formats without checksums: only sizes and headers of their files
            are checked.
        num_keys: number of stored tensors and objects; common state is one, and each name of tied
            tensors counts.
        num_files: number of files that hold the keys.
        num_chunks: number of stored pieces.
        num_bytes: bytes that were read.
        seconds: duration of the call.
        strays: on an object store, files that are no part of the checkpoint: files of saves that
            were interrupted, or that go on. The next save removes them.
        num_fingerprints: number of tensors that were compared with their stored fingerprints; 0 if
            there are none, in the mode "fast", and where checksums differ already.
        num_tensors: number of tensors among the keys.
    """

    location: str
    mode: str
    problems: tuple[Problem, ...]
    has_checksums: bool
    num_keys: int
    num_files: int
    num_chunks: int
    num_bytes: int
    seconds: float
    strays: tuple[str, ...] = ()
    num_fingerprints: int = 0
    num_tensors: int = 0

    @property
    def is_whole(self) -> bool:
        """Return True when there are no problems."""
        return not self.problems


@operation
def verify(
    checkpoint_dir: str | os.PathLike[str],
    mode: Literal["fast", "full"] = "full",
    *,
    live: ShardedStateDict | None = None,
    process_group: Any = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Compare a checkpoint with its checksums, or with tensors in memory.

        report = distckpt.verify("checkpoints/step_100")
        assert report.is_whole, report.problems

        report = distckpt.verify("checkpoints/step_100", live={"model": model})

    Any process may call, alone; with `live`, all ranks must call together. Bytes that the operating
    system still has in memory are taken from there: damage on a disk shows only after they have
    left it.

    Args:
        checkpoint_dir: a path or fsspec URL of a checkpoint, or of a folder of safetensors files
            that other programs wrote.
        mode: "fast" looks at the marker, the manifest, the sizes of all files and their headers;
            "full" also reads every byte and compares all checksums. With fingerprints that
            `fingerprint=True` has stored, it compares the tensors with the tensors that were in
            memory; this reads them a second time.
        live: a state dict as `save` takes it, under any layout. Every rank compares the bits of all
            tensors that it holds, replicas and plain tensors included, with the checkpoint. Tensors
            that were saved for its modules and optimizers, and that no rank has, are problems: give
            `sharded_state_dict(module)` to compare a part of a module. So are tensors of which
            several ranks together have only a part. Other values, and further tensors of the
            checkpoint, are not compared; neither is the padding of a `ShardedTensor` with
            `allow_shape_mismatch`.
        process_group: the ranks that hold `live` together, see `save`.
        num_threads: number of threads that read, each with 2 MiB of memory, or 16 MiB on an object
            store. None takes 4, or 10 on an object store.
        progress: called with the bytes read so far and the bytes to read, by one thread at a time.

    Returns:
        The report. Damage does not raise: it is listed in `problems`, and so are tensors of
        `live` that differ, with their ranks.

    Raises:
        CheckpointNotFoundError: there is nothing to verify, or it was removed meanwhile.
        ValueError: `mode` is neither "fast" nor "full", or "fast" with `live`, or there is no
            thread, or no tensor in `live`.
        RankFailedError: with `live`, raised on all ranks when any rank failed.
    """
    check_choice("mode", mode, ("fast", "full"))
    if live is not None and mode == "fast":
        raise ValueError("A comparison with live tensors reads the checkpoint: mode is 'full'.")
    if num_threads is not None:
        check_count("num_threads", num_threads)
    location = locations.normalize(checkpoint_dir)
    if live is not None:
        comparison: VerifyReport = wing("memory").compare_with_memory(
            location, live, process_group=process_group, num_threads=num_threads, progress=progress
        )
        return comparison
    for attempt in read_attempts(Ranks.alone(), location):
        with attempt:
            started = time.perf_counter()
            timer = PhaseTimer("verify", 0, location)
            with timer.phase("plan"):
                stored = open_or_describe(location, attempt.marker, attempt)
            if isinstance(stored, Problem):
                report = unopened_report(location, mode, stored, time.perf_counter() - started)
            else:
                with timer.phase("read") as details:
                    checked = _check_content(stored, mode, num_threads, progress)
                    details["bytes"] = checked.num_bytes
                report = report_of_verify(stored, mode, checked, time.perf_counter() - started)
            if report.problems:
                attempt.check_is_there()
    return report


def unopened_report(location: str, mode: str, problem: Problem, seconds: float) -> VerifyReport:
    """Return the report of a checkpoint that cannot be opened."""
    problems = [problem]
    if locations.exists(locations.join(location, SEAL_NAME)):
        problems += not_in(problems, check_beside(location, None, mode, None)[0])
    return VerifyReport(location, mode, tuple(problems), True, 0, 0, 0, 0, seconds)


class Checked(NamedTuple):
    """The problems of a checkpoint, and the figures of the check."""

    problems: Sequence[Problem]
    num_bytes: int
    num_fingerprints: int = 0


def report_of_verify(
    stored: StoredCheckpoint, mode: str, checked: Checked, seconds: float
) -> VerifyReport:
    """Return the report of a checkpoint that was checked."""
    manifest = stored.manifest
    location = stored.location
    return VerifyReport(
        location,
        mode,
        problems=tuple(checked.problems),
        has_checksums=manifest.has_checksums or "seal" in (manifest.origin or {}),
        num_keys=len(manifest.keys) + len(manifest.aliases),
        num_files=len(manifest.files),
        num_chunks=len(manifest.key_ids),
        num_bytes=checked.num_bytes,
        seconds=seconds,
        num_fingerprints=checked.num_fingerprints,
        num_tensors=manifest.num_tensors,
        strays=tuple(stray_files(location, {file.name for file in manifest.files})),
    )


def open_or_describe(
    location: str, marker: dict[str, Any] | None, attempt: ReadAttempt | None = None
) -> StoredCheckpoint | Problem:
    """Open a checkpoint, or return which of its describing files is damaged."""
    file = locations.join(location, CONFIG_FNAME)
    try:
        fields = identify(location, marker)
        file = _describing_file(location, fields)
        stored = open_checkpoint(Ranks.alone(), location, marker=fields, attempt=attempt)
        # All chunks are checked, also those that other readers check only as they need them.
        _ = stored.manifest.sums
        return stored
    except CheckpointNotFoundError:
        raise
    except CheckpointingException as error:
        return Problem(getattr(error, "file", None) or file, str(error))


def _describing_file(location: str, marker: Mapping[str, Any]) -> str:
    """Return the location of the file that describes a checkpoint."""
    named = marker.get("manifest", {})
    if named is None:
        # Files of other formats describe themselves.
        return location
    if isinstance(named, dict) and is_manifest_name(named.get("name")):
        return locations.join(location, named["name"])
    return locations.join(location, CONFIG_FNAME)


def _check_content(
    stored: StoredCheckpoint, mode: str, num_threads: int | None, progress: Progress | None
) -> Checked:
    """Check the files of a checkpoint."""
    files = stored.manifest.files
    open_files = OpenFiles()
    stored = stored.with_files(open_files)
    with open_files:
        # 1. Files are there, have their sizes, and begin with the headers that were written.
        problems = check_files(stored, range(len(files)), num_threads)
        beside, num_bytes = check_beside(stored.location, stored.manifest, mode, num_threads)
        problems += not_in(problems, beside)
        num_bytes += sum(file.header_bytes for file in files)
        if mode == "fast":
            return Checked(problems, num_bytes)
        # 2. Blocks have their checksums.
        keys = keys_with_fingerprints(stored)
        tensor_bytes = sum(StoredTensor(stored, key).num_bytes for key in keys)
        block_bytes = int(stored.manifest.sums.bytes_in_files.sum())
        counter = ProgressCounter(progress, block_bytes + tensor_bytes)
        for file_ids in stored.manifest.ranges_of_files():
            blocks = list_blocks(stored, file_ids, num_threads, keeps_checksums=bool(keys))
            units = units_of_blocks(blocks, stored.location)
            bad, num_read = check_units(stored, blocks, units, num_threads, counter.add)
            problems += not_in(problems, blocks.unread)
            problems += describe_blocks(stored, blocks, bad)
            num_bytes += num_read
        if not keys or problems:
            return Checked(problems, num_bytes)
        # 3. Tensors have the fingerprints that they had in memory.
        from distckpt._operations.fingerprint import computed_fingerprints

        computed = computed_fingerprints(stored, keys, counter.add)
        problems = describe_fingerprints(stored, computed)
        return Checked(problems, num_bytes + tensor_bytes, len(keys))


def check_beside(
    location: str, manifest: Manifest | None, mode: str, num_threads: int | None
) -> tuple[list[Problem], int]:
    """Check the sealed bytes of no key, or all without a manifest.

    Return the bytes read, too.
    """
    checked: tuple[list[Problem], int] = ([], 0)
    if manifest is None or "seal" in (manifest.origin or {}):
        checked = wing("seals").check_rest(location, manifest, mode, num_threads)
    return checked


def keys_with_fingerprints(stored: StoredCheckpoint) -> list[str]:
    """Return the keys of whole tensors with stored fingerprints.

    A tensor with gaps is not whole.
    """
    manifest = stored.manifest
    numbers = manifest.figures.get(FINGERPRINTS)
    if numbers is None:
        return []
    table = manifest.all_chunks
    counts = np.bincount(table.key_ids, table.shapes.prod(axis=1), len(manifest.keys))
    are_whole = counts >= np.array([math.prod(shape) for shape in manifest.global_shapes])
    has_fingerprint = (numbers != NO_FINGERPRINT) & are_whole
    return list(itertools.compress(manifest.keys, has_fingerprint.tolist()))


def describe_fingerprints(stored: StoredCheckpoint, computed: Mapping[str, Any]) -> list[Problem]:
    """Return problems of tensors whose fingerprints differ from stored ones."""
    from distckpt._operations.fingerprint import saved_fingerprints

    saved = saved_fingerprints(stored, list(computed))
    text = "the tensor is not the one that was in memory when it was saved: fingerprint mismatch"
    problems = []
    for key in computed:
        if computed[key] != saved[key]:
            problems.append(Problem(stored.location, text, key))
    return problems
