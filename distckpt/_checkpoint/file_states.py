"""Telling whether the files of another program's checkpoint are still the ones that were described.

Without checksums, nothing in them tells that another program has replaced some of them meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._storage import locations
from distckpt._storage.file_state import FileState, has_changed

_LOGS = (".md", ".txt", ".log", ".jsonl", ".lock", ".tmp")
"""Ends of the names of files that no format reads, and that may be written to at any time."""
_WHOLE_SECONDS = 2.0
_TICK_SECONDS = 0.02
"""The time of a file is a whole number of one or two seconds on some file systems, that of the last
tick of the system's clock on others.
"""


def describe(
    location: str,
    read_manifest: Callable[[str], Manifest],
    states: dict[str, FileState],
    names: tuple[str, ...] = (),
) -> Manifest:
    """Read what another program's checkpoint holds; take down the states of its files, and of those
    beside them that describe it, as they were before that: of a file that is replaced later, the
    reader may have seen either.

    Args:
        location: of the checkpoint.
        read_manifest: makes its manifest.
        states: is filled, by location.
        names: ends of the names of files that describe it; all but logs if there are none.
    """
    states.update(_states_within(location, names))
    seconds = seconds_until_settled(states.values(), time.time())
    if seconds:
        time.sleep(seconds)
        states.update(_states_within(location, names))
    manifest = read_manifest(location)
    states.update(states_of_files(location, manifest, states))
    return manifest


def seconds_until_settled(states: Iterable[FileState], now: float) -> float:
    """Return how long to wait until all local files that are written to have another time then."""
    waits = [0.0]
    for state in states:
        if state.inode is not None and state.modified is not None:
            is_whole = state.modified == int(state.modified)
            step = _WHOLE_SECONDS if is_whole else _TICK_SECONDS
            age = now - state.modified
            waits.append(step - age if age >= 0 else 0.0)
    return max(waits)


def _states_within(location: str, names: tuple[str, ...]) -> dict[str, FileState]:
    """Return the states of the files directly inside a directory or prefix that describe it, or of
    a single file; by their locations. What cannot be looked at is left out.
    """
    if not locations.is_local(location):
        found = locations.listed_states(location)
        inside = {path: found[path] for path in found if locations.split(path)[0] == location}
        return {path: inside[path] for path in _describing(inside, names)}
    if not locations.isdir(location):
        return states_of([location], {})
    paths = [locations.join(location, name) for name in locations.list_names(location)]
    return states_of(_describing(paths, names), {})


def _describing(paths: Iterable[str], names: tuple[str, ...]) -> list[str]:
    if names:
        return [path for path in paths if path.endswith(names)]
    return [path for path in paths if not path.endswith(_LOGS)]


def states_of_files(
    location: str, manifest: Manifest, known: Mapping[str, FileState]
) -> dict[str, FileState]:
    """Return the states of the files of a checkpoint, by their locations, as far as they are known;
    looks at the others. One that is missing is left out.
    """
    stored = StoredCheckpoint(location, manifest)
    paths = [stored.path_of_file(file_id) for file_id in range(len(manifest.files))]
    return states_of(paths, known)


def changed_file(location: str, states: Mapping[str, FileState]) -> str | None:
    """Return one of the files at a location that is not as it was, None if all are."""
    if not states:
        return None
    now = states_of(list(states), locations.listed_states(location))
    for path, before in states.items():
        if has_changed(before, now.get(path), partial(_state_of, path)):
            return path
    return None


def _state_of(path: str) -> FileState | None:
    return states_of([path], {}).get(path)


def states_of(paths: list[str], known: Mapping[str, FileState]) -> dict[str, FileState]:
    """Return the states of files by location, as far as they are known; looks at the others. One
    that is missing is left out.
    """
    states = {path: known[path] for path in paths if path in known}

    def look(path: str) -> None:
        # What is missing, or no file, is for others to report.
        with contextlib.suppress(OSError):
            states[path] = locations.file_state(path)

    others = [path for path in paths if path not in states]
    is_local = all(map(locations.is_local, others))
    run_threads(look, others, 1 if is_local else NUM_REQUESTS)
    return states
