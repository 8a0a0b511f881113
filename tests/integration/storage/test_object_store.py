"""Every verb on object stores: a real S3 server, and fsspec's memory."""

from __future__ import annotations

import functools
import json
import re
import signal
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import fsspec
import numpy as np
import pytest
import safetensors.torch
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from distckpt._storage import locations, object_store
from distckpt._storage.remote import part_bytes_of
from distckpt.megatron.core import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from distckpt.strategies.base import SaveShardedStrategy
from distckpt.strategies.safetensors import SafetensorsSaveStrategy
from distckpt.streaming import save_safetensors_streaming_sharded
from tests.support.harness import run
from tests.support.other_program import as_another_program
from tests.support.s3_server import (
    Fault,
    FaultyProxy,
    client,
    keys_in,
    new_bucket,
    reached_at,
    uploads_in,
)
from tests.support.states import whole


class Store(NamedTuple):
    """A place of a test in an object store, and ways to look at it that are not distckpt's."""

    url: str
    server: str | None
    files: fsspec.AbstractFileSystem | None = None
    """Of stores other than S3."""

    def keys(self, below: str = "") -> list[str]:
        place = f"{self.url}/{below}".rstrip("/")
        if self.server is not None:
            return keys_in(self.server, place)
        path = place.partition("://")[2]
        return sorted(name.lstrip("/")[len(path) + 1 :] for name in self.files.find(place))

    def read(self, name: str) -> bytes:
        if self.server is not None:
            bucket = self.url.removeprefix("s3://")
            return client(self.server).get_object(Bucket=bucket, Key=name)["Body"].read()
        return self.files.cat_file(f"{self.url}/{name}")

    def write(self, name: str, data: bytes) -> None:
        if self.server is not None:
            client(self.server).put_object(
                Bucket=self.url.removeprefix("s3://"), Key=name, Body=data
            )
        else:
            self.files.pipe_file(f"{self.url}/{name}", data)

    def remove(self, name: str) -> None:
        if self.server is not None:
            client(self.server).delete_object(Bucket=self.url.removeprefix("s3://"), Key=name)
        else:
            self.files.rm_file(f"{self.url}/{name}")

    def uploads(self) -> list[str]:
        return [] if self.server is None else uploads_in(self.server, self.url)


OTHER_CLOUDS = [
    pytest.param("google", marks=pytest.mark.slow),
    pytest.param("azure", marks=pytest.mark.slow),
]


@pytest.fixture(params=["memory", "s3", *OTHER_CLOUDS])
def store(request):
    if request.param == "s3":
        server = request.getfixturevalue("server")
        yield Store(new_bucket(server), server)
    elif request.param == "memory":
        yield Store(request.getfixturevalue("memory"), None, fsspec.filesystem("memory"))
    else:
        place = request.getfixturevalue(f"{request.param}_store")
        yield Store(place.url, None, place.files)


@pytest.fixture
def s3(server):
    return Store(new_bucket(server), server)


LARGE = 4 * (1 << 20) + 77
"""Elements: a little more than 16 MiB, more than goes into one request."""


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(count, np.float32))


def state(seed: float = 1.0, count: int = 1000) -> dict:
    return {
        "w": whole("w", numbers(count, int(seed))),
        "half": whole("half", numbers(64).to(torch.bfloat16)[::2]),
        "step": seed,
    }


def loaded(location: str, count: int = 1000, **options) -> dict:
    target = {
        "w": whole("w", torch.zeros(count)),
        "half": whole("half", torch.zeros(32, dtype=torch.bfloat16)),
    }
    return distckpt.load(target, location, **options)


def holds(location: str, seed: float, count: int = 1000) -> bool:
    found = loaded(location, count)
    return (
        torch.equal(found["w"], numbers(count, int(seed)))
        and torch.equal(found["half"], numbers(64).to(torch.bfloat16)[::2])
        and found["step"] == seed
    )


