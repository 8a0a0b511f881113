"""Files and directories at locations: local paths and URLs.

Local paths go through `os`, URLs through `object_store`. A location is a `str`: a local path or a
URL such as `s3://bucket/run/step_10`. The bytes of tensors on local disks do not pass through here,
see `_io`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from distckpt._base.libc import swap_names
from distckpt._storage import object_store
from distckpt._storage.file_state import FileState

logger = logging.getLogger(__name__)

_ONLY_SEQUENTIAL = (
    "this mount takes only sequential writes (rclone without a cache does): save to the URL of the "
    "store, such as s3:// or sftp://, or to a disk, and copy it from there"
)
_MAX_NAME_BYTES = 255
_ORDINARY_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{,200}(?:/[0-9A-Za-z][0-9A-Za-z_.-]{,200})*")
_BROKEN_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?:[^/]|/*$)")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


def normalize(location: str | os.PathLike[str]) -> str:
    """Return the location as a `str`: an absolute path or a URL.

    A path is local; a URL stays as it is.

    Raises:
        ValueError: it is empty, begins with a tilde, or is a URL without a name or without its
            second slash, which `pathlib` removes.
    """
    if not isinstance(location, str | bytes | os.PathLike):
        is_state = isinstance(location, Mapping) or hasattr(location, "state_dict")
        got = f"{location!r:.100}"
        if is_state:
            got = f"a {type(location).__name__}"
        hint = " The state dict comes first: save(state, 'checkpoints/step_100')." * is_state
        raise TypeError(f"A location is a path or a URL, got {got}.{hint}")
    text = os.fspath(location)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"A location is a path or a URL, got {text!r}.")
    text = _SCHEME.sub(lambda scheme: scheme[0].lower(), text, count=1)
    for scheme in ("file://", "local://"):
        text = text.removeprefix(scheme)
    if _BROKEN_URL.match(text):
        raise ValueError(
            f"{text!r} is no complete URL: write a str such as 's3://bucket/run', since pathlib "
            f"removes a slash. If a local directory is meant, write './{text}'."
        )
    if not is_local(text):
        return text.rstrip("/")
    return _absolute(text)


def _absolute(path: str) -> str:
    if path.partition("/")[0] == "~":
        raise ValueError(
            f"{path!r} begins with '~', which only a shell replaces: pass "
            f"os.path.expanduser({path!r}). If a directory of this name is meant, write './{path}'."
        )
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, "relative to the current directory, which was removed", path
        ) from error


def is_inner_name(name: str, max_parts: int) -> bool:
    """Return whether a name can only be a file inside its checkpoint.

    This holds for every operating system.
    """
    # Most names are of this kind, and a manifest has one for each rank.
    if _ORDINARY_NAME.fullmatch(name):
        return name.count("/") < max_parts
    parts = name.split("/")
    return len(parts) <= max_parts and all(map(_is_plain_part, parts))


def _is_plain_part(part: str) -> bool:
    try:
        num_bytes = len(os.fsencode(part))
    except UnicodeEncodeError:
        return False
    if part in ("", ".", "..") or num_bytes > _MAX_NAME_BYTES:
        return False
    return "\0" not in part and "\\" not in part


def is_local(location: str) -> bool:
    """Return whether a location is a path of this machine, no URL."""
    return "://" not in location


def join(base: str, *names: str) -> str:
    """Append path components to a location."""
    if is_local(base):
        # An absolute name would lead away from the base.
        return os.path.join(base, *[name.lstrip("/") for name in names])
    if not base.endswith("://"):
        base = base.rstrip("/") + "/"
    return base + "/".join(names)


def split(location: str) -> tuple[str, str]:
    """Split a location into its parent and its last component."""
    if is_local(location):
        return os.path.split(location)
    parent, _, name = location.rpartition("/")
    if parent.endswith(":/"):
        parent += "/"
    return parent, name


def exists(location: str) -> bool:
    """Return whether a file or directory is there (listings are never cached)."""
    return _kind_of(location) is not None


def isdir(location: str) -> bool:
    """Return whether a location is a directory or non-empty prefix."""
    return _kind_of(location) == "directory"


def isfile(location: str) -> bool:
    """Return whether a location is an object, or no directory.

    On a disk, a link that leads nowhere counts, too.
    """
    return _kind_of(location) == "file"


def _kind_of(location: str) -> Literal["file", "directory"] | None:
    """Return the kind of a location, None if nothing is there.

    A disk that does not answer is an error.
    """
    if not is_local(location):
        return object_store.at(location).kind()
    try:
        mode = os.lstat(location).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(mode):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = os.stat(location).st_mode
    return "directory" if stat.S_ISDIR(mode) else "file"


def list_names(location: str) -> list[str]:
    """Return the sorted names directly inside a directory."""
    if is_local(location):
        return sorted(os.listdir(location))
    return object_store.at(location).list_names()


def names_within(location: str) -> list[str]:
    """Return the names inside a directory, none if it is not there."""
    if isdir(location):
        return list_names(location)
    return []


def file_size(location: str) -> int:
    """Return the size of a file.

    OSError with errno EINVAL for pipes and devices, which might never open.
    """
    if is_local(location):
        return _status_of_file(location).st_size
    return object_store.at(location).size()


def _status_of_file(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "a directory, pipe or device", path)
    return status


def file_state(location: str) -> FileState:
    """Return the state that tells a file from its replacement.

    Errors are the ones of `file_size`.
    """
    if is_local(location):
        return FileState.of_local(_status_of_file(location))
    return object_store.at(location).state()


def listed_states(location: str) -> dict[str, FileState]:
    """Return the states of all objects below a prefix, by location.

    There are none if the store does not list them together.
    """
    if is_local(location):
        return {}
    states = object_store.at(location).list_states()
    return {join(location, name): state for name, state in states.items()}


def modified_time(location: str) -> float | None:
    """Return a file's time of writing, in seconds since 1970; None if unknown."""
    try:
        if is_local(location):
            return os.stat(location).st_mtime
        return object_store.at(location).modified_time()
    except OSError:
        return None


