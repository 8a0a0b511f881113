"""The examples of monitoring: each reports the saves of a run with the client of its system."""

from __future__ import annotations

import importlib.util
import json
import re
import time

import pytest

import distckpt
from tests.support.example_programs import ROOT, docstring_of, run_command

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ALERTS = (ROOT / "examples" / "monitoring" / "prometheus_alerts.yml").read_text()
CLIENTS = {
    "json_lines": "json",
    "open_telemetry": "opentelemetry",
    "prometheus": "prometheus_client",
    "prometheus_uploads": "prometheus_client",
    "tensorboard_scalars": "tensorboard",
    "weights_and_biases": "wandb",
}


def run_example(name, work_dir):
    if importlib.util.find_spec(CLIENTS[name]) is None:
        pytest.skip(f"{CLIENTS[name]} is not installed")
    return run_command(f"monitoring/{name}.py", work_dir)


def test_every_example_is_tested_and_on_the_page():
    found = {file.stem for file in (ROOT / "examples" / "monitoring").glob("[!_]*.py")}
    assert found == set(CLIENTS)
    for name in CLIENTS:
        assert f"](../examples/monitoring/{name}.py)" in PAGE
        assert f"python examples/monitoring/{name}.py" in docstring_of(f"monitoring/{name}.py")


def test_json_lines_have_the_figures_of_each_save(tmp_path):
    run_example("json_lines", tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "saves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30]
    assert all(line["phases"].keys() >= {"stage", "write", "commit"} for line in lines)


@pytest.mark.slow
def test_prometheus_serves_the_figures(tmp_path):
    output = run_example("prometheus", tmp_path)

    assert "distckpt_saves_total 3.0" in output
    assert "distckpt_last_step 30.0" in output
    output += run_example("prometheus_uploads", tmp_path)
    for name in set(re.findall(r"distckpt_\w+", ALERTS)):
        assert f"\n{name}" in output


def alerts_that_fire(registry, now):
    """Return the names of alerts whose expressions are true; each is a comparison of numbers."""
    fired = set()
    for name, text in re.findall(r"alert: (\w+)\s+expr: (.*)", ALERTS):
        known = re.search(r"distckpt_\w+", text)[0]
        value = registry.get_sample_value(known)
        if value is not None and eval(text, {"time": lambda: now, known: value}):
            fired.add(name)
    return fired


def test_alerts_fire_when_uploads_fail(tmp_path, monkeypatch):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from prometheus_client import CollectorRegistry

    monkeypatch.syspath_prepend(ROOT / "examples" / "monitoring")
    uploads = importlib.import_module("prometheus_uploads")
    root = tmp_path / "run"
    registry = CollectorRegistry()
    started = time.time()
    with distckpt.CheckpointManager(root, local=tmp_path / "host") as manager:
        uploads.Uploads(registry, manager)
        manager.save(1, {"step": 1})
        manager.wait(uploaded=True)
        assert alerts_that_fire(registry, time.time()) == set()
        (root / "step_00000002").write_text("in the way")
        manager.save(2, {"step": 2})
        manager.wait(uploaded=True)
        assert registry.get_sample_value("distckpt_steps_on_hosts_only") == 1
        late = {"UploadsHaveProblems", "NoUpload"}
        assert alerts_that_fire(registry, started + 7100) == {"UploadsHaveProblems"}
        assert alerts_that_fire(registry, time.time() + 7300) == late
        (root / "step_00000002").unlink()
        manager.save(3, {"step": 3})
        manager.wait(uploaded=True)
        assert alerts_that_fire(registry, time.time()) == set()


@pytest.mark.slow
def test_open_telemetry_gets_the_figures(tmp_path):
    output = run_example("open_telemetry", tmp_path)

    (resource,) = json.loads(output)["resource_metrics"]
    metrics = {each["name"]: each["data"] for each in resource["scope_metrics"][0]["metrics"]}
    assert metrics["distckpt.save.step"]["data_points"][0]["value"] == 30
    counts = [point["count"] for point in metrics["distckpt.save.duration"]["data_points"]]
    assert counts == [3] * len(counts)


@pytest.mark.slow
def test_tensorboard_has_a_point_for_each_save(tmp_path):
    run_example("tensorboard_scalars", tmp_path)

    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("save/seconds/all")] == [10, 20, 30]


@pytest.mark.slow
def test_weights_and_biases_keep_the_last_save(tmp_path):
    output = run_example("weights_and_biases", tmp_path)

    assert "'save/step': 30" in output