class FailsAfterWriting(SaveShardedStrategy):
    """Writes everything like the built-in strategy, and then fails."""

    def __init__(self, strategy=None, error=None):
        self.strategy = strategy or SafetensorsSaveStrategy()
        self.error = error or OSError(5, "the power is out", "somewhere")
        self.backend, self.version = self.strategy.backend, self.strategy.version

    def configure(self, options, process_group):
        return FailsAfterWriting(self.strategy.configure(options, process_group), self.error)

    def prepare(self, sharded_state_dict):
        prepared = self.strategy.prepare(sharded_state_dict)
        write = prepared.write_own

        def write_and_fail(*args):
            write(*args)
            raise self.error

        prepared.write_own = write_and_fail
        return prepared

    def save(self, sharded_state_dict, checkpoint_dir):
        raise NotImplementedError


# --- Save, load, verify ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1000, LARGE])
def test_save_load_and_verify(store, count):
    location = f"{store.url}/run/c"
    distckpt.save(state(1.0, count), location)
    assert holds(location, 1.0, count)
    report = distckpt.verify(location)
    assert report.is_whole
    assert report.num_bytes > 4 * count
    assert distckpt.megatron.check_is_distributed_checkpoint(location)
    assert distckpt.open(location).common_state["step"] == 1.0
    assert set(distckpt.open(location).tensors) == {"w", "half"}
    assert store.uploads() == []
    nonce = json.loads(store.read("run/c/metadata.json"))["save"]
    assert store.keys("run/c") == [
        "manifest.safetensors",
        "metadata.json",
        f"objects-{nonce}/rank-00001.safetensors",
        f"tensors-{nonce}/shard-00001-model-00001-of-00001.safetensors",
    ]


def test_shard_files_are_plain_safetensors(store):
    distckpt.save(state(1.0, LARGE), f"{store.url}/c")
    [name] = [name for name in store.keys("c") if name.startswith("tensors-")]
    tensors = safetensors.torch.load(store.read(f"c/{name}"))
    assert torch.equal(tensors["w"], numbers(LARGE, 1))


def test_any_region_is_read(store):
    table = numbers(3000 * 1001).view(3000, 1001)
    distckpt.save({"t": whole("t", table)}, f"{store.url}/c")
    for verify in (True, False):
        columns, rows = torch.zeros(3000, 91), torch.zeros(1500, 1001)
        parts = {
            "columns": ShardedTensor.from_rank_offsets("t", columns, (1, 7, 11)),
            "rows": ShardedTensor.from_rank_offsets("t", rows, (0, 1, 2)),
        }
        for part in parts.values():
            distckpt.load({"part": part}, f"{store.url}/c", verify=verify)
        assert torch.equal(columns, table[:, 637:728])
        assert torch.equal(rows, table[1500:])


def test_a_load_makes_the_requests_that_the_documentation_lists(s3):
    location = f"{s3.url}/c"
    distckpt.save(state(1.0, LARGE), location)
    nonce = json.loads(s3.read("c/metadata.json"))["save"]
    proxy = FaultyProxy(s3.server)
    with proxy.running() as url, reached_at(url):
        assert torch.equal(loaded(location, LARGE)["w"], numbers(LARGE, 1))
    assert Counter(proxy.requests) == {
        f"GET /{s3.url[5:]}/c/metadata.json": 2,
        f"GET /{s3.url[5:]}/c/manifest.safetensors": 1,
        # A tensor of a little more than 16 MiB, and a small one.
        f"GET /{s3.url[5:]}/c/tensors-{nonce}/shard-00001-model-00001-of-00001.safetensors": 2,
        f"GET /{s3.url[5:]}/c/objects-{nonce}/rank-00001.safetensors": 1,
    }


def table_rows(rank):
    return numbers(16 * 64, rank).view(16, 64)


def load_columns(rank, url, location, share_reads):
    out = torch.empty(64, 16)
    shard = ShardedTensor.from_rank_offsets("w", out, (1, rank, 4))
    with reached_at(url):
        loaded = distckpt.load({"w": shard, "lr": 0.0}, location, share_reads=share_reads)
    return loaded["lr"], out


