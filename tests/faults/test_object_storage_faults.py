"""A network and a store that fail: requests that are refused, cut off, or carried out without an
answer.
"""

from __future__ import annotations

import contextlib
import itertools
import re

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt.megatron.core import CheckpointExistsError, read_file
from tests.support.large_states import holds, large_request, large_state, numbers
from tests.support.other_program import as_another_program
from tests.support.s3_server import (
    EqualPartsProxy,
    Fault,
    FaultyProxy,
    client,
    hurry,
    keys_in,
    reached_at,
    uploads_in,
)
from tests.support.sampling import one_in

FEW_ATTEMPTS = {"AWS_MAX_ATTEMPTS": "4"}
"""What goes on failing is not waited for long."""


@contextlib.contextmanager
def failing(server, *faults, **settings):
    proxy = FaultyProxy(server, *faults)
    with proxy.running() as url, reached_at(url, **settings):
        yield proxy


ACTIONS = ["500", "503", "cut body", "cut answer", "lose answer"]

REQUESTS_OF_A_SAVE = {
    "begin an upload": ("POST", r"shard-.*\?uploads"),
    "put a part": ("PUT", r"shard-.*partNumber=2"),
    "complete an upload": ("POST", r"shard-.*\?uploadId"),
    "put a small file": ("PUT", r"rank-00001"),
    "put the manifest": ("PUT", r"/manifest"),
    "put the marker": ("PUT", r"/metadata\.json"),
    "look for the marker": ("HEAD", r"/metadata\.json"),
    "list files": ("GET", r"list-type=2"),
    "list uploads": ("GET", r"\?uploads|&uploads"),
}


def in_turn(requests, first, count=1):
    """Return a fault for each request, `(method, pattern)`, whose actions take turns."""
    actions = itertools.islice(itertools.cycle(ACTIONS), first, None)
    return [
        Fault(method, pattern, action, count=count)
        for (method, pattern), action in zip(requests, actions, strict=False)
    ]


@pytest.mark.parametrize("first", one_in(2, range(len(ACTIONS))))
def test_saves_survive(server, bucket, first):
    """The first request of every kind fails, in a save and in one that replaces it."""
    faults = in_turn(REQUESTS_OF_A_SAVE.values(), first)
    check_saves(server, bucket, faults, FEW_ATTEMPTS)


def test_saves_survive_with_as_many_attempts_as_are_usual(server, bucket):
    faults = [Fault(*request, "lose answer") for request in REQUESTS_OF_A_SAVE.values()]
    check_saves(server, bucket, faults, {})


def check_saves(server, bucket, faults, settings):
    location = f"{bucket}/run/c"
    for seed in (1, 2):
        with failing(server, *faults, **settings) as proxy:
            distckpt.save(large_state(seed), location, overwrite=True)
        assert len(proxy.happened) == len(faults), proxy.happened
        assert holds(location, seed)
        assert len(keys_in(server, location)) == 4
    # Also what was begun by a request whose answer was lost.
    assert uploads_in(server, bucket) == []


@pytest.mark.parametrize(("action", "survives"), [("503", True), ("500", False)])
def test_a_busy_store_is_asked_more_often_than_a_broken_one(
    server, bucket, action, survives, monkeypatch
):
    hurry(monkeypatch)
    distckpt.save(large_state(1), f"{bucket}/c")
    with failing(server, Fault("GET", "shard-", action, count=15)):
        if survives:
            assert holds(f"{bucket}/c", 1)
            return
        with pytest.raises(OSError, match="500"):
            holds(f"{bucket}/c", 1)


def test_requests_that_are_refused_since_there_are_too_many_do_not_use_up_other_attempts(
    server, bucket, monkeypatch
):
    hurry(monkeypatch)
    distckpt.save(large_state(1), f"{bucket}/c")
    faults = Fault("GET", "rank-", "503", count=8), Fault("GET", "rank-", "cut answer", count=2)
    with failing(server, *faults) as proxy:
        assert holds(f"{bucket}/c", 1)
    assert len(proxy.happened) == 10


@pytest.mark.parametrize("first", one_in(2, range(len(ACTIONS))))
def test_a_load_survives(server, bucket, first):
    """The first two requests for every file fail."""
    location = f"{bucket}/c"
    distckpt.save(large_state(1), location)
    patterns = [r"shard-", r"rank-", r"/manifest", r"/metadata\.json"]
    requests = [(method, pattern) for method in ("GET", "HEAD") for pattern in patterns]
    faults = in_turn(requests, first, count=2)
    with failing(server, *faults, **FEW_ATTEMPTS) as proxy:
        assert holds(location, 1)
    assert {(fault.method, fault.pattern) for fault in faults[:4]} <= {
        (request.split()[0], pattern)
        for _, request in proxy.happened
        for pattern in patterns
        if re.search(pattern, request)
    }


