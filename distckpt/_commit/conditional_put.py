"""Commit of a save to an object store: the marker is put last.

Nothing can be renamed there, so the marker is put on a condition.

Every save writes into folders of its own, `tensors-<nonce>/` and `objects-<nonce>/` (of many ranks
also `tensors-<nonce>-1/` and so on), so files of two savers never meet. The marker names the
manifest, and the manifest the files. It is put only if the marker of the beginning of the save, or
none, is still there. So of several savers one wins, and a reader finds the old checkpoint or the
new one.

A file that is no part of the checkpoint was left by an interrupted save, or belongs to a save that
began before the marker was put and cannot win any more. Files that are there when a marker is about
to be put are therefore safe to remove afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
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
    """Return the files of saves that a location does not refer to.

    Neither its manifest nor its marker names them; names are relative to the location. There are
    none on local disks, where a save becomes visible by a rename.
    """
    if locations.is_local(location):
        return []
    manifest = _manifest_named_by(read_marker(location) or {})
    present = _files_of_saves(location)
    return [name for name in present if name != manifest and name not in named]


def remove_checkpoint(location: str, is_meant: Callable[[str], bool]) -> bool:
    """Remove a checkpoint, the marker first.

    False when another checkpoint is there, or replaces it.
    """
    marker = object_store.at(locations.join(location, CONFIG_FNAME))
    version = marker.version()
    if version is None:
        return True
    if not is_meant(location):
        return False
    if marker.has_conditions:
        # Removals have no conditions. A marker put on one fails all saves that may replace this
        # checkpoint.
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
    """Remove the files of saves from a location without a marker.

    No save may be running there.
    """
    _remove(location, _files_of_saves(location))
    object_store.abort_uploads(location)


def _remove(location: str, names: Sequence[str]) -> None:
    """Remove files of a location, and the folders that become empty."""
    if names:
        object_store.remove_all(locations.join(location, name) for name in names)
        object_store.at(location).remove_empty_folders()


class Transaction:
    """A save to an object store, used by the coordinator alone.

    Without `has_folders` the save writes into no folders of its own, as strategies of users may. It
    cannot replace a checkpoint then, and removes nothing but its own files.
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
            advice = "save with another strategy: this one cannot replace it"
            if has_folders:
                advice = "pass overwrite=True"
            raise posix.already_complete(location, advice)
        if not self._is_conditional:
            self._warn_about_conditions()

    def check_not_overtaken(self) -> None:
        """Raise CheckpointExistsError if another save has put its marker meanwhile.

        The time is counted from the beginning of this save.
        """
        if self._marker.version() != self._version:
            raise self._overtaken()

    def _overtaken(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"Another program has saved to {self._location!r}, or removed what was there, while "
            "this save was being written: that stays. Choose another location, or save again."
        )

    def commit(self, fields: Mapping[str, Any], files: Sequence[str] = ()) -> None:
        """Put the marker unless it has changed since the save began.

        Then remove files that the checkpoint does not name. Nothing is put when any of these files
        is not there. After an OSError other than a refusal it is not known whether the marker was
        put, and nothing is removed.
        """
        try:
            self._put_and_clear_up(fields, files)
        except NoConditionsError:
            self._is_conditional = False
            self._warn_about_conditions()
            self._put_and_clear_up(fields, files)

    def _put_and_clear_up(self, fields: Mapping[str, Any], files: Sequence[str]) -> None:
        present: list[str] = []
        missing: list[str] = []
        if self._has_folders:
            present = _files_of_saves(self._location)
            missing = sorted(set(files).difference(present))
        # With another marker, the save that has won the race removes them; the put below says so.
        if missing and self._marker.version() == self._version:
            more = f" (and {len(missing) - 1} more files)" if len(missing) > 1 else ""
            raise CheckpointingException(
                f"{locations.join(self._location, missing[0])!r} was written and is missing{more}: "
                "another program removes files there, or not all ranks write to the same store. "
                "Nothing was committed."
            )
        strays = self._strays({_manifest_named_by(fields), *files}, present)
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
        """Put the marker, or return False when it has changed.

        It is compared with the marker at the beginning of the save.
        """
        if self._is_conditional:
            return self._marker.replace(content, self._version)
        version = self._marker.version()
        if version == self._version:
            self._marker.write(content)
            return True
        # The store may have carried out a conditional put, and have refused its repetition.
        return version is not None and self._marker.read() == content

    def abandon(self) -> None:
        """Remove the files of the save, unless its marker may be there."""
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

    def _strays(self, named: Collection[str], present: Sequence[str]) -> list[str]:
        """Return the files that can be removed when the marker is there.

        `named` are the files of the checkpoint.
        """
        if not self._has_folders:
            return []
        if not self._is_conditional:
            # Other saves may still be committed, whenever they began: only replaced files go.
            with contextlib.suppress(CorruptCheckpointError):
                old = read_marker(self._location) or {}
                manifest = _manifest_named_by(old)
                # After a removal of tensors, files of the save before are named as well.
                nonces = {old.get(SAVE, ""), *_nonces_in(self._location, manifest)}
                old_files = self._earlier.difference(named)
                return [n for n in old_files if n == manifest or _nonce_of(n) in nonces]
            return []
        return [name for name in present if name not in named and not self._is_own(name)]

    def _uploads(self, strays: bool) -> list[Upload]:
        """Return the unfinished uploads of this save.

        With `strays`, also the uploads of saves that cannot win any more.
        """
        uploads = self._remote.list_uploads()
        has_all = strays and self._is_conditional and self._has_folders
        selected = []
        for upload in uploads:
            name = upload.location[len(self._location) + 1 :]
            if _OURS.fullmatch(name) and (has_all or self._is_own(name)):
                selected.append(upload)
        return selected

    def _abort(self, uploads: Sequence[Upload]) -> None:
        for upload in uploads:
            self._remote.abort(upload)

    def _is_own(self, name: str) -> bool:
        nonce = _nonce_of(name)
        if nonce is not None:
            return nonce == self._nonce
        if name == MANIFEST_NAME and (nonces := _nonces_in(self._location, name)):
            return self._nonce in nonces
        # A file of a strategy that does not know of folders.
        return name not in self._earlier


def _files_of_saves(location: str) -> list[str]:
    return [name for name in object_store.at(location).list_files() if _OURS.fullmatch(name)]


def _manifest_named_by(marker: Mapping[str, Any]) -> str:
    """Return the name of a marker's manifest, or an empty string."""
    manifest = marker.get("manifest")
    if not isinstance(manifest, dict):
        return ""
    return str(manifest.get("name", ""))


def _nonces_in(location: str, manifest: str) -> set[str]:
    """Return the nonces of the folders that a manifest names."""
    content = b""
    with contextlib.suppress(FileNotFoundError):
        if manifest:
            content = locations.read_bytes(locations.join(location, manifest))
    return set(map(bytes.decode, _FOLDER.findall(content)))


def _nonce_of(name: str) -> str | None:
    match = _OURS.fullmatch(name)
    if match is None:
        return None
    return match[1] or match[2]
