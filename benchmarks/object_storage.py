"""Save to and load from an object store, beside s3fs's own transfers of the same bytes.

    python benchmarks/object_storage.py [--mib 256] [--files 1] [--runs 5]
        [--url s3://bucket/place]

Without --url an S3 server (moto) runs in a process of its own on this machine. It is slow, and
shares the processors: what counts is the ratio. As it comes, it reads the whole object for every
range that is asked for (0.7 ms per MiB where this was written), which no real store does; here it
keeps in memory what it has read, for all contestants.

In every round each contestant goes once, in turn; medians over the rounds after one that is not
counted. s3fs moves the bytes of each file with `pipe_file` and `cat_file` from and to memory, and
with `put_file` and `get_file` from and to files in memory (/dev/shm) where there are any; all files
at the same time. distckpt saves as many tensors into its one file, and loads into tensors that are
there already, without and with checksums.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from report import Cell, Report, figure, parser_of, ratio

import distckpt
from distckpt import ShardedTensor


def serve(connection: Any) -> None:
    """Run a server until told to stop."""
    import logging

    from moto.s3.models import FakeKey
    from moto.server import ThreadedMotoServer

    read, write = FakeKey.value.fget, FakeKey.value.fset

    lock = threading.Lock()

    def kept(key: Any) -> bytes:
        with lock:
            if len(key.__dict__.get("kept", b"")) != key.contentsize:
                key.kept = read(key)
            return key.kept

    FakeKey.value = property(kept, write)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    connection.send(server.get_host_and_port())
    connection.recv()
    server.stop()


def start_server() -> tuple[str, Callable[[], None]]:
    """Start a server with a bucket; returns the bucket's URL, and what stops it."""
    import boto3

    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    host, port = ours.recv()
    os.environ.update(
        AWS_ACCESS_KEY_ID="benchmark",
        AWS_SECRET_ACCESS_KEY="benchmark",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
    )
    boto3.client("s3").create_bucket(Bucket="benchmark")

    def stop() -> None:
        ours.send(None)
        process.join()

    return "s3://benchmark", stop


def contestants(
    url: str, num_bytes: int, num_files: int, scratch: Path
) -> dict[str, tuple[Callable, Callable]]:
    """Return what saves and what loads, by name."""
    files, place = fsspec.core.url_to_fs(url)
    size = num_bytes // num_files
    tensors = [
        torch.from_numpy(np.random.default_rng(i).integers(0, 256, size, np.uint8))
        for i in range(num_files)
    ]
    contents = [tensor.numpy().tobytes() for tensor in tensors]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    for index, content in enumerate(contents):
        (scratch / str(index)).write_bytes(content)

    def state(values: list[torch.Tensor]) -> dict[str, ShardedTensor]:
        return {
            f"t{i}": ShardedTensor.from_rank_offsets(f"t{i}", value)
            for i, value in enumerate(values)
        }

    def all_at_once(function: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(num_files) as pool:
            found = list(pool.map(function, range(num_files)))
        if found[0] is not None and isinstance(found[0], bytes):
            assert len(found[0]) == size

    def load(verify: bool) -> None:
        for target in targets:
            target.zero_()
        distckpt.load(state(targets), f"{url}/distckpt", verify=verify)
        assert torch.equal(targets[0], tensors[0])

    return {
        "distckpt": (
            lambda: distckpt.save(state(tensors), f"{url}/distckpt", overwrite=True),
            lambda: load(False),
        ),
        "distckpt, verified": (lambda: None, lambda: load(True)),
        "s3fs pipe_file / cat_file": (
            lambda: all_at_once(lambda i: files.pipe_file(f"{place}/piped/{i}", contents[i])),
            lambda: all_at_once(lambda i: files.cat_file(f"{place}/piped/{i}")),
        ),
        "s3fs put_file / get_file": (
            lambda: all_at_once(
                lambda i: files.put_file(str(scratch / str(i)), f"{place}/put/{i}")
            ),
            lambda: all_at_once(
                lambda i: files.get_file(f"{place}/put/{i}", str(scratch / f"{i}.got"))
            ),
        ),
    }


def measure(
    todo: dict[str, tuple[Callable, Callable]], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Let every contestant save and load in every round, beginning with another one each time."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in todo}
    names = list(todo)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for which in (0, 1):
                started = time.perf_counter()
                todo[name][which]()
                if number:
                    seconds[name][which].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run it and print a table."""
    parser = parser_of(__doc__, has_files=False)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--url", help="an empty place; its content is removed afterwards")
    arguments = parser.parse_args()
    report = Report(arguments)
    report.about = (
        f"{arguments.mib} MiB in {arguments.files} tensors, medians of {arguments.runs} rounds."
    )
    bucket, stop = (arguments.url, lambda: None) if arguments.url else start_server()
    url = f"{bucket.rstrip('/')}/benchmark-{secrets.token_hex(4)}"
    num_bytes = arguments.mib << 20
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    try:
        with tempfile.TemporaryDirectory(dir=memory) as scratch:
            seconds = measure(
                contestants(url, num_bytes, arguments.files, Path(scratch)), arguments.runs
            )
        files, place = fsspec.core.url_to_fs(url)
        files.rm(place, recursive=True)
    finally:
        stop()
    others = [pair for name, pair in seconds.items() if name.startswith("s3fs")]
    best = [min((pair[which] for pair in others), key=statistics.median) for which in (0, 1)]

    def cells(which: int, times: list[float]) -> list[Cell]:
        return [
            figure(f"{num_bytes / statistics.median(times) / 1e6:.0f}", times),
            ratio(best[which], times),
        ]

    rows = [
        [name, *(["", ""] if name == "distckpt, verified" else cells(0, saves)), *cells(1, loads)]
        for name, (saves, loads) in seconds.items()
    ]
    report.add(["", "save MB/s", "of s3fs", "load MB/s", "of s3fs"], rows)
    report.finish()


if __name__ == "__main__":
    main()
