"""Object stores: whole objects, parts of large ones, conditional writes, ranged reads."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from distckpt._storage import object_requests
from distckpt._storage.object_requests import backend_of, call_s3, code_of, discard, get_s3, is_s3, request

MAX_PARTS = 10_000
"""Of one object, as S3 has it. Each part but the last has at least 5 MiB."""

_REMOVALS = 10
"""So many at the same time."""
_Bytes = npt.NDArray[np.uint8]
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
        return str(request(location, lambda fs, path: fs.info(path)["type"]))
    except FileNotFoundError:
        return None


def list_names(location: str) -> list[str]:
    """Return the sorted names directly below a prefix; FileNotFoundError when there is nothing."""
    entries = request(location, lambda fs, path: fs.ls(path, detail=False))
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in entries)


def list_files(location: str) -> list[str]:
    """Return the sorted names of all objects below a prefix, relative to it, such as `tensors/x`."""

    def find(fs: Any, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        names = fs.find(path) if is_s3(fs) else _walk(fs, start)
        return sorted(name[len(start) :] for name in names if name.startswith(start))

    return request(location, find)


def _walk(fs: Any, start: str) -> Iterator[str]:
    """Yield the paths of all objects below a prefix. `fs.find` leaves out silently what it could not list."""
    with contextlib.suppress(FileNotFoundError):
        for entry in fs.ls(start, detail=True):
            name = entry["name"].rstrip("/") + "/"
            if entry["type"] == "directory" and name != start:
                yield from _walk(fs, name)
            elif entry["type"] != "directory":
                yield entry["name"]


def size(location: str) -> int:
    """Return the size of an object in bytes."""
    return int(request(location, lambda fs, path: fs.size(path)))


def version(location: str) -> str | None:
    """Return what changes whenever the object does, None when there is no object."""

    def look(fs: Any, path: str) -> str:
        return str(fs.info(path)["ETag"]) if is_s3(fs) else _digest(fs.cat_file(path))

    try:
        return request(location, look)
    except FileNotFoundError:
        return None


# --- Reading ----------------------------------------------------------------------------------------------------------


def read(location: str, max_bytes: int | None = None) -> bytes:
    """Return a whole object.

    Raises:
        OSError: with errno EFBIG, when it has more than `max_bytes`.
    """

    def fetch(fs: Any, path: str) -> bytes:
        if not is_s3(fs):
            if max_bytes is not None and fs.size(path) > max_bytes:
                raise _too_large(max_bytes)
            return bytes(fs.cat_file(path))
        content = bytearray()

        def take(piece: bytes) -> None:
            content.extend(piece)
            if max_bytes is not None and len(content) > max_bytes:
                raise _too_large(max_bytes)

        # s3fs would ask for the size first, with a request of its own.
        get_s3(fs, path, take)
        return bytes(content)

    return request(location, fetch)


def _too_large(max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"more than {max_bytes} bytes")


def read_into(location: str, start: int, buffers: Sequence[_Bytes]) -> int:
    """Fill buffers from a position of an object on; returns how many bytes there were.

    An answer that is shorter than the rest of the object counts as a failed request.
    """
    wanted = sum(len(buffer) for buffer in buffers)
    if not wanted:
        return 0

    def fetch(fs: Any, path: str) -> int:
        got = 0

        def take(piece: bytes) -> None:
            nonlocal got
            got += _fill(buffers, got, piece)

        try:
            if is_s3(fs):
                get_s3(fs, path, take, Range=f"bytes={start}-{start + wanted - 1}")
            else:
                take(fs.cat_file(path, start=start, end=start + wanted))
        except OSError as error:
            # S3 refuses what begins after the end.
            if code_of(error) != "InvalidRange":
                raise
        if got < wanted and start + got < fs.size(path):
            raise OSError(errno.EIO, f"{got} bytes came, {wanted} were asked for")
        return got

    return request(location, fetch)


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
        if is_s3(fs):
            call_s3(fs, path, "put_object", Body=data)
        else:
            fs.pipe_file(path, data)

    request(location, put)


def has_create(location: str) -> bool:
    """Tell whether `create` is one step of the store, so that of two programs only one can succeed."""
    return object_requests.has_create(backend_of(location)[0])


def has_replace(location: str) -> bool:
    """Tell whether `replace` is one step of the store."""
    return object_requests.has_replace(backend_of(location)[0])


def create(location: str, data: bytes) -> bool:
    """Put an object where there is none; False when there is one, unless it has this very content.

    Then an earlier attempt was carried out, and its answer lost.
    """

    def put(fs: Any, path: str) -> bool:
        with contextlib.nullcontext() if is_s3(fs) else _local_lock:
            mode = {"mode": "create"} if object_requests.has_create(fs) else {}
            if not mode and _is_there(fs, path):
                return False
            try:
                fs.pipe_file(path, data, **mode)
            except FileExistsError:
                return False
            return True

    return request(location, put) or read(location) == data


def _is_there(fs: Any, path: str) -> bool:
    # `fs.exists` calls every failure an absence.
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True


def replace(location: str, data: bytes, known: str) -> bool:
    """Put an object in the place of the one whose version is known; False when that has changed since, see `create`."""

    def put(fs: Any, path: str) -> bool:
        if not is_s3(fs):
            with _local_lock:
                if not _is_there(fs, path) or _digest(fs.cat_file(path)) != known:
                    return False
                fs.pipe_file(path, data)
            return True
        try:
            call_s3(fs, path, "put_object", Body=data, IfMatch=known)
        except OSError as error:
            if code_of(error) not in ("PreconditionFailed", "NoSuchKey"):
                raise
            return False
        return True

    if request(location, put):
        return True
    try:
        return read(location) == data
    except FileNotFoundError:
        return False


def write_stream(location: str, content: Callable[[], Iterable[bytes | _Bytes]]) -> None:
    """Put a whole object in the requests that its backend divides it into.

    Args:
        location: of the object.
        content: returns its pieces. Called once more, for all of them, whenever a request has failed.

    Raises:
        OSError: naming the location. Otherwise what the pieces raise.
    """

    error = request(location, lambda fs, path: _stream(fs, path, iter(content())))
    try:
        if error is not None:
            raise error
    finally:
        # It refers to this frame: a circle would keep what the content is made of.
        del error


def _stream(fs: Any, path: str, pieces: Iterator[bytes | _Bytes]) -> Exception | None:
    """Put pieces into a new object; returns the error of the pieces, which is none of the store, and does not pass."""
    stream = fs.open(path, "wb")
    try:
        while True:
            try:
                piece = next(pieces, None)
            except Exception as error:
                discard(stream)
                return error
            if piece is None:
                break
            stream.write(memoryview(piece))
        stream.close()
    except FileNotFoundError as error:
        # Of an upload that is gone: its backend has repeated a request that was carried out.
        discard(stream)
        raise OSError(errno.EIO, str(error)) from error
    except BaseException:
        discard(stream)
        raise
    return None


def open_for_writing(location: str) -> Any:
    """Open an object for streaming writes, which are not repeated; it becomes visible when it is closed."""
    fs, path = backend_of(location)
    return fs.open(path, "wb")


# --- Objects in parts -------------------------------------------------------------------------------------------------


def takes_parts(location: str) -> bool:
    """Tell whether an object can be put in parts of different sizes, at the same time."""
    fs, _ = backend_of(location)
    return is_s3(fs) and not getattr(fs, "fixed_upload_size", False)


def begin_upload(location: str) -> Upload:
    """Begin an object in parts. It must be completed or aborted: parts are kept, and cost, until then."""
    answer = request(location, lambda fs, path: call_s3(fs, path, "create_multipart_upload"))
    return Upload(location, answer["UploadId"])


def put_part(upload: Upload, number: int, data: bytes) -> str:
    """Put part `number`, from 1; returns its tag. Parts may come in any order, from several threads."""

    def put(fs: Any, path: str) -> Any:
        # Not a stream: where s3fs repeats a call, it would go on from the end of it, and put an empty part.
        return call_s3(fs, path, "upload_part", UploadId=upload.number, PartNumber=number, Body=data)

    return str(request(upload.location, put)["ETag"])


def complete(upload: Upload, tags: Sequence[str], num_bytes: int) -> None:
    """Make an object of its parts, given all their tags and its size."""
    parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]}

    def put(fs: Any, path: str) -> None:
        call_s3(fs, path, "complete_multipart_upload", UploadId=upload.number, MultipartUpload=parts)

    # Of an upload that is gone: it was completed by an attempt whose answer was lost, if there is the object.
    with contextlib.suppress(FileNotFoundError):
        request(upload.location, put)
    arrived = size(upload.location)
    if arrived != num_bytes:
        raise OSError(errno.EIO, f"{arrived} bytes of {num_bytes} have arrived", upload.location)


def abort(upload: Upload) -> None:
    """Give up an object in parts; one that is gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        request(upload.location, lambda fs, path: call_s3(fs, path, "abort_multipart_upload", UploadId=upload.number))


def list_uploads(location: str) -> list[Upload]:
    """Return the uploads below a prefix, or to this very object, that were begun and neither completed nor aborted."""

    def look(fs: Any, path: str) -> list[Upload]:
        if not is_s3(fs):
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

    return request(location, look)


# --- Removing ---------------------------------------------------------------------------------------------------------


def remove(location: str) -> None:
    """Remove an object; one that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        request(location, lambda fs, path: fs.rm_file(path))


def remove_all(locations: Iterable[str]) -> None:
    """Remove objects, several at a time."""
    with ThreadPoolExecutor(_REMOVALS, thread_name_prefix="distckpt-remove") as pool:
        list(pool.map(remove, locations))


def _digest(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))
