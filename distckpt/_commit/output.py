"""An output that appears in one step: a checkpoint, or an export.

    with new_output(ranks, target, settings) as output:
        with output.being_written(), ranks.phase("save"):
            ...  # files below output.location
            output.sync()
        with ranks.phase("commit", decision=True):
            if ranks.is_coordinator:
                output.commit(marker, files)

It is written into a hidden directory beside the target, which is renamed, or on an object store in
its final place, where nobody sees it before its marker (or index) is there. When the body raises,
what was written is removed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._commit import posix
from distckpt._commit.conditional_put import Transaction, folder_suffix
from distckpt._commit.save_directory import (
    SaveDirectory,
    check_files,
    choose_directory,
    make_directory,
)
from distckpt._format.marker import write_marker
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """How an output is written.

    Attributes:
        num_bytes: how much this rank is going to write.
        folders: that are made in it first.
        overwrite: replace a complete checkpoint that is there.
        durable: everything is on disk before the output appears.
        has_marker: whether a marker makes it a checkpoint. On an object store that is put last, on
            a condition, see `conditional_put`.
        has_own_folders: whether the names of its folders end in `Output.folder_suffix`.
        files: what ranks write into its final place on an object store, without a marker: removed
            when the output is given up.
    """

    num_bytes: int = 0
    folders: Sequence[str] = ()
    overwrite: bool = False
    durable: bool = True
    has_marker: bool = False
    has_own_folders: bool = False
    files: Sequence[str] = ()


class Output:
    """An output that is being written, see `new_output`."""

    def __init__(
        self,
        ranks: Ranks,
        place: SaveDirectory,
        settings: OutputSettings,
        held: contextlib.ExitStack,
    ) -> None:
        self._ranks = ranks
        self._place = place
        self._settings = settings
        self._held = held
        self._transaction: Transaction | None = None

    @property
    def location(self) -> str:
        """Return where files are written before the output appears."""
        return self._place.location

    @property
    def folder_suffix(self) -> str:
        """Return how the names of its folders end, which tell saves to an object store apart."""
        return "" if self._is_hidden else folder_suffix(self._place.nonce)

    @property
    def _is_hidden(self) -> bool:
        return locations.is_local(self._place.target)

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Make the place of the output; the body writes into it, in a phase of its own.

        Collective operation: all ranks must call it. If another program takes away what the ranks
        write, the error says so.
        """
        settings = self._settings
        make_directory(self._ranks, self._place, self._held, settings.folders, settings.durable)
        if settings.has_marker and not self._is_hidden:
            with self._ranks.phase("begin on the object store", decision=True):
                self._begin()
        try:
            yield
        except (FileNotFoundError, RankFailedError) as error:
            if self._ranks.are_in_step_after(error) and _is_of_missing_files(error):
                self._name_winner(error)
            raise

    def _begin(self) -> None:
        if self._ranks.is_coordinator:
            settings = self._settings
            self._transaction = Transaction(
                self._place.target,
                self._place.nonce,
                settings.overwrite,
                settings.has_own_folders,
            )

    def _name_winner(self, error: BaseException) -> None:
        """Report uploads that are gone as overtaken: a save that wins aborts those of the others.
        Report likewise that the directory is gone.
        """
        with self._ranks.phase("look for another program's save", decision=True):
            if self._transaction is not None:
                self._transaction.check_not_overtaken()
            elif self._ranks.is_coordinator and not locations.exists(self.location):
                raise CheckpointingException(
                    f"{self.location!r} was removed by another program while this save was written "
                    "into it: nothing was committed. Keep programs that clean up away from hidden "
                    "directories there, and save again."
                ) from error

    def sync(self) -> None:
        """Make the names of this rank's files durable, if the output is to be."""
        if self._settings.durable:
            posix.sync(self.location, self._settings.folders)

    def commit(
        self, marker: Mapping[str, Any] | None, files: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Let a checkpoint appear; for the coordinator, as the last step.

        Args:
            marker: its fields; None where the marker was written already.
            files: names and sizes of its files, which must all be there.

        Raises:
            CheckpointExistsError: another program was faster, or what is there cannot be replaced.
            CheckpointingException: a file is missing, or has another size.
        """
        if self._transaction is not None:
            self._transaction.commit(marker or {}, [name for name, _ in files])
            return
        durable = self._settings.durable
        self.check_files(files)
        if marker is not None:
            write_marker(self.location, marker, durable)
        posix.commit(self.location, self._place.target, self._settings.overwrite, durable)

    def check_files(self, files: Sequence[tuple[str, int]]) -> None:
        """Check that the files of all ranks are there, given as names and sizes; for the
        coordinator.

        Raises:
            CheckpointingException: a file is missing, or has another size.
        """
        check_files(self._ranks, self.location, files)

    def commit_beside_others(self, is_replaced: Callable[[str], bool]) -> None:
        """Let an export appear, together with the files that are there already; for the
        coordinator, as the last step.

        Those stay, unless the export has one of the same name, or the name is one that it replaces.
        """
        posix.commit_beside_others(self.location, self._place.target, is_replaced)

    def abandon(self) -> None:
        """Remove what was written; for the coordinator."""
        if self._transaction is not None:
            self._transaction.abandon()
        elif self._is_hidden:
            posix.abandon(self.location)
        else:
            for name in self._settings.files:
                locations.remove_file(locations.join(self.location, name))


@contextlib.contextmanager
def new_output(ranks: Ranks, target: str, settings: OutputSettings) -> Iterator[Output]:
    """Choose where an output is written; nothing is made yet. It is given up when the body raises.

    Collective operation: all ranks must call it. `target` is what `posix.resolve` has returned.
    """
    place = choose_directory(ranks, target, settings.num_bytes)
    with contextlib.ExitStack() as held:
        output = Output(ranks, place, settings, held)
        try:
            yield output
        except BaseException:
            if ranks.is_coordinator:
                output.abandon()
            raise


def _is_of_missing_files(error: BaseException) -> bool:
    failures = error.failures.values() if isinstance(error, RankFailedError) else [error]
    return all(isinstance(failure, FileNotFoundError) for failure in failures)
