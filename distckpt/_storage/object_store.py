"""Access to URLs: cloud stores through obstore, all others through fsspec.

The cloud stores are S3, Google Cloud Storage and Azure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distckpt._storage.remote import RemoteLocation

DECODED = "orbax-array://"
"""Beginning of the URLs of tensors that are stored encoded."""


def at(location: str, decoded: dict[str, Any] | None = None) -> RemoteLocation:
    """Return the interface to a URL; `decoded` is memory of later ones."""
    # Imported when a URL is used: most programs have local paths only.
    from distckpt._storage.remote import PROVIDERS

    if location.partition("://")[0] in PROVIDERS:
        from distckpt._storage.cloud import CloudLocation

        return CloudLocation(location)
    if location.startswith(DECODED):
        from distckpt._base.wings import wing

        file: RemoteLocation = wing("orbax").ArrayFile(location, decoded)
        return file
    from distckpt._storage.fsspec_urls import FsspecLocation

    return FsspecLocation(location)


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects of one store, in as few requests as possible."""
    listed = list(locations)
    if listed:
        at(listed[0]).remove_many(listed)


def abort_uploads(location: str, paths: Collection[str] | None = None) -> None:
    """Abort the unfinished uploads to an object, or below a prefix.

    With `paths`, only those to these objects.
    """
    remote = at(location)
    for upload in remote.list_uploads():
        if paths is None or upload.location in paths:
            remote.abort(upload)
