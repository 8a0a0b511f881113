"""Object stores, through fsspec: whole objects, parts of large ones, conditional writes, ranged reads.

Every request goes through `_request`, which repeats it while the reason of a
failure may pass: s3fs and botocore repeat single calls, but not those whose answer is cut off while it is read, and
what they repeat after a lost answer may fail because it was carried out the first time.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import fsspec
import fsspec.asyn
import numpy as np
import numpy.typing as npt
import xxhash
from fsspec.implementations.memory import MemoryFileSystem

logger = logging.getLogger(__name__)

MAX_PARTS = 10_000
"""Of one object, as S3 has it. Each part but the last has at least 5 MiB."""

_REMOVALS = 10
"""So many at the same time."""
_ATTEMPTS = 4
_FIRST_DELAY = 0.25
"""Seconds before the second attempt, twice as long before each further one, less a random half."""
_PASSING_ERRNOS = {
    errno.EIO, errno.EBUSY, errno.EAGAIN, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED,
    errno.ECONNABORTED, getattr(errno, "EREMOTEIO", errno.EIO),
}  # fmt: skip
_PASSING_CODES = {"IncompleteBody", "BadDigest", "RequestTimeout", "XAmzContentSHA256Mismatch"}
"""What S3 answers when a request did not arrive whole."""
_PASSING_CLASSES = {
    "ConnectionError", "TimeoutError", "HTTPClientError", "ResponseParserError", "IncompleteReadError",
    "IncompleteRead", "ClientConnectionError", "ClientPayloadError",
}  # fmt: skip
"""By name, wherever they are defined: backends of fsspec bring their own, and are not imported here."""

_Bytes = npt.NDArray[np.uint8]
_Result = TypeVar("_Result")
_local_lock = threading.Lock()


class Upload(NamedTuple):
    """An object that comes in parts, and becomes visible when it is completed."""

    location: str
    number: str


# --- What is there ----------------------------------------------------------------------------------------------------


def exists(location: str) -> bool:
    """Tell whether there is an object, or a prefix of objects."""
    return _kind_of(location) is not None


def isdir(location: str) -> bool:
    """Tell whether a location is a prefix of objects."""
    return _kind_of(location) == "directory"


def _kind_of(location: str) -> str | None:
    """Return "file" or "directory"; None when nothing is there. A store that does not answer is no absence."""
    try:
        return str(_request(location, lambda fs, path: fs.info(path)["type"]))
    except FileNotFoundError:
        return None


def list_names(location: str) -> list[str]:
    """Return the sorted names directly below a prefix; FileNotFoundError when there is nothing."""
    entries = _request(location, lambda fs, path: fs.ls(path, detail=False))
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)


def list_files(location: str) -> list[str]:
    """Return the sorted names of all objects below a prefix, relative to it, such as `tensors/x`."""

    def find(fs: Any, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        return sorted(name[len(start) :] for name in fs.find(path) if name.startswith(start))

    return _request(location, find)


def size(location: str) -> int:
    """Return the size of an object in bytes."""
    return int(_request(location, lambda fs, path: fs.size(path)))


def version(location: str) -> str | None:
    """Return what changes whenever the object does, None when there is no object."""

    def look(fs: Any, path: str) -> str:
        return str(fs.info(path)["ETag"]) if _is_s3(fs) else _digest(fs.cat_file(path))

    try:
        return _request(location, look)
    except FileNotFoundError:
        return None


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(location: str) -> bytes:
    """Return a whole object."""
    return bytes(_request(location, lambda fs, path: fs.cat_file(path)))


def read_into(location: str, start: int, buffers: Sequence[_Bytes]) -> int:
    """Fill buffers from a position of an object on; returns how many bytes there were.

    An answer that is shorter than the rest of the object counts as a failed request.
    """
    wanted = sum(len(buffer) for buffer in buffers)
    if not wanted:
        return 0

    def fetch(fs: Any, path: str) -> int:
        try:
            if _is_s3(fs):
                got = int(fsspec.asyn.sync(fs.loop, _stream_into, fs, path, start, start + wanted, buffers))
            else:
                got = _fill(buffers, 0, fs.cat_file(path, start=start, end=start + wanted))
        except OSError as error:
            # S3 refuses what begins after the end.
            if _code_of(error) != "InvalidRange":
                raise
            got = 0
        if got < wanted and start + got < fs.size(path):
            raise OSError(errno.EIO, f"{got} bytes came, {wanted} were asked for")
        return got

    return _request(location, fetch)


async def _stream_into(fs: Any, path: str, start: int, stop: int, buffers: Sequence[_Bytes]) -> int:
    """Copy the body of an answer to where it belongs while it arrives."""
    bucket, key, _ = fs.split_path(path)
    answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{stop - 1}")
    body, got = answer["Body"], 0
    try:
        while chunk := await body.read(1 << 20):
            got += _fill(buffers, got, chunk)
    finally:
        body.close()
    return got


def _fill(buffers: Sequence[_Bytes], position: int, data: bytes) -> int:
    """Put data at a position of all buffers taken together; returns its size."""
    rest = np.frombuffer(data, np.uint8)
    for buffer in buffers:
        if position < len(buffer) and len(rest):
            count = min(len(buffer) - position, len(rest))
            buffer[position : position + count], rest = rest[:count], rest[count:]
        position = max(0, position - len(buffer))
        if not len(rest):
            break
    return len(data) - len(rest)


# --- Writing ----------------------------------------------------------------------------------------------------------


def write(location: str, data: bytes) -> None:
    """Put a whole object with one request, in the place of one that is there."""

    def put(fs: Any, path: str) -> None:
        if _is_s3(fs):
            _call(fs, path, "put_object", Body=data)
        else:
            fs.pipe_file(path, data)

    _request(location, put)


def has_create(location: str) -> bool:
    """Tell whether `create` is one step of the store, so that of two programs only one can succeed."""
    return _has_create(fsspec.core.url_to_fs(location)[0])


def has_replace(location: str) -> bool:
    """Tell whether `replace` is one step of the store."""
    fs, _ = fsspec.core.url_to_fs(location)
    return _is_s3(fs) or isinstance(fs, MemoryFileSystem)


def _has_create(fs: Any) -> bool:
    put = type(fs)._pipe_file if isinstance(fs, fsspec.asyn.AsyncFileSystem) else type(fs).pipe_file
    # Those that know nothing of the mode have the function of a base class, or one without the argument.
    is_own = put not in (fsspec.asyn.AsyncFileSystem._pipe_file, fsspec.AbstractFileSystem.pipe_file)
    return is_own and "mode" in inspect.signature(put).parameters


def create(location: str, data: bytes) -> bool:
    """Put an object where there is none; False when there is one, unless it has this very content.

    Then an earlier attempt was carried out, and its answer lost.
    """

    def put(fs: Any, path: str) -> bool:
        with contextlib.nullcontext() if _is_s3(fs) else _local_lock:
            if not _has_create(fs) and fs.exists(path):
                return False
            mode = {"mode": "create"} if _has_create(fs) else {}
            try:
                fs.pipe_file(path, data, **mode)
            except FileExistsError:
                return False
            return True

    return _request(location, put) or read(location) == data


def replace(location: str, data: bytes, known: str) -> bool:
    """Put an object in the place of the one whose version is known; False when that has changed since, see `create`."""

    def put(fs: Any, path: str) -> bool:
        if not _is_s3(fs):
            with _local_lock:
                if not fs.exists(path) or _digest(fs.cat_file(path)) != known:
                    return False
                fs.pipe_file(path, data)
            return True
        try:
            _call(fs, path, "put_object", Body=data, IfMatch=known)
        except OSError as error:
            if _code_of(error) not in ("PreconditionFailed", "NoSuchKey"):
                raise
            return False
        return True

    if _request(location, put):
        return True
    try:
        return read(location) == data
    except FileNotFoundError:
        return False


def open_for_writing(location: str) -> Any:
    """Open an object for streaming writes; it becomes visible when it is closed."""
    fs, path = fsspec.core.url_to_fs(location)
    return fs.open(path, "wb")


# --- Objects in parts -------------------------------------------------------------------------------------------------


def takes_parts(location: str) -> bool:
    """Tell whether an object can be put in parts of different sizes, at the same time."""
    fs, _ = fsspec.core.url_to_fs(location)
    return _is_s3(fs) and not getattr(fs, "fixed_upload_size", False)


def begin_upload(location: str) -> Upload:
    """Begin an object in parts. It must be completed or aborted: parts are kept, and cost, until then."""
    answer = _request(location, lambda fs, path: _call(fs, path, "create_multipart_upload"))
    return Upload(location, answer["UploadId"])


def put_part(upload: Upload, number: int, data: bytes) -> str:
    """Put part `number`, from 1; returns its tag. Parts may come in any order, from several threads."""

    def put(fs: Any, path: str) -> Any:
        # Not a stream: where s3fs repeats a call, it would go on from the end of it, and put an empty part.
        return _call(fs, path, "upload_part", UploadId=upload.number, PartNumber=number, Body=data)

    return str(_request(upload.location, put)["ETag"])


def complete(upload: Upload, tags: Sequence[str], num_bytes: int) -> None:
    """Make an object of its parts, given all their tags and its size."""
    parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]}

    def put(fs: Any, path: str) -> None:
        _call(fs, path, "complete_multipart_upload", UploadId=upload.number, MultipartUpload=parts)

    # Of an upload that is gone: it was completed by an attempt whose answer was lost, if there is the object.
    with contextlib.suppress(FileNotFoundError):
        _request(upload.location, put)
    arrived = size(upload.location)
    if arrived != num_bytes:
        raise OSError(errno.EIO, f"{arrived} bytes of {num_bytes} have arrived", upload.location)


def abort(upload: Upload) -> None:
    """Give up an object in parts; one that is gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        _request(upload.location, lambda fs, path: _call(fs, path, "abort_multipart_upload", UploadId=upload.number))


