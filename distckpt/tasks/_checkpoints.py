"""`reshard` in parts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import BACKEND, VERSION, open_undisturbed
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings, continued_output
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import MANIFEST_NAME
from distckpt._format.marker import (
    CONFIG_FNAME,
    CheckpointingConfig,
    config_fields,
    write_marker,
)
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._io.export import num_export_threads
from distckpt._io.save_shards import report_of_written, write_manifest
from distckpt._io.write import NewFile, WriteSettings, in_folder, write_files, write_span
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt._tools.reshard import ReshardReport, report_of_reshard, tensor_file
from distckpt._tools.reshard_plan import (
    ReshardPlan,
    ReshardRequest,
    check_request,
    options_of,
    plan_reshard,
)
from distckpt.tasks._exports import add_up, counting_from, other_files, proof_of, remove_others
from distckpt.tasks._facts import check_sources, facts_of
from distckpt.tasks._work import Attempt, Piece, Work, cut_files


def resharding(
    source_dir: str | os.PathLike[str], checkpoint_dir: str | os.PathLike[str], **options: Any
) -> Work:
    """Plan the work of a call of `reshard` with these arguments."""
    given = options_of(1, **options)
    request = check_request(source_dir, checkpoint_dir, given)
    if request.is_in_place:
        raise CheckpointingException(
            f"{request.source!r} cannot be rewritten in its own place in parts: parts that come "
            "late would read the new one. Choose another directory."
        )
    ranks = Ranks.alone()
    stored = open_undisturbed(ranks, request.source, verify=given.verify)
    with reading(ranks, [stored]):
        plan = plan_reshard(ranks, stored, request)
    return _ReshardWork(stored, request, plan)


class _ReshardWork(Work):
    """A planned checkpoint; `stored` is its source."""

    verb = "reshard"

    def __init__(
        self, stored: StoredCheckpoint, request: ReshardRequest, plan: ReshardPlan
    ) -> None:
        self._stored = stored
        self._plan = plan
        self._options = request.options
        self.place = request.target
        self.sources = [stored.location]
        self._is_local = locations.is_local(request.target)
        self._files = {file.name: file for file in plan.layout.all_files}
        self._sizes = {name: len(f.header) + sum(f.chunk_bytes) for name, f in self._files.items()}
        self._num_bytes = sum(self._sizes.values())
        self.pieces: Sequence[Piece] = cut_files(self._sizes, divides=self._is_local)
        objects = [checksum(shard.data) for shard in plan.content.objects]
        more = {"objects and common state": objects, "the layout": plan.layout.digest()}
        facts = {**self._options.of_all_ranks(), **more}
        self.facts = facts_of(facts, [stored], plan.content.outputs)

    def _output(self, attempt: Attempt) -> Output:
        settings = OutputSettings(
            num_bytes=self._num_bytes,
            folders=posix.SUBDIRECTORIES,
            overwrite=self._options.overwrite,
            has_marker=True,
            has_own_folders=True,
        )
        return continued_output(self.place, attempt.nonce, attempt.journal, settings)

    def files(self, attempt: Attempt) -> list[str]:
        suffix = self._output(attempt).folder_suffix
        planned = self._plan.save.manifest
        assert planned is not None
        return [in_folder(file.name, suffix) for file in planned.chunks.files]

    def damaged(self, attempt: Attempt) -> list[str]:
        if not self._is_local:
            return []
        headers = {name: file.header for name, file in self._files.items()}
        return other_files(self.directory(attempt), self._sizes, headers)

    def check(self) -> None:
        posix.check_target(self.place, self._options.overwrite)

    def begin(self, attempt: Attempt, is_new: bool) -> None:
        if self._is_local:
            output = self._output(attempt)
            output.begin_again()
            if is_new:
                output.check_space()

    def is_begun(self, attempt: Attempt) -> bool:
        return not self._is_local or locations.isdir(self.directory(attempt))

    def directory(self, attempt: Attempt) -> str:
        return self._output(attempt).location

    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        output = self._output(attempt)
        num_threads = num_export_threads(self._options.max_inflight_bytes)
        settings = WriteSettings(num_threads=num_threads, progress=add_bytes)
        with (
            reading(Ranks.alone(), [self._stored]),
            OpenFiles.for_many_reads() as open_files,
        ):
            stored = self._plan.stored.with_files(open_files)
            for number in assigned:
                yield number, self._write(stored, output, self.pieces[number], settings)

    def _write(
        self, stored: StoredCheckpoint, output: Output, piece: Piece, settings: WriteSettings
    ) -> dict[str, Any]:
        """Write a piece; return its checksums, and the overflows in it by tensor."""
        overflows: dict[str, int] = {}
        file = self._new_file(stored, piece.name, overflows)
        placed = file.below(output.location, output.folder_suffix)
        if self._is_local:
            uncounted = self._new_file(stored, piece.name, {}).fill
            counted = counting_from(placed, piece.start, uncounted)
            checksums = write_span(counted, piece.start, piece.stop, settings)
            output.sync()
        else:
            checksums = write_files([placed], settings)
        return {"checksums": checksums.tolist(), "overflows": overflows}

    def _new_file(self, stored: StoredCheckpoint, name: str, overflows: dict[str, int]) -> NewFile:
        of_objects = self._plan.layout.objects.get(name)
        return of_objects or tensor_file(stored, self._plan, self._files[name], overflows)

    def complete(self, attempt: Attempt, results: Sequence[Any]) -> None:
        check_sources(self.facts, [self._stored])
        if self._is_local:
            # Something else may have come to the place meanwhile.
            self.check()
            output = self._output(attempt)
            names = (*posix.SUBDIRECTORIES, MANIFEST_NAME, CONFIG_FNAME)
            remove_others(output.location, names)
            marker, written = self._write_manifest(output, results)
            output.check_files(written)
            for name in self.damaged(attempt):
                path = locations.join(output.location, name)
                raise CorruptCheckpointError(
                    f"{path!r} was changed while the checkpoint was written: its header is not the "
                    "planned one."
                )
            write_marker(output.location, marker, durable=True)

    def _write_manifest(
        self, output: Output, results: Sequence[Any]
    ) -> tuple[dict[str, Any], list[tuple[str, int]]]:
        """Write the manifest; return the fields of the marker, and names and sizes of all files."""
        checksums: list[int] = []
        for result in results:
            checksums += result["checksums"]
        plan = self._plan.save
        suffix = output.folder_suffix
        assert plan.manifest is not None
        report = report_of_written(
            output.location, plan, ChunkTable.empty(), np.array(checksums, np.uint64), suffix
        )
        fields, files = write_manifest(
            output.location, plan.manifest, [report], suffix, durable=True
        )
        config = CheckpointingConfig(BACKEND, VERSION)
        return {**self._plan.notes, **fields, **config_fields(config)}, files

    def commit(self, attempt: Attempt, results: Sequence[Any]) -> None:
        output = self._output(attempt)
        if self._is_local:
            output.commit(None)
            return
        output.begin_again()
        marker, written = self._write_manifest(output, results)
        output.commit(marker, written)

    def proof(self, attempt: Attempt, directory: str) -> Any:
        suffix = self._output(attempt).folder_suffix
        names = [*self.files(attempt), MANIFEST_NAME, f"manifest{suffix}.safetensors"]
        # Checksums, and parts of the manifest, are in files that only the end has named.
        folder = in_folder("objects/", suffix).rstrip("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            inside = locations.list_names(locations.join(directory, folder))
            names += [f"{folder}/{name}" for name in inside]
        return proof_of(directory, CONFIG_FNAME, names)

    def report(self, results: Sequence[Any], seconds: float) -> ReshardReport:
        overflows = add_up(result["overflows"] for result in results)
        return report_of_reshard(self.place, self._plan, overflows, seconds)
