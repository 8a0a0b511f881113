"""Files of a checkpoint that are spread over tiers, under one URL.

`TieredFiles` reads each range from the first source that has it: the own disk, another host, the
store. `mounted` gives them a URL that `distckpt.load` takes, `served` one of a step.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple, NoReturn

import fsspec
import numpy as np

from distckpt._base.libc import read_into
from distckpt._base.memory import Bytes, copy_into
from distckpt._format.marker import CONFIG_FNAME
from distckpt._io.write import in_folder
from distckpt._ranks.collectives import Ranks
from distckpt._storage import locations, object_store
from distckpt.manager import _steps as steps
from distckpt.manager._tiers._file_server import Address, FileServer, FilesOfHost
from distckpt.manager._tiers._hosts import Hosts, decide_together
from distckpt.manager._tiers._local_steps import LocalRoot
from distckpt.manager._tiers._survey import SpreadStep
from distckpt.manager._tiers._uploads import files_of_manifest

logger = logging.getLogger(__name__)

SCHEME = "distckpt-tiers"
"""The scheme of mounted files' URLs, which this process alone can read."""


class Source(NamedTuple):
    """A place that has a file.

    Attributes:
        tier: "own", "peer" or "store".
        location: a path of this host, or a path or URL in the store.
        host: the host of a "peer".
        number: the number of the file there.
    """

    tier: Literal["own", "peer", "store"]
    location: str = ""
    host: FilesOfHost | None = None
    number: int = 0

    @property
    def holder(self) -> str:
        """Return the name of the tier or host in messages."""
        if self.host is not None:
            return f"host {self.host.name}"
        return {"own": "this host", "store": "the store"}[self.tier]

    def read_into(self, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of the file on; return the bytes read."""
        if self.host is not None:
            return self.host.read_into(self.number, buffers, start)
        if not locations.is_local(self.location):
            return object_store.at(self.location).read_into(buffers, start)
        with locations.naming(self.location), open(self.location, "rb", buffering=0) as file:
            return read_into(file.fileno(), buffers, start)


class TieredFile(NamedTuple):
    """A file's size, and its sources in the order of trying."""

    num_bytes: int
    sources: Sequence[Source]


class TieredFiles:
    """The files of a checkpoint by name: small ones in memory, others with sources.

    Attributes:
        sizes: the size of each file.
        made: when they were put together.
    """

    def __init__(self, contents: Mapping[str, bytes], files: Mapping[str, TieredFile]) -> None:
        self.sizes = {name: len(content) for name, content in contents.items()}
        self.sizes |= {name: file.num_bytes for name, file in files.items()}
        self.made = datetime.now(timezone.utc)
        self._contents = contents
        self._files = files
        self._lock = threading.Lock()
        self._num_bytes: Counter[str] = Counter()
        self._warned: set[tuple[str, int]] = set()

    def bytes_of_tiers(self) -> dict[str, int]:
        """Return the number of bytes that were read from each tier."""
        with self._lock:
            return dict(self._num_bytes)

    def read_into(self, name: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of a file on; return the bytes read.

        Raises:
            FileNotFoundError: there is no file of this name.
            OSError: no source has the bytes.
        """
        if name not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        if name in self._contents:
            content = np.frombuffer(self._contents[name], np.uint8)
            return copy_into(buffers, content[start:])
        stop = start + sum(map(len, buffers))
        sources = self._files[name].sources
        reasons: list[str] = []
        for number, source in enumerate(sources):
            try:
                _fill(source, buffers, start, stop)
            except OSError as error:
                reasons.append(f"{source.holder}: {error}")
                self._warn(name, source, error, sources[number + 1 :])
                continue
            with self._lock:
                self._num_bytes[source.tier] += stop - start
            return stop - start
        text = "; ".join(reasons) or "it has no source"
        # Not one of the errors after which a request is repeated.
        raise OSError(errno.ENODATA, f"bytes {start} to {stop} are nowhere: {text}", name)

    def _warn(self, name: str, source: Source, error: OSError, others: Sequence[Source]) -> None:
        """Log the first error of its kind from a holder of files."""
        kind = (source.holder, error.errno or errno.EIO)
        with self._lock:
            is_known = kind in self._warned
            self._warned.add(kind)
        if others and not is_known:
            text = "%s is not read from %s (%s), but from %s; more of this kind is not reported"
            logger.warning(text, name, source.holder, error, others[0].holder)


def _fill(source: Source, buffers: Sequence[Bytes], start: int, stop: int) -> None:
    """Fill buffers from a source; OSError if it does not have all bytes."""
    end = start + source.read_into(buffers, start)
    if end < stop:
        text = f"it ends at byte {end}, bytes {start} to {stop} are read"
        raise OSError(errno.ENODATA, text)


# --- The file system ------------------------------------------------------------------------------

_mounts: dict[str, TieredFiles] = {}
"""Mounted files by the first two names of their paths."""


@contextlib.contextmanager
def mounted(files: TieredFiles, name: str) -> Iterator[str]:
    """Yield a URL of the files, which ends in a name; its process can read it in the body."""
    fsspec.register_implementation(SCHEME, TiersFileSystem, clobber=True)
    mount = f"{secrets.token_hex(8)}/{name}"
    _mounts[mount] = files
    try:
        yield f"{SCHEME}://{mount}"
    finally:
        del _mounts[mount]


class TiersFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """The file system of mounted files, which is only read."""

    protocol = SCHEME
    # One would be kept for each thread that has ever read.
    cachable = False

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the type and size of a path."""
        path = self._strip_protocol(path)
        files, name = _find(path)
        if name in files.sizes:
            return {"name": path, "type": "file", "size": files.sizes[name]}
        if any(other.startswith(_folder(name)) for other in files.sizes):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries directly below a path."""
        path = self._strip_protocol(path)
        files, name = _find(path)
        paths = {path: None}
        if name not in files.sizes:
            paths = {}
            for other in files.sizes:
                if other.startswith(_folder(name)):
                    rest = other[len(_folder(name)) :]
                    paths[f"{path}/{rest.partition('/')[0]}"] = None
        if detail:
            return [self.info(entry) for entry in paths]
        return list(paths)

    def modified(self, path: str) -> datetime:
        """Return the time at which the files were put together."""
        return _find(self._strip_protocol(path))[0].made

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> Bytes:
        """Return bytes [start, end) of a file, fewer if it is shorter."""
        files, name = _find(self._strip_protocol(path))
        size = files.sizes.get(name, 0)
        first = start or 0
        memory = np.empty(max(0, min(size if end is None else end, size) - first), np.uint8)
        files.read_into(name, [memory], first)
        return memory

    def read_into(self, path: str, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of a file on; return the bytes read."""
        files, name = _find(self._strip_protocol(path))
        return files.read_into(name, buffers, start)

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        text = f"{SCHEME}:// is only read: save to the root of the manager, or elsewhere"
        raise OSError(errno.EROFS, text)

    _open = pipe_file = rm_file = mkdir = makedirs = rmdir = cp_file = _refuse


def _find(path: str) -> tuple[TieredFiles, str]:
    """Return the mounted files of a path, and its name among them."""
    identity, _, rest = path.partition("/")
    last, _, name = rest.partition("/")
    files = _mounts.get(f"{identity}/{last}")
    if files is None:
        text = f"no files are mounted here in this process (any more): {SCHEME}:// is for one load"
        raise FileNotFoundError(errno.ENOENT, text, path)
    return files, name


def _folder(name: str) -> str:
    """Return the beginning of the names in a folder."""
    return name and f"{name}/"


# --- A step on several hosts ----------------------------------------------------------------------


_ANSWER_SECONDS = 30.0
"""Seconds without any bytes after which another host is no longer asked."""


@contextlib.contextmanager
def served(
    ranks: Ranks,
    hosts: Hosts,
    place: LocalRoot,
    spread: SpreadStep,
    in_root: str,
    contents: Mapping[str, bytes],
) -> Iterator[str]:
    """Yield a URL of a step, read from the nearest tiers.

    These are the directory of this host, the other hosts, and the root. Hosts serve their files
    to each other for the body, which all ranks must leave together.

    Collective operation: all ranks must call it.

    Args:
        ranks: the ranks of the job.
        hosts: the hosts of the job.
        place: the local directory of this host.
        spread: the step, and who has its files.
        in_root: location of the step in the root.
        contents: marker and manifest.
    """
    directory = place.step(spread.step)
    own = hosts.of_rank[ranks.rank]
    with contextlib.ExitStack() as serving:
        clients = _connected(ranks, hosts, spread, directory, serving)
        numbers = {}
        for host in clients:
            numbers[host] = {name: number for number, name in enumerate(spread.files_of(host))}
        files = {}
        for name, num_bytes in spread.sizes.items():
            sources: list[Source] = []
            holders = spread.hosts[name]
            if own in holders:
                sources.append(Source("own", locations.join(directory, name)))
            # Ranks begin with different ones.
            first = ranks.rank % len(holders)
            for host in (*holders[first:], *holders[:first]):
                if host in clients:
                    number = numbers[host][name]
                    sources.append(Source("peer", host=clients[host], number=number))
            files[name] = TieredFile(num_bytes, sources)
        if spread.root_suffix is not None:
            _add_root(files, contents, in_root, spread.root_suffix)
        tiered = TieredFiles(contents, files)
        yield serving.enter_context(mounted(tiered, steps.step_name(spread.step)))
        logger.info("%s", _describe(spread.step, tiered.bytes_of_tiers()))


def _connected(
    ranks: Ranks,
    hosts: Hosts,
    spread: SpreadStep,
    directory: str,
    serving: contextlib.ExitStack,
) -> dict[int, FilesOfHost]:
    """Serve the files of this host until `serving` ends; return the ones of other hosts."""
    own = hosts.of_rank[ranks.rank]
    token = ranks.decide("choose a token", lambda: secrets.token_bytes(32))

    def serve() -> Address | None:
        if not hosts.leads(ranks.rank) or len(hosts.names) == 1:
            return None
        paths = [locations.join(directory, name) for name in spread.files_of(own)]
        server = FileServer(paths, token)
        serving.callback(server.close)
        return server.address

    addresses = decide_together(ranks, "serve files to other hosts", serve, list)
    clients = {}
    for host in range(len(hosts.names)):
        address = addresses[hosts.members[host][0]]
        if host != own and address is not None:
            clients[host] = FilesOfHost(tuple(address), token, _ANSWER_SECONDS)
            serving.callback(clients[host].close)
    return clients


def _describe(step: int, num_bytes: Mapping[str, int]) -> str:
    parts = []
    for tier, name in (("own", "this host"), ("peer", "other hosts"), ("store", "the root")):
        if num_bytes.get(tier):
            parts.append(f"{num_bytes[tier]} bytes from {name}")
    return f"step {step} was read: {', '.join(parts) or 'nothing but the manifest'}"


def _add_root(
    files: dict[str, TieredFile], contents: Mapping[str, bytes], in_root: str, suffix: str
) -> None:
    """Add the root as the last source of each file."""
    marker = json.loads(contents[CONFIG_FNAME])
    data = contents[marker["manifest"]["name"]]
    for file in files_of_manifest(data):
        name = file.name
        if suffix:
            name = in_folder(name, suffix)
        source = Source("store", locations.join(in_root, name))
        sources = [*files[file.name].sources, source] if file.name in files else [source]
        files[file.name] = TieredFile(file.num_bytes, sources)
