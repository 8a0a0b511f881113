"""`distckpt bench`: figures that add up, and nothing left behind however it ends; the scripts that
compare.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from distckpt.cli import _bench as bench
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

# Every benchmark starts processes that import torch: that takes as long as a busy machine needs for
# it.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def fork(monkeypatch):
    """Fork the ranks of benchmarks that this process starts, as the harness does; others import
    torch anew.
    """
    fork_spawned(monkeypatch)


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch):
    """A machine with 64 GB to spare: other programs may leave less."""
    monkeypatch.setattr(bench, "estimate_available_memory", lambda: 64 * 10**9)


BENCH = """
import runpy
from distckpt.cli import _bench as bench
bench.estimate_available_memory = lambda: 64 * 10**9
runpy.run_module("distckpt", run_name="__main__")
"""


@contextlib.contextmanager
def benchmark_with_ranks(folder):
    """A benchmark that would take for ever, of one tensor per rank, whose ranks have begun."""
    arguments = ["bench", str(folder), "--gb", "0.001", "--runs", "1000000"]
    with Program(["-c", BENCH, *arguments], {**os.environ, **ENVIRONMENT}) as program:
        lines = iter(program.stderr.readline, "")
        assert any(line.startswith("round 1 of") for line in lines)
        yield program


@pytest.fixture
def storage(tmp_path):
    """A directory that must be empty at the end."""
    (tmp_path / "storage").mkdir()
    yield tmp_path / "storage"
    assert list((tmp_path / "storage").iterdir()) == []


@pytest.fixture
def place(server):
    """A URL below which nothing must be at the end, and beside which something is that must
    stay.
    """
    bucket = new_bucket(server)
    client(server).put_object(
        Bucket=bucket.removeprefix("s3://"), Key="place/mine.txt", Body=b"stays"
    )
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
    outcome = json.loads(
        call(capsys, "bench", storage, "--gb", "0.001", "--ranks", "3", "--runs", "2", "--json")
    )
    assert (outcome["location"], outcome["num_ranks"]) == (str(storage), 3)
    assert outcome["num_bytes"] == 3 * TENSOR_BYTES
    cases = [figure["case"] for figure in outcome["figures"]]
    # Not every file system lets go of what is in the page cache.
    assert cases in (
        ["save", "save_unsynced", "warm_load", "cold_load"],
        ["save", "save_unsynced", "warm_load"],
    )
    check_figures(outcome["figures"], outcome["num_bytes"], num_runs=2)
    section = (
        (ROOT / "docs" / "command-line.md")
        .read_text()
        .partition("\n## bench\n")[2]
        .partition("\n## ")[0]
    )
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


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_benchmark_leaves_nothing(tmp_path, number, code):
    with benchmark_with_ranks(tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert sum("spawn_main" in " ".join(child.cmdline()) for child in children) == 2
        process.send_signal(number)
        process.communicate()
        assert process.returncode == code
    assert psutil.wait_procs(children, timeout=600)[1] == []
    # Who is killed cannot put away.
    assert number == signal.SIGKILL or list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_interrupted_benchmark_leaves_nothing_on_a_store(server, place):
    with benchmark_with_ranks(place) as process:
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
def test_what_cannot_be_measured_is_refused_in_one_line(
    storage, capsys, folder, arguments, message
):
    assert message in call_error(capsys, "bench", storage / folder, *arguments)


def test_a_bucket_that_does_not_exist_is_refused_in_one_line(server, capsys):
    assert "s3://nowhere-at-all/place" in call_error(capsys, "bench", "s3://nowhere-at-all/place")


# --- The scripts in benchmarks --------------------------------------------------------------------


@pytest.fixture
def run_script(fork, monkeypatch, capsys):
    def run(name, *arguments):
        """Run a script in this process; return what it printed."""
        script = ROOT / "benchmarks" / name
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        monkeypatch.syspath_prepend(script.parent)
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_comparison_runs(storage, tmp_path, run_script):
    options = [
        "--gb",
        "0.005",
        "--runs",
        "1",
        "--only",
        "distckpt",
        "raw",
        "--cases",
        "save",
        "warm_load",
    ]
    printed = run_script(
        "save_load.py", "--dir", storage, *options, "--json", tmp_path / "figures.json"
    )
    figures = json.loads((tmp_path / "figures.json").read_text())["outcome"]["figures"]
    assert {(figure["case"], figure["name"]) for figure in figures} >= {
        ("save", "distckpt"),
        ("save", "raw O_DIRECT"),
        ("warm_load", "distckpt"),
        ("warm_load", "raw buffered"),
    }
    assert all(f"| {figure['name']} " in printed for figure in figures)


def test_the_script_for_stats_and_diff_runs(tmp_path, run_script):
    printed = run_script(
        "values.py", "--dir", tmp_path, "--gigabytes", "0.001", "--kib", "64", "--runs", "1"
    )
    assert {
        line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| warm")
    } == {
        "warm, raw reads",
        "warm, verify",
        "warm, stats",
        "warm, diff (two checkpoints)",
    }


def test_the_script_for_gpus_runs_without_one(storage, tmp_path, run_script):
    if not torch.cuda.is_available():
        assert (
            run_script("gpu.py", "--json", tmp_path / "figures.json")
            == "no CUDA device: nothing was measured\n"
        )
        assert not (tmp_path / "figures.json").exists()
    run_script(
        "gpu.py",
        "--device",
        "cpu",
        "--gb",
        0,
        "--runs",
        1,
        "--dir",
        storage,
        "--json",
        tmp_path / "figures.json",
    )
    tables = json.loads((tmp_path / "figures.json").read_text())["tables"]
    rows = {table["heads"][0]: [row[0] for row in table["rows"]] for table in tables}
    assert rows["out of the device"][:3] == [
        "page-locked copy",
        "page-locked ring",
        "async_save, until it returns",
    ]
    assert rows["into the device, warm"][:2] == ["read and copy", "distckpt"]
    assert rows.keys() >= {"steps", "page-locked memory from the system"}


@pytest.mark.slow
def test_all_scripts_run(tmp_path, run_script):
    (tmp_path / "README.md").write_text("")
    with pytest.raises(SystemExit) as ended:
        run_script("run_all.py", "--quick", "--docs", tmp_path, "--dir", tmp_path)
    assert ended.value.code == 0


BENCHMARKS = ROOT / "benchmarks"
OTHERS = {
    *(
        "cold_start_throttled",
        "fingerprints",
        "local_directory",
        "moving",
        "orbax_reads",
        "parts",
        "second_load",
        "store_limits",
    ),
    *("store_requests", "throttled_mount", "tiers"),
}
FOR_DEVELOPERS = {"structure", "structure_calls", "ab", "ab_run", *OTHERS}
SCRIPTS = {path.stem for path in BENCHMARKS.glob("*.py") if "\nif __name__" in path.read_text()} - {
    "run_all",
    *FOR_DEVELOPERS,
}


UNPUBLISHED = {
    *("gpu", "import_time", "interpreter_lock", "merging", "modules", "optimizers", "planning"),
    *("quantized", "repeated_save"),
}
"""Without a table in the README."""


def test_every_script_is_run_by_the_one_that_runs_all_and_is_described(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert {
        benchmark.name for benchmark in importlib.import_module("run_all").BENCHMARKS
    } == SCRIPTS
    readme = (BENCHMARKS / "README.md").read_text()
    assert set(re.findall(r"^\| `python benchmarks/(\w+)\.py", readme, re.M)) == SCRIPTS
    assert all(f"{name}.py" in readme for name in FOR_DEVELOPERS)
    assert set(re.findall(r"<!-- figures/(\w+)\.json -->", readme)) == SCRIPTS - UNPUBLISHED


OPTIONAL = {"mfusepy", "pytorch_optimizer"}


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_every_script_finds_the_names_that_it_imports(monkeypatch, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A library that only this script needs.
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise


def is_worthless(noise, others):
    return noise is None or noise > 0.3 or (others or 0) > 0.25


def shown(cell, others):
    """What stands in a table for a figure."""
    return (
        cell if isinstance(cell, str) else cell["text"] + " ?" * is_worthless(cell["noise"], others)
    )


def test_the_page_and_the_pictures_are_those_of_the_figures(tmp_path, run_script):
    docs = ROOT / "docs"
    shutil.copytree(docs / "figures", tmp_path / "figures")
    page = (BENCHMARKS / "README.md").read_text()
    blank = re.sub(r"(?<=\.json -->\n).*?(?=<!-- end -->)", "", page, flags=re.S)
    (tmp_path / "README.md").write_text(blank)
    with pytest.raises(SystemExit) as ended:
        run_script("run_all.py", "--render", "--docs", tmp_path)
    assert ended.value.code == 0
    for path in [BENCHMARKS / "README.md", *docs.glob("*.svg")]:
        text = (tmp_path / path.name).read_text()
        assert text == path.read_text(), f"run benchmarks/run_all.py --render for {path.name}"
    for path in (docs / "figures").glob("*.json"):
        if path.stem in UNPUBLISHED:
            continue
        value = json.loads(path.read_text())
        block = page.partition(f"<!-- figures/{path.name} -->")[2].partition("<!-- end -->")[0]
        rows = [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in block.splitlines()
            if line[:1] == "|"
        ]
        expected = [
            [shown(cell, value["others"]) for cell in row]
            for t in value["tables"]
            for row in t["rows"]
        ]
        assert [row for row in rows if row in expected] == expected, path.name


def test_figures_follow_from_the_seconds_that_were_measured():
    value = json.loads((ROOT / "docs" / "figures" / "save_load.json").read_text())
    rows = {(table["heads"][0], row[0]): row for table in value["tables"] for row in table["rows"]}
    figures = value["outcome"]["figures"]
    cases = dict.fromkeys(figure["case"] for figure in figures)
    titles = dict(zip(cases, (table["heads"][0] for table in value["tables"]), strict=True))
    for figure in figures:
        seconds = figure["seconds"]
        low, median, high = np.percentile(seconds, [25, 50, 75])
        _, shown_median, spread, rate, *_ = rows[titles[figure["case"]], figure["name"]]
        assert shown_median == {
            "text": f"{median:.3f}",
            "noise": pytest.approx((high - low) / median, abs=6e-4),
        }
        assert spread == f"{min(seconds):.3f} - {max(seconds):.3f}"
        assert rate["text"] == f"{figure['num_bytes'] / median / 1e9:.2f}"
    readme = (ROOT / "README.md").read_text().partition("\n## Figures\n")[2].partition("\n## ")[0]
    names = ["distckpt", "DCP FileSystemWriter", "Megatron Core fully parallel"]
    for title, case in (
        ("save,", "save"),
        ("load, files", "warm_load"),
        ("load along", "reshard_axis"),
    ):
        expected = [rows[titles[case], name][3]["text"] for name in names]
        (cells,) = re.findall(rf"^\| {title}[^|]*\|(.*)\|$", readme.replace("*", ""), re.M)
        assert [cell.strip() for cell in cells.split("|")] == expected
    assert (
        f"reach {rows[titles['save'], 'distckpt'][4]['text']} of the speed of raw writes" in readme
    )


@pytest.mark.parametrize(
    ("runs", "others", "mark"),
    [
        ([1.0, 1.1, 1.2], 0.1, ""),
        ([1.0, 1.1, 1.2], None, ""),
        ([1.0, 1.1, 1.2], 0.3, " ?"),
        ([1.0, 1.1, 2.2], 0.1, " ?"),
        ([1.0, 1.0, 1.0, 1.0, 9.0], 0.1, ""),
        ([1.0, 1.0], 0.1, " ?"),
    ],
    ids=["quiet", "unknown", "busy", "differ", "outlier", "few"],
)
def test_figures_that_noise_makes_worthless_are_marked(monkeypatch, runs, others, mark):
    monkeypatch.syspath_prepend(BENCHMARKS)
    report = importlib.import_module("report")
    steady = [2.0, 2.0, 2.0]
    row = [
        "one",
        report.median(runs),
        report.ratio(runs, steady),
        report.ratio(steady, steady, "{:.1f}x"),
        "5",
    ]
    value = {
        "command": "c",
        "date": "2026-01-01",
        "machine": "m",
        "others": others,
        "about": "",
        "notes": [],
    }
    text = report.markdown(
        {**value, "tables": [{"caption": "", "heads": ["", *"abcd"], "rows": [row]}]}
    )
    (cells,) = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "| one" in line
    ]
    median = np.median(runs)
    assert cells == [
        "one",
        f"{median:.2f}{mark}",
        f"{median / 2:.2f}{mark}",
        f"1.0x{mark * (others == 0.3)}",
        "5",
    ]
    assert ("mean little" in text) == bool(mark)


@pytest.mark.slow
def test_a_benchmark_that_fails_leaves_older_figures_and_others_go_on(tmp_path, run_script):
    (tmp_path / "figures").mkdir()
    (tmp_path / "README.md").write_text("<!-- figures/modules.json -->\n<!-- end -->\n")
    old = shutil.copyfile(
        ROOT / "docs" / "figures" / "values.json", tmp_path / "figures" / "values.json"
    ).read_text()
    options = [
        "--quick",
        "--docs",
        tmp_path,
        "--dir",
        tmp_path / "nowhere",
        "--only",
        "values",
        "modules",
    ]
    with pytest.raises(SystemExit) as ended:
        run_script("run_all.py", *options)
    assert ended.value.code == 1
    assert (tmp_path / "figures" / "values.json").read_text() == old
    assert re.search(r"^\| plain +\| ", (tmp_path / "README.md").read_text(), re.M)


# --- The scripts for work on the package ----------------------------------------------------------

COMPLEX = '''"""A module,
whose docstring does not count."""

LIMIT = 3
"""Nor does this."""


def decide(values, limit=LIMIT):  # 1
    def inner(value):  # for itself: 2
        return 1 if value else 0

    assert values  # 2
    with open("x"):
        pass
    try:
        if values and limit and inner(1):  # 5
            return [a for a in values for b in a if b if a]  # 9
        elif limit:  # 10
            pass
    except ValueError:  # 11
        pass
    for value in values:  # 12
        while value or limit:  # 14
            match value:
                case 1:  # 15
                    value = """a
                    string"""
                case _:  # 16
                    return lambda: 1 if value else 2  # 17
'''


# A package of two steps a verb, one of them imported by a string.
TOY = {
    "__init__": """from typing import TYPE_CHECKING
