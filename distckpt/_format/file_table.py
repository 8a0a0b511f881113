"""The files of a large manifest, in columns.

A name is computed when it is asked for. The names differ in numbers, mostly in the number of a
rank. They are stored as patterns, lists such as ["objects/rank-", 5, ".checksums"] in which 5
stands for a number of at least 5 digits, and as the numbers of each file.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distckpt._format.checksum import Checksums
from distckpt._format.columns import Column, narrow, stored_column
from distckpt._format.safetensors_file import CHECKSUMS_SUFFIX, MAX_HEADER_BYTES, ShardFile
from distckpt._geometry.region import IntArray
from distckpt._storage import locations

_PATTERNS = "file_patterns"
_NUMBERS = "file_numbers"
_BYTES = "file_bytes"
_HEADER_BYTES = "file_header_bytes"
_CHECKSUMS = "file_checksums"
_MAX_DIGITS = 18
"""Maximum digits of a number that fits into int64."""
_NUMBER = re.compile("([0-9]+)")
_BESIDE_NUMBER = re.compile("[0-9]\0|\0[0-9]|\0\0")
_BLOCK_FILES = 1 << 12
"""Files that are decoded together when all are."""


class NamePattern(NamedTuple):
    """The common pattern of some files' names.

    Attributes:
        texts: texts before the first number, between two numbers, and after the last one.
        widths: number of digits to which each number is padded with zeros.
    """

    texts: tuple[str, ...]
    widths: tuple[int, ...]

    @classmethod
    def from_json(cls, pieces: Any) -> NamePattern:
        """Decode a result of `to_json`.

        Raises:
            ValueError: it is something else, or different numbers could give the same name.
        """
        if not isinstance(pieces, list):
            raise ValueError("a pattern of names is no list")
        texts = tuple(pieces[::2])
        widths = tuple(pieces[1::2])
        are_texts = len(texts) == len(widths) + 1 and {*map(type, texts)} == {str}
        are_widths = all(type(width) is int and 0 < width <= _MAX_DIGITS for width in widths)
        if not are_texts or not are_widths or _BESIDE_NUMBER.search("\0".join(texts)):
            raise ValueError(f"{pieces!r:.300} is no pattern of names")
        return cls(texts, widths)

    def to_json(self) -> list[str | int]:
        """Return texts and widths in turn."""
        pieces: list[str | int] = [self.texts[0]]
        for width, text in zip(self.widths, self.texts[1:], strict=True):
            pieces += width, text
        return pieces

    def template(self) -> str:
        """Return the template that makes names of numbers with %."""
        texts = [text.replace("%", "%%") for text in self.texts]
        return texts[0] + "".join(
            f"%0{width}d{text}" for width, text in zip(self.widths, texts[1:], strict=True)
        )


@dataclass(eq=False, repr=False)
class FileTable(Sequence[ShardFile]):
    """Files, as a sequence that computes them.

    The columns have a number for each file.
    """

    patterns: Sequence[NamePattern]
    _pattern_ids: Column
    _numbers: Column
    num_bytes: Column
    header_bytes: Column
    _checksums: Checksums

    def __post_init__(self) -> None:
        self._templates = [(pattern.template(), len(pattern.widths)) for pattern in self.patterns]

    @classmethod
    def of(cls, files: Sequence[ShardFile]) -> FileTable:
        """Encode files."""
        found = list(_patterns_of([file.name for file in files]))
        patterns = [pattern for pattern, *_ in found]
        pattern_ids = np.empty(len(files), np.int64)
        columns = np.zeros((_num_numbers(patterns), len(files)), np.int64)
        for number, (_, ids, numbers) in enumerate(found):
            columns[: len(numbers), ids] = numbers
            pattern_ids[ids] = number
        num_bytes = np.array([file.num_bytes for file in files], np.int64)
        header_bytes = np.array([file.header_bytes for file in files], np.int64)
        checksums = np.array([file.header_checksum for file in files], np.uint64)
        return cls(
            patterns,
            narrow(pattern_ids),
            narrow(columns.T),
            narrow(num_bytes),
            narrow(header_bytes),
            checksums,
        )

    @classmethod
    def from_columns(
        cls, patterns: Any, columns: Mapping[str, Column], max_table_bytes: int
    ) -> FileTable:
        """Decode a field and columns of a manifest, and check them.

        Args:
            patterns: the field.
            columns: all columns of the manifest.
            max_table_bytes: the limit of files that are all header.

        Raises:
            ValueError: they contradict each other, or are no files of a checkpoint.
        """
        if not isinstance(patterns, list):
            raise ValueError("its patterns of names are no list")
        decoded = list(map(NamePattern.from_json, patterns))
        shape = (len(columns[_PATTERNS]),)
        table = cls(
            decoded,
            stored_column(columns, _PATTERNS, shape),
            stored_column(columns, _NUMBERS, (*shape, _num_numbers(decoded))),
            stored_column(columns, _BYTES, shape),
            stored_column(columns, _HEADER_BYTES, shape),
            stored_column(columns, _CHECKSUMS, shape, (np.uint64,)),
        )
        table._check_names()
        table._check_sizes(max_table_bytes)
        return table

    def columns(self) -> dict[str, Column]:
        """Return the columns of a manifest."""
        return {
            _PATTERNS: self._pattern_ids,
            _NUMBERS: self._numbers,
            _BYTES: self.num_bytes,
            _HEADER_BYTES: self.header_bytes,
            _CHECKSUMS: self._checksums,
        }

    def __len__(self) -> int:
        return len(self._pattern_ids)

    def __getitem__(self, index: Any) -> Any:
        """Return a file, or the files of a slice as a list."""
        if isinstance(index, slice):
            return list(self._decoded(index))
        number = range(len(self))[operator.index(index)]
        template, num_numbers = self._templates[self._pattern_ids[number]]
        name = template % tuple(self._numbers[number, :num_numbers].tolist())
        columns = (self.num_bytes, self.header_bytes, self._checksums)
        return ShardFile(name, *(int(column[number]) for column in columns))

    def __iter__(self) -> Iterator[ShardFile]:
        for start in range(0, len(self), _BLOCK_FILES):
            yield from self._decoded(slice(start, start + _BLOCK_FILES))

    def containing(self, text: str) -> IntArray:
        """Return the files whose names have a text without numbers."""
        is_found = [any(text in own for own in pattern.texts) for pattern in self.patterns]
        return np.flatnonzero(np.array(is_found, bool)[self._pattern_ids])

    @property
    def holders(self) -> IntArray:
        """The files that hold checksums, see `ShardFile.holds_checksums`."""
        suffixes = [pattern.texts[-1] for pattern in self.patterns]
        holds = np.array([suffix.endswith(CHECKSUMS_SUFFIX) for suffix in suffixes], bool)
        return np.flatnonzero(holds[self._pattern_ids])

    def _decoded(self, rows: slice) -> Iterator[ShardFile]:
        columns = (self._pattern_ids, self._numbers, self.num_bytes, self.header_bytes)
        lists = (column[rows].tolist() for column in (*columns, self._checksums))
        for pattern, numbers, *others in zip(*lists, strict=True):
            template, num_numbers = self._templates[pattern]
            yield ShardFile(template % tuple(numbers[:num_numbers]), *others)

    def _check_names(self) -> None:
        """Check that names are distinct and lead to files of the checkpoint."""
        ids = self._pattern_ids
        numbers = self._numbers
        num_patterns = len(self.patterns)
        if num_patterns > len(self):
            raise ValueError("there are more patterns of names than files")
        if not len(self):
            return
        if not 0 <= ids.min() <= ids.max() < num_patterns:
            raise ValueError("a file has no pattern of its name")
        num_numbers = np.array([len(pattern.widths) for pattern in self.patterns])
        is_unused = np.arange(numbers.shape[1]) >= num_numbers[ids][:, None]
        fits = numbers.min(initial=0) == 0 and numbers.max(initial=0) < 10**_MAX_DIGITS
        if not fits or numbers[is_unused].any():
            raise ValueError("a number in a file name is impossible")
        largest = np.zeros((num_patterns, numbers.shape[1]), np.int64)
        np.maximum.at(largest, ids, numbers)
        # The number in a name makes it longer, and nothing else.
        for (template, count), row in zip(self._templates, largest.tolist(), strict=True):
            name = template % tuple(row[:count])
            if not locations.is_inner_name(name, max_parts=2):
                raise ValueError(f"the file name {name!r:.300} leads elsewhere")
        self._check_names_are_distinct()

    def _check_names_are_distinct(self) -> None:
        texts = {_NUMBER.sub("0", template % ((0,) * n)) for template, n in self._templates}
        if len(texts) < len(self.patterns):
            # Different patterns may give the same name.
            seen: set[str] = set()
            for file in self:
                if file.name in seen:
                    raise ValueError(f"two files have the name {file.name!r:.300}")
                seen.add(file.name)
            return
        keys = (*self._numbers.T, self._pattern_ids)
        order = np.lexsort(keys)
        is_same = np.ones(len(order) - 1, bool)
        for key in keys:
            is_same &= key[order[1:]] == key[order[:-1]]
        for place in np.flatnonzero(is_same)[:1].tolist():
            raise ValueError(f"two files have the name {self[order[place]].name!r:.300}")

    def _check_sizes(self, max_table_bytes: int) -> None:
        is_all_header = self.header_bytes == self.num_bytes
        limits = np.where(is_all_header, max_table_bytes, 8 + MAX_HEADER_BYTES)
        fits = (self.header_bytes >= 0) & (self.header_bytes <= self.num_bytes)
        fits &= self.header_bytes <= limits
        for place in np.flatnonzero(~fits)[:1].tolist():
            file = self[place]
            raise ValueError(f"the file {file.name!r} has a header of {file.header_bytes} bytes")


def _num_numbers(patterns: Iterable[NamePattern]) -> int:
    """Return the most numbers that a name has."""
    return max((len(pattern.widths) for pattern in patterns), default=0)


def _patterns_of(names: Sequence[str]) -> Iterator[tuple[NamePattern, IntArray, IntArray]]:
    """Yield patterns, each with its names' places and their numbers.

    There is a row for each number of a name.
    """
    # All names at once, which takes half the time.
    pieces = _NUMBER.split("\0".join(names))
    texts = pieces[::2]
    digits = pieces[1::2]
    forms = "0".join(texts).split("\0")[: len(names)]
    kinds = {form: kind for kind, form in enumerate(dict.fromkeys(forms))}
    kind_of = np.array([kinds[form] for form in forms], np.int64)
    counts = np.array([form.count("0") for form in kinds], np.int64)[kind_of]
    firsts = np.cumsum(counts) - counts
    for form, kind in kinds.items():
        ids = np.flatnonzero(kind_of == kind)
        between = form.split("0")
        columns = []
        for place in range(len(between) - 1):
            columns.append([digits[index] for index in (firsts[ids] + place).tolist()])
        if all(map(_are_numbers, columns)):
            yield _pattern_of(between, columns, ids)
        else:
            # As the names of files of several saves may be.
            for index in ids.tolist():
                pattern = NamePattern((names[index],), ())
                yield pattern, np.array([index]), np.zeros((0, 1), np.int64)


def _are_numbers(texts: Sequence[str]) -> bool:
    """Return whether digits are all the same, or padded numbers.

    Padded numbers have zeros up to the length of the shortest.
    """
    lengths = {*map(len, texts)}
    shortest = min(lengths)
    are_padded = len(lengths) == 1 or all(len(text) == shortest or text[0] != "0" for text in texts)
    return (are_padded and max(lengths) <= _MAX_DIGITS) or len(set(texts)) == 1


def _pattern_of(
    texts: Sequence[str], columns: Iterable[Sequence[str]], ids: IntArray
) -> tuple[NamePattern, IntArray, IntArray]:
    """Return the pattern of names with common texts, and their numbers.

    There are columns of digits between the texts. Numbers that all names have are texts of the
    pattern.
    """
    pattern_texts = [texts[0]]
    widths = []
    numbers = []
    for column, text in zip(columns, texts[1:], strict=True):
        if len(set(column)) == 1:
            pattern_texts[-1] += column[0] + text
        else:
            pattern_texts.append(text)
            widths.append(min(map(len, column)))
            numbers.append(np.array([*map(int, column)], np.int64))
    pattern = NamePattern((*pattern_texts,), (*widths,))
    return pattern, ids, np.array(numbers).reshape(-1, len(ids))
