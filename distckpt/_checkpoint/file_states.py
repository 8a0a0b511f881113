"""Telling whether the files of another program's checkpoint are still the ones that were described.

Without checksums, nothing in them tells that another program has replaced some of them meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from distckpt._base.threads import NUM_REQUESTS, run_threads
from distckpt._format.manifest import Manifest
from distckpt._format.stored_checkpoint import StoredCheckpoint
from distckpt._storage import locations
from distckpt._storage.file_state import FileState


def states_within(location: str) -> dict[str, FileState]:
    """Return the states of the files directly inside a directory, of all below a prefix, or of a
    single file; by their locations. What cannot be looked at is left out.
    """
    if not locations.is_local(location):
        return locations.listed_states(location)
    if not locations.isdir(location):
        return _states_of([location], {})
    paths = [locations.join(location, name) for name in locations.list_names(location)]
    return _states_of(paths, {})


def states_of_files(
    location: str, manifest: Manifest, known: Mapping[str, FileState]
) -> dict[str, FileState]:
    """Return the states of the files of a checkpoint, by their locations, as far as they are known;
    looks at the others. One that is missing is left out.
    """
    stored = StoredCheckpoint(location, manifest)
    paths = [stored.path_of_file(file_id) for file_id in range(len(manifest.files))]
    return _states_of(paths, known)


def changed_file(stored: StoredCheckpoint) -> str | None:
    """Return the location of a file that is not as it was when the checkpoint was described, None
    if all are.
    """
    if not stored.states:
        return None
    known = locations.listed_states(stored.location)
    now = _states_of(list(stored.states), known)
    return next((path for path, state in stored.states.items() if now.get(path) != state), None)


def _states_of(paths: list[str], known: Mapping[str, FileState]) -> dict[str, FileState]:
    states = {path: known[path] for path in paths if path in known}

    def look(path: str) -> None:
        # What is missing, or no file, is for others to report.
        with contextlib.suppress(OSError):
            states[path] = locations.file_state(path)

    others = [path for path in paths if path not in states]
    is_local = all(map(locations.is_local, others))
    run_threads(look, others, 1 if is_local else NUM_REQUESTS)
    return states