import importlib
if TYPE_CHECKING:
    from distckpt.verbs import consolidate, load, save, verify
    from distckpt.typed import Alone
def __getattr__(name):
    value = getattr(importlib.import_module("distckpt.verbs"), name)
    return globals().setdefault(name, value)
""",
    "verbs": """import importlib
from typing import TYPE_CHECKING
from distckpt import write
if TYPE_CHECKING:
    from distckpt import typed
class ShardedTensor:
    @staticmethod
    def from_rank_offsets(key, data):
        return data
def save(state, path):
    checked(path)
    write.write_file(path)
    checked(path)
def load(state, path):
    on_demand("read").read_file(path)
def consolidate(path, out):
    from distckpt.merge import merge
    merge(path, out)
def verify(path):
    pass
def checked(path):
    return path
_MODULES = {"read": "distckpt.read"}
def on_demand(name):
    return importlib.import_module(_MODULES[name])
""",
    "write": """def write_file(path):
    with open(path, "wb") as file:
        file.write(bytes(8))
""",
    "read": """def read_file(path):
    with open(path, "rb") as file:
        return file.read()
""",
    "merge": """def merge(path, out):
    pass
""",
    "typed": """class Alone:
    pass
""",
}


@pytest.fixture
def checkout(tmp_path):
    """A folder with a small package that has all verbs."""
    package = tmp_path / "checkout" / "distckpt"
    package.mkdir(parents=True)
    for name, text in TOY.items():
        (package / f"{name}.py").write_text(text)
    return package.parent


@pytest.fixture
def counted(checkout, monkeypatch):
    """Add a module of one text to the package; return the scripts that count, and their figures."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    structure = importlib.import_module("structure")

    def count(text):
        (checkout / "distckpt" / "module.py").write_text(text)
        source = structure.read_source(checkout)
        return source, structure.figures_of_source(source)

    return count


