"""Access to URLs: cloud stores through obstore, all others through fsspec.

The cloud stores are S3, Google Cloud Storage and Azure.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distckpt._storage.remote import RemoteLocation

PROVIDERS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
"""Scheme of URLs -> object store. All other schemes are fsspec's."""

_CLOUD = ("distckpt._storage.cloud", "CloudLocation")
_FSSPEC = ("distckpt._storage.fsspec_urls", "FsspecLocation")
"""Module and class, imported when a URL is used: most programs have local paths only."""


def at(location: str) -> RemoteLocation:
    """Return the interface to a URL."""
    module, name = _FSSPEC
    if location.partition("://")[0] in PROVIDERS:
        module, name = _CLOUD
    remote: RemoteLocation = getattr(importlib.import_module(module), name)(location)
    return remote


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects of one store, in as few requests as possible."""
    listed = list(locations)
    if listed:
        at(listed[0]).remove_many(listed)


def abort_uploads_to(location: str, paths: Collection[str]) -> None:
    """Abort the unfinished uploads to some objects below a prefix."""
    remote = at(location)
    for upload in remote.list_uploads():
        if upload.location in paths:
            remote.abort(upload)


def abort_uploads(location: str) -> None:
    """Abort the unfinished uploads to an object or below a prefix."""
    remote = at(location)
    for upload in remote.list_uploads():
        remote.abort(upload)