def save_rows(rank, url, location):
    rows = numbers((16, 64), rank)
    state = {"w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, 4)), "lr": 0.5}
    # Ranks have the environment of the process that forks them, which may be older than the server.
    with reached_at(url):
        distckpt.save(state, location)


@pytest.mark.parametrize(("share_reads", "num_ranges"), [("off", 16), ("on", 4)])
def test_ranks_ask_for_no_sizes_and_one_reads_the_common_state(s3, share_reads, num_ranges):
    location = f"{s3.url}/c"
    run(save_rows, 4, s3.server, location)
    proxy = FaultyProxy(s3.server)
    with proxy.running() as url:
        loaded = run(load_columns, 4, url, location, share_reads)
    whole = torch.cat([table_rows(rank) for rank in range(4)])
    for rank, (lr, columns) in enumerate(loaded):
        assert lr == 0.5
        assert torch.equal(columns, whole[:, 16 * rank : 16 * rank + 16])
    folders = re.compile("(tensors|objects)-[0-9a-f]{16}.*")
    requests = Counter(folders.sub(r"\1", request) for request in proxy.requests)
    start = f"GET /{s3.url[5:]}/c"
    # Columns are in all four files, and runs are closer than a request is worth. Of ranks that
    # share, one reads each file.
    assert requests == {
        f"{start}/metadata.json": 2,
        f"{start}/manifest.safetensors": 1,
        f"{start}/tensors": num_ranges,
        f"{start}/objects": 1,
    }


@pytest.mark.parametrize(
    ("gap", "expected"), [(250 << 10, 1), (300 << 10, 3)], ids=["small gaps", "large gaps"]
)
@pytest.mark.parametrize("verify", [True, False])
def test_ranges_that_are_near_are_read_with_one_request(s3, gap, expected, verify):
    location = f"{s3.url}/c"
    # Small tensors of 4-byte elements lie in a file in the order of their names.
    half = gap // 8
    sizes = {"a": 1000, "b1": half, "b2": half, "c": 3, "d1": half, "d2": half, "e": 60000, "f": 5}
    tensors = {key: numbers(size, size) for key, size in sizes.items()}
    distckpt.save({key: whole(key, tensor) for key, tensor in tensors.items()}, location)
    proxy = FaultyProxy(s3.server)
    targets = {key: torch.zeros(sizes[key]) for key in "ace"}
    with proxy.running() as url, reached_at(url):
        distckpt.load({key: whole(key, t) for key, t in targets.items()}, location, verify=verify)
    for key, target in targets.items():
        assert torch.equal(target, tensors[key])
    ranges = [(start, stop) for path, start, stop in proxy.ranges if "/tensors" in path]
    assert len(ranges) == expected
    wanted = sum(4 * sizes[key] for key in "ace")
    assert sum(stop - start for start, stop in ranges) == wanted + 2 * gap * (expected == 1)


def test_damage_is_found_in_what_a_request_reads_with_others(s3):
    location = f"{s3.url}/c"
    tensors = {key: numbers(size, size) for key, size in {"a": 1000, "b": 2000, "c": 300}.items()}
    distckpt.save({key: whole(key, tensor) for key, tensor in tensors.items()}, location)
    [name] = [name for name in s3.keys("c") if name.startswith("tensors-")]
    data = bytearray(s3.read(f"c/{name}"))

    def load(**damage):
        for key, at in damage.items():
            data[data.index(tensors[key].numpy().tobytes()) + at] ^= 1
        s3.write(f"c/{name}", bytes(data))
        targets = {key: torch.zeros(len(tensors[key])) for key in "ac"}
        distckpt.load({key: whole(key, t) for key, t in targets.items()}, location)

    # Nobody asked for what lies between.
    load(b=17)
    with pytest.raises(CorruptCheckpointError, match=r"Checksum mismatch.*key 'c'"):
        load(c=1199)
    del data[-1]
    with pytest.raises(CorruptCheckpointError, match="key 'c' goes on after it"):
        load()


def test_an_export_looks_at_each_file_without_asking_for_its_size(s3, tmp_path):
    location = f"{s3.url}/c"
    distckpt.save(state(1.0, LARGE), location)
    proxy = FaultyProxy(s3.server)
    with proxy.running() as url, reached_at(url):
        distckpt.consolidate(location, tmp_path / "hf")
    requests = Counter(
        request.split("/tensors-")[0] for request in proxy.requests if "/tensors-" in request
    )
    # More than one unit of output is read from the file.
    assert requests[f"GET /{s3.url[5:]}/c"] > 1
    assert requests[f"HEAD /{s3.url[5:]}/c"] == 0


def test_a_request_removes_a_thousand_objects(s3):
    distckpt.save(state(), f"{s3.url}/c")
    s3.write("other", b"stays")
    proxy = FaultyProxy(s3.server)
    with proxy.running() as url, reached_at(url):
        locations.remove_tree(f"{s3.url}/c")
        assert [request.split()[0] for request in proxy.requests].count("POST") == 1
        assert s3.keys() == ["other"]
        proxy.requests.clear()
        object_store.remove_all([f"{s3.url}/absent/{i}" for i in range(1001)] + [f"{s3.url}/other"])
    assert [request.split()[0] for request in proxy.requests] == ["POST", "POST"]
    assert s3.keys() == []


def test_a_removal_that_is_refused_is_an_error(s3):
    proxy = FaultyProxy(s3.server, Fault("POST", "delete", "403"))
    with proxy.running() as url, reached_at(url), pytest.raises(PermissionError):
        object_store.remove_all([f"{s3.url}/a", f"{s3.url}/b"])


MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "max_part_bytes", "expected"),
    [
        (20 * MIB, 1 << 40, 16 * MIB),
        (64 * 40 * MIB, 1 << 40, 40 * MIB),
        (1 << 40, 1 << 40, 128 * MIB),
        (1 << 40, 50 * MIB, 50 * MIB),
        (1 << 40, 0, 16 * MIB),
    ],
)
def test_parts_grow_with_the_file_within_the_memory_there_is(num_bytes, max_part_bytes, expected):
    assert part_bytes_of(num_bytes, max_part_bytes) == expected


