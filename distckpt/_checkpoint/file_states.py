"""States of another program's files, to notice that they were replaced.

Without checksums, nothing in the files tells that another program has replaced some of them since
they were described.
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
"""Endings of files that no format reads, but programs write to."""
_WHOLE_SECONDS = 2.0
"""Resolution of file times on some file systems: one or two seconds."""
_TICK_SECONDS = 0.02
"""Resolution of file times elsewhere: a tick of the system's clock."""


def describe(
    location: str,
    read_manifest: Callable[[str], Manifest],
    states: dict[str, FileState],
    names: tuple[str, ...] = (),
) -> Manifest:
    """Describe another program's checkpoint, and record its files' states before.

    The states are recorded first, since the reader may have seen either version of a file that is
    replaced later. They include the states of neighboring files that describe the checkpoint.

    Args:
        location: location of the checkpoint.
        read_manifest: makes its manifest.
        states: filled with the states, by location.
        names: endings of the files that describe it; all files but logs if there are none.
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
    """Return the seconds until any further write changes a file's time.

    Only local files count.
    """
    waits = [0.0]
    for state in states:
        if state.inode is not None and state.modified is not None:
            is_whole = state.modified == int(state.modified)
            step = _WHOLE_SECONDS if is_whole else _TICK_SECONDS
            age = now - state.modified
            waits.append(step - age if age >= 0 else 0.0)
    return max(waits)


def _states_within(location: str, names: tuple[str, ...]) -> dict[str, FileState]:
    """Return the states of the files that describe a checkpoint, by location.

    They are the files directly inside a directory or prefix, or a single file. Unreadable ones are
    left out.
    """
    if not locations.is_local(location):
        inside: dict[str, FileState] = {}
        for path, state in locations.listed_states(location).items():
            if locations.split(path)[0] == location:
                inside[path] = state
        return {path: inside[path] for path in describing(inside, names)}
    if not locations.isdir(location):
        return states_of([location], {})
    paths = [locations.join(location, name) for name in locations.list_names(location)]
    return states_of(describing(paths, names), {})


def describing(paths: Iterable[str], names: tuple[str, ...]) -> list[str]:
    if names:
        return [path for path in paths if path.endswith(names)]
    return [path for path in paths if not path.endswith(_LOGS)]


def states_of_files(
    location: str, manifest: Manifest, known: Mapping[str, FileState]
) -> dict[str, FileState]:
    """Return the states of a checkpoint's files, by location.

    Known states are used, other files are looked at. Missing ones are left out.
    """
    stored = StoredCheckpoint(location, manifest)
    paths = [stored.path_of_file(file_id) for file_id in range(len(manifest.files))]
    return states_of(paths, known)


def changed_file(location: str, states: Mapping[str, FileState]) -> str | None:
    """Return a file at a location that has changed, or None."""
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
    """Return the states of files, by location.

    Known states are used, other files are looked at. Missing ones are left out.
    """
    states = {path: known[path] for path in paths if path in known}

    def look(path: str) -> None:
        # A missing file, or a directory, is an error of a later step.
        with contextlib.suppress(OSError):
            states[path] = locations.file_state(path)

    others = [path for path in paths if path not in states]
    is_local = all(map(locations.is_local, others))
    run_threads(look, others, 1 if is_local else NUM_REQUESTS)
    return states
