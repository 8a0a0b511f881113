"""`distckpt bench`: figures that add up, and nothing left behind however it ends; the scripts that compare."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import statistics
import sys
from pathlib import Path

import psutil
import pytest

from distckpt._ranks import processes
from tests.support.cli_command import call, call_error
from tests.support.programs import Program, fork_spawned
from tests.support.s3_server import (
    Fault,
    FaultyProxy,
    client,
    keys_in,
    new_bucket,
    reached_at,
    uploads_in,
)

ROOT = Path(__file__).parents[2]
TENSOR_BYTES = 16 << 20
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

# Every benchmark starts processes that import torch: that takes as long as a busy machine needs for it.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def fork(monkeypatch):
    """Fork the ranks of benchmarks that this process starts, as the harness does; others import torch anew."""
    fork_spawned(monkeypatch, processes)


def start_and_wait_for_ranks(folder):
    """Start a benchmark that would take for ever, of one tensor per rank; return it when its ranks have begun."""
    arguments = ["bench", str(folder), "--gb", "0.001", "--runs", "1000000"]
    program = Program(["-m", "distckpt", *arguments], {**os.environ, **ENVIRONMENT})
    while not program.stderr.readline().startswith("round 1 of"):
        assert program.returncode is None
    return program


@pytest.fixture
def storage(tmp_path):
    """A directory that must be empty at the end."""
    (tmp_path / "storage").mkdir()
    yield tmp_path / "storage"
    assert list((tmp_path / "storage").iterdir()) == []


@pytest.fixture
def place(server):
    """A URL below which nothing must be at the end, and beside which something is that must stay."""
    bucket = new_bucket(server)
    client(server).put_object(Bucket=bucket.removeprefix("s3://"), Key="place/mine.txt", Body=b"stays")
    yield f"{bucket}/place"
    assert keys_in(server, bucket) == ["place/mine.txt"]
    assert uploads_in(server, bucket) == []


def check_figures(figures, num_bytes, num_runs):
    for figure in figures:
        own, raw = (statistics.median(figure[name]) for name in ("seconds", "raw_seconds"))
        assert (len(figure["seconds"]), len(figure["raw_seconds"])) == (num_runs, num_runs)
        assert figure["median_seconds"] == own
        assert figure["gb_per_second"] == pytest.approx(num_bytes / own / 1e9)
        assert figure["raw_gb_per_second"] == pytest.approx(num_bytes / raw / 1e9)
        assert figure["of_raw"] == pytest.approx(raw / own)


def test_a_local_storage(fork, storage, capsys):
    outcome = json.loads(call(capsys, "bench", storage, "--gb", "0.001", "--ranks", "3", "--runs", "2", "--json"))
    assert (outcome["location"], outcome["num_ranks"]) == (str(storage), 3)
    assert outcome["num_bytes"] == 3 * TENSOR_BYTES
    cases = [figure["case"] for figure in outcome["figures"]]
    # Not every file system lets go of what is in the page cache.
    assert cases in (["save", "save_unsynced", "warm_load", "cold_load"], ["save", "save_unsynced", "warm_load"])
    check_figures(outcome["figures"], outcome["num_bytes"], num_runs=2)
    section = (ROOT / "docs" / "command-line.md").read_text().partition("\n## bench\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section.partition("JSON: ")[2]))
    assert outcome.keys() | outcome["figures"][0].keys() == documented


def test_the_table(fork, storage, capsys):
    output = call(capsys, "bench", storage, "--gb", "0.001", "--runs", "1", "--ranks", "1")
    assert output.startswith("16.78 MB in tensors of 16 MiB on 1 rank, median of 1 round\n")
    assert re.search(r"^ +seconds +GB/s +raw GB/s +of raw$", output, re.M)
    assert re.search(r"^durable save +(\d+\.\d+ *){4}$", output, re.M)


def test_an_object_store(fork, place, capsys):
    outcome = json.loads(call(capsys, "bench", place, "--gb", "0.001", "--runs", "1", "--json"))
    assert [(figure["case"], figure["title"]) for figure in outcome["figures"]] == [
        ("save", "save"),
        ("warm_load", "load"),
    ]
    check_figures(outcome["figures"], 2 * TENSOR_BYTES, num_runs=1)


def test_a_rank_that_fails_ends_the_benchmark_with_one_line(fork, server, place, capsys):
    proxy = FaultyProxy(server, Fault("PUT", r"/checkpoint/metadata", "404", count=1000))
    with proxy.running() as url, reached_at(url):
        error = call_error(capsys, "bench", place, "--gb", "0.001", "--runs", "1")
    assert proxy.happened
    assert re.search(r"^error: rank \d failed: .*metadata", error)


# SIGINT is also sent by the test of a store.
@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_an_interrupted_benchmark_leaves_nothing(tmp_path, number, code):
    process = start_and_wait_for_ranks(tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum("spawn_main" in " ".join(child.cmdline()) for child in children) == 2
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    assert psutil.wait_procs(children, timeout=600)[1] == []
    # Who is killed cannot put away.
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []


def test_an_interrupted_benchmark_leaves_nothing_on_a_store(server, place):
    process = start_and_wait_for_ranks(place)
    assert len(keys_in(server, place)) > 1
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("folder", "arguments", "message"),
    [
        (".", ["--gb", "1e4"], "TB of memory are needed"),
        (".", ["--gb", "1e-9", "--ranks", "100000"], "TB of memory are needed"),
        ("nowhere", [], "is not a directory"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(storage, capsys, folder, arguments, message):
    assert message in call_error(capsys, "bench", storage / folder, *arguments)


def test_a_bucket_that_does_not_exist_is_refused_in_one_line(server, capsys):
    assert "s3://nowhere-at-all/place" in call_error(capsys, "bench", "s3://nowhere-at-all/place")


# --- The scripts in tests/benchmarks ----------------------------------------------------------------------------------


@pytest.fixture
def run_script(fork, monkeypatch, capsys):
    def run(name, *arguments):
        """Run a script in this process; return what it printed."""
        script = ROOT / "tests" / "benchmarks" / name
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.syspath_prepend(script.parent)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_comparison_runs(storage, tmp_path, run_script):
    options = ["--gb", "0.005", "--runs", "1", "--only", "distckpt", "raw", "--cases", "save", "warm_load"]
    printed = run_script("save_load.py", "--dir", storage, *options, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {(figure["case"], figure["name"]) for figure in figures} >= {
        ("save", "distckpt"),
        ("save", "raw O_DIRECT"),
        ("warm_load", "distckpt"),
        ("warm_load", "raw buffered"),
    }
    assert all(f"| {figure['name']} " in printed for figure in figures)


def test_the_script_for_stats_and_diff_runs(tmp_path, run_script):
    printed = run_script("values.py", "--dir", tmp_path, "--gigabytes", "0.001", "--kib", "64", "--runs", "1")
    assert {line.split("|")[2].strip() for line in printed.splitlines() if line.startswith("| warm")} == {
        "raw reads",
        "stats",
        "diff (two checkpoints)",
    }


def test_the_pictures_and_the_page_are_those_of_the_scripts_and_figures(tmp_path, run_script):
    docs = ROOT / "docs"
    (tmp_path / "figures").mkdir()
    shutil.copyfile(docs / "figures" / "save_load.json", tmp_path / "figures" / "save_load.json")
    page = (docs / "performance.md").read_text()
    (tmp_path / "performance.md").write_text(re.sub(r"\d\.\d{3} - ", "0.000 - ", page))
    run_script("page.py", "--docs", tmp_path)
    for name in ["performance.md", *(picture.name for picture in docs.glob("*.svg"))]:
        assert (tmp_path / name).read_text() == (docs / name).read_text(), f"run tests/benchmarks/page.py for {name}"
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:4]) for line in page.splitlines()]
    for figure in json.loads((docs / "figures" / "save_load.json").read_text())["figures"]:
        median, num_bytes = statistics.median(figure["seconds"]), figure["num_bytes"]
        spread = f"{min(figure['seconds']):.3f} - {max(figure['seconds']):.3f}"
        assert (figure["name"], f"{median:.3f}", spread, f"{num_bytes / median / 1e9:.2f}") in rows
