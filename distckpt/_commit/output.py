"""An output that appears in one step: a checkpoint, or an export.

    with new_output(ranks, target, settings) as output:
        with output.being_written(), ranks.phase("save"):
            output.check_is_seen()
            ...  # files below output.location
            output.sync()
        with ranks.phase("commit", decision=True):
            if ranks.is_coordinator:
                output.commit(marker, files)

It is written into a hidden directory next to the target, which is renamed, or on an object store in
its final place, where no one reads it before its marker (or index) is there. When the body raises,
its files are removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distckpt._base.errors import CheckpointingException, RankFailedError
from distckpt._base.threads import run_threads
from distckpt._commit import hidden_directories, posix
from distckpt._commit.target import prepare_to_replace
from distckpt._format.marker import write_marker
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations

if TYPE_CHECKING:
    from distckpt._commit.conditional_put import Transaction

SECONDS_TO_APPEAR = 10.0
"""Longest delay until one node sees another one's files on network storage. Ranks with a shorter
timeout give up earlier, before the other ranks lose contact with the one that looks.
"""
_FILES_PER_BATCH = 64
_MAX_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Settings for writing an output.

    Attributes:
        num_bytes: number of bytes that this rank is going to write.
        folders: folders that are made in it first.
        overwrite: replace a complete checkpoint that is there.
        durable: everything is on disk before the output appears.
        has_marker: whether a marker makes it a checkpoint. On an object store that is put last, on
            a condition, see `conditional_put`.
        has_own_folders: whether the names of its folders end in `Output.folder_suffix`.
        files: files that ranks write into its final place on an object store, without a marker:
            removed when the output is given up.
    """

    num_bytes: int = 0
    folders: Sequence[str] = ()
    overwrite: bool = False
    durable: bool = True
    has_marker: bool = False
    has_own_folders: bool = False
    files: Sequence[str] = ()


_DEFAULTS = OutputSettings()


