"""Errors of background saves that were not reported yet.

The next save of the ranks raises them. `background_save` has the saves themselves. It is not
imported here, since most saves do not need it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distckpt._operations.planned_save import SaveRequest
from distckpt._ranks import groups
from distckpt._ranks.collectives import Ranks

FINE, FAILED, OUT_OF_STEP = range(3)


@dataclass
class GroupSaves:
    """The background saves of one process group.

    Attributes:
        ranks: ranks by timeout; each has a process group that only the background thread uses.
        unreported: the `SaveHandle`s of saves that failed, or may fail, and whose result was not
            asked for.
        state: the worst state since ranks last compared it; `OUT_OF_STEP` after a rank was lost.
    """

    ranks: dict[float, Ranks] = field(default_factory=dict)
    unreported: list[Any] = field(default_factory=list)
    state: int = FINE


_saves_of_groups: weakref.WeakKeyDictionary[Any, GroupSaves] = weakref.WeakKeyDictionary()
"""Background saves by process group of the caller. When a group is destroyed, so are the groups
that its background saves use, which other ranks notice.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_saves_of_groups.clear)


def saves_of(process_group: Any) -> GroupSaves:
    """Return the background saves of a process group, for adding new ones."""
    return _saves_of_groups.setdefault(_owner_of(process_group), GroupSaves())


def _owner_of(process_group: Any) -> Any:
    # The class stands for this process without a group.
    return groups.group_of(process_group) or GroupSaves


@contextlib.contextmanager
def raising_pending_errors(ranks: Ranks, request: SaveRequest) -> Iterator[None]:
    """Run the body, a save, then raise errors of background saves.

    These are errors of earlier background saves of these ranks that were not asked for. The save
    comes first: a program that ends with the error has its newest state stored.

    Collective operation: all ranks must call it. It exchanges one number, and nothing if there were
    no background saves. If a save has failed on any rank, all ranks wait for their unfinished
    saves, and all raise.
    """
    saves = _saves_of_groups.get(_owner_of(request.process_group))
    if saves is None or not _has_failed(ranks, saves):
        yield
        return
    failed = saves.unreported
    saves.unreported = []
    try:
        yield
    except BaseException:
        saves.unreported[:0] = failed
        saves.state = max(saves.state, FAILED)
        raise
    with ranks.phase("raise the error of an earlier background save"):
        raise_unseen_error(failed)


def _has_failed(ranks: Ranks, saves: GroupSaves) -> bool:
    """Whether a background save has failed on any rank.

    If so, wait for all of them, and make it possible to save again.
    """
    state = saves.state
    if ranks.all_equal(state) and state == FINE:
        return False
    from distckpt._io.background import wait_for_all

    wait_for_all()
    if OUT_OF_STEP in ranks.all_gather_numbers([saves.state]):
        # The groups are left as they are: a group made instead of a destroyed one would get its
        # name, and meet its traces in the store.
        saves.ranks.clear()
    saves.state = FINE
    return True


def raise_unseen_error(handles: list[Any]) -> None:
    """Wait for saves; raise the first error that was not asked for.

    `handles` are `SaveHandle`s; the list is emptied.
    """
    unasked = []
    for handle in handles:
        if not handle.was_asked:
            unasked.append(handle)
    handles.clear()
    for error in [handle.exception() for handle in unasked]:
        if error is not None:
            raise error
