"""Locations and what can be done with them: local paths through `os`, URLs through fsspec.

A location is a `str`: a local path or an fsspec URL such as `s3://bucket/run/step_10`. This is the only module
that imports fsspec and the only one that renames, lists or removes. Bulk tensor bytes on local disks do not pass
through here: see `_io`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from typing import Any

import fsspec

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def normalize(location: str | os.PathLike[str]) -> str:
    """Return the location as a `str`: an absolute path for local files, an unchanged URL otherwise."""
    text = os.fspath(location)
    if text.startswith("file://"):
        text = text[len("file://") :]
    return os.path.abspath(text) if is_local(text) else text.rstrip("/")


def is_local(location: str) -> bool:
    """Tell whether a location is a path of this machine's file system rather than an fsspec URL."""
    return "://" not in location


def join(base: str, *names: str) -> str:
    """Append path components to a location."""
    return os.path.join(base, *names) if is_local(base) else "/".join([base.rstrip("/"), *names])


def split(location: str) -> tuple[str, str]:
    """Split a location into its parent and its last component."""
    if is_local(location):
        return os.path.split(location)
    parent, _, name = location.rpartition("/")
    return parent, name


def _filesystem(location: str) -> tuple[Any, str]:
    fs, path = fsspec.core.url_to_fs(location)
    return fs, path


def exists(location: str) -> bool:
    """Tell whether a file or directory is there (never answered from a listing cache)."""
    if is_local(location):
        return os.path.lexists(location)
    fs, path = _filesystem(location)
    fs.invalidate_cache()
    return bool(fs.exists(path))


def isdir(location: str) -> bool:
    """Tell whether a location is a directory, or a non-empty prefix of an object store."""
    if is_local(location):
        return os.path.isdir(location)
    fs, path = _filesystem(location)
    fs.invalidate_cache()
    return bool(fs.isdir(path))


def list_names(location: str) -> list[str]:
    """Return the sorted names directly inside a directory."""
    if is_local(location):
        return sorted(os.listdir(location))
    fs, path = _filesystem(location)
    fs.invalidate_cache()
    return sorted(entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=False))


def file_size(location: str) -> int:
    """Return the size of a file in bytes; FileNotFoundError when it is not there."""
    if is_local(location):
        return os.stat(location).st_size
    fs, path = _filesystem(location)
    fs.invalidate_cache()
    return int(fs.size(path))


def read_bytes(location: str) -> bytes:
    """Return a whole small file; FileNotFoundError when it is not there."""
    if is_local(location):
        with open(location, "rb") as file:
            return file.read()
    fs, path = _filesystem(location)
    return bytes(fs.cat_file(path))


def read_range(location: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file, fewer when the file is shorter."""
    if is_local(location):
        with open(location, "rb", buffering=0) as file:
            file.seek(start)
            return file.read(stop - start)
    fs, path = _filesystem(location)
    return bytes(fs.cat_file(path, start=start, end=stop))


def write_bytes(location: str, data: bytes, durable: bool = True) -> None:
    """Write a whole small file so that it is there entirely or not at all, and, when durable, on disk on return."""
    if not is_local(location):
        fs, path = _filesystem(location)
        fs.pipe_file(path, data)
        return
    parent, name = os.path.split(location)
    temporary = os.path.join(parent, f".{name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, location)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(parent)


def open_remote_for_writing(location: str) -> Any:
    """Open a remote file for streaming writes; it becomes visible when it is closed without an error."""
    fs, path = _filesystem(location)
    return fs.open(path, "wb")


def make_directories(location: str, durable: bool = True) -> None:
    """Create a directory and its missing parents, each recorded on disk; nothing to do on an object store."""
    if not is_local(location) or os.path.isdir(location):
        return
    parent = os.path.dirname(location)
    make_directories(parent, durable)
    with contextlib.suppress(FileExistsError):
        os.mkdir(location)
    if durable:
        sync_directory(parent)


def sync_directory(location: str) -> None:
    """Make the names in a local directory durable (creations and renames need this besides fsync of the files)."""
    if not is_local(location):
        return
    fd = os.open(location, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems refuse fsync on directories; their renames are durable by protocol.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def remove_file(location: str) -> None:
    """Remove one file; a file that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        if is_local(location):
            os.unlink(location)
        else:
            fs, path = _filesystem(location)
            fs.rm_file(path)


def remove_tree(location: str) -> None:
    """Remove a directory and all in it; what is already gone is fine."""
    if is_local(location):
        shutil.rmtree(location, ignore_errors=True)
        return
    fs, path = _filesystem(location)
    fs.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
        fs.rm(path, recursive=True)


def link_tree(source: str, target: str) -> None:
    """Give local files a second name, directories recursively; copies where the file system has no hard links."""
    if os.path.isdir(source) and not os.path.islink(source):
        os.mkdir(target)
        for name in os.listdir(source):
            link_tree(os.path.join(source, name), os.path.join(target, name))
        sync_directory(target)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def rename(source: str, target: str, durable: bool = True) -> None:
    """Rename a local directory and make the change durable; an empty directory at `target` is replaced."""
    os.rename(source, target)
    if durable:
        sync_directory(os.path.dirname(target))


def exchange(first: str, second: str, durable: bool = True) -> bool:
    """Swap two local directories in one atomic step; False where the system or file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is None:
        return False
    paths = (os.fsencode(first), os.fsencode(second))
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        raise OSError(code, os.strerror(code), first, None, second)
    if durable:
        sync_directory(os.path.dirname(first))
    return True
