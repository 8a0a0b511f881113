"""Steps that were rejected: passed over, not counted by retention, and replaced by another save."""

from __future__ import annotations

import json
import shutil

import fsspec
import pytest

import distckpt
from distckpt import CheckpointManager, CheckpointNotFoundError, list_checkpoints
from tests.support.cli_command import call, call_error, call_json
from tests.support.s3_server import FaultyProxy, client, keys_in, new_bucket, reached_at
from tests.support.states import state_of, value_in, value_of

REASON = "loss differs on replay: 1.5 != 2.25"


class Root:
    """A root of steps, whose files are reached without distckpt."""

    def __init__(self, url, server=None):
        self.url = str(url)
        self._server = server
        self._bucket = self.url.split("/")[2] if server else ""
        self._files = None if server else fsspec.core.url_to_fs(self.url)[0]

    def paths(self):
        if self._server:
            return keys_in(self._server, self.url)
        top = self._files._strip_protocol(self.url)
        return sorted(path[len(top) + 1 :] for path in self._files.find(top))

    def rejections(self):
        return [path for path in self.paths() if "rejected_" in path]

    def read(self, name):
        if self._server:
            found = client(self._server).get_object(Bucket=self._bucket, Key=f"run/{name}")
            return found["Body"].read()
        return self._files.cat_file(f"{self.url}/{name}")

    def write(self, name, content):
        if self._server:
            client(self._server).put_object(Bucket=self._bucket, Key=f"run/{name}", Body=content)
        else:
            self._files.pipe_file(f"{self.url}/{name}", content)

    def remove(self, below):
        for path in self.paths():
            if not path.startswith(below):
                continue
            if self._server:
                client(self._server).delete_object(Bucket=self._bucket, Key=f"run/{path}")
            else:
                self._files.rm_file(f"{self.url}/{path}")


@pytest.fixture(params=["local", "memory", "s3"])
def root(request, tmp_path):
    if request.param == "local":
        return Root(tmp_path / "run")
    if request.param == "memory":
        return Root(f"{request.getfixturevalue('memory')}/run")
    url = request.getfixturevalue("bucket")
    return Root(f"{url}/run", request.getfixturevalue("server"))


def save_steps(root, *steps, metrics=None, **settings):
    with CheckpointManager(root.url, async_save=False, **settings) as manager:
        for step in steps:
            manager.save(step, state_of(step), metrics=metrics and {"loss": metrics[step]})
    return manager


def newest_value(root):
    return value_of(CheckpointManager(root.url).load(state_of(-1)))


# --- Loading --------------------------------------------------------------------------------------


def test_a_rejected_step_is_loaded_only_when_it_is_named(root, caplog):
    save_steps(root, 1, 2, 3)
    CheckpointManager(root.url).reject(3, REASON)
    manager = CheckpointManager(root.url)
    assert value_of(manager.load(state_of(-1))) == 2
    assert manager.skipped == {3: f"rejected: {REASON}"}
    assert (manager.latest(), manager.steps()) == (2, [1, 2, 3])
    assert manager.skipped == {3: f"rejected: {REASON}"}
    assert f"step 3 in {root.url} is passed over: rejected: {REASON}" in caplog.text
    caplog.clear()
    assert value_of(manager.load(state_of(-1), 3)) == 3
    assert f"was rejected: {REASON}: it is loaded because it was named" in caplog.text
    caplog.clear()
    manager.reject(3, None)
    assert newest_value(root) == value_of(manager.load(state_of(-1), 3)) == 3
    assert (caplog.text, root.rejections()) == ("", [])


def test_a_run_of_rejected_steps_only_names_the_reasons(root):
    manager = save_steps(root, 1, 2)
    for step in (1, 2):
        manager.reject(step, f"reason {step}")
    assert manager.latest() is None
    with pytest.raises(CheckpointNotFoundError, match=r"2: rejected: reason 2\n  1: rejected"):
        CheckpointManager(root.url).load(state_of(-1))


def test_the_last_of_several_reasons_counts(root):
    manager = save_steps(root, 1)
    manager.reject(1, "the first")
    manager.reject(1, "the\nsecond")
    manager.latest()
    assert manager.skipped == {1: "rejected: the second"}
    [name] = root.rejections()
    assert json.loads(root.read(name))["reason"] == "the\nsecond"


def test_steps_that_no_manager_saved_can_be_rejected(root):
    for step in (1, 2):
        distckpt.save(state_of(step), f"{root.url}/step_0000000{step}")
    manager = CheckpointManager(root.url)
    manager.reject(2, REASON)
    assert newest_value(root) == 1
    distckpt.save(state_of(3), f"{root.url}/step_00000002", overwrite=True)
    assert newest_value(root) == 3