def test_verify_and_consolidate_survive(server, bucket):
    location = f"{bucket}/c"
    distckpt.save(large_state(1), location)
    with failing(server, Fault("GET", r"/c/tensors", "cut answer", 2, 2), **FEW_ATTEMPTS) as proxy:
        assert distckpt.verify(location).is_whole
        assert len(proxy.happened) == 2
    faults = (
        Fault("PUT", r"/hf/.*partNumber", "lose answer", 2),
        Fault("POST", r"/hf/.*uploadId", "lose answer"),
    )
    with failing(server, *faults, **FEW_ATTEMPTS) as proxy:
        distckpt.consolidate(location, f"{bucket}/hf")
        assert len(proxy.happened) == 2
    target = large_request()
    assert torch.equal(distckpt.load(target, f"{bucket}/hf")["w"], numbers(1))
    assert uploads_in(server, bucket) == []


def test_an_upload_that_is_gone_was_completed_or_is_an_error(server, bucket):
    kind = REQUESTS_OF_A_SAVE["complete an upload"]
    with failing(server, Fault(*kind, "lose answer"), Fault(*kind, "404"), **FEW_ATTEMPTS) as proxy:
        distckpt.save(large_state(1), f"{bucket}/c")
    assert [action for action, _ in proxy.happened] == ["lose answer", "404"]
    assert holds(f"{bucket}/c", 1)
    with (
        failing(server, Fault(*kind, "404", count=1000), **FEW_ATTEMPTS),
        pytest.raises(FileNotFoundError),
    ):
        distckpt.save(large_state(2), f"{bucket}/d")
    assert keys_in(server, f"{bucket}/d") == []
    assert uploads_in(server, bucket) == []


REQUESTS_THAT_CAN_FAIL = ["put a part", "complete an upload", "put the manifest"]


@pytest.mark.parametrize("request_kind", REQUESTS_THAT_CAN_FAIL)
def test_what_goes_on_failing_is_an_error_that_names_the_file_and_leaves_nothing(
    server, bucket, request_kind
):
    method, pattern = REQUESTS_OF_A_SAVE[request_kind]
    distckpt.save(large_state(1), f"{bucket}/c")
    before = keys_in(server, bucket)
    with (
        failing(server, Fault(method, pattern, "500", count=1000), **FEW_ATTEMPTS),
        pytest.raises(OSError, match="injected") as caught,
    ):
        distckpt.save(large_state(2), f"{bucket}/c", overwrite=True)
    assert re.match(rf"{bucket}/c/.*({pattern.split('.*')[0].strip('/')})", caught.value.filename)
    assert keys_in(server, bucket) == before
    assert uploads_in(server, bucket) == []
    assert holds(f"{bucket}/c", 1)


def test_a_read_that_goes_on_failing_is_an_error_that_names_the_file(server, bucket):
    distckpt.save(large_state(1), f"{bucket}/c")
    with (
        failing(server, Fault("GET", r"shard-", "cut answer", count=1000), **FEW_ATTEMPTS),
        pytest.raises(OSError, match=r"c/tensors-\w+/shard-00001"),
    ):
        holds(f"{bucket}/c", 1)


def test_only_one_layer_repeats_a_request(server, bucket):
    client(server).put_object(Bucket=bucket[5:], Key="x", Body=b"content")
    fault = Fault("GET", r"/x$", "cut answer", count=1000)
    with (
        failing(server, fault, **FEW_ATTEMPTS) as proxy,
        pytest.raises(OSError, match=r"s3://"),
    ):
        read_file(f"{bucket}/x", 100)
    assert len(proxy.happened) == 4
    fault = Fault("GET", r"uploads", "lose answer", count=1000)
    with failing(server, fault, **FEW_ATTEMPTS) as proxy:
        distckpt.save({"step": 1}, f"{bucket}/c")
    assert len(proxy.happened) == 4


def test_a_store_that_does_not_answer_to_the_marker_loses_nothing(server, bucket):
    """Whether the marker was put is unknown then, so neither checkpoint's files may go."""
    location = f"{bucket}/c"
    distckpt.save(large_state(1), location)
    with (
        failing(
            server, Fault("PUT", r"/metadata\.json", "lose answer", count=1000), **FEW_ATTEMPTS
        ),
        pytest.raises(OSError, match=r"metadata\.json"),
    ):
        distckpt.save(large_state(2), location, overwrite=True)
    # It was put.
    assert holds(location, 2)
    distckpt.save(large_state(3), location, overwrite=True)
    assert holds(location, 3)
    assert len(keys_in(server, location)) == 4


def test_a_refused_marker_removes_what_was_uploaded(server, bucket):
    location = f"{bucket}/c"
    for seed in (1, 2):
        before = keys_in(server, bucket)
        with (
            failing(server, Fault("PUT", r"/metadata\.json", "403", count=1000)) as proxy,
            pytest.raises(PermissionError, match="AccessDenied") as caught,
        ):
            distckpt.save(large_state(seed), location, overwrite=True)
        assert caught.value.filename == f"{location}/metadata.json"
        assert len(proxy.happened) == 1
        assert keys_in(server, bucket) == before
        distckpt.save(large_state(seed), location, overwrite=True)


