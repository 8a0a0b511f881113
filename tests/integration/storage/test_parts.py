"""Work in parts on an object store."""

from __future__ import annotations

import pytest

import distckpt
from distckpt import CheckpointingException, tasks
from distckpt.megatron.core import read_file
from tests.support.disk import tree_of
from tests.support.s3_server import FaultyProxy, client, keys_in, new_bucket, reached_at, uploads_in
from tests.support.states import numbered, save_checkpoint

OPTIONS = {"max_file_bytes": 100_000}


@pytest.fixture
def bucket(s3_server):
    with reached_at(s3_server):
        bucket = new_bucket(s3_server)
        save_checkpoint(f"{bucket}/a", {f"layers.{i}.w": numbered(60, 50) - i for i in range(30)})
        yield bucket


def test_consolidate(bucket, tmp_path):
    work = tasks.consolidate(f"{bucket}/a", f"{bucket}/out", num_tasks=3, **OPTIONS)
    reports = [task.run() for task in reversed(work)]
    assert [report.is_complete for report in reports] == [False, False, True]
    distckpt.consolidate(f"{bucket}/a", tmp_path / "one", **OPTIONS)
    for name, content in tree_of(tmp_path / "one").items():
        assert read_file(f"{bucket}/out/{name}", len(content) + 1) == content
    assert work[0].run().num_pieces == 0
    assert tasks.abandon(f"{bucket}/out")
    assert distckpt.diff(f"{bucket}/a", f"{bucket}/out").is_same


def test_an_abandoned_attempt(bucket, s3_server):
    work = tasks.consolidate(f"{bucket}/a", f"{bucket}/out", num_tasks=2, **OPTIONS)
    work[0].run()
    name = bucket.removeprefix("s3://")
    keys = ("out/model-00004-of-00004.safetensors", "out/other.safetensors")
    for key in keys:
        client(s3_server).create_multipart_upload(Bucket=name, Key=key)
    others = tasks.consolidate(f"{bucket}/a", f"{bucket}/out", num_tasks=2)
    with pytest.raises(CheckpointingException, match="max_file_bytes was 100000 and is"):
        others[1].run()
    assert tasks.abandon(f"{bucket}/out")
    assert [key for key in keys_in(s3_server, bucket) if "out" in key] == []
    assert [upload for upload in uploads_in(s3_server, name) if "model" in upload] == []
    assert len(uploads_in(s3_server, name)) == 1


def test_reshard(bucket, s3_server):
    work = tasks.reshard(f"{bucket}/a", f"{bucket}/b", num_tasks=3, num_ranks=4)
    for task in work[:2]:
        task.run()
    tasks.abandon(f"{bucket}/b")
    assert {key.partition("/")[0] for key in keys_in(s3_server, bucket)} == {"a"}
    assert [task.run() for task in work][-1].is_complete
    assert distckpt.verify(f"{bucket}/b").is_whole
    assert distckpt.diff(f"{bucket}/a", f"{bucket}/b").is_same
    assert work[1].run().num_pieces == 0


def test_uploads_of_killed_processes_are_aborted_at_the_end(bucket, s3_server):
    name = bucket.removeprefix("s3://")
    keys = ("out/model-00004-of-00004.safetensors", "out/other.safetensors")

    def leave_uploads():
        for key in keys:
            client(s3_server).create_multipart_upload(Bucket=name, Key=key)

    work = tasks.consolidate(f"{bucket}/a", f"{bucket}/out", num_tasks=2, **OPTIONS)
    work[0].run()
    leave_uploads()
    assert len(uploads_in(s3_server, name)) == 2
    assert work[1].run().is_complete
    assert uploads_in(s3_server, name) == ["out/other.safetensors"]
    leave_uploads()
    assert tasks.abandon(f"{bucket}/out")
    assert set(uploads_in(s3_server, name)) == {"out/other.safetensors"}
    assert distckpt.diff(f"{bucket}/a", f"{bucket}/out").is_same


def test_a_part_of_a_check_lists_files_instead_of_asking_for_each(bucket, s3_server):
    proxy = FaultyProxy(s3_server)
    with proxy.running() as url, reached_at(url):
        (task,) = tasks.verify(f"{bucket}/a", "fast", journal=f"{bucket}/journal", num_tasks=1)
        report = task.run().report
        assert report.is_whole
        proxy.requests.clear()
        assert task.run().report == report
    of_source = [request for request in proxy.requests if "/tensors" in request]
    assert of_source == []
