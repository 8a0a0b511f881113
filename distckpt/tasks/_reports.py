"""Checks and comparisons in parts: `verify`, `stats` and `diff`.

They write nothing but a journal.

Their pieces are runs of the items that one process goes through in the same order, so that reports
put together from the results equal a single process's.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.messages import check_choice, check_count
from distckpt._base.threads import ProgressCounter
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._commit import posix
from distckpt._format.marker import marker_of
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._geometry.region import IntArray
from distckpt._io.block_stats import BlockStats
from distckpt._operations.file_checks import (
    BadBlock,
    Blocks,
    Problem,
    check_files,
    check_units,
    describe_blocks,
    list_blocks,
    not_in,
    units_of_blocks,
)
from distckpt._operations.fingerprint import fingerprints_of, window_number
from distckpt._operations.verify import (
    Checked,
    VerifyReport,
    describe_fingerprints,
    keys_with_fingerprints,
    open_or_describe,
    report_of_verify,
    unopened_report,
)
from distckpt._operations.windows import Window, map_some_windows, windows_of
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations
from distckpt._storage.open_files import OpenFiles
from distckpt._tools.diff import Compared, DiffReport, check_arguments, plan_diff, report_of_diff
from distckpt._tools.stats import (
    TensorStats,
    WindowStats,
    measure_window,
    stats_of_windows,
    tensors_to_measure,
)
from distckpt._tools.tensor_differences import Change, compare_window
from distckpt.tasks._facts import check_sources, facts_of, facts_of_copies
from distckpt.tasks._work import Attempt, Piece, Work, piece_bytes


def place_of(verb: str, journal: str | os.PathLike[str]) -> str:
    """Return the location next to a verb's journal in a directory."""
    return locations.join(posix.resolve(journal), verb)


_Step: TypeAlias = Callable[[StoredCheckpoint, range, Callable[[int], None]], Any]
"""The function that does a run of a check's items."""


def runs_of(sizes: Sequence[int]) -> list[range]:
    """Divide a sequence of items into runs of about a piece's size."""
    limit = piece_bytes(sum(sizes))
    runs = []
    first = 0
    filled = 0
    for number, size in enumerate(sizes):
        if filled and filled + size > limit:
            runs.append(range(first, number))
            first = number
            filled = 0
        filled += size
    if sizes:
        return [*runs, range(first, len(sizes))]
    return runs


def pieces_of(
    runs: Sequence[range], sizes: Sequence[int], name_of: Callable[[int], str]
) -> list[Piece]:
    """Return a piece for each run, named after its first item."""
    pieces = []
    for run in runs:
        pieces.append(Piece(name_of(run.start), 0, sum(sizes[run.start : run.stop])))
    return pieces


def bytes_of_window(tensors: Sequence[StoredTensor], window: Window) -> int:
    """Return the size of a window of a tensor."""
    return window.region.num_elements * ITEM_BYTES[tensors[window.tensor].dtype]


def by_tensor(
    tensors: Sequence[StoredTensor], windows: Sequence[Window], results: Iterable[Iterable[Any]]
) -> list[list[Any]]:
    """Return the results of each tensor's windows, from the results of pieces."""
    results_by_tensor: list[list[Any]] = [[] for _ in tensors]
    for window, result in zip(windows, itertools.chain.from_iterable(results), strict=True):
        results_by_tensor[window.tensor].append(result)
    return results_by_tensor


# --- verify ---------------------------------------------------------------------------------------


def verification(
    checkpoint_dir: str | os.PathLike[str],
    mode: Literal["fast", "full"] = "full",
    *,
    journal: str | os.PathLike[str],
    num_threads: int | None = None,
) -> Work:
    """Return the work of `verify` with these arguments."""
    check_choice("mode", mode, ("fast", "full"))
    if num_threads is not None:
        check_count("num_threads", num_threads)
    location = locations.normalize(checkpoint_dir)
    place = place_of("verify", journal)
    stored = open_or_describe(location, marker_of(location))
    if isinstance(stored, Problem):
        return _Unopened(location, place, mode, stored)
    return _VerifyWork(stored, place, mode, num_threads)