def list_uploads(location: str) -> list[Upload]:
    """Return the uploads below a prefix, or to this very object, that were begun and neither completed nor aborted."""

    def look(fs: Any, path: str) -> list[Upload]:
        if not _is_s3(fs):
            return []
        bucket, prefix, _ = fs.split_path(path)
        found: list[Upload] = []
        more: dict[str, str] = {}
        while True:
            answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            names = [(item["Key"][len(prefix) :], item["UploadId"]) for item in answer.get("Uploads", [])]
            found += [Upload(location + name, number) for name, number in names if name[:1] in ("", "/")]
            if not answer.get("IsTruncated"):
                return found
            more = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    return _request(location, look)


# --- Removing ---------------------------------------------------------------------------------------------------------


def remove(location: str) -> None:
    """Remove an object; one that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        _request(location, lambda fs, path: fs.rm_file(path))


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects, several at a time."""
    with ThreadPoolExecutor(_REMOVALS, thread_name_prefix="distckpt-remove") as pool:
        list(pool.map(remove, locations))


# --- Requests ---------------------------------------------------------------------------------------------------------


def _request(location: str, request: Callable[[Any, str], _Result]) -> _Result:
    """Make a request, again after a while as long as the reason of its failure may pass.

    Listings are never taken from a cache.

    Raises:
        OSError: naming the location.
    """
    fs, path = fsspec.core.url_to_fs(location)
    delay = _FIRST_DELAY
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            fs.invalidate_cache()
            return request(fs, path)
        except (FileNotFoundError, FileExistsError) as error:
            if error.filename is not None:
                raise
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EEXIST
            raise type(error)(number, str(error), location) from error
        except Exception as error:
            if attempt == _ATTEMPTS or not _may_pass(error):
                raise _naming(error, location) from error
            logger.info("%s: %s: %s; trying again", location, type(error).__name__, error)
        time.sleep(delay * random.uniform(0.5, 1.0))
        delay *= 2
    raise AssertionError("the last attempt returns or raises")


def _call(fs: Any, path: str, method: str, **arguments: Any) -> Any:
    bucket, key, _ = fs.split_path(path)
    return fs.call_s3(method, Bucket=bucket, Key=key, **arguments)


def _is_s3(fs: Any) -> bool:
    protocols = type(fs).protocol
    return "s3" in ((protocols,) if isinstance(protocols, str) else protocols)


def _code_of(error: BaseException) -> str:
    """Return what S3 calls an error, nothing when it did not answer."""
    answer = getattr(error.__cause__, "response", None)
    return str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""


def _may_pass(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    return _code_of(error) in _PASSING_CODES or any(kind.__name__ in _PASSING_CLASSES for kind in type(error).__mro__)


def _naming(error: Exception, location: str) -> Exception:
    """Return an error that names the location; one of the program (a bug) as it is."""
    if isinstance(error, OSError):
        number = error.errno or (errno.EACCES if isinstance(error, PermissionError) else errno.EIO)
        return OSError(number, error.strerror or str(error), location)
    if type(error).__module__ == "builtins":
        return error
    return OSError(errno.EIO, f"{type(error).__name__}: {error}", location)


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))
