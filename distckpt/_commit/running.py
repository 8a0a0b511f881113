"""Tell saves that are running from what interrupted ones have left beside a checkpoint, without comparing times.

The coordinator of a save to a local path locks its staging directory; the kernel releases the lock when the process
ends, however it ends. Such locks are seen on the same kernel and mount only, so the nonce of a save begins with 8
digits that stand for these two.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from distckpt._storage import locations

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOT_OFFERED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Errors of file systems without such locks, where nobody can tell whether a save is running."""


def new_nonce(location: str) -> str:
    """Return the nonce of a save to a location."""
    if not locations.is_local(location):
        return secrets.token_hex(8)
    directory = os.path.dirname(location)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return _place_of(directory) + secrets.token_hex(4)


@contextlib.contextmanager
def locked_staging(staging: str, durable: bool) -> Iterator[None]:
    """Create a local staging directory and the ones above it, and keep it locked."""
    locations.make_directories(os.path.dirname(staging), durable)
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(staging)
        try:
            fd = _lock(staging, fcntl.LOCK_EX)
        except FileNotFoundError:
            # Between the two calls another program saw a directory that nobody had locked, and has removed it.
            continue
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
            fd = None
        break
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def claimed(staging: str) -> Iterator[bool | None]:
    """Find out whether a save is running: True when it has ended, False when it goes on, None when unknown.

    One that has ended stays locked for the body, which may remove what it has left.
    """
    parent, name = os.path.split(staging)
    fd = None
    try:
        is_known = locations.is_local(staging) and name.rpartition("-")[2].startswith(_place_of(parent))
        has_ended = True if is_known else None
        if is_known:
            fd = _lock(staging, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        has_ended = False
    except OSError:
        has_ended = None
    try:
        yield has_ended
    finally:
        if fd is not None:
            os.close(fd)


def _lock(directory: str, mode: int) -> int:
    """Lock a directory; return the descriptor that holds the lock. FileNotFoundError when another one took its name."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, mode)
        if not os.path.samestat(os.fstat(fd), os.stat(directory)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _place_of(directory: str) -> str:
    """Return 8 hex digits for this kernel since it was started, and the mount that a directory is on."""
    try:
        text = f"{_BOOT_ID.read_text()} {os.stat(directory).st_dev}"
    except OSError:
        return secrets.token_hex(4)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