def numbers_of(lines):
    """The numbers of the lines that are in the module of a test."""
    places = (line.place.split(":") for line in lines)
    return [int(number) for file, number in places if file == "distckpt/module.py"]


def test_the_source_is_counted_as_described(counted):
    source, _ = counted(COMPLEX)
    found = [one for one in source.functions if one.place.startswith("distckpt/module.py")]
    assert [(one.complexity, one.place, one.name) for one in found] == [
        (17, "distckpt/module.py:8", "decide"),
        (2, "distckpt/module.py:9", "inner"),
    ]
    assert numbers_of(source.lines) == [4, 8, 9, 10, *range(12, 30)]


def test_tokens_are_names_numbers_and_operators(counted):
    _, without = counted("")
    _, figures = counted('"""A docstring."""\nx = f"{y:{z}} {w}" + "a"  # a comment\n')
    assert figures["tokens"] - without["tokens"] == 3  # x = +


def test_places_are_counted_as_described(counted):
    source, figures = counted(
        "a, b = 1, 2\n"
        "c = d = 1\n"
        "e, f = d\n"
        "g = [h for h in e if h]\n"
        "i = j if g else c\n"
        "class KeptPlan: pass\n"
        "class _Plan: pass\n"
        "k = {l: m for l, m in sum(n for n in g)}\n"
    )
    assert numbers_of(source.findings["parallel"]) == [1]
    assert numbers_of(source.findings["comprehension"]) == [4, 8, 8]
    assert numbers_of(source.findings["conditional"]) == [5]
    assert figures["classes named ...Plan..."] == 1


