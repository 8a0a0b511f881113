"""Units of work: all bytes are in them once, in order, and nothing is cut within a block."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from distckpt._geometry.units import units_of

SIZES = st.lists(st.integers(0, 200), max_size=20)


@given(sizes=SIZES, unit=st.integers(1, 100), block=st.integers(1, 40), first=st.integers(0, 3))
def test_units_hold_every_byte_once_and_cut_between_blocks(sizes, unit, block, first):
    units = list(units_of(sizes, unit, block, first))
    spans = list(itertools.chain.from_iterable(units))
    for chunk, size in enumerate(sizes, first):
        pieces = [(start, stop) for number, start, stop in spans if number == chunk]
        edges = [0, *(stop for _, stop in pieces)]
        assert pieces == list(itertools.pairwise(edges))
        assert edges[-1] == size
        assert all(edge % block == 0 for edge in edges[:-1])
    assert [span.chunk for span in spans] == sorted(span.chunk for span in spans)
    for spans_of_unit in units:
        assert 0 < sum(span.num_bytes for span in spans_of_unit) <= max(unit, block)


@given(sizes=SIZES, unit=st.integers(1, 100))
def test_units_are_as_full_as_they_can_be(sizes, unit):
    filled = [sum(span.num_bytes for span in spans) for spans in units_of(sizes, unit, 1)]
    assert filled[:-1] == [unit] * (len(filled) - 1 if filled else 0)


@given(sizes=SIZES, unit=st.integers(1, 100))
def test_with_blocks_as_large_as_units_what_fits_one_stays_whole(sizes, unit):
    for spans in units_of(sizes, unit, unit):
        for chunk, start, stop in spans:
            assert sizes[chunk] > unit or (start, stop) == (0, sizes[chunk])
