"""The examples of monitoring: each reports the saves of a run with the client of its system."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.support.example_programs import ROOT, docstring_of, run_command

PAGE = (ROOT / "docs" / "monitoring.md").read_text()
ALERTS = (ROOT / "examples" / "monitoring" / "prometheus_alerts.yml").read_text()
CLIENTS = {
    "json_lines": "json",
    "open_telemetry": "opentelemetry",
    "prometheus": "prometheus_client",
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
    for name in set(re.findall(r"distckpt_\w+", ALERTS)):
        assert f"\n{name}" in output


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
