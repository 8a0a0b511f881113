"""Work with an output, which appears in one step."""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distckpt._base.memory import Bytes
from distckpt._checkpoint.consistent_read import states_of
from distckpt._commit.output import Output, OutputSettings, continued_output
from distckpt._format.marker import CONFIG_FNAME
from distckpt._geometry.units import Unit
from distckpt._io.tensor_source import TensorSource
from distckpt._io.write import Fill, NewFile, WriteSettings, write_files, write_span
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt.tasks._pieces import cut_files
from distckpt.tasks._work import AddBytes, Work


class OutputWork(Work):
    """Work whose pieces are in the files of an output.

    Attributes:
        settings: settings of the output.
        headers: headers of the files that are compared with the plan, by name.
        sizes: sizes of these.
        last_file: the file without which there is no output.
    """

    settings: OutputSettings
    headers: Mapping[str, bytes] = {}
    sizes: Mapping[str, int] = {}
    last_file = CONFIG_FNAME

    @property
    def is_local(self) -> bool:
        """Whether the output is not on an object store."""
        return locations.is_local(self.place)

    def output(self) -> Output:
        """Return the output, in its place before it appears."""
        return continued_output(self.place, self.nonce, self.journal.location, self.settings)

    def directory(self) -> str:
        return self.output().location

    def is_begun(self) -> bool:
        return not self.is_local or locations.isdir(self.directory())

    def begin(self, is_new: bool) -> None:
        if self.is_local:
            output = self.output()
            output.begin_again()
            if is_new:
                output.check_space(self.settings.num_bytes)

    def damaged(self) -> list[str]:
        directory = self.directory()
        damaged = []
        for name, header in self.headers.items():
            path = locations.join(directory, name)
            with contextlib.suppress(FileNotFoundError):
                is_longer = locations.file_size(path) > self.sizes[name]
                if is_longer or locations.read_range(path, 0, len(header)) != header:
                    damaged.append(name)
        return damaged

    def complete(self, results: Sequence[Any]) -> None:
        super().complete(results)
        if self.is_local:
            # Something else may have come to the place meanwhile.
            self.check()
            # Remains of an interrupted completion. Another process may be about to let the rest
            # appear.
            directory = self.directory()
            remaining = self.names()
            for name in locations.list_names(directory):
                if name not in remaining:
                    locations.remove_tree(locations.join(directory, name))
        self.add_rest(results)

    def names(self) -> Collection[str]:
        """Return the names in the directory of the complete output."""
        return self.files()

    @abstractmethod
    def add_rest(self, results: Sequence[Any]) -> None:
        """Check the files of the pieces, and write the others."""

    def proof(self, directory: str) -> Any:
        return self.proof_of(directory, self.files())

    def proof_of(self, directory: str, names: Iterable[str]) -> Any:
        """Return a proof that identifies the complete output in a directory.

        It is the time of its last file, and the sizes of all files that are there; None without
        its last file.
        """
        paths = {}
        for name in [*names, self.last_file]:
            paths[locations.join(directory, *name.split("/"))] = name
        states = states_of(list(paths), locations.listed_states(directory))
        last = states.get(locations.join(directory, self.last_file))
        if last is None:
            return None
        sizes = sorted((paths[path], state.num_bytes) for path, state in states.items())
        return {"modified": last.modified, "sizes": sizes}


class FileWork(OutputWork):
    """Work whose pieces are ranges of planned files.

    Attributes:
        source: values of the tensors to write.
        write_settings: settings for writing.
    """

    source: TensorSource
    write_settings: WriteSettings

    def divide(self, sizes: Mapping[str, int], headers: Mapping[str, bytes]) -> None:
        """Divide files into pieces, given the sizes and headers of all."""
        self.sizes = sizes
        self.headers = headers
        self.pieces = cut_files(sizes, divides=self.is_local)

    @abstractmethod
    def new_file(self, output: Output, name: str, overflows: dict[str, int]) -> NewFile:
        """Describe a file; `overflows` is filled while it is written."""

    def use(self, files: OpenFiles) -> None:
        self.source = self.source.with_files(files)

    def do(self, number: int, add_bytes: AddBytes) -> dict[str, Any]:
        """Write a piece; return its checksums, and the overflows in it by tensor."""
        piece = self.pieces[number]
        output = self.output()
        settings = replace(self.write_settings, progress=add_bytes)
        overflows: dict[str, int] = {}
        new_file = self.new_file(output, piece.name, overflows)
        if self.is_local:
            uncounted = self.new_file(output, piece.name, {}).fill
            counted = _counting_from(new_file, piece.start, uncounted)
            checksums = write_span(counted, piece.start, piece.stop, settings)
            output.sync()
        else:
            checksums = write_files([new_file], settings)
        return {"checksums": checksums.tolist(), "overflows": overflows}


def _counting_from(file: NewFile, start: int, uncounted: Fill) -> NewFile:
    """Return a file that leaves some of its units uncounted.

    Units that begin before `start` are filled by `uncounted`, which counts no overflows: another
    process writes and counts them.
    """
    starts = list(itertools.accumulate(file.chunk_bytes, initial=len(file.header)))

    def fill(unit: Unit, memory_of_thread: Bytes) -> list[Bytes]:
        if unit and starts[unit[0].chunk] + unit[0].start < start:
            return uncounted(unit, memory_of_thread)
        return file.fill(unit, memory_of_thread)

    return file._replace(fill=fill)


def overflows_of(results: Sequence[Any]) -> dict[str, int]:
    """Return the overflows of all pieces together, by tensor."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result["overflows"])
    return dict(total)
