"""An object store in this process, behind a file system of fsspec's plain kind, whose requests fail
now and then.

Like gcsfs and adlfs, and unlike fsspec's memory: `open` writes in blocks, which become an object
when the last one has come, and nothing is conditional.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile

Fails = Callable[[str, str, int], Exception | None]
"""Given the kind of a request, the object, and how many such requests there were before, returns
what goes wrong.
"""


class FlakyFileSystem(fsspec.AbstractFileSystem):
    """Objects under `flaky://bucket/...`."""

    protocol = "flaky"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    requests: ClassVar[Counter[tuple[str, str]]] = Counter()
    fails: ClassVar[Fails | None] = None

    def request(self, kind: str, path: str) -> str:
        """Count a request, and fail it when its turn has come; returns the name of the object."""
        name = self._strip_protocol(path)
        number = self.requests[kind, name]
        self.requests[kind, name] += 1
        error = type(self).fails(kind, name, number) if self.fails else None
        if error is not None:
            raise error
        return name

    def info(self, path, **kwargs):
        name = self.request("info", path)
        if name in self.objects:
            return {"name": name, "size": len(self.objects[name]), "type": "file"}
        if any(key.startswith(f"{name}/") for key in self.objects):
            return {"name": name, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **kwargs):
        name = self.request("list", path)
        start = f"{name}/"
        below = sorted(
            {key[len(start) :].split("/")[0] for key in self.objects if key.startswith(start)}
        )
        if not below:
            raise FileNotFoundError(path)
        if not detail:
            return [start + key for key in below]
        sizes = {
            key: len(self.objects[start + key]) for key in below if start + key in self.objects
        }
        return [
            {
                "name": start + key,
                "size": sizes.get(key, 0),
                "type": "file" if key in sizes else "directory",
            }
            for key in below
        ]

    def cat_file(self, path, start=None, end=None, **kwargs):
        name = self.request("get", path)
        if name not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[name][start:end]

    def pipe_file(self, path, value, **kwargs):
        name = self.request("put", path)
        self.objects[name] = bytes(value)

    def rm_file(self, path):
        name = self.request("remove", path)
        if self.objects.pop(name, None) is None:
            raise FileNotFoundError(path)

    def _open(
        self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, **kwargs
    ):
        return FlakyFile(
            self,
            path,
            mode,
            block_size or 5 << 20,
            autocommit,
            cache_options=cache_options,
            **kwargs,
        )


class FlakyFile(AbstractBufferedFile):
    """An object while it is written in blocks."""

    def _initiate_upload(self):
        self.fs.request("begin", self.path)
        self.blocks = []

    def _upload_chunk(self, final=False):
        name = self.fs.request("block", self.path)
        self.blocks.append(self.buffer.getvalue())
        if final:
            self.fs.objects[name] = b"".join(self.blocks)
        return True


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@contextlib.contextmanager
def failing(fails: Fails) -> Iterator[Counter[tuple[str, str]]]:
    """Let requests fail inside the block; yields how many there were, by kind and object."""
    FlakyFileSystem.requests.clear()
    FlakyFileSystem.fails = staticmethod(fails)
    try:
        yield FlakyFileSystem.requests
    finally:
        FlakyFileSystem.fails = None