def test_a_marker_of_absurd_size_is_not_read(s3):
    distckpt.save(state(1.0), f"{s3.url}/c")
    s3.write("c/metadata.json", b" " * (5 << 20))
    with pytest.raises(CorruptCheckpointError, match="more than 4194304 bytes"):
        loaded(f"{s3.url}/c")


def test_nothing_is_there(store):
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        loaded(f"{store.url}/none")


def test_a_file_that_was_cut_off_is_found(store):
    distckpt.save(state(1.0), f"{store.url}/c")
    [name] = [name for name in store.keys("c") if name.startswith("tensors-")]
    data = store.read(f"c/{name}")
    store.write(f"c/{name}", data[:-8])
    with pytest.raises(CorruptCheckpointError, match=f"{name}.*cut off"):
        loaded(f"{store.url}/c")
    assert "cut off" in distckpt.verify(f"{store.url}/c").problems[0].message
    store.write(f"c/{name}", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
        loaded(f"{store.url}/c")


def test_names_with_special_characters(store):
    location = f"{store.url}/run [a]*/step 1"
    distckpt.save(state(1.0), location)
    store.write("run a/step 1/other", b"stays")
    assert holds(location, 1.0)
    distckpt.save(state(2.0), location, overwrite=True)
    assert holds(location, 2.0)
    assert store.read("run a/step 1/other") == b"stays"


# --- Commit ---------------------------------------------------------------------------------------


def test_overwrite_replaces_everything(store):
    location = f"{store.url}/c"
    distckpt.save(state(1.0), location)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        distckpt.save(state(2.0), location)
    assert holds(location, 1.0)
    before = store.keys("c")
    distckpt.save(state(2.0), location, overwrite=True)
    assert holds(location, 2.0)
    assert set(before) & set(store.keys("c")) == {"metadata.json"}
    assert len(store.keys("c")) == 4
    distckpt.save(state(3.0), location, overwrite=True)
    assert holds(location, 3.0)
    assert len(store.keys("c")) == 4


def test_a_failed_overwrite_leaves_the_old_checkpoint_and_nothing_else(store):
    location = f"{store.url}/c"
    distckpt.save(state(1.0, LARGE), location)
    before = store.keys()
    with pytest.raises(OSError, match="the power is out"):
        distckpt.save(state(2.0, LARGE), location, strategy=FailsAfterWriting(), overwrite=True)
    assert store.keys() == before
    assert store.uploads() == []
    assert holds(location, 1.0, LARGE)


@pytest.mark.parametrize("max_inflight_bytes", [1, 1 << 30], ids=["one by one", "at the same time"])
@pytest.mark.parametrize("error", [OSError(5, "broken"), KeyboardInterrupt()])
def test_an_error_while_parts_are_put_leaves_nothing(store, error, max_inflight_bytes):
    told = []

    def fail(num_bytes, total_bytes):
        told.append(num_bytes)
        raise error

    with pytest.raises(type(error)):
        distckpt.save(
            state(1.0, LARGE),
            f"{store.url}/c",
            progress=fail,
            max_inflight_bytes=max_inflight_bytes,
        )
    assert told
    assert store.keys() == []
    assert store.uploads() == []


def test_an_interrupt_from_the_keyboard_leaves_nothing(s3):
    def interrupt(num_bytes, total_bytes):
        signal.raise_signal(signal.SIGINT)

    # Shells let what they start in the background ignore Ctrl-C, and that would be inherited.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            distckpt.save(
                state(1.0, LARGE), f"{s3.url}/c", progress=interrupt, max_inflight_bytes=1
            )
    finally:
        signal.signal(signal.SIGINT, previous)
    assert s3.keys() == []
    assert s3.uploads() == []