@dataclass(eq=False)
class Output:
    """An output that is being written, see `new_output`.

    Attributes:
        target: a result of `posix.resolve`; it may be set later, as the settings may, before the
            place of the output is made.
    """

    _ranks: Ranks
    _locks: contextlib.ExitStack
    target: str
    settings: OutputSettings
    _place: SaveDirectory | None = None
    _transaction: Transaction | None = None
    _is_committing: bool = False

    @property
    def location(self) -> str:
        """Return the place of files before the output appears."""
        return self._made.location

    @property
    def folder_suffix(self) -> str:
        """Return the suffix of its folders.

        It tells saves to an object store apart.
        """
        if self._made.is_hidden:
            return ""
        return f"-{self._made.nonce}"

    @property
    def _made(self) -> SaveDirectory:
        assert self._place is not None, "it is not made yet"
        return self._place

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Make the place of the output, unless it is there.

        The body writes into it, in a phase of its own.

        Collective operation: all ranks must call it. If another program takes the files of the
        ranks away, the error says so.
        """
        if self._place is None:
            with self._ranks.telling("create directories") as told:
                told.payload = self.settings.num_bytes.to_bytes(8, "little")
            with self._ranks.answering(told, "create directories"):
                if self._ranks.is_coordinator:
                    sizes = [int.from_bytes(size, "little") for size in told.payloads]
                    told.answer = self.make(sum(sizes))
            self.enter(told.answer)
        try:
            yield
        except (FileNotFoundError, RankFailedError) as error:
            if self._ranks.are_in_step_after(error) and _is_of_missing_files(error):
                self._name_winner(error)
            raise

    def make(self, num_bytes: int) -> bytes:
        """Make the place of the output, where all ranks write `num_bytes`.

        It is for the coordinator. Return the argument for `enter` of all ranks. Nothing but
        directories has been written when this raises, which it also does when there is no space for
        that.
        """
        target = self.target
        settings = self.settings
        is_local = locations.is_local(target)
        nonce = hidden_directories.new_nonce(target) if is_local else secrets.token_hex(8)
        description = [nonce, os.uname().nodename, target]
        place = self._place = _place_of(target, *description)
        if place.is_hidden:
            _make_hidden(place, self._locks, settings.folders, settings.durable)
            self.check_space(num_bytes)
        elif settings.has_marker:
            self._begin()
        return json.dumps(description).encode()

    def enter(self, made: bytes) -> None:
        """Note the place of the output, which the coordinator has made."""
        if self._place is None:
            self._place = _place_of(self.target, *json.loads(made))

    def check_is_seen(self) -> None:
        """Check that this rank sees the coordinator's place of the output."""
        if self._ranks.size == 1:
            return
        place = self._made
        if place.is_hidden and locations.is_local(place.first_target):
            made = place.inner(self.settings.folders) or [place.location]
            seconds = _seconds_to_appear(self._ranks)
            is_same = _wait_until(lambda: all(map(locations.isdir, made)), seconds)
        else:
            is_same = place.target == place.first_target
        if not is_same:
            raise CheckpointingException(
                f"{place.target!r} on rank {self._ranks.rank} (host {os.uname().nodename!r}) is "
                f"not the place that rank 0 (host {place.first_host!r}) calls "
                f"{place.first_target!r}: what one writes, the other does not see. Give all ranks "
                "the same location, on storage that all nodes share."
            )

    def begin_again(self) -> None:
        """Make the directory of a continued output, unless it is there.

        On an object store, begin the commit of a checkpoint instead.
        """
        place = self._made
        if not place.is_hidden:
            if self.settings.has_marker:
                self._begin()
            return
        for name in self.settings.folders or [""]:
            locations.make_directories(locations.join(place.location, name).rstrip("/"))
        if locations.isdir(place.target):
            locations.take_over_access(place.target, place.location)

    def check_space(self, num_bytes: int) -> None:
        """Raise ENOSPC when there is certainly no room for so many bytes."""
        if not self._made.is_hidden:
            return
        try:
            disk = os.statvfs(self.location)
        except OSError:
            return
        # The last blocks are for root. Some network file systems know no numbers, and report 0.
        free = disk.f_frsize * (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail)
        if disk.f_blocks and 0 < free < num_bytes:
            numbers = (
                f"{num_bytes} bytes are to be written, and host {os.uname().nodename!r} reports "
                f"{free} free"
            )
            text = f"{os.strerror(errno.ENOSPC)}: {numbers}"
            raise OSError(errno.ENOSPC, text, self._made.target)

    def _begin(self) -> None:
        settings = self.settings
        # Imported when it is needed: most programs save to local paths only.
        from distckpt._commit.conditional_put import Transaction

        self._transaction = Transaction(
            self.target,
            self._made.nonce,
            settings.overwrite,
            settings.has_own_folders,
        )

    def _name_winner(self, error: BaseException) -> None:
        """Report missing uploads as overtaken.

        A save that wins aborts the uploads of other saves. Report likewise that the directory is
        missing.
        """
        with self._ranks.phase("look for another program's save", decision=True):
            if self._is_committing:
                return
            if self._transaction is not None:
                self._transaction.check_not_overtaken()
                return
            is_looking = self._ranks.is_coordinator and self._made.is_hidden
            if is_looking and not locations.exists(self.location):
                raise CheckpointingException(
                    f"{self.location!r} was removed or renamed by another program while this save "
                    "was written into it: nothing was committed. Leave hidden directories there, "
                    "and those that hold them, alone during a save, and save again."
                ) from error

    def sync(self) -> None:
        """Make the names of this rank's files durable, if settings say so."""
        place = self._made
        if self.settings.durable and place.is_hidden:
            for directory in (*place.inner(self.settings.folders), place.location):
                locations.sync_directory(directory)

    def commit(
        self, marker: Mapping[str, Any] | None, files: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Let a checkpoint appear; for the coordinator, as the last step.

        Args:
            marker: its fields; None where the marker was written already.
            files: names and sizes of its files, which must all be there.

        Raises:
            CheckpointExistsError: another program was faster, or the directory there cannot be
                replaced.
            CheckpointingException: a file is missing, or has another size.
        """
        self._is_committing = True
        if self._transaction is not None:
            self._transaction.commit(marker or {}, [name for name, _ in files])
            return
        durable = self.settings.durable
        self.check_files(files)
        if marker is not None:
            write_marker(self.location, marker, durable)
        if self._made.is_hidden:
            posix.commit(self.location, self.target, self.settings.overwrite, durable)

    def check_files(self, files: Sequence[tuple[str, int]]) -> None:
        """Check that all files are there with their sizes; for the coordinator.

        Raises:
            CheckpointingException: a file is missing, or has another size.
        """
        directory = self.location
        wrong = dict(files)
        sizes: dict[str, int | None] = {}

        def look_at(names: Sequence[str]) -> None:
            for name in names:
                sizes[name] = _size_of(os.path.join(directory, name))

        def are_right() -> bool:
            names = list(wrong)
            starts = range(0, len(names), _FILES_PER_BATCH)
            run_threads(look_at, [names[i : i + _FILES_PER_BATCH] for i in starts], _MAX_THREADS)
            for name in names:
                if wrong[name] == sizes[name]:
                    del wrong[name]
            return not wrong

        # A single process has written all of them itself, and object stores list all their files.
        is_waiting = self._ranks.size > 1 and locations.is_local(directory)
        seconds = _seconds_to_appear(self._ranks) if is_waiting else 0.0
        if _wait_until(are_right, seconds):
            return
        name, size = next(iter(wrong.items()))
        state = f"has {sizes[name]} bytes instead of {size}"
        if sizes[name] is None:
            state = "is missing"
        more = f" (and {len(wrong) - 1} more files)" if len(wrong) > 1 else ""
        raise CheckpointingException(
            f"{os.path.join(directory, name)!r} was written and {state} as rank 0 (host "
            f"{os.uname().nodename!r}) sees it{more}: another program removes or changes files "
            "there, or not all ranks share this storage. Nothing was committed."
        )

    def commit_beside_others(self, is_replaced: Callable[[str], bool]) -> None:
        """Let an export appear, together with the files already there.

        It is for the coordinator, as the last step. Those files stay, unless the export has one of
        the same name, or the name is one that it replaces.
        """
        if self._made.is_hidden:
            posix.commit_beside_others(self.location, self.target, is_replaced)

    def abandon(self) -> None:
        """Remove the output's files; for the coordinator."""
        if self._place is None:
            return
        if self._transaction is not None:
            self._transaction.abandon()
        elif self._place.is_hidden:
            locations.remove_tree(self.location)
        else:
            for name in self.settings.files:
                path = locations.join(self.location, name)
                with locations.only_logging(f"remove {path}, which is not complete"):
                    locations.remove_file(path)


@contextlib.contextmanager
def new_output(
    ranks: Ranks, target: str = "", settings: OutputSettings = _DEFAULTS
) -> Iterator[Output]:
    """Return an output of which nothing is made yet.

    It is given up when the body raises. See `Output` for the arguments.
    """
    with contextlib.ExitStack() as locks:
        output = Output(ranks, locks, target, settings)
        try:
            yield output
        except BaseException:
            if ranks.is_coordinator:
                output.abandon()
            raise


def continued_output(target: str, nonce: str, journal: str, settings: OutputSettings) -> Output:
    """Return an output that several processes write independently.

    It stays when they end; nothing is made yet. On a local disk its directory is in `journal`, a
    directory next to the target. Its name is always the same for a nonce, which must belong to one
    content.
    """
    is_local = locations.is_local(target)
    name = locations.split(target)[1]
    directory = target
    if is_local:
        directory = hidden_directories.beside(locations.join(journal, name), "tmp", nonce)
    place = SaveDirectory(nonce, directory, is_local, target, os.uname().nodename, target)
    return Output(Ranks.alone(), contextlib.ExitStack(), target, settings, place)


def _is_of_missing_files(error: BaseException) -> bool:
    failures: Iterable[BaseException] = [error]
    if isinstance(error, RankFailedError):
        failures = error.failures.values()
    return all(isinstance(failure, FileNotFoundError) for failure in failures)


# --- The place that is written into ---------------------------------------------------------------
#
# Ranks that share no storage would each leave their files where no other rank finds them. The name
# of the directory ends in a random nonce, so any rank that finds it under its own path has found
# the directory of rank 0, whatever that path is: nodes may mount one file system in different
# places.


@dataclass(frozen=True)
class SaveDirectory:
    """The place that all ranks of a save write into.

    Paths are the ones of this rank.

    Attributes:
        nonce: nonce of the save.
        location: path of the directory; the target itself on an object store.
        is_hidden: whether it is next to the target, on a local disk.
        target: path where the save is to appear.
        first_host: host of rank 0.
        first_target: path of the target on rank 0.
    """

    nonce: str
    location: str
    is_hidden: bool
    target: str
    first_host: str
    first_target: str

    def inner(self, folders: Sequence[str]) -> list[str]:
        """Return the paths of folders in it."""
        return [os.path.join(self.location, name) for name in folders]


def _place_of(target: str, nonce: str, first_host: str, first_target: str) -> SaveDirectory:
    is_local = locations.is_local(target)
    place = hidden_directories.beside(target, "tmp", nonce) if is_local else target
    return SaveDirectory(nonce, place, is_local, target, first_host, first_target)


def _make_hidden(
    place: SaveDirectory, locks: contextlib.ExitStack, folders: Sequence[str], durable: bool
) -> None:
    """Make the directory and its parents.

    They are on disk on return if durable.
    """
    _remove_empty_leftovers(place.target)
    try:
        locks.enter_context(hidden_directories.locked_directory(place.location, durable))
        if locations.isdir(place.target):
            prepare_to_replace(place.target, place.location)
        for folder in place.inner(folders):
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        if not str(error.filename).startswith(place.location):
            raise
        text = f"{error.strerror}: a save makes a directory beside its target"
        raise OSError(error.errno, text, place.target) from error


def _remove_empty_leftovers(target: str) -> None:
    """Remove directories of ended saves of this target without files.

    Network file systems keep a removed file as long as a reader has it open, and its directory.
    """
    for path in hidden_directories.left_beside(target, "tmp"):
        with hidden_directories.claimed(path) as has_ended:
            if has_ended and not any(files for _, _, files in os.walk(path)):
                locations.remove_tree(path)


def _seconds_to_appear(ranks: Ranks) -> float:
    return min(SECONDS_TO_APPEAR, ranks.timeout / 3)


def _size_of(path: str) -> int | None:
    """Return the size of a file, None if there is no file."""
    try:
        return locations.file_size(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINVAL):
            raise
        return None


def _wait_until(is_true: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    delay = 0.01
    while not is_true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(delay)
        delay = min(2 * delay, 0.5)
    return True
