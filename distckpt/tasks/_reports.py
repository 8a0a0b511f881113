"""Checks and comparisons in parts: `verify`, `stats` and `diff`.

They write nothing but a journal.

Their pieces are runs of the items that one process goes through in the same order, so that reports
put together from the results equal a single process's.
"""

from __future__ import annotations

import functools
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from distckpt._base.dtypes import ITEM_BYTES
from distckpt._base.errors import CorruptCheckpointError
from distckpt._base.messages import check_choice, check_count
from distckpt._checkpoint.consistent_read import reading
from distckpt._checkpoint.opening import open_undisturbed
from distckpt._checkpoint.stored_values import StoredTensor
from distckpt._commit import posix
from distckpt._format.marker import marker_of
from distckpt._format.stored_checkpoint import StoredCheckpoint
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
    check_beside,
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
from distckpt._tools.diff import DiffReport, check_arguments, plan_diff, report_of_diff
from distckpt._tools.stats import (
    TensorStats,
    WindowStats,
    measure_window,
    stats_of_windows,
    tensors_to_measure,
)
from distckpt._tools.tensor_differences import Change, compare_window
from distckpt.tasks._pieces import Piece, cut_files, runs_of
from distckpt.tasks._work import AddBytes, Work, facts_of, facts_of_copies


def place_of(verb: str, journal: str) -> str:
    """Return the location next to a verb's journal in a directory."""
    return locations.join(posix.resolve(journal), verb)


def pieces_of(
    runs: Sequence[range], sizes: Sequence[int], name_of: Callable[[int], str]
) -> list[Piece]:
    """Return a piece for each run, named after its first item."""
    pieces = []
    for run in runs:
        pieces.append(Piece(name_of(run.start), 0, sum(sizes[run.start : run.stop])))
    return pieces


class _Windows:
    """The windows of tensors, which each side has, in runs.

    Attributes:
        tensors: the tensors of the first side.
        pieces: a piece for each run.
    """

    def __init__(self, sides: Sequence[Sequence[StoredTensor]]) -> None:
        self._sides = sides
        self.tensors = sides[0]
        self._windows = list(windows_of(self.tensors))
        sizes = []
        for window in self._windows:
            item_bytes = sum(ITEM_BYTES[side[window.tensor].dtype] for side in sides)
            sizes.append(window.region.num_elements * item_bytes)
        self._runs = runs_of(sizes)
        self.pieces = pieces_of(self._runs, sizes, self._key_of)

    def _key_of(self, window: int) -> str:
        return self.tensors[self._windows[window].tensor].key

    def results(self, number: int, compute: Callable[..., Any], add_bytes: AddBytes) -> list[Any]:
        """Return what `compute(window, *values)` returns for the windows of a piece."""
        run = self._runs[number]
        windows = self._windows[run.start : run.stop]
        results = map_some_windows(self._sides, windows, compute, add_bytes)
        return [result for _, result in results]

    def by_tensor(self, results: Iterable[Iterable[Any]]) -> list[list[Any]]:
        """Return the results of each tensor's windows, from the results of pieces."""
        results_by_tensor: list[list[Any]] = [[] for _ in self.tensors]
        all_results = itertools.chain.from_iterable(results)
        for window, result in zip(self._windows, all_results, strict=True):
            results_by_tensor[window.tensor].append(result)
        return results_by_tensor


# --- verify ---------------------------------------------------------------------------------------


def verification(
    checkpoint_dir: str,
    mode: Literal["fast", "full"] = "full",
    *,
    journal: str,
    num_threads: int | None = None,
) -> Work:
    """Return the work of `verify` with these arguments."""
    check_choice("mode", mode, ("fast", "full"))
    if num_threads is not None:
        check_count("num_threads", num_threads)
    place = place_of("verify", journal)
    stored = open_or_describe(checkpoint_dir, marker_of(checkpoint_dir))
    if isinstance(stored, Problem):
        return _Unopened(checkpoint_dir, place, mode, stored)
    return _VerifyWork(stored, place, mode, num_threads)