def other_save(location: str, seed: float, overwrite: bool = False):
    """Return what makes a whole save to the same place, once, while another one is on its way."""
    runs = iter([1])

    def progress(num_bytes, total_bytes):
        if next(runs, None):
            as_another_program(distckpt.save, state(seed), location, overwrite=overwrite)

    return progress


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_at_once_one_wins_and_nothing_is_mixed(store, overwrite):
    location = f"{store.url}/c"
    if overwrite:
        distckpt.save(state(1.0), location)
    with pytest.raises(CheckpointExistsError, match=r"Another program has saved to .*/c"):
        distckpt.save(
            state(2.0), location, overwrite=overwrite, progress=other_save(location, 3.0, overwrite)
        )
    assert holds(location, 3.0)
    assert distckpt.verify(location).is_whole
    assert len(store.keys("c")) == 4


def test_a_checkpoint_that_is_removed_while_it_is_replaced_is_not_brought_back(store):
    location = f"{store.url}/c"
    distckpt.save(state(1.0), location)
    once = iter([1])

    def progress(num_bytes, total_bytes):
        if next(once, None):
            store.remove("c/metadata.json")

    before = store.keys("c")
    with pytest.raises(CheckpointExistsError, match="or removed what was there"):
        distckpt.save(state(2.0), location, overwrite=True, progress=progress)
    assert store.keys("c") == [name for name in before if name != "metadata.json"]


def test_leftovers_of_a_killed_save_do_not_block_and_go_with_the_next_one(store):
    location, nonce = f"{store.url}/c", "0123456789abcdef"
    store.write(f"c/tensors-{nonce}/shard-00001-model-00001-of-00001.safetensors", b"half")
    store.write("c/manifest.safetensors", b"of nobody")
    store.write("c/mine.txt", b"stays")
    if store.server:
        client(store.server).create_multipart_upload(
            Bucket=store.url.removeprefix("s3://"),
            Key=f"c/tensors-{nonce}/shard-00002-model-00001-of-00001.safetensors",
        )
    distckpt.save(state(1.0), location)
    assert holds(location, 1.0)
    assert len(store.keys("c")) == 5
    assert distckpt.verify(location).strays == ()
    store.write(f"c/objects-{nonce}/rank-00001.safetensors", b"half")
    assert distckpt.verify(location).strays == (f"objects-{nonce}/rank-00001.safetensors",)
    assert distckpt.verify(location).is_whole
    assert store.read("c/mine.txt") == b"stays"
    assert store.uploads() == []
    marker = json.loads(store.read("c/metadata.json"))
    # What stood there was not replaced: it could have been of a save that goes on.
    assert marker["manifest"]["name"] == f"manifest-{marker['save']}.safetensors"


