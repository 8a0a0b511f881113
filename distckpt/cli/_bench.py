"""`distckpt bench`: compare saves and loads with the raw speed of a storage."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from distckpt._base.errors import CheckpointingException
from distckpt._base.threads import PART_BYTES
from distckpt._storage import locations, object_store
from distckpt._storage.remote import PROVIDERS, NoConditionsError, RemoteLocation
from distckpt.cli._output import Output, count_text, size_text
from distckpt.cli._processes import run_ranks
from distckpt.cli._storage_speed import TENSOR_BYTES, Task, measure
from distckpt.streaming._tensors import estimate_available_memory

logger = logging.getLogger(__name__)

TITLES = {
    "save": "durable save",
    "save_unsynced": "save without fsync",
    "warm_load": "warm load",
    "cold_load": "cold load",
}
STORE_TITLES = {"save": "save", "warm_load": "load"}
"""Titles of the cases on an object store.

A put is always durable there, and nothing is in the page cache.
"""
_COLUMNS = ("median_seconds", "gb_per_second", "raw_gb_per_second", "of_raw")
RANK_BYTES = 500_000_000
"""Memory of a process that has imported torch."""


def run(arguments: Namespace, output: Output) -> int:
    """Measure, and print a table."""
    folder = locations.normalize(arguments.dir)
    num_tensors = max(1, round(arguments.gb * 1e9 / arguments.ranks / TENSOR_BYTES))
    task = Task(folder, arguments.ranks, num_tensors, arguments.runs)
    _check_resources(task)
    if arguments.gb == 0:
        return _only_try(folder, output)
    with scratch_folder(folder) as scratch:
        seconds = run_ranks(measure, task.num_ranks, task._replace(folder=scratch))
    titles = TITLES if locations.is_local(folder) else STORE_TITLES
    figures = []
    rows = []
    for case, title in titles.items():
        if case in seconds:
            figure = _figure(case, title, task.num_bytes, seconds[case])
            figures.append(figure)
            rows.append([title, *(f"{figure[column]:.3f}" for column in _COLUMNS)])
    output.json(
        {
            "location": folder,
            "num_bytes": task.num_bytes,
            "num_ranks": task.num_ranks,
            "figures": figures,
        }
    )
    ranks = count_text(task.num_ranks, "rank")
    rounds = count_text(task.num_runs, "round")
    output.line(f"{size_text(task.num_bytes)} in tensors of 16 MiB on {ranks}, median of {rounds}")
    output.line()
    output.table(["", "seconds", "GB/s", "raw GB/s", "of raw"], rows)
    if len(figures) < len(titles):
        output.line(
            "cold load was not measured: the files cannot be dropped from the page cache here"
        )
    return 0


def _only_try(folder: str, output: Output) -> int:
    with scratch_folder(folder):
        pass
    output.json({"location": folder, "num_bytes": 0, "num_ranks": 0, "figures": []})
    output.line(f"{folder} can be written to, read, listed and cleared up")
    return 0


def _figure(
    case: str, title: str, num_bytes: int, seconds: Mapping[str, list[float]]
) -> dict[str, Any]:
    own, raw = (statistics.median(seconds[name]) for name in ("distckpt", "raw"))
    return {
        "case": case,
        "title": title,
        "seconds": seconds["distckpt"],
        "raw_seconds": seconds["raw"],
        "median_seconds": own,
        "gb_per_second": num_bytes / own / 1e9,
        "raw_gb_per_second": num_bytes / raw / 1e9,
        "of_raw": raw / own,
    }


def _check_resources(task: Task) -> None:
    needs = [
        ("memory", estimate_available_memory(), 2 * task.num_bytes + task.num_ranks * RANK_BYTES)
    ]
    if locations.is_local(task.folder):
        if not os.path.isdir(task.folder):
            raise CheckpointingException(
                f"{task.folder!r} is not a directory: name one on the storage to measure"
            )
        needs.append(
            ("disk space", shutil.disk_usage(task.folder).free, round(1.1 * task.num_bytes))
        )
    for resource, available, needed in needs:
        if available < needed:
            raise CheckpointingException(
                f"{size_text(needed)} of {resource} are needed, {size_text(available)} are "
                "available: use a smaller --gb"
            )


@contextlib.contextmanager
def scratch_folder(folder: str) -> Iterator[str]:
    """Make a temporary folder below a directory or URL.

    It is removed afterwards, even if Ctrl-C is pressed again.
    """
    scratch = locations.join(folder, f"distckpt-bench-{secrets.token_hex(8)}")
    try:
        if locations.is_local(folder):
            os.mkdir(scratch)
        else:
            # Before the ranks start, rather than after a job has uploaded all its bytes.
            reason = _try_requests(scratch)
            if reason:
                logger.warning(
                    "%s has %s: nothing keeps two programs that save there at the same time apart",
                    folder,
                    reason,
                )
        yield scratch
    finally:
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(OSError):
            locations.remove_tree(scratch)
        # A store may still carry out a request of a rank that was killed: look again.
        try:
            locations.remove_tree(scratch)
        except OSError as error:
            logger.warning("%s could not be removed: %s", scratch, error)
        for number, handler in before.items():
            signal.signal(number, handler)


# --- The requests of a save -----------------------------------------------------------------------


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


def _try_requests(folder: str) -> str:
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