def read_bytes(location: str, max_bytes: int | None = None) -> bytes:
    """Return the content of a small file.

    OSError with errno EFBIG if it has more than `max_bytes`, EINVAL as in `file_size`.
    """
    if not is_local(location):
        return object_store.at(location).read(max_bytes)
    # A file can be large without taking space on the disk.
    if max_bytes is not None and file_size(location) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", location)
    with naming(location), open(location, "rb") as file:
        return file.read()


def read_range(location: str, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of a file, fewer if it is shorter."""
    if is_local(location):
        # A buffered read goes on after a short one.
        with naming(location), open(location, "rb") as file:
            file.seek(start)
            return file.read(stop - start)
    return object_store.at(location).read_range(start, stop - start).tobytes()


def write_bytes(location: str, data: bytes, durable: bool = True, mode: int = 0o666) -> None:
    """Write a small file, which appears completely or not at all.

    If durable, it is on disk on return. A local one has at most the given mode.
    """
    if not is_local(location):
        object_store.at(location).write(data)
        return
    temporary = temporary_beside(location)
    try:
        opener = functools.partial(os.open, mode=mode)
        with naming(location), open(temporary, "xb", opener=opener) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, location)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(location))


def temporary_beside(location: str) -> str:
    """Return the temporary path of a local file that is written.

    It is a hidden name in the same directory.
    """
    parent, name = os.path.split(location)
    return os.path.join(parent, f".{name}.{secrets.token_hex(8)}")


def create_bytes(location: str, data: bytes, durable: bool = True) -> bool:
    """Write a small file like `write_bytes`.

    False if a remote one is there with other content, or the store cannot tell.
    """
    if not is_local(location):
        return object_store.at(location).create(data)
    write_bytes(location, data, durable)
    return True


def make_directories(location: str, durable: bool = True) -> None:
    """Create a directory and its missing parents.

    Each is recorded on disk if durable. Does nothing on an object store.
    """
    if not is_local(location) or isdir(location):
        return
    parent = os.path.dirname(location)
    make_directories(parent, durable)
    with contextlib.suppress(FileExistsError):
        os.mkdir(location)
    if durable:
        sync_directory(parent)


def sync_directory(location: str) -> None:
    """Make the names in a local directory durable.

    Creations and renames need this as well as the fsync of files.
    """
    if not is_local(location):
        return
    fd = os.open(location, os.O_RDONLY | os.O_DIRECTORY)
    with naming(location):
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems refuse fsync on directories; their renames are always
            # durable.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)


@contextlib.contextmanager
def only_logging(doing: str) -> Iterator[None]:
    """Log errors of the body as a warning: nothing that was promised depends on it."""
    try:
        yield
    except Exception as error:
        logger.warning("could not %s: %s: %s", doing, type(error).__name__, error)


@contextlib.contextmanager
def naming(location: str) -> Iterator[None]:
    """Name a file in errors of its descriptor in the body."""
    try:
        yield
    except OSError as error:
        name_file(error, location)
        raise


def name_file(error: OSError, location: str) -> None:
    """Name a file in a system error that knows only its descriptor."""
    # Our own errors have no number; an error that already names a file is about that one.
    if error.errno is not None and error.filename is None:
        error.filename = location
    if error.errno == errno.ESPIPE:
        error.strerror = _ONLY_SEQUENTIAL


def remove_file(location: str) -> None:
    """Remove one file; a file that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        if is_local(location):
            os.unlink(location)
        else:
            object_store.at(location).remove()


def remove_tree(location: str) -> None:
    """Remove a file, or a directory with everything in it.

    A missing file is fine, and files that cannot be removed stay.
    """
    if is_local(location):
        with contextlib.suppress(OSError):
            if isdir(location) and not os.path.islink(location):
                # It ignores all errors except when it closes directories.
                shutil.rmtree(location, ignore_errors=True)
            else:
                os.unlink(location)
        return
    remote = object_store.at(location)
    object_store.remove_all(join(location, name) for name in remote.list_files())
    remote.remove_empty_folders()
    object_store.abort_uploads(location)


def take_over_access(source: str, target: str) -> None:
    """Give a new local directory or file another one's access rights.

    They are its mode, and its group and owner as far as that is allowed. Another program may have
    removed the other one meanwhile.
    """
    try:
        source_status = os.stat(source)
    except FileNotFoundError:
        return
    target_status = os.stat(target)
    if (source_status.st_uid, source_status.st_gid) != (target_status.st_uid, target_status.st_gid):
        owner = -1
        if os.geteuid() == 0:
            owner = source_status.st_uid
        with contextlib.suppress(PermissionError):
            os.chown(target, owner, source_status.st_gid)
    # Changing the owner clears some bits; a directory that is still written must stay accessible.
    mode = stat.S_IMODE(source_status.st_mode)
    if stat.S_ISDIR(source_status.st_mode):
        mode |= stat.S_IRWXU
    if stat.S_IMODE(os.stat(target).st_mode) != mode:
        os.chmod(target, mode)


def link_tree(source: str, target: str) -> None:
    """Give local files a second name, directories recursively.

    They are copied if the file system has no hard links.
    """
    if isdir(source) and not os.path.islink(source):
        os.mkdir(target)
        take_over_access(source, target)
        for name in os.listdir(source):
            link_tree(os.path.join(source, name), os.path.join(target, name))
        sync_directory(target)
        return
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)
        if os.path.islink(source):
            return
        take_over_access(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def move_tree(source: str, target: str) -> None:
    """Move a local file, or all files of a directory, over another."""
    if isdir(source) and not os.path.islink(source) and isdir(target):
        for name in os.listdir(source):
            move_tree(os.path.join(source, name), os.path.join(target, name))
        return
    # Two names of one file both stay.
    os.replace(source, target)


def rename(source: str, target: str, durable: bool = True) -> None:
    """Rename a local directory and make the change durable, or undo it.

    An empty directory at `target` is replaced.
    """
    os.rename(source, target)
    if durable:
        with undone_by(lambda: os.rename(target, source)):
            sync_directory(os.path.dirname(target))


def replace_file(source: str, target: str) -> None:
    """Replace a local file by another one, durably.

    The change is undone if possible when it fails. The replaced file is removed.
    """
    if not exists(target):
        rename(source, target)
    elif exchange(source, target):
        remove_tree(source)
    else:
        os.replace(source, target)
        sync_directory(os.path.dirname(target))


def exchange(first: str, second: str, durable: bool = True) -> bool:
    """Swap two local directories or files in one atomic step.

    The change is made durable, or undone. Returns False where the file system cannot.
    """
    if not swap_names(first, second):
        return False
    if durable:
        with undone_by(lambda: swap_names(first, second)):
            sync_directory(os.path.dirname(first))
    return True


@contextlib.contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Undo a change if the body fails.

    After an error, callers rely on the state before it.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            undo()
        raise