def test_a_copy_on_a_local_disk_is_a_checkpoint(store, tmp_path):
    location = f"{store.url}/c"
    distckpt.save(state(1.0), location)
    distckpt.save(state(2.0), location, overwrite=True)
    for name in store.keys("c"):
        path = tmp_path / "c" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(f"c/{name}"))
    assert holds(tmp_path / "c", 2.0)
    assert distckpt.megatron.remove_sharded_tensors(tmp_path / "c", "w") is None
    assert set(distckpt.open(tmp_path / "c").tensors) == {"half"}
    assert distckpt.verify(tmp_path / "c").is_whole


class Wrapped(SaveShardedStrategy):
    """A strategy that knows nothing of folders."""

    def __init__(self):
        self.strategy = SafetensorsSaveStrategy()
        self.backend, self.version = self.strategy.backend, self.strategy.version

    def save(self, sharded_state_dict, checkpoint_dir):
        return self.strategy.save(sharded_state_dict, checkpoint_dir)


def test_a_strategy_without_folders_of_its_own_saves_but_does_not_replace(store):
    location = f"{store.url}/c"
    distckpt.save(state(1.0), location, strategy=Wrapped())
    assert holds(location, 1.0)
    assert distckpt.verify(location).strays == ()
    with pytest.raises(CheckpointExistsError, match="another strategy"):
        distckpt.save(state(2.0), location, strategy=Wrapped(), overwrite=True)
    assert holds(location, 1.0)
    distckpt.save(state(3.0), location, overwrite=True)
    assert holds(location, 3.0)
    assert len(store.keys("c")) == 4


def test_a_strategy_without_folders_of_its_own_keeps_what_it_wrote_over_leftovers(store):
    store.write("c/tensors/shard-00001-model-00001-of-00001.safetensors", b"half")
    store.write("c/manifest.safetensors", b"of nobody")
    distckpt.save(state(1.0), f"{store.url}/c", strategy=Wrapped())
    assert holds(f"{store.url}/c", 1.0)


# --- Background saves and the manager -------------------------------------------------------------


def test_async_save(store):
    tensor = numbers(LARGE, 1)
    handle = distckpt.async_save({**state(1.0, 10), "w": whole("w", tensor)}, f"{store.url}/c")
    tensor.zero_()
    handle.result(60)
    assert holds(f"{store.url}/c", 1.0, LARGE)


def test_a_manager_keeps_and_removes(store):
    root = f"{store.url}/runs"
    with CheckpointManager(root, keep_last=2, keep_every=4) as manager:
        assert manager.latest() is None
        for step in range(1, 8):
            manager.save(step, state(step))
        manager.wait()
        assert (manager.steps(), manager.latest()) == ([4, 6, 7], 7)
        assert store.read("runs/latest_checkpointed_iteration.txt") == b"7"
        assert len(store.keys("runs")) == 3 * 4 + 1
        target = {"w": whole("w", torch.zeros(1000))}
        assert torch.equal(manager.load(target)["w"], numbers(1000, 7))
        with pytest.raises(CheckpointExistsError):
            manager.save(7, state(8))
        manager.save(7, state(9), overwrite=True)
        manager.wait()
        assert holds(manager.location(7), 9.0)


