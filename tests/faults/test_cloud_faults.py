"""S3, Google Cloud Storage and Azure alike: requests that are refused, cut off, or carried out
without an answer.
"""

from __future__ import annotations

import pytest

import distckpt
from distckpt import CheckpointManager, list_checkpoints
from tests.support.large_states import holds, large_state
from tests.support.s3_server import Fault, hurry

ALWAYS = 10**6
METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE"]
PUT_MARKER = ("PUT", r"metadata\.json|metadata%2Ejson")
LIST = ("GET", "list-type=2|comp=list")
REMOVE = [("DELETE", ""), ("POST", r"\?delete"), ("POST", "comp=batch")]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    hurry(monkeypatch)


def in_all_requests(action, share):
    return [Fault(method, "", action, count=ALWAYS, share=share) for method in METHODS]


# Of S3, test_object_storage_faults.py has many single cases.
@pytest.mark.parametrize(
    "cloud", [pytest.param("s3", marks=pytest.mark.slow), "google", "azure"], indirect=True
)
def test_all_verbs_on_a_busy_store_that_loses_and_cuts_answers(cloud):
    faults = [
        *in_all_requests("503", 0.3),
        *in_all_requests("lose answer", 0.15),
        *in_all_requests("cut answer", 0.05),
        *in_all_requests("cut body", 0.02),
    ]
    location, run = f"{cloud.url}/c", f"{cloud.url}/run"
    with cloud.failing(*faults, AWS_MAX_ATTEMPTS="20") as proxy:
        distckpt.save(large_state(1), location)
        distckpt.async_save(large_state(2), location, overwrite=True).result()
        assert holds(location, 2)
        distckpt.consolidate(location, f"{cloud.url}/hf")
        distckpt.reshard(location, f"{cloud.url}/resharded")
        with CheckpointManager(run, keep_last=1) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
    assert {action for action, _ in proxy.happened} >= {"503", "lose answer", "cut answer"}
    for place in (location, f"{cloud.url}/resharded"):
        report = distckpt.verify(place)
        assert report.is_whole
        assert report.strays == ()
    assert holds(f"{cloud.url}/resharded", 2)
    assert distckpt.diff(location, f"{cloud.url}/hf").is_same
    assert [info.step for info in list_checkpoints(run)] == [3]
    names = {key.partition("/")[0] for key in cloud.keys(run)}
    assert names == {"latest_checkpointed_iteration.txt", "step_00000003"}


@pytest.mark.parametrize("action", ["lose answer", "cut answer"])
def test_a_marker_that_was_put_without_an_answer_is_the_one_of_the_save(cloud, action):
    location = f"{cloud.url}/c"
    for step in (1, 2):
        with cloud.failing(Fault(*PUT_MARKER, action)) as proxy:
            distckpt.save({"step": step}, location, overwrite=True)
        assert len(proxy.happened) == 1
        assert distckpt.load({}, location) == {"step": step}
        assert distckpt.verify(location).strays == ()


def test_a_marker_whose_answers_are_all_lost_may_have_been_put(cloud):
    location = f"{cloud.url}/c"
    faults = Fault(*PUT_MARKER, "lose answer", count=ALWAYS)
    for step in (1, 2):
        with (
            cloud.failing(faults, AWS_MAX_ATTEMPTS="3"),
            pytest.raises(OSError, match=r"metadata\.json"),
        ):
            distckpt.save({"step": step}, location, overwrite=True)
        assert distckpt.load({}, location) == {"step": step}
    distckpt.save({"step": 3}, location, overwrite=True)
    assert distckpt.verify(location).strays == ()


def test_a_marker_that_is_never_put_leaves_the_earlier_checkpoint(cloud):
    location = f"{cloud.url}/c"
    distckpt.save({"step": 1}, location)
    before = cloud.keys(location)
    for action in ("403", "503"):
        with (
            cloud.failing(Fault(*PUT_MARKER, action, count=ALWAYS), AWS_MAX_ATTEMPTS="2"),
            pytest.raises(OSError, match=action),
        ):
            distckpt.save({"step": 2}, location, overwrite=True)
        assert distckpt.load({}, location) == {"step": 1}
    distckpt.save({"step": 1}, location, overwrite=True)
    assert len(cloud.keys(location)) == len(before)


def test_a_store_that_refuses_removals_keeps_what_was_saved(cloud, caplog):
    location, run = f"{cloud.url}/c", f"{cloud.url}/run"
    refusals = [Fault(*request, "403", count=ALWAYS) for request in REMOVE]
    manager = CheckpointManager(run, keep_last=1, async_save=False)
    with cloud.failing(*refusals) as proxy:
        for step in (1, 2):
            distckpt.save({"step": step}, location, overwrite=True)
            manager.save(step, {"step": step})
        assert f"could not remove what the checkpoint in {location} does not need" in caplog.text
        assert distckpt.load({}, location) == {"step": 2}
        assert "403" in manager.not_removed[1]
        for step in (1, 2):
            assert manager.load({}, step) == {"step": step}
    assert proxy.happened
    distckpt.save({"step": 3}, location, overwrite=True)
    assert distckpt.verify(location).strays == ()
    manager.save(3, {"step": 3})
    assert [info.step for info in list_checkpoints(run)] == [3]


WRITERS = {
    "save": lambda source, place: distckpt.save({"step": 2}, f"{place}/c"),
    "overwrite": lambda source, place: distckpt.save({"step": 2}, source, overwrite=True),
    "manager": lambda source, place: CheckpointManager(f"{place}/run").save(2, {"step": 2}),
    "consolidate": lambda source, place: distckpt.consolidate(source, f"{place}/hf"),
    "reshard": lambda source, place: distckpt.reshard(source, f"{place}/resharded"),
}
"""Verb -> a call of it, given a checkpoint and a place for others."""


@pytest.mark.parametrize("action", ["403", "501"])
def test_a_store_that_refuses_listings_is_read_and_not_written(cloud, action):
    location = f"{cloud.url}/c"
    distckpt.save({"step": 1}, location)
    with cloud.failing(Fault(*LIST, action, count=ALWAYS)):
        assert distckpt.load({}, location) == {"step": 1}
        for name, verb in WRITERS.items():
            with pytest.raises(OSError, match=action) as caught:
                verb(location, f"{cloud.url}/others")
            assert caught.value.filename.startswith(cloud.url), name
    assert cloud.keys(f"{cloud.url}/others") == []
    assert distckpt.load({}, location) == {"step": 1}
    assert distckpt.verify(location).strays == ()


@pytest.mark.parametrize("action", ["403", "501"])
def test_listings_that_are_refused_in_the_middle_of_a_save_lose_no_checkpoint(
    cloud, action, caplog
):
    location = f"{cloud.url}/c"
    distckpt.save({"step": 1}, location)
    with (
        cloud.failing(Fault(*LIST, action, first=3, count=ALWAYS)),
        pytest.raises(OSError, match=action),
    ):
        distckpt.save({"step": 2}, location, overwrite=True)
    assert "could not remove the files of a save that failed" in caplog.text
    assert "conditional writes" not in caplog.text
    assert distckpt.load({}, location) == {"step": 1}
    distckpt.save({"step": 3}, location, overwrite=True)
    assert distckpt.verify(location).strays == ()
