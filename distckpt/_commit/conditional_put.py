"""Commit a save to an object store, where nothing can be renamed: the marker is put last, on a
condition.

Every save writes into folders of its own, `tensors-<nonce>/` and `objects-<nonce>/` (of many ranks
also `tensors-<nonce>-1/` and so on), so files of two savers never meet. The marker names the
manifest, and the manifest the files. It is put only if the marker that was there when the save
began, or none, is still there. So of several savers one wins, and a reader finds the old checkpoint
or the new one.

What is no part of the checkpoint that the marker names was left by a save that was interrupted, or
belongs to one that began before the marker was put and cannot win any more. Files that are there
when a marker is about to be put are therefore safe to remove once it has been put.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from distckpt._base.errors import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
)
from distckpt._commit import posix
from distckpt._format.manifest import MANIFEST_NAME
from distckpt._format.marker import CONFIG_FNAME, encode_marker, read_marker
from distckpt._storage import locations, object_store
from distckpt._storage.remote import NoConditionsError, RefusedError, Upload

logger = logging.getLogger(__name__)

SAVE = "save"
"""Field of the marker: the nonce of the save."""

_OURS = re.compile(
    r"(?:tensors|objects)(?:-([0-9a-f]{16})(?:-[0-9]+)?)?/.+|"
    r"manifest(?:-([0-9a-f]{16}))?\.safetensors"
)
_FOLDER = re.compile(rb"(?:tensors|objects)-([0-9a-f]{16})(?:-[0-9]+)?/")


def stray_files(location: str, named: Container[str]) -> list[str]:
    """Return the files of saves at a location that neither its manifest names nor its marker,
    relative to it.

    There are none on local disks, where a save becomes visible by a rename.
    """
    if locations.is_local(location):
        return []
    manifest_name = _manifest_named_by(read_marker(location) or {})
    return [
        name for name in _files_of_saves(location) if name != manifest_name and name not in named
    ]


def remove_checkpoint(location: str, is_meant: Callable[[str], bool]) -> bool:
    """Remove a checkpoint, the marker first; False when another one is there, or replaces it."""
    marker = object_store.at(locations.join(location, CONFIG_FNAME))
    version = marker.version()
    if version is None:
        return True
    if not is_meant(location):
        return False
    if marker.has_conditions:
        # Removals have no conditions. A marker that is put on one fails all saves that may replace
        # this checkpoint.
        fields = {**(read_marker(location) or {}), "removed": True}
        try:
            if not marker.replace(encode_marker(fields), version):
                return False
        except NoConditionsError:
            pass  # removed as it is
    marker.remove()
    locations.remove_tree(location)
    return True


def unfinished_files(location: str) -> list[str]:
    """Return the files and uploads of saves at a location."""
    uploads = object_store.at(location).list_uploads()
    return [*_files_of_saves(location), *(f"{upload.location} {upload.id}" for upload in uploads)]


def remove_unfinished(location: str) -> None:
    """Remove the files of saves from a location without a marker; nobody may be saving there."""
    _remove(location, _files_of_saves(location))
    object_store.abort_uploads(location)


def _remove(location: str, names: Sequence[str]) -> None:
    """Remove files of a location, and the folders that are empty then."""
    if names:
        object_store.remove_all(locations.join(location, name) for name in names)
        object_store.at(location).remove_empty_folders()


class Transaction:
    """A save to an object store, used by the coordinator alone.

    Without `has_folders` the save writes into no folders of its own, as strategies of users may. It
    cannot replace a checkpoint then, and removes nothing but what it has written.
    """

    def __init__(
        self,
        location: str,
        nonce: str,
        overwrite: bool,
        has_folders: bool,
    ) -> None:
        self._location = location
        self._has_folders = has_folders
        self._remote = object_store.at(location)
        self._marker = object_store.at(locations.join(location, CONFIG_FNAME))
        self._nonce = nonce
        self._version = self._marker.version()
        self._earlier = set(_files_of_saves(location))
        self._is_conditional = self._marker.has_conditions
        self._may_be_committed = False
        if self._version is not None and not (overwrite and has_folders):
            advice = (
                "pass overwrite=True"
                if has_folders
                else "save with another strategy: this one cannot replace it"
            )
            raise posix.already_complete(location, advice)
        if not self._is_conditional:
            self._warn_about_conditions()

    def check_not_overtaken(self) -> None:
        """Raise CheckpointExistsError when another save has put its marker since this one began."""
        if self._marker.version() != self._version:
            raise self._overtaken()

    def _overtaken(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"Another program has saved to {self._location!r}, or removed what was there, while "
            "this save was being written: that stays. Choose another location, or save again."
        )

    def commit(self, fields: Mapping[str, Any], files: Sequence[str] = ()) -> None:
        """Put the marker unless it has changed since the save began, then remove what the
        checkpoint does not name.

        Nothing is put when any of these files is not there. After an OSError other than a refusal
        it is not known whether the marker was put, and nothing is removed.
        """
        try:
            self._put_and_clear_up(fields, files)
        except NoConditionsError:
            self._is_conditional = False
            self._warn_about_conditions()
            self._put_and_clear_up(fields, files)

    def _put_and_clear_up(self, fields: Mapping[str, Any], files: Sequence[str]) -> None:
        present = _files_of_saves(self._location) if self._has_folders else []
        missing = sorted(set(files).difference(present)) if self._has_folders else []
        # With another marker, the save that has won the race removes them; the put below says so.
        if missing and self._marker.version() == self._version:
            more = f" (and {len(missing) - 1} more files)" if len(missing) > 1 else ""
            raise CheckpointingException(
                f"{locations.join(self._location, missing[0])!r} was written and is missing{more}: "
                "another program removes files there, or not all ranks write to the same store. "
                "Nothing was committed."
            )
        strays = self._strays(fields, present)
        uploads = self._uploads(strays=True)
        content = encode_marker({**fields, SAVE: self._nonce})
        self._may_be_committed = True
        try:
            is_put = self._put(content)
        except RefusedError:
            self._may_be_committed = False
            raise
        if not is_put:
            self._may_be_committed = False
            raise self._overtaken()
        with locations.only_logging(
            f"remove what the checkpoint in {self._location} does not need"
        ):
            _remove(self._location, strays)
        with locations.only_logging(f"abort unfinished uploads in {self._location}"):
            self._abort(uploads)

    def _put(self, content: bytes) -> bool:
        """Put the marker; False when it is not what it was when the save began."""
        if self._is_conditional:
            return self._marker.replace(content, self._version)
        version = self._marker.version()
        if version == self._version:
            self._marker.write(content)
            return True
        # The store may have carried out a conditional put, and have refused its repetition.
        return version is not None and self._marker.read() == content

    def abandon(self) -> None:
        """Remove what the save has written, unless its marker may have been put."""
        if self._may_be_committed:
            return
        with locations.only_logging(
            f"remove the files of a save that failed from {self._location}"
        ):
            files = _files_of_saves(self._location)
            _remove(self._location, [name for name in files if self._is_own(name)])
        with locations.only_logging(f"abort the uploads of a save that failed to {self._location}"):
            self._abort(self._uploads(strays=False))

    def _warn_about_conditions(self) -> None:
        logger.warning(
            "%s has no conditional writes: nothing keeps two programs that save there at the "
            "same time apart",
            self._location,
        )

    def _strays(self, fields: Mapping[str, Any], present: Sequence[str]) -> list[str]:
        """Return the files that can be removed when the marker is there."""
        if not self._has_folders:
            return []
        named = _manifest_named_by(fields)
        if not self._is_conditional:
            # Other saves may still be committed, whenever they began: only what is replaced goes.
            with contextlib.suppress(CorruptCheckpointError):
                old = read_marker(self._location) or {}
                old_manifest, old_nonce = _manifest_named_by(old), old.get(SAVE, "")
                replaced = {
                    name
                    for name in self._earlier
                    if name == old_manifest or _nonce_of(name) == old_nonce
                }
                return sorted(replaced - {named})
            return []
        return [name for name in present if name != named and not self._is_own(name)]

    def _uploads(self, strays: bool) -> list[Upload]:
        """Return unfinished uploads: of this save, and with `strays` of others that cannot win any
        more.
        """
        uploads = self._remote.list_uploads()
        names = [(upload, upload.location[len(self._location) + 1 :]) for upload in uploads]
        every = strays and self._is_conditional and self._has_folders
        return [
            upload
            for upload, name in names
            if _OURS.fullmatch(name) and (every or self._is_own(name))
        ]

    def _abort(self, uploads: Sequence[Upload]) -> None:
        for upload in uploads:
            self._remote.abort(upload)

    def _is_own(self, name: str) -> bool:
        nonce = _nonce_of(name)
        if nonce is not None:
            return nonce == self._nonce
        folders: set[bytes] = set()
        if name == MANIFEST_NAME:
            with contextlib.suppress(FileNotFoundError):
                folders.update(
                    _FOLDER.findall(locations.read_bytes(locations.join(self._location, name)))
                )
        if folders:
            return self._nonce.encode() in folders
        # Of a strategy that does not know of folders.
        return name not in self._earlier


def _files_of_saves(location: str) -> list[str]:
    return [name for name in object_store.at(location).list_files() if _OURS.fullmatch(name)]


def _manifest_named_by(marker: Mapping[str, Any]) -> str:
    """Return the name of the manifest, nothing when a marker names none."""
    manifest = marker.get("manifest")
    return str(manifest.get("name", "")) if isinstance(manifest, dict) else ""


def _nonce_of(name: str) -> str | None:
    match = _OURS.fullmatch(name)
    return (match[1] or match[2]) if match else None