class _Unopened(Work):
    """A checkpoint that cannot be opened, which leaves nothing more to do."""

    verb = "verify"
    pieces = ()

    def __init__(self, location: str, place: str, mode: str, problem: Problem) -> None:
        self.place = place
        self.sources = [location]
        self.facts = {"mode": mode, "the problem": problem.message}
        self._mode = mode
        self._problem = problem

    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        return iter(())

    def report(self, results: Sequence[Any], seconds: float) -> VerifyReport:
        return unopened_report(self.sources[0], self._mode, self._problem, seconds)


class _VerifyWork(Work):
    """A verification: files first, then blocks, then tensors that have fingerprints."""

    verb = "verify"

    def __init__(
        self, stored: StoredCheckpoint, place: str, mode: str, num_threads: int | None
    ) -> None:
        self._stored = stored
        self._mode = mode
        self._num_threads = num_threads
        self.place = place
        self.sources = [stored.location]
        is_full = mode == "full"
        self._headers = [file.header_bytes for file in stored.manifest.files]
        self._ranges = stored.manifest.ranges_of_files() if is_full else []
        # Pieces follow one another within a range.
        self._blocks_in = functools.lru_cache(maxsize=1)(self._list_blocks)
        self._first_blocks = [0]
        self._units = np.zeros((0, 5), np.int64)
        self._unread: list[Problem] = []
        for number in range(len(self._ranges)):
            self._units = np.concatenate([self._units, self._units_in(number)])
            self._first_blocks.append(self._first_blocks[-1] + len(self._blocks_in(number).starts))
            self._unread += self._blocks_in(number).unread
        keys = []
        if is_full:
            keys = keys_with_fingerprints(stored)
        self._tensors = [StoredTensor(stored, key) for key in keys]
        self._windows = list(windows_of(self._tensors))
        unit_bytes: list[int] = self._units[:, 3].tolist()
        window_bytes = []
        for window in self._windows:
            window_bytes.append(bytes_of_window(self._tensors, window))
        self._of_files = runs_of([size + 1 for size in self._headers])
        self._of_units = runs_of(unit_bytes)
        self._of_windows = runs_of(window_bytes)
        self.pieces: Sequence[Piece] = [
            *pieces_of(self._of_files, self._headers, lambda _: "headers"),
            *pieces_of(self._of_units, unit_bytes, self._file_of),
            *pieces_of(self._of_windows, window_bytes, self._key_of),
        ]
        self.facts = {**facts_of({"mode": mode}, [stored]), **facts_of_copies([stored])}

    def _list_blocks(self, number: int) -> Blocks:
        """Return the blocks of a range of files."""
        file_ids = self._ranges[number]
        return list_blocks(self._stored, file_ids, self._num_threads, keeps_checksums=True)

    def _units_in(self, number: int) -> IntArray:
        """Return the units of a range of files, as rows.

        A row has the number of the range, the first block and the one behind the last, the number
        of bytes, and the file.
        """
        blocks = self._blocks_in(number)
        units = list(units_of_blocks(blocks, self._stored.location))
        firsts, stops = np.array([(u.start, u.stop) for u in units], np.int64).reshape(-1, 2).T
        sizes = blocks.stops[stops - 1] - blocks.starts[firsts]
        return np.stack([0 * sizes + number, firsts, stops, sizes, blocks.file_ids[firsts]], axis=1)

    def _file_of(self, unit: int) -> str:
        """Return the file of a unit."""
        return self._stored.manifest.files[int(self._units[unit, 4])].name

    def _key_of(self, window: int) -> str:
        return self._tensors[self._windows[window].tensor].key

    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        steps: list[tuple[_Step, range]] = [
            *((self._check_files, run) for run in self._of_files),
            *((self._check_units, run) for run in self._of_units),
            *((self._compute_numbers, run) for run in self._of_windows),
        ]
        with OpenFiles() as open_files:
            stored = self._stored.with_files(open_files)
            for number in assigned:
                step, run = steps[number]
                yield number, step(stored, run, add_bytes)

    def _check_files(
        self, stored: StoredCheckpoint, run: range, add_bytes: Callable[[int], None]
    ) -> tuple[Any, int]:
        problems = check_files(stored, run, self._num_threads)
        return list(map(vars, problems)), sum(self._headers[run.start : run.stop])

    def _check_units(
        self, stored: StoredCheckpoint, run: range, add_bytes: Callable[[int], None]
    ) -> tuple[Any, int]:
        units = self._units[run.start : run.stop].tolist()
        bad = []
        num_read = 0
        for number, here in itertools.groupby(units, operator.itemgetter(0)):
            blocks = self._blocks_in(number)
            first = self._first_blocks[number]
            ranges = [range(*unit[1:3]) for unit in here]
            results = check_units(stored, blocks, ranges, self._num_threads, add_bytes)
            bad += [BadBlock(first + block.number, block.message) for block in results[0]]
            num_read += results[1]
        return bad, num_read

    def _compute_numbers(
        self, stored: StoredCheckpoint, run: range, add_bytes: Callable[[int], None]
    ) -> tuple[list[int], str | None]:
        """Return the terms that windows add to fingerprints, and any error.

        An error of reading matters only if all blocks are whole.
        """
        windows = self._windows[run.start : run.stop]
        tensors = [tensor._replace(stored=stored) for tensor in self._tensors]
        counter = ProgressCounter(_differences(add_bytes), 0)
        try:
            numbers = map_some_windows([tensors], windows, window_number, counter)
            return [number for _, number in numbers], None
        except (CorruptCheckpointError, OSError) as error:
            return [], str(error)

    def complete(self, attempt: Attempt, results: Sequence[Any]) -> None:
        check_sources(self.facts, [self._stored])

    def report(self, results: Sequence[Any], seconds: float) -> VerifyReport:
        remaining = iter(results)
        file_results = list(itertools.islice(remaining, len(self._of_files)))
        unit_results = list(itertools.islice(remaining, len(self._of_units)))
        problems = []
        for list_of_fields, _ in file_results:
            problems += [Problem(**fields) for fields in list_of_fields]
        bad = []
        for blocks, _ in unit_results:
            bad += [BadBlock(*block) for block in blocks]
        problems += not_in(problems, self._unread)
        problems += self._describe(bad)
        num_bytes = sum(num_read for _, num_read in [*file_results, *unit_results])
        checked = Checked(problems, num_bytes)
        if self._tensors and not problems:
            num_bytes += sum(tensor.num_bytes for tensor in self._tensors)
            checked = Checked(self._compare(list(remaining)), num_bytes, len(self._tensors))
        return report_of_verify(self._stored, self._mode, checked, seconds)

    def _describe(self, bad: Sequence[BadBlock]) -> list[Problem]:
        """Describe blocks by their numbers among all, which ascend."""
        problems = []
        for number, (first, stop) in enumerate(itertools.pairwise(self._first_blocks)):
            here = []
            for n, message in bad:
                if first <= n < stop:
                    here.append(BadBlock(n - first, message))
            if here:
                problems += describe_blocks(self._stored, self._blocks_in(number), here)
        return problems

    def _compare(self, results: Sequence[tuple[list[int], str | None]]) -> list[Problem]:
        """Compare fingerprints."""
        errors = [error for _, error in results if error is not None]
        if errors:
            return [Problem(self._stored.location, error) for error in errors]
        numbers = by_tensor(
            self._tensors, self._windows, [window_numbers for window_numbers, _ in results]
        )
        return describe_fingerprints(self._stored, fingerprints_of(self._tensors, numbers))


