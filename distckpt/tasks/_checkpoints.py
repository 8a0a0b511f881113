"""`reshard` in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from distckpt._base.errors import CheckpointingException, CorruptCheckpointError
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import BACKEND, VERSION, open_undisturbed
from distckpt._commit import posix
from distckpt._commit.output import Output, OutputSettings
from distckpt._format.checksum import checksum
from distckpt._format.chunk_table import ChunkTable
from distckpt._format.manifest import MANIFEST_NAME
from distckpt._format.marker import (
    CONFIG_FNAME,
    CheckpointingConfig,
    config_fields,
    write_marker,
)
from distckpt._io.export import num_export_threads
from distckpt._io.save_shards import report_of_written, write_manifest
from distckpt._io.tensor_source import TensorSource
from distckpt._io.write import NewFile, WriteSettings, in_folder
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._tools.reshard import ReshardReport, report_of_reshard, tensor_file
from distckpt._tools.reshard_plan import plan_reshard, request_of
from distckpt.tasks._outputs import FileWork, overflows_of
from distckpt.tasks._work import facts_of


class ReshardWork(FileWork):
    """The work of `reshard` with these arguments."""

    verb = "reshard"

    def __init__(self, source_dir: str, checkpoint_dir: str, **arguments: Any) -> None:
        request = request_of(1, source_dir, checkpoint_dir, **arguments)
        request.check()
        if request.is_in_place:
            raise CheckpointingException(
                f"{request.source!r} cannot be rewritten in its own place in parts: parts that "
                "come late would read the new one. Choose another directory."
            )
        ranks = Ranks.alone()
        stored = open_undisturbed(ranks, request.source, verify=request.verify)
        with reading(ranks, [stored]):
            plan = plan_reshard(ranks, stored, request)
        self._plan = plan
        self._overwrite = request.overwrite
        self._files = {file.name: file for file in plan.layout.all_files}
        self.place = request.target
        self.checkpoints = [stored]
        self.source = TensorSource(plan.stored)
        num_threads = num_export_threads(request.max_inflight_bytes)
        self.write_settings = WriteSettings(num_threads=num_threads)
        sizes = {name: len(f.header) + sum(f.chunk_bytes) for name, f in self._files.items()}
        headers = {}
        if self.is_local:
            headers = {name: file.header for name, file in self._files.items()}
        self.divide(sizes, headers)
        self.settings = OutputSettings(
            num_bytes=sum(sizes.values()),
            folders=posix.SUBDIRECTORIES,
            overwrite=request.overwrite,
            has_marker=True,
            has_own_folders=True,
        )
        objects = [checksum(shard.data) for shard in plan.objects]
        more = {"objects and common state": objects, "the layout": plan.layout.digest()}
        outputs = plan.outputs.values()
        self.facts = facts_of({**request.of_all_ranks(), **more}, [stored], outputs)

    def files(self) -> list[str]:
        suffix = self.output().folder_suffix
        planned = self._plan.save.manifest
        assert planned is not None
        return [in_folder(file.name, suffix) for file in planned.chunks.files]

    def names(self) -> Collection[str]:
        return (*posix.SUBDIRECTORIES, MANIFEST_NAME, CONFIG_FNAME)

    def check(self) -> None:
        posix.check_target(self.place, self._overwrite)

    def new_file(self, output: Output, name: str, overflows: dict[str, int]) -> NewFile:
        file = self._plan.layout.objects.get(name)
        if file is None:
            file = tensor_file(self.source.stored, self._plan, self._files[name], overflows)
        return file.below(output.location, output.folder_suffix)

    def add_rest(self, results: Sequence[Any]) -> None:
        if not self.is_local:
            return
        output = self.output()
        marker, written = self._write_manifest(output, results)
        output.check_files(written)
        for name in self.damaged():
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

    def commit(self, results: Sequence[Any]) -> None:
        output = self.output()
        if self.is_local:
            output.commit(None)
            return
        output.begin_again()
        marker, written = self._write_manifest(output, results)
        output.commit(marker, written)

    def proof(self, directory: str) -> Any:
        suffix = self.output().folder_suffix
        names = [*self.files(), MANIFEST_NAME, f"manifest{suffix}.safetensors"]
        # Checksums, and parts of the manifest, are in files that only the end has named.
        folder = in_folder("objects/", suffix).rstrip("/")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            inside = locations.list_names(locations.join(directory, folder))
            names += [f"{folder}/{name}" for name in inside]
        return self.proof_of(directory, names)

    def report(self, results: Sequence[Any], seconds: float) -> ReshardReport:
        return report_of_reshard(self.place, self._plan, overflows_of(results), seconds)