def test_a_step_that_is_not_there_cannot_be_rejected(root):
    manager = save_steps(root, 1)
    for reason in (REASON, None):
        with pytest.raises(CheckpointNotFoundError, match="no complete step 2 in"):
            manager.reject(2, reason)
    for reason in ("", " \n", 5):
        with pytest.raises(ValueError, match="needs a reason"):
            manager.reject(1, reason)
    with pytest.raises(ValueError, match="integer from 0"):
        manager.reject(-1, REASON)
    assert root.rejections() == []


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"reason": "x"}', b'{"reason": "x", "time": "noon"}', b"[" * 100_000],
    ids=["empty", "no text", "list", "no time", "odd time", "deep"],
)
def test_a_damaged_rejection_counts(content, root, caplog):
    manager = save_steps(root, 1, 2, keep_last=1, keep=lambda step: True)
    manager.reject(2, REASON)
    [name] = root.rejections()
    root.write(name, content)
    assert newest_value(root) == 1
    assert f"{name} is damaged" in caplog.text
    caplog.clear()
    assert value_of(manager.load(state_of(-1), 2)) == 2
    assert f"{name} is damaged" in caplog.text
    assert [info.step for info in list_checkpoints(root.url) if info.is_newest] == [1]
    save_steps(root, 3, keep_last=1, keep=lambda step: True)
    assert newest_value(root) == 3
    manager.reject(2, "again")
    manager.reject(3, "too")
    manager.latest()
    assert manager.skipped == {3: "rejected: too", 2: "rejected: again"}


def test_a_step_whose_marker_was_changed_stays_rejected(root):
    manager = save_steps(root, 1, 2)
    manager.reject(2, REASON)
    fields = json.loads(root.read("step_00000002/metadata.json"))
    fields |= {"checksum": None, "seconds": 9.0}
    root.write("step_00000002/metadata.json", json.dumps(fields).encode())
    assert newest_value(root) == 1
    # Which save this is cannot be told any more.
    root.write("step_00000002/metadata.json", b"{")
    assert (manager.latest(), manager.skipped) == (1, {2: f"rejected: {REASON}"})


def test_a_directory_in_the_place_of_a_rejection_counts(tmp_path):
    root = Root(tmp_path)
    manager = save_steps(root, 1, 2)
    manager.reject(2, REASON)
    [name] = root.rejections()
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    assert manager.latest() == 1
    save_steps(root, 3)
    assert manager.latest() == 3


def test_a_rejection_that_another_program_wrote_without_a_reason_counts(root):
    manager = save_steps(root, 1, 2)
    manager.reject(2, REASON)
    [name] = root.rejections()
    root.write(name, json.dumps({"time": 1.0, "reason": ""}).encode())
    assert (manager.latest(), manager.skipped) == (1, {2: "rejected: without a reason"})


# --- Saving again ---------------------------------------------------------------------------------


def test_another_save_of_a_rejected_step_replaces_it(root, caplog):
    save_steps(root, 1, 2, 3)
    for step in (2, 3):
        CheckpointManager(root.url).reject(step, REASON)
    caplog.clear()
    with CheckpointManager(root.url, async_save=False) as manager:
        assert value_of(manager.load(state_of(-1))) == 1
        manager.save(2, state_of(20))
        # Of the newer steps, one is rejected: a restart does not prefer it.
        assert "beside newer steps" not in caplog.text
        assert f"step 2 in {root.url} was rejected: {REASON}: it is replaced" in caplog.text
        assert newest_value(root) == 20
        manager.save(3, state_of(30))
        assert newest_value(root) == 30
        manager.save(4, state_of(4))
    assert (root.rejections(), value_in(f"{root.url}/step_00000002")) == ([], 20)


def test_a_step_that_was_overwritten_or_removed_is_not_rejected(root):
    save_steps(root, 1, 2)
    with CheckpointManager(root.url, async_save=False) as manager:
        manager.reject(2, REASON)
        manager.save(2, state_of(20), overwrite=True)
        assert newest_value(root) == 20
        manager.reject(2, REASON)
        root.remove("step_00000002/")
        assert newest_value(root) == 1
        manager.save(2, state_of(200))
        assert newest_value(root) == 200
        manager.save(3, state_of(3))
    assert root.rejections() == []