class _Unopened(Work):
    """A checkpoint that cannot be opened, which leaves nothing more to do."""

    verb = "verify"

    def __init__(self, location: str, place: str, mode: str, problem: Problem) -> None:
        self.place = place
        self._location = location
        self.facts = {"mode": mode, "the problem": problem.message}
        self._mode = mode
        self._problem = problem

    @property
    def sources(self) -> list[str]:
        return [self._location]

    def do(self, number: int, add_bytes: AddBytes) -> Any:
        raise AssertionError(number)

    def report(self, results: Sequence[Any], seconds: float) -> VerifyReport:
        return unopened_report(self._location, self._mode, self._problem, seconds)


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
        self.checkpoints = [stored]
        manifest = stored.manifest
        self._headers = [file.header_bytes for file in manifest.files]
        self._ranges: list[range] = []
        keys: list[str] = []
        if mode == "full":
            self._ranges = manifest.ranges_of_files()
            keys = keys_with_fingerprints(stored)
        # Pieces follow one another within a range.
        self._blocks_of = functools.lru_cache(maxsize=1)(self._list_blocks)
        self._file_ids: dict[str, int] = {}
        sizes = {}
        for file_id in itertools.chain(*self._ranges):
            file = manifest.files[file_id]
            self._file_ids[file.name] = file_id
            sizes[file.name] = file.num_bytes
        self._spans = cut_files(sizes, divides=True)
        span_bytes = [span.num_bytes for span in self._spans]
        self._windows = _Windows([[StoredTensor(stored, key) for key in keys]])
        self._of_files = runs_of([size + 1 for size in self._headers])
        self._of_spans = runs_of(span_bytes)
        self.pieces: Sequence[Piece] = [
            *pieces_of(self._of_files, self._headers, lambda _: "headers"),
            *pieces_of(self._of_spans, span_bytes, lambda span: self._spans[span].name),
            *self._windows.pieces,
        ]
        self.facts = {**facts_of({"mode": mode}, [stored]), **facts_of_copies([stored])}

    def _list_blocks(self, file_ids: range) -> Blocks:
        """Return the blocks of a range of files."""
        return list_blocks(self._stored, file_ids, self._num_threads, keeps_checksums=True)

    def use(self, files: OpenFiles) -> None:
        self._stored = self._stored.with_files(files)

    def do(self, number: int, add_bytes: AddBytes) -> Any:
        if number < len(self._of_files):
            return self._check_headers(self._of_files[number])
        number -= len(self._of_files)
        if number < len(self._of_spans):
            return self._check_blocks(self._of_spans[number], add_bytes)
        return self._compute_numbers(number - len(self._of_spans), add_bytes)

    def _check_headers(self, run: range) -> tuple[list[Any], int]:
        """Check a run of files; return their problems and the bytes read."""
        stored = self._stored
        problems = check_files(stored, run, self._num_threads)
        num_bytes = sum(self._headers[run.start : run.stop])
        if run.stop == len(self._headers):
            beside, num_beside = check_beside(
                stored.location, stored.manifest, self._mode, self._num_threads
            )
            problems += not_in(problems, beside)
            num_bytes += num_beside
        return list(map(vars, problems)), num_bytes

    def _check_blocks(
        self, run: range, add_bytes: AddBytes
    ) -> tuple[list[_BadBlock], list[Any], int]:
        """Check the blocks that begin in a run of spans.

        Return the bad ones, problems of files of checksums, and the bytes read.
        """
        spans = self._spans[run.start : run.stop]
        first = self._file_ids[spans[0].name]
        last = self._file_ids[spans[-1].name]
        bad: list[_BadBlock] = []
        unread: list[Any] = []
        total = 0
        for file_ids in self._ranges:
            if file_ids.stop <= first or last < file_ids.start:
                continue
            blocks = self._blocks_of(file_ids)
            low = _number_of(blocks, first, spans[0].start)
            high = _number_of(blocks, last, spans[-1].stop)
            part = Blocks(
                blocks.chunks[low:high],
                blocks.file_ids[low:high],
                blocks.starts[low:high],
                blocks.stops[low:high],
                blocks.expected[low:high],
            )
            units = units_of_blocks(part, self._stored.location)
            bad_here, num_read = check_units(
                self._stored, part, units, self._num_threads, add_bytes
            )
            for number, message in bad_here:
                bad.append((int(part.file_ids[number]), int(part.starts[number]), message))
            unread += map(vars, blocks.unread)
            total += num_read
        return bad, unread, total

    def _compute_numbers(self, number: int, add_bytes: AddBytes) -> tuple[list[int], str | None]:
        """Return the terms that windows add to fingerprints, and any error.

        An error of reading matters only if all blocks are whole.
        """
        try:
            return self._windows.results(number, window_number, add_bytes), None
        except (CorruptCheckpointError, OSError) as error:
            return [], str(error)

    def report(self, results: Sequence[Any], seconds: float) -> VerifyReport:
        remaining = iter(results)
        problems: list[Problem] = []
        num_bytes = 0
        for list_of_fields, num_read in itertools.islice(remaining, len(self._of_files)):
            problems += [Problem(**fields) for fields in list_of_fields]
            num_bytes += num_read
        bad: list[_BadBlock] = []
        for blocks, unread, num_read in itertools.islice(remaining, len(self._of_spans)):
            problems += not_in(problems, [Problem(**fields) for fields in unread])
            bad += blocks
            num_bytes += num_read
        problems += self._describe(bad)
        tensors = self._windows.tensors
        checked = Checked(problems, num_bytes)
        if tensors and not problems:
            num_bytes += sum(tensor.num_bytes for tensor in tensors)
            checked = Checked(self._compare(list(remaining)), num_bytes, len(tensors))
        return report_of_verify(self._stored, self._mode, checked, seconds)

    def _describe(self, bad: Sequence[_BadBlock]) -> list[Problem]:
        """Describe bad blocks, which are in the order of files."""
        problems = []
        for file_ids in self._ranges:
            bad_here = [block for block in bad if block[0] in file_ids]
            if bad_here:
                blocks = self._blocks_of(file_ids)
                numbered = []
                for file_id, start, message in bad_here:
                    numbered.append(BadBlock(_number_of(blocks, file_id, start), message))
                problems += describe_blocks(self._stored, blocks, numbered)
        return problems

    def _compare(self, results: Sequence[tuple[list[int], str | None]]) -> list[Problem]:
        """Compare fingerprints."""
        errors = [error for _, error in results if error is not None]
        if errors:
            return [Problem(self._stored.location, error) for error in errors]
        numbers = self._windows.by_tensor([window_numbers for window_numbers, _ in results])
        fingerprints = fingerprints_of(self._windows.tensors, numbers)
        return describe_fingerprints(self._stored, fingerprints)


