"""Save to an object store, replace a checkpoint in one step, race two writers, export, and prune.

    python examples/object_storage.py                  # in memory
    python examples/object_storage.py --local-server   # a real S3 server (moto) on this machine
    python examples/object_storage.py --url s3://bucket/some/place

The code is the same for all stores. Prints the contents of the store after each step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import threading
from collections.abc import Iterator

import fsspec
import torch

import distckpt
from distckpt import CheckpointExistsError, CheckpointManager, ShardedTensor


def state(step: int) -> dict:
    """Describe the state of a rank; here one process holds everything."""
    weight = torch.full((512, 1024), float(step))
    return {"weight": ShardedTensor.from_rank_offsets("model.weight", weight), "step": step}


def show(title: str, url: str) -> None:
    """Print the contents of the store."""
    print(f"\n{title}")
    for name, size in sorted(sizes_below(url).items()):
        print(f"  {size:>9,}  {name}")


def sizes_below(url: str) -> dict[str, int]:
    """List a place with the libraries that distckpt reaches it through."""
    if url.startswith("memory://"):
        files, path = fsspec.core.url_to_fs(url)
        return {name.removeprefix(f"{path}/"): files.size(name) for name in files.find(path)}
    import obstore.store

    store = obstore.store.from_url(url, client_options={"allow_http": True})
    return {entry["path"]: entry["size"] for entry in store.list().collect()}


def run(url: str) -> None:
    """Run the example once."""
    place = f"{url}/checkpoint"
    distckpt.save(state(1), place)
    show("saved: files first, the marker metadata.json last", url)

    distckpt.save(state(2), place, overwrite=True)
    loaded = distckpt.load(state(0), place)
    assert loaded["step"] == 2
    assert bool((loaded["weight"] == 2).all())
    show("replaced by putting one marker; the old files are gone", url)

    racers = iter(
        [threading.Thread(target=distckpt.save, args=(state(4), place), kwargs={"overwrite": True})]
    )

    def another_program_saves(done: int, total: int) -> None:
        for racer in racers:
            racer.start()
            racer.join()

    try:
        distckpt.save(state(3), place, overwrite=True, progress=another_program_saves)
    except CheckpointExistsError as error:
        print(f"\nlost the race: {error}")
    assert distckpt.load(state(0), place)["step"] == 4
    assert distckpt.verify(place).is_whole
    distckpt.consolidate(place, f"{url}/export")
    show("exported", f"{url}/export")

    with CheckpointManager(f"{url}/run", keep_last=2) as manager:
        for step in range(1, 6):
            manager.save(step, state(step))
        manager.wait()
        print(f"\nsteps that are kept: {manager.steps()}, the latest is {manager.latest()}")
        assert manager.load(state(0))["step"] == 5


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """Run a local S3 server with an empty bucket; yield the bucket's URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ACCESS_KEY_ID="example",
        AWS_SECRET_ACCESS_KEY="example",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
    )
    try:
        boto3.client("s3").create_bucket(Bucket="example")
        yield "s3://example"
    finally:
        server.stop()


def main() -> None:
    """Parse the arguments and run on the chosen store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="memory://example", help="an empty place")
    parser.add_argument("--local-server", action="store_true", help="start an S3 server")
    arguments = parser.parse_args()
    with local_server() if arguments.local_server else contextlib.nullcontext(arguments.url) as url:
        run(f"{url}/{secrets.token_hex(4)}")


if __name__ == "__main__":
    main()