# --- Windows of tensors ---------------------------------------------------------------------------


class _WindowWork(Work):
    """A value per window of the tensors of one checkpoint or two.

    Attributes:
        checkpoints: one for each side.
        sides: their tensors.
    """

    checkpoints: Sequence[StoredCheckpoint]
    sides: Sequence[Sequence[StoredTensor]]

    def _divide(self) -> None:
        self.sources = [stored.location for stored in self.checkpoints]
        self._windows = list(windows_of(self.sides[0]))
        sizes = []
        for w in self._windows:
            sizes.append(sum(bytes_of_window(side, w) for side in self.sides))
        self._runs = runs_of(sizes)
        self.pieces = pieces_of(self._runs, sizes, self._key_of)

    def _key_of(self, window: int) -> str:
        return self.sides[0][self._windows[window].tensor].key

    def compute(self, window: Window, *values: torch.Tensor) -> Any:
        """Return the result of a window from its values on each side."""
        raise NotImplementedError

    def encoded(self, result: Any) -> Any:
        """Return a result for JSON."""
        return result

    def decoded(self, result: Any) -> Any:
        """Return the argument of `encoded`."""
        raise NotImplementedError

    def run(
        self, attempt: Attempt, assigned: Iterable[int], add_bytes: Callable[[int], None]
    ) -> Iterator[tuple[int, Any]]:
        with reading(Ranks.alone(), self.checkpoints):
            for number in assigned:
                run = self._runs[number]
                counter = ProgressCounter(_differences(add_bytes), self.pieces[number].num_bytes)
                windows = self._windows[run.start : run.stop]
                values = map_some_windows(self.sides, windows, self.compute, counter)
                yield number, [self.encoded(result) for _, result in values]

    def complete(self, attempt: Attempt, results: Sequence[Any]) -> None:
        check_sources(self.facts, self.checkpoints)

    def decoded_by_tensor(self, results: Sequence[Any]) -> list[list[Any]]:
        """Return the results of the windows of each tensor."""
        results_by_tensor = by_tensor(self.sides[0], self._windows, results)
        decoded = []
        for tensor_results in results_by_tensor:
            decoded.append([self.decoded(result) for result in tensor_results])
        return decoded