@pytest.mark.parametrize(
    ("text", "num_free"),
    [
        ("Return what is left.", 1),
        ("What a rank knows: what it has read.", 2),
        ("What is left?", 0),
        ("Say what is left.", 0),
        ("An error says what to do.", 0),
        ("Say what is left of what there was.", 1),
        ("Return `what`.", 0),
        ("Whatever is left.", 0),
    ],
)
def test_a_free_what_is_no_question(counted, text, num_free):
    in_docstring, _ = counted(f'"""{text}"""\n')
    in_comment, _ = counted(f"# {text}\n")
    in_string, _ = counted(f"x = 1, {text!r}\n")
    found = [len(one.findings["what"]) for one in (in_docstring, in_comment, in_string)]
    assert found == [num_free, num_free, 0]


def test_docstrings_are_told_by_their_beginnings(counted):
    long = " ".join(["word"] * 13)
    source, _ = counted(f'"""What."""\na = 1\n"""Of a."""\nb = 2\n"""{long}. Of b."""\n')
    assert numbers_of(source.findings["beginning"]) == [1, 3]
    assert numbers_of(source.findings["long"]) == [5]


def test_the_kernel_is_what_the_verbs_import(counted):
    source, figures = counted("")
    assert source.imports.kernel(["save", "load"]) == {"distckpt.verbs", "distckpt.write"}
    assert source.imports.kernel_on_demand(["save"]) == {
        "distckpt.verbs",
        "distckpt.write",
        "distckpt.merge",
    }
    assert source.imports.kernel_by_string(["save"]) == {
        "distckpt.verbs",
        "distckpt.write",
        "distckpt.merge",
        "distckpt.read",
    }
    assert figures["kernel: modules"] == 2
    assert figures["kernel: lines"] == sum(
        len(TOY[name].splitlines()) for name in ("verbs", "write")
    )
    assert [one.text for one in source.findings["string"]] == [
        "importlib.import_module('distckpt.verbs')",
        "on_demand('read')",
    ]
    assert [one.text for one in source.findings["table"]] == ["'distckpt.read'"]