def test_a_rejected_step_that_is_moved_aside_for_a_moment_stays_rejected(tmp_path, capsys):
    root = Root(tmp_path)
    save_steps(root, 1, 2, 3).reject(3, REASON)
    step = tmp_path / "step_00000003"
    aside = step.rename(tmp_path / f".{step.name}.old-{'0' * 16}")
    assert call_json(capsys, "prune", tmp_path, "--keep-last", 1)["removed"] == [1]
    aside.rename(step)
    assert newest_value(root) == 2


def test_an_interrupted_rejection_is_cleared(tmp_path):
    root = Root(tmp_path)
    manager = save_steps(root, 1)
    manager.reject(1, REASON)
    [name] = root.rejections()
    shutil.move(tmp_path / name, tmp_path / f".{name}.{'0' * 16}")
    assert manager.latest() == 1
    save_steps(root, 2)
    assert root.rejections() == []


# --- Retention ------------------------------------------------------------------------------------


def test_the_last_good_steps_stay_until_as_many_newer_ones_are_good(root):
    save_steps(root, 1, 2, 3, 4)
    for step in (3, 4):
        CheckpointManager(root.url).reject(step, REASON)
    assert save_steps(root, 5, keep_last=2).steps() == [2, 3, 4, 5]
    assert len(root.rejections()) == 2
    assert save_steps(root, 6, keep_last=2).steps() == [5, 6]
    assert root.rejections() == []


def test_a_step_that_is_rejected_at_once_removes_none(root):
    def reject_second(report):
        if report.location.endswith("2"):
            CheckpointManager(root.url).reject(2, REASON)

    manager = save_steps(root, 1, 2, keep_last=1, on_report=reject_second)
    assert (manager.steps(), newest_value(root)) == ([1, 2], 1)


def test_a_rejected_step_is_not_among_the_best(root):
    losses = {1: 3.0, 2: 0.5, 3: 2.0, 4: 4.0}
    save_steps(root, 1, 2, 3, metrics=losses)
    settings = {"keep_last": 1, "best_metric": "loss"}
    CheckpointManager(root.url).reject(2, REASON)
    manager = save_steps(root, 4, metrics=losses, **settings)
    assert manager.steps() == [3, 4]


def test_prune_keeps_the_last_good_step(root, capsys):
    manager = save_steps(root, 1, 2, 3, 4)
    for step in (1, 3, 4):
        manager.reject(step, REASON)
    pruned = call_json(capsys, "prune", root.url, "--keep-last", 1)
    assert (pruned["kept"], pruned["removed"]) == ([2, 3, 4], [1])
    assert (newest_value(root), len(root.rejections())) == (2, 2)
    manager.reject(2, REASON)
    assert call_json(capsys, "prune", root.url, "--keep-last", 1)["removed"] == []


# --- Requests -------------------------------------------------------------------------------------


def test_only_rejections_that_are_met_are_read(server):
    root = Root(f"{new_bucket(server)}/run", server)
    manager = save_steps(root, 1, 2, 3, 4)
    listings = []
    for rejected in ((), (1,), (1, 4)):
        for step in rejected:
            manager.reject(step, REASON)
        proxy = FaultyProxy(server)
        with proxy.running() as url, reached_at(url):
            assert newest_value(root) == (3 if 4 in rejected else 4)
        reads = [request for request in proxy.requests if "rejected_" in request]
        assert len(reads) == rejected.count(4), proxy.requests
        listings.append(sum("?" in request for request in proxy.requests))
    assert listings[0] == listings[1], listings
    proxy = FaultyProxy(server)
    with proxy.running() as url, reached_at(url):
        assert [info.step for info in list_checkpoints(root.url) if info.rejected] == [1, 4]
    assert len([request for request in proxy.requests if "rejected_" in request]) == 2


# --- The command line -----------------------------------------------------------------------------


def test_the_command_line(root, tmp_path, capsys):
    save_steps(root, 1, 2)
    assert "step 2 in" in call(capsys, "reject", root.url, 2, "--reason", REASON)
    assert newest_value(root) == 1
    listed = call_json(capsys, "ls", root.url)
    assert [(item["rejected"], item["is_newest"]) for item in listed] == [
        (None, True),
        (REASON, False),
    ]
    assert f"rejected: {REASON}" in call(capsys, "ls", root.url)
    call(capsys, "ls", root.url, "--html", tmp_path / "run.html")
    assert f"rejected: {REASON}" in (tmp_path / "run.html").read_text()
    found = call_json(capsys, "reject", root.url, 2, "--undo")
    assert (found["step"], found["rejected"], newest_value(root)) == (2, None, 2)
    assert "no complete step 3" in call_error(capsys, "reject", root.url, 3, "--reason", REASON)