_BadBlock: TypeAlias = tuple[int, int, str]
"""A file's number, a block's first byte, and a message."""


def _number_of(blocks: Blocks, file_id: int, first_byte: int) -> int:
    """Return the first block of a file from a byte on."""
    low, high = np.searchsorted(blocks.file_ids, [file_id, file_id + 1]).tolist()
    return int(low + np.searchsorted(blocks.starts[low:high], first_byte))


# --- Windows of tensors ---------------------------------------------------------------------------


class _WindowWork(Work):
    """A value per window of the tensors of one checkpoint or two.

    Attributes:
        compute: returns the JSON result of a window's values on both sides.
    """

    compute: Callable[..., Any]

    def __init__(
        self,
        journal: str,
        checkpoints: Sequence[StoredCheckpoint],
        sides: Sequence[Sequence[StoredTensor]],
        options: Mapping[str, Any],
    ) -> None:
        self.place = place_of(self.verb, journal)
        self.checkpoints = checkpoints
        self.windows = _Windows(sides)
        self.pieces = self.windows.pieces
        self.facts = {**facts_of(options, checkpoints), **facts_of_copies(checkpoints)}

    @abstractmethod
    def decoded(self, result: Any) -> Any:
        """Return the result of a window from JSON."""

    def do(self, number: int, add_bytes: AddBytes) -> list[Any]:
        return self.windows.results(number, self.compute, add_bytes)

    def decoded_by_tensor(self, results: Sequence[Any]) -> list[list[Any]]:
        """Return the results of the windows of each tensor."""
        return self.windows.by_tensor(map(self.decoded, of_piece) for of_piece in results)


# --- stats ----------------------------------------------------------------------------------------


class StatsWork(_WindowWork):
    """The work of `distckpt stats` with these arguments."""

    verb = "stats"

    def __init__(
        self, checkpoint_dir: str, *, journal: str, keys: Sequence[str] | None = None
    ) -> None:
        stored = open_undisturbed(Ranks.alone(), checkpoint_dir)
        self._tensors = tensors_to_measure(stored, keys)
        super().__init__(journal, [stored], [self._tensors], {"keys": keys})

    def compute(self, window: Window, *values: torch.Tensor) -> Any:
        parts, sample = measure_window(self._tensors, window, *values)
        return parts, sample.tolist()

    def decoded(self, result: Any) -> WindowStats:
        parts, sample = result
        return WindowStats([BlockStats(*part) for part in parts], np.array(sample, np.float64))

    def report(self, results: Sequence[Any], seconds: float) -> list[TensorStats]:
        values = self.decoded_by_tensor(results)
        return [stats_of_windows(*pair) for pair in zip(self._tensors, values, strict=True)]


# --- diff -----------------------------------------------------------------------------------------


class DiffWork(_WindowWork):
    """The work of `diff` with these arguments."""

    verb = "diff"

    def __init__(
        self,
        a: str,
        b: str,
        *,
        journal: str,
        keys: str | Sequence[str] | None = None,
        rename: Mapping[str, str] | None = None,
        atol: float = 0.0,
        rtol: float = 0.0,
    ) -> None:
        check_arguments(keys, rename, atol, rtol)
        ranks = Ranks.alone()
        first = open_undisturbed(ranks, a)
        second = open_undisturbed(ranks, b)
        self._compared = plan_diff(first, second, keys, rename or {})
        self.compute = functools.partial(compare_window, atol=atol, rtol=rtol)
        options = {"keys": keys, "rename": rename, "atol": atol, "rtol": rtol}
        super().__init__(journal, [first, second], self._compared.sides, options)

    def decoded(self, result: Any) -> Change | None:
        if result is None:
            return None
        num_different, largest, first_index, *rest = result
        return Change(num_different, largest, tuple(first_index), *rest)

    def report(self, results: Sequence[Any], seconds: float) -> DiffReport:
        changes = dict(zip(self._compared.comparable, self.decoded_by_tensor(results), strict=True))
        started = time.perf_counter() - seconds
        with reading(Ranks.alone(), self.checkpoints):
            return report_of_diff(self._compared, changes, started)
