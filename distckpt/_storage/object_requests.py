"""Requests of object stores, made through fsspec, and again while the reason of a failure may pass.

s3fs and botocore repeat single calls, but not those whose answer is cut off while it is read, and what they repeat
after a lost answer may fail because it was carried out the first time. Other backends repeat some of what they do, or
nothing.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec
import fsspec.asyn
import fsspec.spec
from fsspec.implementations.memory import MemoryFileSystem

logger = logging.getLogger(__name__)

_ATTEMPTS = 4
_FIRST_DELAY = 0.25
"""Seconds before the second attempt, twice as long before each further one, less a random half."""
_PIECE_BYTES = 1 << 20
"""Of an answer that arrives, at most; usually there are fewer at a time."""
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
    errno.ECONNABORTED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_PASSING_CODES = {"IncompleteBody", "BadDigest", "RequestTimeout", "XAmzContentSHA256Mismatch"}
"""What S3 answers when a request did not arrive whole."""
_PASSING_STATUSES = {"408", "429", "500", "502", "503", "504"}
"""Of HTTP: busy, or broken for a moment."""
_PASSING_CLASSES = {
    "ConnectionError", "TimeoutError", "HTTPClientError", "ResponseParserError", "IncompleteReadError",
    "IncompleteRead", "ClientConnectionError", "ClientPayloadError", "ServiceRequestError", "ServiceResponseError",
}  # fmt: skip
"""By name, wherever they are defined: backends of fsspec bring their own, and are not imported here."""

_Result = TypeVar("_Result")


def request(location: str, make: Callable[[Any, str], _Result]) -> _Result:
    """Make a request, again after a while as long as the reason of its failure may pass.

    Listings are never taken from a cache.

    Raises:
        OSError: naming the location.
    """
    fs, path = backend_of(location)
    delay = _FIRST_DELAY
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            fs.invalidate_cache()
            return make(fs, path)
        except Exception as error:
            if attempt == _ATTEMPTS or not _may_pass(error):
                raise _naming(error, location) from error
            logger.info("%s: %s: %s; trying again", location, type(error).__name__, error)
        time.sleep(delay * random.uniform(0.5, 1.0))
        delay *= 2
    raise AssertionError("the last attempt returns or raises")


# --- Backends ---------------------------------------------------------------------------------------------------------


def backend_of(location: str) -> tuple[Any, str]:
    """Return the file system of fsspec that serves a URL, and the path that it knows the place by.

    Raises:
        ImportError: the library that the file system needs is not installed.
    """
    try:
        fs, path = fsspec.core.url_to_fs(location)
    except ImportError as error:
        advice = ": pip install 'distckpt[s3]'" if location.startswith(("s3://", "s3a://")) else ""
        raise ImportError(f"{location}: {error}{advice}") from error
    return fs, path


def is_s3(fs: Any) -> bool:
    """Tell whether a file system speaks S3's protocol, through s3fs."""
    protocols = type(fs).protocol
    return "s3" in ((protocols,) if isinstance(protocols, str) else protocols)


def has_create(fs: Any) -> bool:
    """Tell whether a file system can put an object where there is none, in one step."""
    put = type(fs)._pipe_file if isinstance(fs, fsspec.asyn.AsyncFileSystem) else type(fs).pipe_file
    # Those that know nothing of the mode have the function of a base class, or one without the argument.
    is_own = put not in (fsspec.asyn.AsyncFileSystem._pipe_file, fsspec.AbstractFileSystem.pipe_file)
    return is_own and "mode" in inspect.signature(put).parameters


def has_replace(fs: Any) -> bool:
    """Tell whether a file system can put an object in the place of a known one, in one step."""
    return is_s3(fs) or isinstance(fs, MemoryFileSystem)


def discard(stream: Any) -> None:
    """Give up what is being written to a file of a backend, so that no object is made of it where that is possible."""
    with contextlib.suppress(Exception):
        if isinstance(stream, fsspec.spec.AbstractBufferedFile):
            # The garbage collector would close it later, in the place of what has been put there by then.
            stream.closed = True
            stream.discard()
        else:
            stream.close()


def call_s3(fs: Any, path: str, method: str, **arguments: Any) -> Any:
    """Call a method of S3's interface that is about one object; returns its answer."""
    bucket, key, _ = fs.split_path(path)
    return fs.call_s3(method, Bucket=bucket, Key=key, **arguments)


def get_s3(fs: Any, path: str, take: Callable[[bytes], object], **arguments: Any) -> None:
    """Get an object, or a range of it; `take` is given the content piece by piece, while it arrives."""

    async def get() -> None:
        bucket, key, _ = fs.split_path(path)
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **arguments)
        body = answer["Body"]
        try:
            while piece := await body.read(_PIECE_BYTES):
                take(piece)
        finally:
            body.close()

    fsspec.asyn.sync(fs.loop, get)


# --- Errors -----------------------------------------------------------------------------------------------------------


def code_of(error: BaseException) -> str:
    """Return what S3 calls an error, nothing when it did not answer."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _may_pass(error: Exception) -> bool:
    """Tell whether a request that failed may succeed when it is made again."""
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    # aiohttp, azure and gcsfs have the status of an answer under these names.
    statuses = {str(getattr(error, name, "")) for name in ("status", "status_code", "code")}
    return (
        code_of(error) in _PASSING_CODES
        or not statuses.isdisjoint(_PASSING_STATUSES)
        or any(kind.__name__ in _PASSING_CLASSES for kind in type(error).__mro__)
    )


def _naming(error: Exception, location: str) -> Exception:
    """Return an error that names the location; one of the program (a bug) as it is."""
    if isinstance(error, FileNotFoundError | FileExistsError):
        if error.filename is not None:
            return error
        number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EEXIST
        return type(error)(number, str(error), location)
    if isinstance(error, OSError):
        number = error.errno or (errno.EACCES if isinstance(error, PermissionError) else errno.EIO)
        return OSError(number, error.strerror or str(error), location)
    if type(error).__module__ == "builtins":
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {error}", location)
