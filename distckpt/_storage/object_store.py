"""Access to URLs: S3, Google Cloud Storage and Azure through obstore, all others through fsspec."""

from __future__ import annotations

from collections.abc import Iterable

from distckpt._storage.cloud import CLOUD_SCHEMES, CloudLocation
from distckpt._storage.fsspec_urls import FsspecLocation
from distckpt._storage.remote import RemoteLocation


def at(location: str) -> RemoteLocation:
    """Return the interface to a URL."""
    scheme = location.partition("://")[0]
    return CloudLocation(location) if scheme in CLOUD_SCHEMES else FsspecLocation(location)


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects of one store, in as few requests as possible."""
    listed = list(locations)
    if listed:
        at(listed[0]).remove_many(listed)


def abort_uploads(location: str) -> None:
    """Abort the unfinished uploads to an object or below a prefix."""
    remote = at(location)
    for upload in remote.list_uploads():
        remote.abort(upload)