def test_the_kernel_is_found_where_the_modules_have_moved(checkout, counted):
    package = checkout / "distckpt"
    (package / "_operations").mkdir()
    (package / "_operations" / "__init__.py").write_text(
        "from distckpt._operations.verbs import save\n"
    )
    (package / "verbs.py").rename(package / "_operations" / "verbs.py")
    face = TOY["__init__"].replace("distckpt.verbs", "distckpt._operations")
    (package / "__init__.py").write_text(face)
    source, _ = counted("")
    assert source.imports.kernel(["save"]) == {
        "distckpt._operations",
        "distckpt._operations.verbs",
        "distckpt.write",
    }


def test_the_check_names_what_exceeds_a_budget(checkout, capsys, run_script):
    module = checkout / "distckpt" / "module.py"
    module.write_text(f"{COMPLEX}\nWIDE = '{'a' * 93}'\n")
    with pytest.raises(SystemExit) as ended:
        run_script("structure.py", "--check", checkout)
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "distckpt/module.py:31: 102 columns (at most 100)",
        "distckpt/module.py:8: decide has complexity 17 (at most 12)",
        "lines over 100 columns: 1 (at most 0)",
        "highest complexity: 17 (at most 12)",
    ]
    module.write_text("FITS = 1\n")
    with pytest.raises(SystemExit) as ended:
        run_script("structure.py", "--check", checkout)
    assert ended.value.code == 0


