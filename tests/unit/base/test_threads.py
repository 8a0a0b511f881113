"""Work that a few threads divide among themselves."""

from __future__ import annotations

import itertools
import threading

import pytest

from distckpt._base.threads import run_threads

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 1000]


@pytest.mark.parametrize("in_stretches", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_items", SIZES)
def test_every_item_is_done_once(num_items, num_threads, in_stretches):
    done = []
    run_threads(done.append, range(num_items), num_threads, in_stretches=in_stretches)
    assert sorted(done) == list(range(num_items))


def test_each_of_two_threads_takes_a_quarter_of_what_is_left():
    # Both threads are in their first stretches at the same time.
    both = threading.Barrier(2)
    items = {}

    def note(item):
        mine = items.setdefault(threading.get_ident(), [])
        if not mine:
            both.wait(60)
        mine.append(item)

    run_threads(note, range(1000), 2, in_stretches=True)
    assert sorted(mine[0] for mine in items.values()) == [0, 250]
    assert sorted(mine[1] for mine in items.values()) == [125, 344]
    for mine in items.values():
        # From both halves of the quarter by turns, each of them in order.
        for half in mine[:180:2], mine[1:180:2]:
            assert {b - a for a, b in itertools.pairwise(half)} == {1}


def test_an_error_ends_the_stretch_in_which_it_occurs():
    done = []

    def work(item):
        if item == 0:
            raise ValueError("item 0")
        done.append(item)

    with pytest.raises(ValueError, match="item 0"):
        run_threads(work, range(1000), 4, in_stretches=True)
    assert 1 not in done
