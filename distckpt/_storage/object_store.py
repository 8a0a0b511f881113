"""Access to what URLs name: S3, Google Cloud Storage and Azure through obstore, all other URLs through fsspec."""

from __future__ import annotations

from collections.abc import Iterable

from distckpt._base.threads import Pool
from distckpt._storage.cloud import CLOUD_SCHEMES, CloudLocation
from distckpt._storage.fsspec_urls import FsspecLocation
from distckpt._storage.remote import RemoteLocation

_NUM_REMOVALS = 10
"""At the same time."""


def at(location: str) -> RemoteLocation:
    """Return the interface to a URL."""
    scheme = location.partition("://")[0]
    return CloudLocation(location) if scheme in CLOUD_SCHEMES else FsspecLocation(location)


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects, several at a time."""
    with Pool(_NUM_REMOVALS, thread_name_prefix="distckpt-remove") as pool:
        list(pool.map(lambda location: at(location).remove(), locations))


def abort_uploads(location: str) -> None:
    """Abort the unfinished uploads to an object or below a prefix."""
    remote = at(location)
    for upload in remote.list_uploads():
        remote.abort(upload)
