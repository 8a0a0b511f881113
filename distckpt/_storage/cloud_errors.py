"""Errors of obstore and boto3, translated to errors of files."""

from __future__ import annotations

import errno
import http
import re

_TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
_BUSY_STATUSES = (429, 503)
_ERRNOS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    416: errno.ESPIPE,
    501: errno.ENOSYS,
}
"""HTTP status -> errno of a file; EIO for other statuses."""
_NO_CONTAINER = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")


def os_error(error: Exception, location: str) -> Exception:
    """Return a library's error as an error that names the location.

    Other errors are returned as they are.
    """
    if _NO_CONTAINER.search(str(error)) and (
        _is_of_library(error) or isinstance(error, FileNotFoundError)
    ):
        # Not FileNotFoundError, which would pass for a bucket without this checkpoint.
        return OSError(errno.ENXIO, "the bucket or container does not exist", location)
    if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
        number = errno.EEXIST
    elif isinstance(error, FileNotFoundError) and error.errno is None:
        number = errno.ENOENT
    elif _is_of_library(error):
        number = _ERRNOS.get(_status_of(error), errno.EIO)
    else:
        return error
    # It is a FileExistsError, FileNotFoundError or PermissionError by its number.
    return OSError(number, text_of(error), location)


def is_temporary(error: Exception) -> bool:
    """Return whether a request that failed may succeed if repeated."""
    # obstore has already repeated the requests of streams, except for answers that were cut off.
    status = _status_of(error)
    may_end = _is_of_library(error) and (status == 0 or status in _TEMPORARY_STATUSES)
    return may_end and not re.search(r"after \d+ retries", str(error))


def is_busy(error: Exception) -> bool:
    """Return whether a store has refused a request as too many."""
    return _is_of_library(error) and _status_of(error) in _BUSY_STATUSES


def _is_of_library(error: Exception) -> bool:
    return any(
        kind.__module__.partition(".")[0] in ("obstore", "botocore") for kind in type(error).__mro__
    )


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an answer; 0 if there was no answer."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if "Wanted range starting at" in str(error):
        # obstore has detected this itself, from an answer without an error.
        return http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    # obstore gives it only in its message.
    match = re.search(r"status code: (\d{3})", str(error))
    if match is None:
        return 0
    return int(match[1])


def text_of(error: Exception) -> str:
    """Return an error's message, without obstore's dump of the values inside."""
    return str(error).partition("\n\nDebug source:")[0]
