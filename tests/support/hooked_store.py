"""A remote file system (to distckpt) whose files are local ones, and which calls a function before
it reads data.
"""

from __future__ import annotations

from contextlib import contextmanager

import fsspec
from fsspec.implementations.local import LocalFileSystem


class HookedFileSystem(LocalFileSystem):
    """Files under `hooked:///path` are those under `/path`."""

    protocol = "hooked"
    cachable = False
    before_read = staticmethod(lambda path, start, stop: None)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("hooked://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.before_read(path, start, end)
        return super().cat_file(path, start, end, **kwargs)


fsspec.register_implementation("hooked", HookedFileSystem)


@contextmanager
def hooked_reads(function):
    """Call `function(path, start, stop)` before every read inside the block."""
    HookedFileSystem.before_read = staticmethod(function)
    try:
        yield
    finally:
        HookedFileSystem.before_read = staticmethod(lambda path, start, stop: None)