def test_a_manager_replaces_a_damaged_step_and_clears_up_unfinished_ones(store):
    root = f"{store.url}/runs"
    with CheckpointManager(root, keep_last=2, async_save=False) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        [name] = [name for name in store.keys("runs/step_00000003") if name.startswith("tensors-")]
        store.remove(f"runs/step_00000003/{name}")
        store.write("runs/step_00000002/notes.txt", b"stays")
        # A save that was interrupted: everything but the marker.
        store.remove("runs/step_00000002/metadata.json")
        store.write("runs/step_00000009/tensors-0123456789abcdef/x.safetensors", b"half")
    # It takes what it has seen twice, this long apart, for abandoned.
    with CheckpointManager(root, keep_last=2, async_save=False, timeout=1e-9) as manager:
        assert manager.latest() is None
        assert set(manager.skipped) == {2, 3, 9}
        manager.save(3, state(4))
        assert manager.latest() == 3
        assert holds(manager.location(3), 4.0)
        assert len(store.keys("runs/step_00000009")) == 1
        store.write("runs/step_00000009/tensors-0123456789abcdef/y.safetensors", b"it goes on")
        manager.save(4, state(4))
        assert len(store.keys("runs/step_00000009")) == 2
        manager.save(5, state(4))
        assert store.keys("runs/step_00000002") == ["notes.txt"]
        assert store.keys("runs/step_00000009") == []


# --- Exports --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_file_bytes", [1 << 20, 1 << 30])
def test_consolidate_to_from_and_between_stores(store, tmp_path, max_file_bytes):
    states = {f"m.{i}": whole(f"m.{i}", numbers(200_000, i)) for i in range(4)}
    distckpt.save(states, f"{store.url}/c")
    distckpt.save(states, tmp_path / "c")
    for source in (f"{store.url}/c", tmp_path / "c"):
        for number, target in enumerate((f"{store.url}/hf", tmp_path / "hf")):
            name = f"{target}-{'remote' if source != tmp_path / 'c' else 'local'}"
            report = distckpt.consolidate(source, name, max_file_bytes=max_file_bytes)
            assert report.num_tensors == 4
            below = name.removeprefix(f"{store.url}/")
            found = {}
            for file in report.files:
                data = (
                    store.read(f"{below}/{file}")
                    if number == 0
                    else (tmp_path / name / file).read_bytes()
                )
                found.update(safetensors.torch.load(data))
            assert all(torch.equal(found[f"m.{i}"], numbers(200_000, i)) for i in range(4))
            target = {"m": whole("m.2", torch.zeros(200_000))}
            assert torch.equal(distckpt.load(target, name)["m"], numbers(200_000, 2))
            if number == 0 and len(report.files) > 1:
                assert "model.safetensors.index.json" in store.keys(below)
                with pytest.raises(CheckpointExistsError, match="already holds an export"):
                    distckpt.consolidate(source, name)
    assert store.uploads() == []


def test_a_failed_export_leaves_nothing(store):
    distckpt.save({"m": whole("m", numbers(LARGE))}, f"{store.url}/c")
    before = store.keys()
    [name] = [name for name in store.keys("c") if name.startswith("tensors-")]
    data = bytearray(store.read(f"c/{name}"))
    data[-5] ^= 1
    store.write(f"c/{name}", bytes(data))
    with pytest.raises(CorruptCheckpointError, match="Checksum mismatch"):
        distckpt.consolidate(f"{store.url}/c", f"{store.url}/hf")
    assert store.keys() == before
    assert store.uploads() == []


def test_streaming(store):
    tensors = {f"t{i}": numbers(700_000, i) for i in range(8)}
    metas = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    save_safetensors_streaming_sharded(
        tensors.items(), f"{store.url}/s", metas, max_file_bytes=12 << 20
    )
    target = {"t": whole("t5", torch.zeros(700_000))}
    assert torch.equal(distckpt.load(target, f"{store.url}/s")["t"], tensors["t5"])
    assert store.uploads() == []


