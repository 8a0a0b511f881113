"""Object stores that are busy, lose answers, or refuse requests: S3, Google Cloud Storage and Azure
alike.
"""

from __future__ import annotations

import pytest

import distckpt
from distckpt import CheckpointManager, list_checkpoints
from distckpt._storage import object_store, remote
from tests.support.large_states import holds, large_state
from tests.support.s3_server import Fault

ALWAYS = 10**6
METHODS = ["GET", "HEAD", "PUT", "POST", "DELETE"]


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_DELAY", 1e-5)


def in_all_requests(action, share):
    return [Fault(method, "", action, count=ALWAYS, share=share) for method in METHODS]


def test_all_verbs_on_a_busy_store_that_loses_answers(cloud):
    faults = [*in_all_requests("503", 0.3), *in_all_requests("lose answer", 0.15)]
    location, run = f"{cloud.url}/c", f"{cloud.url}/run"
    with cloud.failing(*faults) as proxy:
        distckpt.save(large_state(1), location)
        distckpt.async_save(large_state(2), location, overwrite=True).result()
        assert holds(location, 2)
        distckpt.consolidate(location, f"{cloud.url}/hf")
        distckpt.reshard(location, f"{cloud.url}/resharded")
        with CheckpointManager(run, keep_last=1) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
    assert {action for action, _ in proxy.happened} == {"503", "lose answer"}
    assert holds(location, 2)
    for place in (location, f"{cloud.url}/resharded"):
        report = distckpt.verify(place)
        assert report.is_whole
        assert report.strays == ()
    assert distckpt.diff(location, f"{cloud.url}/hf").is_same
    assert [info.step for info in list_checkpoints(run)] == [3]
    assert object_store.at(run).list_names() == ["step_00000003"]


def refusing(kind, action="403"):
    """Return the faults of a store that always refuses requests of a kind."""
    removals = [("DELETE", ""), ("POST", r"\?delete")]
    listings = [("GET", r"list-type=2|comp=list&|comp=list$")]
    requests = {"remove": removals, "list": listings}[kind]
    return [Fault(method, pattern, action, count=ALWAYS) for method, pattern in requests]


def test_a_store_that_refuses_removals_keeps_what_was_saved(cloud, caplog):
    location, run = f"{cloud.url}/c", f"{cloud.url}/run"
    with cloud.failing(*refusing("remove")) as proxy:
        distckpt.save(large_state(1), location)
        distckpt.save(large_state(2), location, overwrite=True)
        assert f"could not remove what the checkpoint in {location} does not need" in caplog.text
        assert holds(location, 2)
        manager = CheckpointManager(run, keep_last=1, async_save=False)
        for step in (1, 2):
            manager.save(step, {"step": step})
        print(manager.not_removed)
        print([info.step for info in list_checkpoints(run)])
        print(manager.latest())
        for s in (1,2): print(distckpt.load({}, f"{run}/step_0000000{s}"))
    assert proxy.happened
    # With the right to remove, what was left goes.
    distckpt.save(large_state(3), location, overwrite=True)
    assert distckpt.verify(location).strays == ()


@pytest.mark.parametrize("action", ["403", "501"])
def test_a_store_that_refuses_listings(cloud, action):
    location = f"{cloud.url}/c"
    distckpt.save(large_state(1), location)
    with cloud.failing(*refusing("list", action)):
        assert holds(location, 1)
        for f in (lambda: distckpt.save(large_state(2), f"{cloud.url}/d"),
          lambda: distckpt.save(large_state(2), location, overwrite=True),
            lambda: distckpt.verify(location), lambda: distckpt.consolidate(location, f"{cloud.url}/hf"),
            lambda: CheckpointManager(f"{cloud.url}/run").save(1, {"step":1}).result(), lambda: list_checkpoints(f"{cloud.url}/run"),
            lambda: distckpt.reshard(location, f"{cloud.url}/rs")):
            try: print("ok", f())
            except Exception as e: print(type(e).__name__, e)
    print(object_store.at(cloud.url).list_files())
    assert 0
