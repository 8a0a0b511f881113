"""`distckpt bench`: figures that add up, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import psutil
import pytest

from tests.support.s3_server import (
    Fault,
    FaultyProxy,
    client,
    keys_in,
    new_bucket,
    reached_at,
    running_server,
    uploads_in,
)

ROOT = Path(__file__).parents[2]
HIDDEN, INTERMEDIATE, KEY_VALUE, VOCABULARY = 256, 704, 64, 256
# Of the smallest model that --gb can ask for: one layer, embedding and output, two bytes and two moments of four.
BYTES = 10 * (2 * HIDDEN * (HIDDEN + KEY_VALUE) + 3 * HIDDEN * INTERMEDIATE + 2 * VOCABULARY * HIDDEN + 3 * HIDDEN)
CASES = ["save", "save_unsynced", "warm_load", "cold_load", "reshard_axis", "reshard_one"]

FAKE_MEGATRON = """
import os, signal
import torch.distributed as dist

class ShardedTensor:
    from_rank_offsets = staticmethod(lambda *args, **kwargs: None)

def save(*args):
    if dist.get_rank() == 1:
        {failure}
    dist.barrier()  # never reached by rank 1

load = save
"""


def start(folder, *arguments, path=()):
    """Start a small benchmark."""
    places = os.pathsep.join(map(str, [*path, ROOT]))
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "distckpt", "bench", str(folder), "--gb", "0.005", "--runs", "1", *arguments]
    return subprocess.Popen(
        line,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        # Shells let what they start in the background ignore Ctrl-C, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(folder, *arguments, code=0, path=()):
    """Run a small benchmark to its end; return what it printed on stdout and stderr."""
    process = start(folder, *arguments, path=path)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == code, errors
    return output, errors


@pytest.fixture
def storage(tmp_path):
    """A directory that must be empty at the end."""
    (tmp_path / "storage").mkdir()
    yield tmp_path / "storage"
    assert list((tmp_path / "storage").iterdir()) == []


def fake_megatron(folder, failure):
    """Write a package that takes the place of Megatron Core and whose second rank fails."""
    package = folder / "megatron" / "core" / "dist_checkpointing"
    (package / "strategies").mkdir(parents=True)
    for place in (folder / "megatron", folder / "megatron" / "core", package / "strategies"):
        (place / "__init__.py").write_text("")
    (package / "__init__.py").write_text(FAKE_MEGATRON.format(failure=failure))
    (package / "serialization.py").write_text("get_default_save_sharded_strategy = object")
    (package / "strategies" / "fully_parallel.py").write_text("FullyParallelSaveStrategyWrapper = bool")
    return folder


@pytest.fixture
def server():
    with running_server() as url:
        yield url


@pytest.fixture
def place(server):
    """A URL below which nothing must be at the end, and beside which something is that must stay."""
    bucket = new_bucket(server)
    client(server).put_object(Bucket=bucket.removeprefix("s3://"), Key="place/mine.txt", Body=b"stays")
    yield f"{bucket}/place"
    assert keys_in(server, bucket) == ["place/mine.txt"]
    assert uploads_in(server, bucket) == []


def test_all_contestants_and_cases(storage, tmp_path):
    files = (tmp_path / "figures.json", tmp_path / "figures.svg")
    output, _ = run(storage, "--json", str(files[0]), "--svg", str(files[1]))
    outcome = json.loads(files[0].read_text())
    assert outcome["failed"] == {}
    assert (outcome["num_bytes"], outcome["num_ranks"], outcome["num_runs"]) == (BYTES, 2, 1)
    figures = {(figure["case"], figure["name"]): figure for figure in outcome["figures"]}
    names = {name for _, name in figures}
    expected = {"distckpt", "DCP FileSystemWriter", "safetensors save_file per rank", "raw O_DIRECT", "raw buffered"}
    assert names >= expected
    cases = [case for case in CASES if case != "cold_load" or outcome["cold"]]
    assert list(dict.fromkeys(case for case, _ in figures)) == cases
    for case in cases:
        of_case = [figure for figure in outcome["figures"] if figure["case"] == case]
        raw = min(statistics.median(f["seconds"]) for f in of_case if not f["is_checkpoint"])
        for figure in of_case:
            median = statistics.median(figure["seconds"])
            assert len(figure["seconds"]) == 1
            assert figure["gb_per_second"] == pytest.approx(figure["num_bytes"] / median / 1e9)
            assert figure["of_raw"] == pytest.approx(raw / median)
            row = next(
                line for line in output.split(figure["title"])[1].splitlines() if line.startswith(figure["name"])
            )
            assert f"{figure['gb_per_second']:.2f}" in row
    # Along axis 0 lie embedding and output, query, key, value, gate and up.
    along = 2 * VOCABULARY * HIDDEN + HIDDEN * (HIDDEN + 2 * KEY_VALUE) + 2 * INTERMEDIATE * HIDDEN
    assert figures["reshard_axis", "distckpt"]["num_bytes"] == 10 * along
    assert figures["reshard_one", "distckpt"]["num_bytes"] == BYTES
    texts = [text.text for text in ElementTree.parse(files[1]).iter("{http://www.w3.org/2000/svg}text")]
    assert all(texts.count(name) == sum(name == other for _, other in figures) for name in names)


def test_an_object_store(place):
    output, _ = run(place, "--json")
    outcome = json.loads(output)
    assert (outcome["failed"], outcome["is_store"], outcome["num_bytes"]) == ({}, True, BYTES)
    assert "s3 store" in outcome["machine"]
    section = (ROOT / "docs" / "command-line.md").read_text().partition("\n## bench\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section.partition("JSON: ")[2]))
    assert outcome.keys() | outcome["figures"][0].keys() == documented
    names = {case: [figure["name"] for figure in outcome["figures"] if figure["case"] == case] for case in CASES}
    own, others = ["distckpt", "distckpt, verify=none"], ["DCP FsspecWriter", "raw pipe_file / cat_file"]
    loads = dict.fromkeys(["warm_load", "reshard_axis", "reshard_one"], own + others)
    assert names == {"save": own[:1] + others, "save_unsynced": [], "cold_load": [], **loads}
    titles = {figure["case"]: figure["title"] for figure in outcome["figures"]}
    assert (titles["save"], titles["warm_load"]) == ("save", "load, same layout")
    for figure in outcome["figures"]:
        assert figure["gb_per_second"] == pytest.approx(figure["num_bytes"] / figure["seconds"][0] / 1e9)


def test_a_contestant_that_a_store_fails_is_left_out(server, place):
    proxy = FaultyProxy(server, Fault("PUT", r"/checkpoint/\.metadata", "404", count=1000))
    with proxy.running() as url, reached_at(url):
        output, _ = run(place, "--only", "DCP", "raw", "--cases", "save")
    assert proxy.happened
    assert "FAILED: DCP FsspecWriter: " in output
    assert "raw pipe_file / cat_file" in output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_benchmark_leaves_nothing_on_a_store(server, place, number, code):
    process = start(place, "--only", "distckpt", "DCP", "--cases", "save", "--runs", "1000")
    while not process.stderr.readline().startswith("warming up: DCP"):
        assert process.poll() is None
    assert len(keys_in(server, place)) > 1
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code


def test_what_a_store_cannot_do_is_refused_in_one_line(server, place):
    output, errors = run(place, "--cases", "save", "cold_load", code=1)
    assert "an object store has no case 'cold_load'" in errors
    assert (output, errors.count("\n")) == ("", 1)
    output, errors = run("s3://nowhere-at-all/place", code=1)
    assert "s3://nowhere-at-all/place" in errors
    assert (output, errors.count("\n")) == ("", 1)


def test_the_page_shows_the_committed_figures(tmp_path):
    docs = ROOT / "docs"
    for name in ("figures/save_load.json", "performance.md", "storage.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(docs / name, tmp_path / name)
    page = (docs / "performance.md").read_text()
    (tmp_path / "performance.md").write_text(re.sub(r"\d\.\d{3} - ", "0.000 - ", page))
    (tmp_path / "storage.svg").unlink()
    line = [sys.executable, str(ROOT / "tests" / "benchmarks" / "page.py"), "--docs", str(tmp_path)]
    subprocess.run(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=120)
    for name in ("performance.md", "storage.svg"):
        assert (tmp_path / name).read_text() == (docs / name).read_text(), f"run tests/benchmarks/page.py for {name}"
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")[:4]) for line in page.splitlines()]
    for figure in json.loads((docs / "figures" / "save_load.json").read_text())["figures"]:
        median, num_bytes = statistics.median(figure["seconds"]), figure["num_bytes"]
        spread = f"{min(figure['seconds']):.3f} - {max(figure['seconds']):.3f}"
        assert (figure["name"], f"{median:.3f}", spread, f"{num_bytes / median / 1e9:.2f}") in rows


def test_one_rank_some_contestants_one_case(storage, tmp_path):
    output, _ = run(storage, "--ranks", "1", "--only", "distckpt", "raw", "--cases", "save", "warm_load")
    assert "warm load, same layout" in output
    assert "cold" not in output
    assert "DCP" not in output


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ("raise RuntimeError('this one needs a GPU')", "RuntimeError: this one needs a GPU"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended with exit code -9"),
    ],
    ids=["error", "death"],
)
def test_a_contestant_that_fails_is_left_out(storage, tmp_path, failure, why):
    package = fake_megatron(tmp_path / "fake", failure)
    wanted = ["--only", "Megatron", "safetensors", "raw buffered", "--cases", "save"]
    output, errors = run(storage, *wanted, path=[package])
    assert f"FAILED: Megatron Core fully parallel: {why}" in output
    assert "safetensors save_file per rank" in output
    assert "Traceback" not in output + errors


def test_a_library_that_cannot_be_imported_is_left_out(storage, tmp_path):
    package = fake_megatron(tmp_path / "fake", "pass")
    (package / "megatron" / "core" / "dist_checkpointing" / "__init__.py").write_text("raise RuntimeError('no driver')")
    output, _ = run(storage, "--only", "safetensors", "Megatron", "--cases", "warm_load", path=[package])
    assert "left out: Megatron Core fully parallel: cannot be imported: RuntimeError: no driver" in output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_benchmark_leaves_nothing(tmp_path, number, code):
    process = start(tmp_path, "--only", "raw", "--cases", "save", "--runs", "1000")
    while not process.stderr.readline().startswith("warming up: raw buffered"):
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert sum("spawn_main" in " ".join(child.cmdline()) for child in children) == 2
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert psutil.wait_procs(children, timeout=30)[1] == []
    # Who is killed cannot put away.
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gb", "1e4"], "free, this needs"),
        (["--ranks", "3"], "power of two"),
        (["--only", "nobody"], "No contestant is left"),
        (["--json", "/nowhere/figures.json"], "cannot be written"),
    ],
    ids=["room", "ranks", "nobody", "json"],
)
def test_what_cannot_be_measured_is_refused_in_one_line(storage, arguments, message):
    output, errors = run(storage, *arguments, code=1)
    assert message in errors
    assert output == ""
    assert errors.count("\n") == 1


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "is no directory" in run(tmp_path / "nowhere", code=1)[1]
