"""A store that refuses some requests: housekeeping fails no save, and turns no condition off."""

from __future__ import annotations

import contextlib
import re

import pytest

import distckpt
from distckpt import CheckpointManager
from distckpt.megatron.core import CheckpointExistsError
from tests.support.large_states import holds, large_state
from tests.support.other_program import as_another_program
from tests.support.s3_server import Fault, FaultyProxy, client, keys_in, reached_at, uploads_in
from tests.support.states import state_of_step, step_in

FEW_ATTEMPTS = {"AWS_MAX_ATTEMPTS": "2"}
LISTING_OF_UPLOADS = r"[?&]uploads(&|$)"
MARKER = r"/metadata\.json$"


@contextlib.contextmanager
def reached_through(proxy):
    with proxy.running() as url, reached_at(url, **FEW_ATTEMPTS):
        yield proxy


def refusing(server, *faults):
    return reached_through(FaultyProxy(server, *faults))


class RacingProxy(FaultyProxy):
    """Lets another program save just before the first marker reaches the server."""

    def __init__(self, server, other, *faults):
        super().__init__(server, *faults)
        self.others = iter([other])

    def forward(self, method, path, headers, body):
        if method == "PUT" and re.search(MARKER, path) and (other := next(self.others, None)):
            as_another_program(other)
        return super().forward(method, path, headers, body)


@pytest.mark.parametrize("action", ["403", "500", "501"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_savers_one_wins_whatever_the_listing_of_uploads_answers(
    server, bucket, action, overwrite
):
    location = f"{bucket}/c"
    if overwrite:
        distckpt.save(state_of_step(1), location)

    def save_of_another():
        distckpt.save(state_of_step(3), location, overwrite=overwrite)

    refused = Fault("GET", LISTING_OF_UPLOADS, action, count=1000)
    with (
        reached_through(RacingProxy(server, save_of_another, refused)) as proxy,
        pytest.raises(CheckpointExistsError, match="Another program"),
    ):
        distckpt.save(state_of_step(2), location, overwrite=overwrite)
    assert proxy.happened
    assert step_in(location) == 3
    assert distckpt.verify(location).is_whole


@pytest.mark.parametrize("action", ["403", "500", "501"])
def test_everything_works_without_a_listing_of_uploads(server, bucket, action, caplog):
    refused = Fault("GET", LISTING_OF_UPLOADS, action, count=1000)
    with refusing(server, refused) as proxy:
        for step in (1, 2):
            distckpt.save(state_of_step(step), f"{bucket}/c", overwrite=step == 2)
            assert step_in(f"{bucket}/c") == step
        distckpt.async_save(state_of_step(3), f"{bucket}/d").result()
        distckpt.consolidate(f"{bucket}/d", f"{bucket}/hf")
        with CheckpointManager(f"{bucket}/run", keep_last=1) as manager:
            for step in (1, 2):
                manager.save(step, state_of_step(step))
            manager.wait()
            assert manager.steps() == [2]
        with pytest.raises(distckpt.CheckpointExistsError):
            distckpt.save(state_of_step(4), f"{bucket}/c")
    assert proxy.happened
    assert step_in(f"{bucket}/d") == 3
    assert len(keys_in(server, f"{bucket}/c")) == 4
    told = [record.message for record in caplog.records if "unfinished uploads" in record.message]
    assert len(told) == 1
    assert "s3:ListBucketMultipartUploads" in told[0]


def test_an_upload_that_may_not_be_aborted_fails_no_save(server, bucket, caplog):
    killed = f"{bucket}/c/tensors-0123456789abcdef/shard-00001-model-00001-of-00001.safetensors"
    name, _, key = killed.removeprefix("s3://").partition("/")
    client(server).create_multipart_upload(Bucket=name, Key=key)
    with refusing(server, Fault("DELETE", "uploadId", "403", count=1000)):
        distckpt.save(state_of_step(1), f"{bucket}/c")
    assert step_in(f"{bucket}/c") == 1
    assert uploads_in(server, bucket) == [key]
    assert "allow s3:AbortMultipartUpload" in caplog.text
    distckpt.save(state_of_step(2), f"{bucket}/c", overwrite=True)
    assert uploads_in(server, bucket) == []


def test_files_that_may_not_be_removed_fail_no_save(server, bucket, caplog):
    refused = Fault("POST", r"\?delete", "403", count=1000)
    with refusing(server, refused) as proxy:
        for step in (1, 2):
            distckpt.save(state_of_step(step), f"{bucket}/c", overwrite=step == 2)
    assert len(proxy.happened) == 1
    assert step_in(f"{bucket}/c") == 2
    assert "could not remove what the checkpoint" in caplog.text
    assert len(distckpt.verify(f"{bucket}/c").strays) == 3


# --- Stores without conditions --------------------------------------------------------------------

CONDITIONAL_PUTS = [
    Fault("PUT", "", "501", count=1000, header=header) for header in ("If-None-Match", "If-Match")
]


def test_a_store_that_refuses_all_conditions_is_saved_to(server, bucket, caplog):
    location = f"{bucket}/c"
    with refusing(server, *CONDITIONAL_PUTS) as proxy:
        for step in (1, 2, 3):
            distckpt.save(state_of_step(step), location, overwrite=step > 1)
            assert step_in(location) == step
        with CheckpointManager(f"{bucket}/run", keep_last=1, async_save=False) as manager:
            for step in (1, 2):
                manager.save(step, state_of_step(step))
            assert manager.steps() == [2]
    assert proxy.happened
    assert caplog.text.count(f"{location} has no conditional writes") == 3
    assert len(keys_in(server, location)) == 4
    assert keys_in(server, f"{bucket}/run/step_00000001") == []
    assert distckpt.verify(location).is_whole


def test_a_marker_that_was_put_before_conditions_were_refused_is_found(server, bucket):
    location, kind = f"{bucket}/c", ("PUT", MARKER)
    for step in (1, 2):
        faults = Fault(*kind, "lose answer"), Fault(*kind, "501")
        with refusing(server, *faults) as proxy:
            distckpt.save(state_of_step(step), location, overwrite=step == 2)
        assert [action for action, _ in proxy.happened] == ["lose answer", "501"]
        assert step_in(location) == step
        assert distckpt.verify(location).is_whole


def test_another_request_that_is_not_implemented_says_nothing_about_conditions(
    server, bucket, caplog
):
    """The listing of files fails in the commit."""
    refused = Fault("GET", "list-type=2", "501", first=3)
    with refusing(server, refused) as proxy, pytest.raises(OSError, match="501"):
        distckpt.save(large_state(1), f"{bucket}/c")
    assert proxy.happened
    assert "conditional" not in caplog.text
    distckpt.save(large_state(2), f"{bucket}/c")
    assert holds(f"{bucket}/c", 2)
