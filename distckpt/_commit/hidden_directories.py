"""Directories next to a local output, named `.NAME.KIND-NONCE`, and their locks.

The coordinator of a save to a local path locks the directory that it writes into; the kernel
releases the lock when the process ends, however it ends. So running saves are told from the
leftovers of interrupted ones without comparing times. Such locks are visible on the same kernel and
mount only, so the nonce of a save begins with 8 digits that stand for these two.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from distckpt._storage import locations

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NOT_OFFERED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Errors of file systems without such locks."""

Kind = Literal["tmp", "old", "trash", "incomplete", "damaged", "parts"]
"""Content of such a directory. It is an output that is being written, an output that an overwrite
is replacing, files that are being removed, leftovers of an unfinished save, a damaged checkpoint,
or the journal of work in parts.
"""

_HIDDEN = re.compile(r"\.(.+)\.(tmp|old|trash|incomplete|damaged|parts)-([0-9a-f]{16})", re.DOTALL)


class HiddenName(NamedTuple):
    """The name of a directory next to an output.

    Attributes:
        name: name of the output.
        kind: content of the directory.
        nonce: 16 hex digits.
    """

    name: str
    kind: str
    nonce: str


def parse(name: str) -> HiddenName | None:
    """Return the parts of a name, None for any other name."""
    match = _HIDDEN.fullmatch(name)
    if match is None:
        return None
    return HiddenName(*match.groups())


def beside(location: str, kind: Kind, nonce: str | None = None) -> str:
    """Return the path of a directory next to a local output.

    Without a nonce, the directory is a new one.
    """
    parent, name = os.path.split(location)
    return os.path.join(parent, f".{name}.{kind}-{nonce or secrets.token_hex(8)}")


def nonce_of(directory: str) -> str:
    """Return the nonce of a directory that `beside` has named."""
    hidden = parse(os.path.basename(directory))
    assert hidden is not None, directory
    return hidden.nonce


def target_of(directory: str) -> str:
    """Return the output next to a directory that `beside` has named."""
    parent, name = os.path.split(directory)
    hidden = parse(name)
    assert hidden is not None, directory
    return os.path.join(parent, hidden.name)


def left_beside(location: str, kind: Kind) -> list[str]:
    """Return the directories of a kind next to a local output."""
    parent, name = os.path.split(location)
    try:
        names = sorted(os.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Everything else, such as other steps, is passed over without a closer look.
    start = f".{name}.{kind}-"
    directories = []
    for other in names:
        if other.startswith(start) and parse(other) == (name, kind, other[len(start) :]):
            directories.append(os.path.join(parent, other))
    return directories


# --- Saves that are running -----------------------------------------------------------------------


def new_nonce(location: str) -> str:
    """Return the nonce of a save to a local path."""
    directory = os.path.dirname(location)
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    return _place_of(directory) + secrets.token_hex(4)


@contextlib.contextmanager
def locked_directory(directory: str, durable: bool) -> Iterator[None]:
    """Create the local directory of a save, and lock it."""
    locations.make_directories(os.path.dirname(directory), durable)
    with contextlib.ExitStack() as locks:
        is_there = False
        while not is_there:
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            try:
                is_there = locks.enter_context(_locked(directory, fcntl.LOCK_EX))
                if not is_there:
                    # Before the next attempt, which would wait for this lock if the name only
                    # appeared late.
                    locks.close()
            except OSError as error:
                # Without locks, a running save cannot be told from an ended one.
                is_there = error.errno in _NOT_OFFERED
                # Another program may have found a directory that was not locked yet, and have
                # removed it.
                if not is_there and error.errno != errno.ENOENT:
                    raise
        yield


@contextlib.contextmanager
def claimed(directory: str) -> Iterator[bool | None]:
    """Find out whether a save has ended, and lock its directory then.

    True when it has ended, False when it goes on, None when unknown. The lock lasts for the body,
    which may remove the leftovers.
    """
    parent, name = os.path.split(directory)
    hidden = parse(name) if locations.is_local(directory) else None
    with contextlib.ExitStack() as locks:
        has_ended: bool | None = None
        if hidden is not None and hidden.nonce.startswith(_place_of(parent)):
            try:
                has_ended = (
                    locks.enter_context(_locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)) or None
                )
            except BlockingIOError:
                has_ended = False
            except OSError:
                has_ended = None
        yield has_ended


@contextlib.contextmanager
def kept_in_sight(directory: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a directory still has its name.

    It may have been removed, or renamed, and another one may have the name by now.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # As long as it is open, no other one gets its inode.
        yield lambda: _has_name(fd, directory)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_if_offered(path: str) -> Iterator[None]:
    """Keep other users of the same lock file out of the body.

    This works where the file system has locks. Network file systems have them for files that are
    open for writing, and not for directories.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    is_locked = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            is_locked = True
        except OSError as error:
            if error.errno not in _NOT_OFFERED:
                raise
        yield
    finally:
        _release(fd, path, is_locked)


@contextlib.contextmanager
def _locked(directory: str, mode: int) -> Iterator[bool]:
    """Lock a directory; False when another one has its name by now."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    is_locked = False
    try:
        fcntl.flock(fd, mode)
        is_locked = True
        yield _has_name(fd, directory)
    finally:
        _release(fd, directory, is_locked)


def _release(fd: int, path: str, is_locked: bool) -> None:
    """Close a file; a failure is a warning.

    The work that its lock protected may be committed by now.
    """
    if is_locked:
        with locations.only_logging(f"release the lock of {path}"):
            # Processes that were forked meanwhile share the lock, and would keep it.
            fcntl.flock(fd, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(fd)


def _has_name(fd: int, directory: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _place_of(directory: str) -> str:
    """Return 8 hex digits for the kernel's boot and a mount.

    The mount is the one of a directory.
    """
    try:
        text = f"{_BOOT_ID.read_text()} {os.stat(directory).st_dev}"
    except OSError:
        return secrets.token_hex(4)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