def test_a_figure_that_cannot_be_counted_exceeds_its_budget(checkout, capsys, run_script):
    (checkout / "distckpt" / "write.py").write_text("def write_file(path):\n    return 1 / 0\n")
    with pytest.raises(SystemExit) as ended:
        run_script("structure.py", "--check", checkout)
    assert ended.value.code == 1
    assert "modules imported by save: not counted (at most " in capsys.readouterr().out


@pytest.mark.slow
def test_calls_are_counted_as_described(checkout, capsys, run_script):
    with pytest.raises(SystemExit) as ended:
        run_script("structure.py", "--json", checkout)
    assert ended.value.code == 0
    (figures,) = json.loads(capsys.readouterr().out).values()
    assert figures["modules imported by save"] == 2
    assert figures["modules imported by load"] == 3
    assert figures["parameters of consolidate"] == 2
    assert figures["save of a plain tensor: files"] == 2
    assert figures["save of a plain tensor: changes of file"] == 2  # verbs, write, verbs
    assert figures["load of a ShardedTensor: files"] == 2
    assert figures["load: frames to where it waits or reads"] == 2


@pytest.mark.slow
def test_the_structure_of_this_checkout_has_all_figures(capsys, run_script):
    with pytest.raises(SystemExit) as ended:
        run_script("structure.py", "--json", ROOT)
    assert ended.value.code == 0
    (figures,) = json.loads(capsys.readouterr().out).values()
    assert figures.keys() >= importlib.import_module("structure").BUDGETS.keys()
    assert figures["functions"] > figures["functions over complexity 10"]
    assert 1 < figures["modules imported by save"] <= figures["kernel, by a string: modules"]


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([2.0] * 9, [1.0] * 8 + [3.0], "faster"),
        ([2.0] * 9, [1.0] * 7 + [3.0] * 2, "no difference seen"),
        ([2.0] * 9, [3.0] * 9, "slower"),
        ([2.0] * 5, [1.0] * 5, "too few rounds"),
        ([2.0] * 9, [2.0] * 9, "no difference seen"),
    ],
)
def test_two_commits_differ_where_most_rounds_agree(monkeypatch, old, new, verdict):
    monkeypatch.syspath_prepend(BENCHMARKS)
    assert importlib.import_module("ab").verdict(old, new) == verdict


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose package takes long to import, but not in its last commit."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    root = tmp_path / "repository"
    (root / "distckpt").mkdir(parents=True)
    git = ["git", "-C", str(root), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for source in ("sum(range(30_000_000))\n", ""):
        (root / "distckpt" / "__init__.py").write_text(source)
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "A commit"], check=True)
    monkeypatch.setattr(importlib.import_module("ab"), "ROOT", root)
    return git


@pytest.mark.slow
def test_two_commits_take_turns_and_leave_nothing(tmp_path, monkeypatch, capsys, repository):
    (tmp_path / "files").mkdir()
    options = ["--only", "import", "--rounds", "1", "--dir", str(tmp_path / "files")]
    monkeypatch.setattr(sys, "argv", ["ab.py", "HEAD~1", "HEAD", *options])
    importlib.import_module("ab").main()
    (row,) = re.findall(r"^\| import distckpt .*", capsys.readouterr().out, re.M)
    _, _, old, new, ratio, _, _ = row.split("|")
    assert float(new) < float(old)
    assert float(ratio) == pytest.approx(float(new) / float(old), abs=0.01)
    assert list((tmp_path / "files").iterdir()) == []
    listed = subprocess.run([*repository, "worktree", "list"], stdout=subprocess.PIPE, check=True)
    assert len(listed.stdout.splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_fails_ends_the_comparison_and_leaves_nothing(
    tmp_path, monkeypatch, capfd, repository
):
    (tmp_path / "files").mkdir()
    options = ["--only", "save_small", "--quick", "--dir", str(tmp_path / "files")]
    monkeypatch.setattr(sys, "argv", ["ab.py", "HEAD", "HEAD", *options])
    with pytest.raises(SystemExit, match="a run has failed"):
        importlib.import_module("ab").main()
    assert "ShardedTensor" in capfd.readouterr().err
    assert list((tmp_path / "files").iterdir()) == []