def test_reshard(store):
    distckpt.save(state(1.0), f"{store.url}/c")
    distckpt.save(state(2.0), f"{store.url}/d")
    distckpt.reshard(f"{store.url}/c", f"{store.url}/d", num_ranks=3, overwrite=True)
    assert holds(f"{store.url}/d", 1.0)


def test_a_whole_bucket_is_a_place_for_a_checkpoint(store):
    distckpt.save(state(), store.url)
    assert loaded(store.url)["step"] == 1.0
    distckpt.save(state(2.0), store.url, overwrite=True)
    assert loaded(store.url)["step"] == 2.0


def test_a_missing_bucket_is_no_empty_run(server):
    with pytest.raises(OSError, match="bucket or container does not exist"):
        CheckpointManager("s3://no-such-bucket/run").latest()
    with pytest.raises(OSError, match="bucket or container does not exist"):
        distckpt.megatron.check_is_distributed_checkpoint("s3://no-such-bucket/run/step_1")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("s3:///run/step_1", "'' is no name of a bucket"),
        ("s3://two words/x", "'two words' is no name of a bucket"),
        ("s3://b/a//c", "a part of the path is empty"),
        ("s3://b/../c", "a part of the path is empty"),
        ("dir://c::/tmp", "another name of a directory: give its path"),
        ("dir::file:///tmp/c", "another name of a directory: give its path"),
        ("github://a:b/c", "fsspec does not open this URL"),
        ("nothing-like-this://c", "Protocol not known"),
    ],
)
def test_urls_that_name_no_place_are_refused_at_once(path, problem):
    with pytest.raises(OSError, match=problem) as caught:
        distckpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, path)
    assert path in str(caught.value)


class TakesAll(BaseHTTPRequestHandler):
    """Answers 404 to whoever reads, and takes whatever is sent, as servers with their own idea of
    PUT do.
    """

    def answer(self):
        self.server.methods.append(self.command)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(404 if self.command in ("GET", "HEAD") else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = do_POST = answer

    def log_message(self, *arguments):
        pass


def test_nothing_is_written_over_http():
    pytest.importorskip("aiohttp")
    with ThreadingHTTPServer(("127.0.0.1", 0), TakesAll) as server:
        server.methods = []
        threading.Thread(target=server.serve_forever).start()
        location = f"http://127.0.0.1:{server.server_port}/c"
        try:
            for write in (
                distckpt.save,
                lambda state, path: distckpt.async_save(state, path).result(),
            ):
                for url in (location, f"simplecache::{location}"):
                    with pytest.raises(OSError, match="cannot be written over HTTP") as caught:
                        write({"step": 1}, url)
                    assert location in str(caught.value)
        finally:
            server.shutdown()
        assert {"PUT", "POST"}.isdisjoint(server.methods)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_server_that_ignores_ranges_is_refused(tmp_path, first):
    """As Python's own server does: it sends the whole file in any case."""
    pytest.importorskip("aiohttp")
    tensors = {"a": torch.ones(5000), "b": torch.zeros(5000)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}/model.safetensors"
        try:
            with pytest.raises(OSError, match="ignores ranges of bytes") as caught:
                distckpt.open(url).read(first)
            assert url in str(caught.value)
        finally:
            server.shutdown()


def test_another_version_in_the_same_second_is_noticed(bucket):
    """Objects tell their times in seconds."""
    path = f"{bucket}/model.safetensors"
    file = object_store.at(path)
    one, other = (safetensors.torch.save({"a": torch.full((5000,), n)}) for n in (0.0, 1.0))
    file.write(one)
    checkpoint = distckpt.open(path)
    file.write(one)
    assert torch.equal(checkpoint.read("a"), torch.zeros(5000))
    file.write(other)
    with pytest.raises(distckpt.CheckpointingException, match="was replaced"):
        checkpoint.read("a")


@pytest.mark.parametrize(("name", "value"), [("AWS_ENDPOINT_URL", ""), ("AWS_MAX_ATTEMPTS", "abc")])
def test_odd_settings_are_named(bucket, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises((OSError, ValueError), match=name):
        distckpt.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))}, f"{bucket}/x")
