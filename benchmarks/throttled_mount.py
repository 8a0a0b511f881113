"""A read-only file system as slow as shared storage, for one node of a benchmark.

    pip install mfusepy
    python benchmarks/throttled_mount.py SOURCE MOUNTPOINT [--mbps 200] [--latency 0.001]
        [--counts FILE]

The kernel asks it for all bytes that are not in the page cache, those of mapped files included.
Each read waits for its turn on a line of so many MB/s, and for the latency; other requests,
such as the opening of a file, wait for the latency alone. Latencies overlap.

Needs libfuse 3. It ends when it is unmounted, and writes to `--counts` the number of reads and
bytes. The kernel divides reads into as many bytes as it reads ahead, 1 MiB at most: see
`read_ahead_kb` in `/sys/class/bdi`.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import mfusepy

MAX_THREADS = 64
MAX_READ_BYTES = 1 << 20


class Line:
    """A line to storage: bytes pass one after the other, latencies overlap."""

    def __init__(self, bytes_per_second: float, latency_seconds: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._latency_seconds = latency_seconds
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.num_reads = 0
        self.num_bytes = 0

    def wait(self, num_bytes: int, asked_at: float) -> None:
        """Wait until the last byte of a read has arrived that was asked for at some time."""
        with self._lock:
            self.num_reads += 1
            self.num_bytes += num_bytes
            self._free_at = max(self._free_at, asked_at) + num_bytes / self._bytes_per_second
            arrives_at = self._free_at + self._latency_seconds
        time.sleep(max(0.0, arrives_at - time.monotonic()))

    def wait_once(self) -> None:
        """Wait for the latency."""
        time.sleep(self._latency_seconds)


class ThrottledFolder(mfusepy.Operations):
    """The files of a folder, behind a line."""

    use_ns = True

    def __init__(self, source: str, line: Line, counts: Path | None) -> None:
        self._source = source
        self._line = line
        self._counts = counts

    def _path(self, path: str) -> str:
        return os.path.join(self._source, path.lstrip("/"))

    def init_with_config(self, conn_info: Any, config_3: Any) -> None:
        """Keep pages of unchanged files, as network file systems do."""
        config_3.auto_cache = 1
        conn_info.max_readahead = MAX_READ_BYTES
        conn_info.max_background = MAX_THREADS
        conn_info.congestion_threshold = MAX_THREADS

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        self._line.wait_once()
        state = os.stat(self._path(path))
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        fields = {name: getattr(state, name) for name in names}
        times = ("st_atime", "st_mtime", "st_ctime")
        return {**fields, **{name: getattr(state, f"{name}_ns") for name in times}}

    def readdir(self, path: str, fh: int) -> list[str]:
        self._line.wait_once()
        return [".", "..", *os.listdir(self._path(path))]

    def open(self, path: str, flags: int) -> int:
        self._line.wait_once()
        return os.open(self._path(path), os.O_RDONLY)

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        asked_at = time.monotonic()
        data = os.pread(fh, size, offset)
        self._line.wait(len(data), asked_at)
        return data

    def destroy(self, path: str) -> None:
        if self._counts is not None:
            counts = {"reads": self._line.num_reads, "bytes": self._line.num_bytes}
            self._counts.write_text(json.dumps(counts), encoding="utf-8")


def main() -> None:
    """Mount until somebody unmounts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("mountpoint")
    parser.add_argument("--mbps", type=float, default=200.0)
    parser.add_argument("--latency", type=float, default=0.001)
    parser.add_argument("--counts", type=Path)
    arguments = parser.parse_args()
    line = Line(arguments.mbps * 1e6, arguments.latency)
    mfusepy.FUSE(
        ThrottledFolder(os.path.abspath(arguments.source), line, arguments.counts),
        arguments.mountpoint,
        foreground=True,
        max_threads=MAX_THREADS,
        fsname="throttled",
        ro=True,
    )


if __name__ == "__main__":
    main()