def _differences(add_bytes: Callable[[int], None]) -> Callable[[int, int], None]:
    """Return a function that takes sums and passes on their growth."""
    before = 0

    def report(done: int, total: int) -> None:
        nonlocal before
        add_bytes(done - before)
        before = done

    return report


# --- stats ----------------------------------------------------------------------------------------


def measurement(
    checkpoint_dir: str | os.PathLike[str],
    *,
    journal: str | os.PathLike[str],
    keys: Sequence[str] | None = None,
) -> Work:
    """Return the work of `distckpt stats` with these arguments."""
    stored = open_undisturbed(Ranks.alone(), locations.normalize(checkpoint_dir))
    return _StatsWork(stored, place_of("stats", journal), keys)


class _StatsWork(_WindowWork):
    verb = "stats"

    def __init__(self, stored: StoredCheckpoint, place: str, keys: Sequence[str] | None) -> None:
        self.place = place
        self.checkpoints = [stored]
        self._tensors = tensors_to_measure(stored, keys)
        self.sides = [self._tensors]
        self.facts = {**facts_of({"keys": keys}, [stored]), **facts_of_copies([stored])}
        self._divide()

    def compute(self, window: Window, *values: torch.Tensor) -> WindowStats:
        return measure_window(self._tensors, window, *values)

    def encoded(self, result: WindowStats) -> Any:
        return [result.parts, result.sample.tolist()]

    def decoded(self, result: Any) -> WindowStats:
        parts, sample = result
        return WindowStats([BlockStats(*part) for part in parts], np.array(sample, np.float64))

    def report(self, results: Sequence[Any], seconds: float) -> list[TensorStats]:
        values = self.decoded_by_tensor(results)
        return [stats_of_windows(*pair) for pair in zip(self._tensors, values, strict=True)]


# --- diff -----------------------------------------------------------------------------------------


def comparison(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    journal: str | os.PathLike[str],
    keys: str | Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> Work:
    """Return the work of `diff` with these arguments."""
    check_arguments(keys, rename, atol, rtol)
    ranks = Ranks.alone()
    first, second = (open_undisturbed(ranks, locations.normalize(location)) for location in (a, b))
    compared = plan_diff(first, second, keys, rename or {})
    options = {"keys": keys, "rename": rename, "atol": atol, "rtol": rtol}
    return _DiffWork(compared, place_of("diff", journal), options)


class _DiffWork(_WindowWork):
    verb = "diff"

    def __init__(self, compared: Compared, place: str, options: Mapping[str, Any]) -> None:
        self.place = place
        self.checkpoints = [compared.first, compared.second]
        self._compared = compared
        self._options = options
        self.sides = compared.sides
        copies = facts_of_copies(self.checkpoints)
        self.facts = {**facts_of(options, self.checkpoints), **copies}
        self._divide()

    def compute(self, window: Window, *values: torch.Tensor) -> Change | None:
        atol = self._options["atol"]
        rtol = self._options["rtol"]
        return compare_window(window, *values, atol=atol, rtol=rtol)

    def decoded(self, result: Any) -> Change | None:
        if result is None:
            return None
        num_different, largest, first_index, spans, norms = result
        pairs = [(start, stop) for start, stop in spans]
        return Change(num_different, largest, tuple(first_index), pairs, tuple(norms))

    def report(self, results: Sequence[Any], seconds: float) -> DiffReport:
        changes = dict(zip(self._compared.comparable, self.decoded_by_tensor(results), strict=True))
        started = time.perf_counter()
        with reading(Ranks.alone(), self.checkpoints):
            return report_of_diff(
                self._compared, changes, lambda: seconds + time.perf_counter() - started
            )
