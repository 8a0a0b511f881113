"""Conversions to `torch_dist` in parts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from distckpt._checkpoint.opening import open_undisturbed
from distckpt._commit import posix
from distckpt._commit.output import OutputSettings
from distckpt._foreign.torch_dist.reader import COMMON_NAME, METADATA_NAME
from distckpt._format.marker import CONFIG_FNAME
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt.tasks._outputs import OutputWork
from distckpt.tasks._pieces import Piece, runs_of
from distckpt.tasks._work import AddBytes, facts_of
from distckpt.torch_dist._export import (
    check_place,
    chunks_to_write,
    common_state_to_write,
    write_chunks,
    write_metadata,
)

_OTHER_FILES = (COMMON_NAME, METADATA_NAME, CONFIG_FNAME)


class TorchDistWork(OutputWork):
    """The work of `torch_dist.export` with these arguments.

    Its pieces are files of whole chunks.
    """

    verb = "convert"

    def __init__(self, checkpoint_dir: str, output_dir: str, *, overwrite: bool = False) -> None:
        self.place = posix.resolve(output_dir)
        check_place(checkpoint_dir, self.place)
        stored = open_undisturbed(Ranks.alone(), checkpoint_dir)
        self._stored = stored
        self.checkpoints = [stored]
        chunks = chunks_to_write(stored)
        sizes = stored.manifest.num_bytes[chunks].tolist()
        self._chunks = []
        pieces = []
        # Without chunks, an empty file.
        for number, run in enumerate(runs_of(sizes) or [range(0)]):
            self._chunks.append(chunks[run.start : run.stop])
            size = sum(sizes[run.start : run.stop])
            pieces.append(Piece(f"__{number}_0.distcp", 0, size))
        self.pieces = pieces
        self.settings = OutputSettings(num_bytes=sum(sizes), overwrite=overwrite)
        self.facts = facts_of({"overwrite": overwrite, "format": "torch_dist"}, [stored])

    @functools.cached_property
    def _common(self) -> dict[Any, Any]:
        return common_state_to_write(self._stored)

    def files(self) -> list[str]:
        return [*(piece.name for piece in self.pieces), *_OTHER_FILES]

    def check(self) -> None:
        posix.check_target(self.place, self.settings.overwrite)
        # Before hours of work.
        _ = self._common

    def do(self, number: int, add_bytes: AddBytes) -> list[tuple[int, str, int, int]]:
        directory = self.directory()
        name = self.pieces[number].name
        # Under another name until it is whole: another process may do the same.
        path = locations.temporary_beside(locations.join(directory, name))
        temporary = locations.split(path)[1]
        written = write_chunks(self._stored, self._chunks[number], directory, temporary, None)
        locations.replace_file(path, locations.join(directory, name))
        add_bytes(self.pieces[number].num_bytes)
        return [(chunk, name, start, size) for chunk, _, start, size in written]

    def add_rest(self, results: Sequence[Any]) -> None:
        write_metadata(self._stored, self._common, results, self.directory())
        ends = []
        for written in results:
            ends.append(max((start + size for _, _, start, size in written), default=0))
        names = [piece.name for piece in self.pieces]
        self.output().check_files(list(zip(names, ends, strict=True)))

    def commit(self, results: Sequence[Any]) -> None:
        self.output().commit(None)

    def report(self, results: Sequence[Any], seconds: float) -> None:
        return None