def test_a_marker_that_is_refused_after_an_answer_was_lost_may_have_been_put(server, bucket):
    location, kind = f"{bucket}/c", ("PUT", r"/metadata\.json")
    faults = Fault(*kind, "lose answer"), Fault(*kind, "403", count=1000)
    with failing(server, *faults, **FEW_ATTEMPTS), pytest.raises(PermissionError):
        distckpt.save(large_state(1), location)
    assert holds(location, 1)


def test_the_loser_of_a_race_is_told_so_though_its_answer_was_lost(server, bucket):
    location, others = f"{bucket}/c", iter([1])

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, large_state(3), location)

    # Put with one request, before the other save begins, so that only the marker is left to put.
    small = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(10)), "step": 2}
    with (
        failing(server, Fault("PUT", r"/metadata\.json", "lose answer", 2)) as proxy,
        pytest.raises(CheckpointExistsError, match="Another program"),
    ):
        distckpt.save(small, location, progress=progress)
    assert proxy.happened
    assert holds(location, 3)
    assert len(keys_in(server, location)) == 4


def test_a_save_whose_upload_the_winner_of_a_race_aborts_is_told_so(server, bucket):
    location, others = f"{bucket}/c", iter([1])

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, large_state(3), location)

    with pytest.raises(CheckpointExistsError, match="Another program"):
        distckpt.save(large_state(2), location, progress=progress)
    assert holds(location, 3)
    assert uploads_in(server, bucket) == []


def test_missing_credentials_are_said_at_once(server):
    proxy = FaultyProxy(server)
    nothing = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": "/nonexistent"}
    with (
        proxy.running() as address,
        reached_at(address, **nothing),
        pytest.raises(OSError, match="no AWS credentials found: set AWS_ACCESS_KEY_ID") as caught,
    ):
        distckpt.save(large_state(1), "s3://bucket/c")
    assert caught.value.filename.startswith("s3://bucket/c")
    assert proxy.requests == []


# --- Stores that lack something -------------------------------------------------------------------


def test_a_store_that_wants_equal_parts_gets_them(server, bucket):
    """Such as Cloudflare R2."""
    proxy = EqualPartsProxy(
        server,
        Fault("PUT", r"/c/.*partNumber=2", "500"),
        Fault("POST", r"/c/.*uploadId", "lose answer"),
    )
    large = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(9 << 20)), "step": 1}
    with proxy.running() as url, reached_at(url, **FEW_ATTEMPTS):
        distckpt.save(large, f"{bucket}/c")
        distckpt.save(large_state(2), f"{bucket}/c", overwrite=True)
        distckpt.consolidate(f"{bucket}/c", f"{bucket}/hf")
        assert holds(f"{bucket}/c", 2)
    assert len(proxy.happened) == 2
    assert sorted(len(sizes) for sizes in proxy.parts.values()) == [2, 2, 3]
    assert len(keys_in(server, f"{bucket}/c")) == 4
    assert uploads_in(server, bucket) == []


NO_CONDITIONS = [
    Fault("PUT", r"/metadata\.json", "501", count=1000, header=header)
    for header in ("If-None-Match", "If-Match")
]


def test_a_store_without_conditional_writes_is_warned_about_and_saved_to(server, bucket, caplog):
    location = f"{bucket}/c"
    with failing(server, *NO_CONDITIONS) as proxy:
        for seed in (1, 2):
            distckpt.save(large_state(seed), location, overwrite=seed == 2)
            assert holds(location, seed)
            assert len(proxy.happened) == seed
        with pytest.raises(CheckpointExistsError, match="already holds"):
            distckpt.save(large_state(3), location)
    assert caplog.text.count("has no conditional writes") == 2
    assert len(keys_in(server, location)) == 4


def test_without_conditional_writes_a_marker_that_is_seen_to_change_still_wins(server, bucket):
    location, others = f"{bucket}/c", iter([1])
    distckpt.save(large_state(1), location)

    def progress(num_bytes, total_bytes):
        if next(others, None):
            as_another_program(distckpt.save, large_state(3), location, overwrite=True)

    with (
        failing(server, *NO_CONDITIONS),
        pytest.raises(CheckpointExistsError, match="Another program"),
    ):
        distckpt.save(large_state(2), location, overwrite=True, progress=progress)
    assert holds(location, 3)


def test_without_conditional_writes_files_of_a_save_under_way_are_left_alone(server, bucket):
    """Its marker may still be put in the place of this one."""
    location = f"{bucket}/c"
    other = f"{location}/tensors-0123456789abcdef/shard-00001-model-00001-of-00001.safetensors"
    with failing(server, *NO_CONDITIONS):
        distckpt.save(large_state(1), location)
        client(server).put_object(
            Bucket=bucket[5:], Key=other.removeprefix(f"{bucket}/"), Body=b"of another program"
        )
        distckpt.save(large_state(2), location, overwrite=True)
    assert other.removeprefix(f"{location}/") in keys_in(server, location)
    assert len(keys_in(server, location)) == 5
    assert holds(location, 2)
