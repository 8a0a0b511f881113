"""Checkpoints of Orbax in object stores: values, how much is read, and requests that fail."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import distckpt
from distckpt._storage import object_store
from tests.data.make_orbax import trees
from tests.support.cli_command import call
from tests.support.harness import run
from tests.support.orbax_trees import check, unpack, write_chunks
from tests.support.s3_server import Fault, FaultyProxy, hurry, reached_at


def put_folder(folder, url):
    """Put the files of a folder into a store."""
    for path in folder.rglob("*"):
        if path.is_file():
            object_store.at(f"{url}/{path.relative_to(folder)}").write(path.read_bytes())
    return url


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("orbax"))


IN_FOLDERS = pytest.param("plain_zarr3", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["standard", IN_FOLDERS])
def test_all_verbs_take_them(s3_store, made, tmp_path, capsys, name):
    url = put_folder(made / name, f"{s3_store.url}/run/{name}")
    expected = trees()[name]
    check(distckpt.open(f"{url}/").read_tensors(), expected)
    assert distckpt.load({}, url) == distckpt.load({}, made / name)
    assert distckpt.verify(url).is_whole
    assert distckpt.diff(url, made / name).is_same
    assert "orbax" in call(capsys, "inspect", url)
    distckpt.reshard(url, f"{s3_store.url}/ours")
    check(distckpt.open(f"{s3_store.url}/ours").read_tensors(), expected)
    distckpt.consolidate(url, tmp_path / "exported")
    check(load_file(tmp_path / "exported/model.safetensors"), expected)


@pytest.mark.parametrize("name", ["zarr3", "plain"])
def test_they_are_read_from_every_store(cloud, made, name):
    url = put_folder(made / name, f"{cloud.url}/run/{name}")
    check(distckpt.open(url).read_tensors(), trees()[name])


def test_roots_and_items(s3_store, made, capsys):
    steps = put_folder(made / "steps", f"{s3_store.url}/steps")
    items = put_folder(made / "items", f"{s3_store.url}/items")
    with pytest.raises(distckpt.CheckpointNotFoundError, match=rf"newest is '{steps}/20'"):
        distckpt.open(steps)
    assert [info.name for info in distckpt.list_checkpoints(steps)] == ["3", "20"]
    assert "20" in call(capsys, "ls", steps)
    # So does the bucket itself: only a directory of Orbax is read.
    with pytest.raises(distckpt.CheckpointNotFoundError, match="is not a distributed checkpoint"):
        distckpt.open(s3_store.url)
    opened = distckpt.open(f"{items}/0")
    check(opened.read_tensors(), {name: trees()[f"items/0/{name}"] for name in ("params", "state")})
    assert opened.common_state["extra"] == {"seen": 7}
    # Old versions have written no marker.
    object_store.at(f"{items}/0/_CHECKPOINT_METADATA").remove()
    assert set(distckpt.open(f"{items}/0").tensors) == set(opened.tensors)


def test_the_bucket_may_be_the_checkpoint(s3_store, made):
    put_folder(made / "standard", s3_store.url)
    check(distckpt.open(s3_store.url).read_tensors(), trees()["standard"])
    check(distckpt.open(f"{s3_store.url}/").read_tensors(), trees()["standard"])


def load_columns(rank, server, url):
    shard = distckpt.ShardedTensor.from_rank_offsets
    state = {
        "columns": shard("both", torch.zeros(16, 10), (1, rank, 2)),
        "same": shard("replica", torch.zeros(300), replica_id=rank),
    }
    # Ranks may be forked by a process that is older than the server.
    with reached_at(server):
        distckpt.load(state, url)
    return state["columns"].data.numpy(), state["same"].data.numpy()


def test_two_ranks_load_parts(s3_store, made):
    server = os.environ["AWS_ENDPOINT_URL"]
    url = put_folder(made / "hosts/0", f"{s3_store.url}/hosts/0")
    columns, copies = zip(*run(load_columns, 2, server, url), strict=True)
    assert np.array_equal(np.concatenate(columns, 1), trees()["hosts/0"]["both"])
    assert all(np.array_equal(copy, trees()["hosts/0"]["replica"]) for copy in copies)


# ---- how much is read


class CountingProxy(FaultyProxy):
    """Counts the bytes of all answers."""

    num_bytes = 0

    def forward(self, *request):
        answer = super().forward(*request)
        self.num_bytes += len(answer[2])
        return answer


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("uses_ocdbt", [True, False])
def test_a_region_reads_the_chunks_that_it_touches(s3_store, tmp_path, driver, uses_ocdbt):
    values = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
    stored_bytes = write_chunks(tmp_path / "made", values, (64, 512), driver, uses_ocdbt)
    url = put_folder(tmp_path / "made", f"{s3_store.url}/made")
    proxy = CountingProxy(os.environ["AWS_ENDPOINT_URL"])
    with proxy.running() as address, s3_store.reached_at(address):
        opened = distckpt.open(url)
        assert proxy.num_bytes < 0.1 * stored_bytes
        proxy.num_bytes = 0
        proxy.requests.clear()
        region = opened.read("x", (slice(70, 130), slice(5, 9)))
        assert np.array_equal(region.numpy(), values[70:130, 5:9])
        # Rows 64 to 192 are two of eight chunks.
        assert stored_bytes / 4 <= proxy.num_bytes <= 1.1 * stored_bytes / 4
        assert len(proxy.requests) <= 12
        proxy.num_bytes = 0
        assert np.array_equal(opened.read("x").numpy(), values)
        assert proxy.num_bytes <= 1.1 * stored_bytes


@pytest.mark.parametrize("is_sealed", [True, False])
def test_many_reads_describe_the_checkpoint_once(s3_store, tmp_path, is_sealed):
    values = np.random.default_rng(0).standard_normal((512, 512), dtype=np.float32)
    write_chunks(tmp_path / "made", values, (64, 512))
    url = put_folder(tmp_path / "made", f"{s3_store.url}/made")
    if is_sealed:
        distckpt.seal(url)
    proxy = CountingProxy(os.environ["AWS_ENDPOINT_URL"])
    with proxy.running() as address, s3_store.reached_at(address):
        opened = distckpt.open(url)
        opened.read("x", (slice(0, 8),))
        proxy.requests.clear()
        proxy.num_bytes = 0
        # Of the chunk that the first read has decoded, and of others.
        for start in (8, 70, 80, 500):
            rows = opened.read("x", (slice(start, start + 8),))
            assert np.array_equal(rows.numpy(), values[start : start + 8])
        names = [request.split()[1] for request in proxy.requests]
        assert not [name for name in names if name.endswith(("_METADATA", ".ocdbt", ".seal"))]
        num_ranges = len(proxy.ranges)
        opened.read("x", (slice(72, 80),))
        assert len(proxy.ranges) == num_ranges
        # Nothing of other checkpoints, nor of those that are opened anew.
        assert np.array_equal(distckpt.open(url).read("x").numpy(), values)


def test_later_reads_compare_their_bytes_with_the_seal(s3_store, tmp_path):
    values = np.random.default_rng(0).standard_normal((128, 512), dtype=np.float32)
    write_chunks(tmp_path / "made", values, (64, 512), uses_ocdbt=False)
    url = put_folder(tmp_path / "made", f"{s3_store.url}/made")
    distckpt.seal(url)
    opened = distckpt.open(url)
    assert np.array_equal(opened.read("x").numpy(), values)
    chunk = object_store.at(f"{url}/x/1.0")
    content = bytearray(chunk.read())
    content[-9] ^= 1
    chunk.write(bytes(content))
    damaged = r"/x/1\.0' is not as it was sealed: .*'x', \[64:128"
    with pytest.raises(distckpt.CorruptCheckpointError, match=damaged):
        opened.read("x")
    content[-9] ^= 1
    chunk.write(bytes(content))
    assert np.array_equal(opened.read("x").numpy(), values)


def test_reads_after_a_failed_one_ask_again(s3_store, made, monkeypatch):
    hurry(monkeypatch)
    url = put_folder(made / "standard", f"{s3_store.url}/run")
    opened = distckpt.open(url)
    denied = Fault("GET", "manifest.ocdbt", "403", count=99)
    with s3_store.failing(denied), pytest.raises(PermissionError):
        opened.read("params.embed")
    check(opened.read_tensors(), trees()["standard"])


# ---- requests that fail


def largest_file(made, name):
    files = [
        path for path in (made / name).rglob("*") if path.is_file() and path.name != "_METADATA"
    ]
    return max(files, key=lambda path: path.stat().st_size).relative_to(made / name)


@pytest.mark.parametrize("name", ["standard", "plain"])
def test_errors_name_key_and_object(s3_store, made, name, monkeypatch):
    hurry(monkeypatch)
    url = put_folder(made / name, f"{s3_store.url}/{name}")
    file = largest_file(made, name)
    with s3_store.failing(Fault("GET", file.name, "503", count=3)) as proxy:
        check(distckpt.open(url).read_tensors(), trees()[name])
    assert len(proxy.happened) == 3
    with s3_store.failing(Fault("GET", file.name, "403", count=99)):
        opened = distckpt.open(url)
        with pytest.raises(PermissionError, match=r"'params\.embed'") as denied:
            opened.read("params.embed")
    assert denied.value.filename == f"{url}/{file}"
    refused = pytest.raises(PermissionError, match=f"{url}/_METADATA")
    with s3_store.failing(Fault("GET", "_METADATA", "403", count=99)), refused:
        distckpt.open(url)
    content = object_store.at(f"{url}/{file}").read()
    object_store.at(f"{url}/{file}").write(content[: len(content) // 2])
    with pytest.raises(distckpt.CorruptCheckpointError, match=f"'params.embed'.*'{url}/{file}'"):
        distckpt.open(url).read("params.embed")
    object_store.at(f"{url}/{file}").remove()
    with pytest.raises(distckpt.CorruptCheckpointError, match=f"'params.embed'.*'{url}/{file}'"):
        distckpt.open(url).read("params.embed")
    (problem,) = distckpt.verify(url).problems
    assert problem.key == "params.embed"
    assert f"{url}/{file}" in problem.message


def test_another_save_meanwhile_is_an_error(s3_store, made):
    url = put_folder(made / "standard", f"{s3_store.url}/run")
    opened = distckpt.open(url)
    put_folder(made / "zarr3", url)
    with pytest.raises(distckpt.CheckpointingException, match="was replaced or written to"):
        opened.read_tensors()


def test_a_node_that_leads_out_of_the_directory_is_refused(s3_store, made, monkeypatch):
    url = put_folder(made / "standard", f"{s3_store.url}/run")
    from distckpt._foreign.orbax import values

    dumped = values._dump
    text = "btreenode::../secret:0:9"

    def forged(*arguments):
        fields = dumped(*arguments)
        if "versions" in fields:
            fields["versions"][-1]["root"]["location"] = text
        return fields

    monkeypatch.setattr(values, "_dump", forged)
    with pytest.raises(distckpt.CorruptCheckpointError, match=r"\.\./secret"):
        distckpt.open(url)


def test_a_sealed_one_is_compared(s3_store, made, capsys):
    url = put_folder(made / "standard", f"{s3_store.url}/run")
    distckpt.seal(url)
    check(distckpt.open(url).read_tensors(), trees()["standard"])
    report = distckpt.verify(url)
    assert report.is_whole
    assert report.has_checksums
    assert json.loads(call(capsys, "inspect", "--json", url))
    object_store.at(f"{url}/d/more").write(b"added")
    # Not one that is read.
    check(distckpt.open(url).read_tensors(), trees()["standard"])
    (problem,) = distckpt.verify(url).problems
    assert problem.message == "was added"
