"""Try a save's requests on a store, before jobs depend on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import PART_BYTES
from distckpt._storage import locations, object_store
from distckpt._storage.remote import PROVIDERS, NoConditionsError, RemoteLocation

_DATA = b"written by distckpt bench"


class Permissions(NamedTuple):
    """The names of permissions that a request needs, by provider."""

    s3: str
    gcs: str
    azure: str


_PUT = Permissions("s3:PutObject", "storage.objects.create", "blobs/write (SAS: cw)")
_GET = Permissions("s3:GetObject", "storage.objects.get", "blobs/read (SAS: r)")
_LIST = Permissions("s3:ListBucket", "storage.objects.list", "blobs/read (SAS: l)")
_UPLOAD = Permissions("s3:PutObject", "storage.multipartUploads.create", "blobs/write (SAS: cw)")
_DELETE = Permissions("s3:DeleteObject", "storage.objects.delete", "blobs/delete (SAS: d)")

_Request = Callable[[str], object]


def try_requests(folder: str) -> str:
    """Make each request of a save once, below an unused URL.

    Returns:
        The reason why two programs that save to one place at the same time are not kept apart;
        an empty string if they are.

    Raises:
        CheckpointingException: a request fails that saves, or the removal of steps, need.
    """
    for action, (make, permissions) in _REQUESTS.items():
        try:
            make(folder)
        except OSError as error:
            raise _failed(folder, action, permissions, error) from error
    reason = _lacks_conditions(locations.join(folder, "marker"))
    # A failure to list or abort is a warning there.
    object_store.abort_uploads(folder)
    _remove(folder)
    return reason


def _failed(
    folder: str, action: str, permissions: Permissions, error: OSError
) -> CheckpointingException:
    provider = PROVIDERS.get(folder.partition("://")[0])
    advice = ""
    if provider:
        advice = f" Allow {getattr(permissions, provider)} there."
    return CheckpointingException(f"{folder!r}: cannot {action}: {error}.{advice}")


def _put(folder: str) -> None:
    locations.write_bytes(locations.join(folder, "object"), _DATA)


def _get(folder: str) -> None:
    if locations.read_bytes(locations.join(folder, "object")) != _DATA:
        raise OSError("another content came than was put")


def _look_for_none(folder: str) -> None:
    if object_store.at(locations.join(folder, "none")).version() is not None:
        raise OSError("it is there")


def _list(folder: str) -> None:
    if "object" not in object_store.at(folder).list_files():
        raise OSError("an object that was put is not listed")


def _upload(folder: str) -> None:
    file = object_store.at(locations.join(folder, "parts"))
    file.write_stream(lambda: [_DATA], len(_DATA), 1, PART_BYTES)


def _break_off(folder: str) -> None:
    """Break an upload off, as a save that fails does."""

    def content() -> Iterator[bytes]:
        yield _DATA
        raise _BrokenOffError

    file = object_store.at(locations.join(folder, "broken-off"))
    with contextlib.suppress(_BrokenOffError):
        file.write_stream(content, 2 * PART_BYTES, 1, PART_BYTES)


class _BrokenOffError(Exception):
    """Ends an upload."""


def _remove(folder: str) -> None:
    locations.remove_tree(folder)
    if object_store.at(folder).kind() is not None:
        raise OSError("objects that were removed are still there")


_REQUESTS: Mapping[str, tuple[_Request, Permissions]] = {
    "put an object": (_put, _PUT),
    "read an object": (_get, _GET),
    "see that an object is not there": (_look_for_none, _LIST),
    "list objects": (_list, _LIST),
    "upload an object in parts": (_upload, _UPLOAD),
    "break off an upload": (_break_off, _UPLOAD),
    "remove objects": (_remove, _DELETE),
}


def _lacks_conditions(marker: str) -> str:
    """Return the reason why conditional puts fail, or an empty string."""
    file = object_store.at(marker)
    if not file.has_conditions:
        return "no conditional writes"
    try:
        if _are_checked(file):
            return ""
        return "conditional writes that it accepts and ignores"
    except NoConditionsError:
        return "no conditional writes"


def _are_checked(file: RemoteLocation) -> bool:
    """Whether the store refuses a put whose condition is not met."""
    if not file.replace(b"1", None):
        raise CheckpointingException(f"{file.location!r} is there already")
    version = file.version()
    is_created_once = not file.replace(b"2", None)
    is_replaced = file.replace(b"3", version)
    return is_created_once and is_replaced and not file.replace(b"4", version)
