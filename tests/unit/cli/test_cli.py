"""The command line: every verb, what it prints and its exit codes. Its processes are in
tests/processes/cli.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint

import distckpt
from distckpt import CheckpointNotFoundError, ShardedObject, ShardedTensor
from distckpt.cli import main
from distckpt.cli._output import Output, table_lines
from tests.support.cli_command import ROOT, call, call_error, call_json, call_usage_error
from tests.support.command_line import parser_of
from tests.support.disk import flip
from tests.support.quantized_models import WRITTEN_FORMATS

BIG = torch.arange(3 << 18, dtype=torch.float32).view(768, 1024)  # three checksum blocks
GRID = np.arange(60, dtype=np.float32).reshape(6, 10)
LAYERS = {
    f"model.layers.{i}.up.weight": torch.full((4, 6), float(i), dtype=torch.bfloat16)
    for i in range(3)
}


@pytest.fixture
def checkpoint(tmp_path):
    state = {"big": ShardedTensor.from_rank_offsets("big", BIG), "step": 7}
    state |= {key: ShardedTensor.from_rank_offsets(key, value) for key, value in LAYERS.items()}
    columns = torch.from_numpy(GRID.copy()).chunk(2, 1)
    state |= {
        f"g{i}": ShardedTensor.from_rank_offsets("grid", c.contiguous(), (1, i, 2))
        for i, c in enumerate(columns)
    }
    state["rng"] = ShardedObject("rng", {"seed": 3}, (1,), (0,))
    distckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("damage", "message"),
    [(Path.unlink, "the file is missing"), (lambda file: os.truncate(file, 100), "was cut off")],
)
def test_inspect_shows_missing_and_short_files(checkpoint, capsys, damage, message):
    assert call_json(capsys, "inspect", checkpoint)["problems"] == []
    file = next((checkpoint / "tensors").iterdir())
    damage(file)
    for more in ((), ("--key", "big")):
        (problem,) = call_json(capsys, "inspect", checkpoint, *more, code=1)["problems"]
        assert problem["file"] == str(file)
        assert message in problem["message"]
        first, second = call(capsys, "inspect", checkpoint, *more, code=1).splitlines()[:2]
        assert first == "DAMAGED (1 problem): what follows is what was saved"
        assert second.startswith(f"BAD  {file}: ")


@pytest.fixture
def two_ranks(tmp_path):
    """Shards as torch's writer leaves them, written by nothing but safetensors: the columns of a
    matrix, two ranks.
    """
    for rank, columns in enumerate(np.split(GRID, 2, 1)):
        info = json.dumps({"grid": {"saved_offsets": [0, 5 * rank]}})
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
        (tmp_path / "shards").mkdir(exist_ok=True)
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.numpy.save_file(
            {"grid": np.ascontiguousarray(columns)}, tmp_path / "shards" / name, metadata
        )
    return tmp_path / "shards"


def chunk_places(checkpoint):
    """Read from the headers of shard files where each chunk lies: file -> [(key, first byte, stop,
    offset, shape)].
    """
    places = {}
    for file in sorted((checkpoint / "tensors").iterdir()):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        places[file] = [
            (
                key,
                *(8 + length + at for at in entry["data_offsets"]),
                offsets[key]["saved_offsets"],
                entry["shape"],
            )
            for key, entry in header.items()
        ]
    return places


# --- All verbs ------------------------------------------------------------------------------------


def test_help_and_usage(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out
    verbs = [
        "inspect",
        "cat",
        "verify",
        "diff",
        "consolidate (export)",
        "import",
        "convert",
        "reshard",
        "prune",
        "bench",
    ]
    assert all(verb in listed for verb in [*verbs, "completion"])
    assert "no verb 'inspekt' (did you mean 'inspect'?)" in call_usage_error(capsys, "inspekt")
    assert "no verb 'xyz': choose from ls, inspect, cat," in call_usage_error(capsys, "xyz")
    assert "inspect has no option '--tee' (did you mean '--tree'" in call_usage_error(
        capsys, "inspect", "x", "--tee"
    )
    assert "distckpt has no option '--verson' (did you mean '--version'" in call_usage_error(
        capsys, "--verson"
    )
    assert "inspect has no option '--xyz'; see distckpt inspect --help" in call_usage_error(
        capsys, "inspect", "x", "--xyz"
    )
    assert "inspect does not take 'y'" in call_usage_error(capsys, "inspect", "x", "y")
    assert "PATH" in call_usage_error(capsys, "verify").upper()
    assert "'0' is not a positive integer" in call_usage_error(capsys, "verify", "x", "--jobs", "0")


def test_the_formats_that_can_be_written_are_offered(checkpoint, tmp_path, capsys):
    with pytest.raises(ValueError, match="quantize must be") as caught:
        distckpt.consolidate(checkpoint, tmp_path / "out", quantize="x")
    assert re.findall(r"'([\w-]+)'", str(caught.value)) == [*WRITTEN_FORMATS, "x"]
    said = call_usage_error(capsys, "consolidate", checkpoint, tmp_path / "out", "--quantize", "x")
    assert f"'x' is no format: choose from {', '.join(WRITTEN_FORMATS)};" in said


def test_narrow_terminals_leave_columns_out():
    heads, rows = ["key", "shape", "size"], [["model.weight", "10x10", "400 B"], ["b", "2", "8 B"]]
    whole = table_lines(heads, rows, 2, ["shape"], width=26)
    assert whole[2:] == ["model.weight  10x10  400 B", "b             2        8 B"]
    narrow = table_lines(heads, rows, 2, ["shape"], width=21)
    assert narrow[2:] == ["model.weight  400 B", "b               8 B"]
    assert table_lines(heads, rows, 2, ["shape"], width=19) == narrow


def test_narrow_terminals_break_names_after_dots():
    """A name may have two fifths of the width before columns are left out, and its parts are never
    broken.
    """
    heads = ["key", "shape", "size"]
    rows = [["model.layers.{0..3}.weight", "10x10", "400 B"], ["  a.longest_of_all.b", "2", "8 B"]]
    lines = table_lines(heads, rows, 2, ["shape"], width=33)
    assert lines[2:] == [
        "model.layers.        10x10  400 B\n  {0..3}.weight",
        "  a.longest_of_all.  2        8 B\n    b",
    ]
    assert (
        table_lines(heads, rows, 2, ["shape"], width=32)[2]
        == "model.layers.{0..3}.       400 B\n  weight"
    )
    for width in range(9, 60):
        printed = "\n".join(table_lines(heads, rows, 2, ["shape"], width)).split("\n")
        assert max(map(len, printed)) <= max(width, 27)
        names = "".join(
            re.sub(r" +(10x10|2)?( +\d+ B)?$", "", line).strip() for line in printed[2:]
        )
        assert names == "model.layers.{0..3}.weighta.longest_of_all.b"


def test_errors_are_one_line_and_a_traceback_on_demand(tmp_path, capsys):
    line = call_error(capsys, "inspect", tmp_path / "nothing")
    assert "does not exist" in line
    assert "CheckpointNotFoundError" in line
    with pytest.raises(CheckpointNotFoundError):
        main(["inspect", str(tmp_path / "nothing"), "--debug"])


def test_json_holds_no_numbers_that_json_does_not_have(capsys):
    Output(as_json=True).json({"a": [float("nan"), 1.5, (float("inf"),)], "b": -float("inf")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": ["NaN", 1.5, ["Infinity"]],
        "b": "-Infinity",
    }


# --- inspect --------------------------------------------------------------------------------------


def test_inspect_summarises(checkpoint, capsys):
    found = call_json(capsys, "inspect", checkpoint)
    assert found["num_tensors"] == 5
    assert found["num_elements"] == BIG.numel() + GRID.size + 3 * 24
    assert found["tensor_bytes"] == BIG.nbytes + GRID.nbytes + 3 * 48
    assert found["num_objects"] == 1
    groups = {group["pattern"]: group for group in found["groups"]}
    layers = groups["model.layers.{0..2}.up.weight"]
    assert (layers["num_keys"], layers["shape"], layers["dtype"], layers["num_bytes"]) == (
        3,
        [4, 6],
        "BF16",
        144,
    )
    assert (groups["grid"]["num_chunks"], groups["grid"]["num_bytes"]) == (2, 240)
    places = chunk_places(checkpoint)
    for file in found["files"]:
        path = checkpoint / file["name"]
        assert file["bytes"] == path.stat().st_size
        assert file["rank"] == 0
        if path in places:
            assert file["data_bytes"] == sum(stop - first for _, first, stop, *_ in places[path])
    assert found["writers"] == [
        {
            "rank": 0,
            "file": None,
            "num_files": len(found["files"]),
            "data_bytes": sum(f["data_bytes"] for f in found["files"]),
        }
    ]
    text = call(capsys, "inspect", checkpoint)
    assert text.endswith("\n\nall written by rank 0\n")
    assert re.search(r"model\.layers\.\{0\.\.2\}\.up\.weight +4x6 +BF16 +3 +3 +144 B", text)
    assert "5 tensors" in text
    assert "\x1b" not in text


def test_inspect_shows_modules_with_totals_and_what_the_save_says(checkpoint, tmp_path, capsys):
    whole = call(capsys, "inspect", checkpoint, "--tree")
    assert re.search(
        r"^model\.layers +3 +3 +144 B\n  0\.up\.weight +4x6 +BF16 +1 +1 +48 B\n  1\.up", whole, re.M
    )
    top = call(capsys, "inspect", checkpoint, "--tree", "--depth", 1, "--sort", "size")
    keys = [line.split()[0] for line in top.partition("---\n")[2].partition("\n\n")[0].splitlines()]
    assert keys == ["big", "grid", "model.layers", "rng"]
    assert re.search(r"^1 object and common state \(step\), \d+ B$", top, re.M)
    zone = r"UTC([+-]\d{4})?"
    assert re.search(
        rf"^format distckpt 3, metadata\.json written \d{{4}}-\d\d-\d\d \d\d:\d\d {zone}$",
        top,
        re.M,
    )
    with distckpt.CheckpointManager(tmp_path / "run", async_save=False) as manager:
        manager.save(7, {"lr": 0.1})
    found = call_json(capsys, "inspect", tmp_path / "run/step_00000007")
    assert (found["step"], found["common_state"], found["format"]) == (7, ["lr"], "distckpt 3")
    assert call_json(capsys, "inspect", checkpoint)["groups"][0]["ranks"] == [0]


def test_inspect_names_the_values_that_the_save_left_out(tmp_path, capsys):
    distckpt.save({"args": {"lr": 1, "log": object()}}, tmp_path / "step", unsupported="warn")
    text = call(capsys, "inspect", tmp_path / "step")
    assert "common state (args) without 'args.log', which the save left out, " in text
    assert call_json(capsys, "inspect", tmp_path / "step")["left_out"] == ["args.log"]


def test_inspect_draws_the_chunks_of_a_key(two_ranks, capsys):
    text = call(capsys, "inspect", two_ranks, "--key", "grid")
    assert text.splitlines().count("0000011111") == 6
    assert "[0:6, 5:10]" in text
    found = call_json(capsys, "inspect", two_ranks, "--key", "grid")
    assert [(chunk["rank"], chunk["offset"], chunk["num_bytes"]) for chunk in found["chunks"]] == [
        (0, [0, 0], 120),
        (1, [0, 5], 120),
    ]
    assert "did you mean 'grid'?" in call_error(capsys, "inspect", two_ranks, "--key", "grit")


def test_inspect_compares_ranks_by_bars(tmp_path, capsys):
    """Rank 1 wrote a third of what rank 0 did, in files whose names tell the ranks."""
    for rank, (offset, rows) in enumerate([(0, 6), (6, 2)]):
        metadata = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [offset, 0]}})}
        name = f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.numpy.save_file(
            {"w": np.zeros((rows, 4), np.float32)}, tmp_path / name, metadata
        )
    text = call(capsys, "inspect", tmp_path)
    assert re.search(r"^rank 0 +#{30} +1 +96 B$", text, re.M)
    assert re.search(r"^rank 1 +#{10} +1 +32 B$", text, re.M)
    assert "2 ranks wrote; the largest share is 1.500 x the mean" in text


# --- verify ---------------------------------------------------------------------------------------


def test_verify_accepts_what_is_whole(checkpoint, two_ranks, capsys):
    report = call_json(capsys, "verify", checkpoint, "--jobs", "2")
    assert (report["is_whole"], report["problems"], report["mode"]) == (True, [], "full")
    # All bytes of all files but those of marker and manifest, whose headers count as read as well.
    files = [*(checkpoint / "tensors").iterdir(), *(checkpoint / "objects").iterdir()]
    assert report["num_bytes"] == sum(file.stat().st_size for file in files)
    assert call(capsys, "verify", checkpoint, "--fast").startswith("OK: ")
    assert "no checksums" in call(capsys, "verify", two_ranks)
    assert "does not exist" in call_error(capsys, "verify", checkpoint / "nothing", code=2)


def test_verify_says_how_many_fingerprints_were_compared(tmp_path, capsys):
    distckpt.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "step", fingerprint=True)
    assert call_json(capsys, "verify", tmp_path / "step")["num_fingerprints"] == 2
    assert "; 2 tensors compared with the fingerprints" in call(capsys, "verify", tmp_path / "step")
    assert "fingerprints" not in call(capsys, "verify", tmp_path / "step", "--fast")


def test_verify_finds_a_flipped_bit_in_each_chunk(checkpoint):
    places = [
        (file, *chunk) for file, chunks in chunk_places(checkpoint).items() for chunk in chunks
    ]
    assert len(places) == 6
    for file, key, first, stop, offset, shape in places:
        for position in (first, (first + stop) // 2, stop - 1):
            flip(file, position)
            report = distckpt.verify(checkpoint)
            (problem,) = report.problems
            assert not report.is_whole
            assert (problem.file, problem.key) == (str(file), key)
            region = ", ".join(f"{o}:{o + n}" for o, n in zip(offset, shape, strict=True))
            assert problem.region == f"[{region}]"
            assert problem.first_byte <= position < problem.stop_byte <= stop
            assert problem.stop_byte - problem.first_byte <= 256 << 10
            assert distckpt.verify(checkpoint, "fast").is_whole
            flip(file, position)
    assert distckpt.verify(checkpoint).is_whole


def test_verify_tells_blocks_apart_and_joins_neighbours(checkpoint, capsys):
    ((file, first),) = [
        (f, c[1]) for f, chunks in chunk_places(checkpoint).items() for c in chunks if c[0] == "big"
    ]
    block = 256 << 10
    flip(file, first + 5)
    flip(file, first + 2 * block + 5)
    found = [
        (p.first_byte - first, p.stop_byte - first) for p in distckpt.verify(checkpoint).problems
    ]
    assert found == [(0, block), (2 * block, 3 * block)]
    flip(file, first + block)
    (problem,) = distckpt.verify(checkpoint, num_threads=1).problems
    assert (problem.first_byte - first, problem.stop_byte - first) == (0, 3 * block)
    text = call(capsys, "verify", checkpoint, code=1)
    assert f"{file}: checksum mismatch in a chunk; bytes {first} to" in text
    assert "key 'big', region [0:768, 0:1024]" in text
    assert "DAMAGED (1 problem)" in text


def all_files(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


@pytest.mark.parametrize("mode", ["fast", "full"])
def test_verify_finds_damage_in_the_beginning_and_end_of_every_file(checkpoint, mode):
    files = all_files(checkpoint)
    assert {file.parent.name for file in files} == {"c", "tensors", "objects"}
    for file in files:
        content = file.read_bytes()
        damaged = [
            content[:-1],
            content[: len(content) // 2],
            b"",
            bytes([content[0] ^ 1]) + content[1:],
        ]
        if file.name != "metadata.json":
            damaged.append(content + b"\0")  # a marker may end in any white space
        for bad in damaged[1:] if file.name == "metadata.json" else damaged:
            file.write_bytes(bad)
            report = distckpt.verify(checkpoint, mode)
            assert not report.is_whole, (file, len(bad))
            assert any(
                str(file) in f"{problem.file} {problem.message}" for problem in report.problems
            )
        file.write_bytes(content)
    assert distckpt.verify(checkpoint, mode).is_whole


def test_verify_names_keys_in_files_that_were_cut_off_or_are_missing(checkpoint, capsys):
    places = chunk_places(checkpoint)
    ((file, first, stop),) = [
        (f, *c[1:3]) for f, chunks in places.items() for c in chunks if c[0] == "big"
    ]
    content = file.read_bytes()
    file.write_bytes(content[: first + (2 << 20) + 3])
    whole_file, *chunks = call_json(capsys, "verify", checkpoint, code=1)["problems"]
    assert "cut off" in whole_file["message"]
    last = max(chunk[2] for chunk in places[file])
    assert (whole_file["first_byte"], whole_file["stop_byte"]) == (first + (2 << 20) + 3, last)
    assert ("big", first + (2 << 20), stop) in [
        (p["key"], p["first_byte"], p["stop_byte"]) for p in chunks
    ]
    file.unlink()
    (problem,) = distckpt.verify(checkpoint).problems
    assert (problem.file, problem.message) == (str(file), "the file is missing")


def test_verify_reports_progress_and_refuses_unknown_modes(checkpoint):
    seen = []
    distckpt.verify(checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > BIG.nbytes
    with pytest.raises(ValueError, match="'fast' or 'full'"):
        distckpt.verify(checkpoint, "quick")


# --- consolidate ----------------------------------------------------------------------------------


def test_consolidate_with_options(checkpoint, tmp_path, capsys):
    arguments = [
        "--keys",
        "model.",
        "--keys",
        "grid",
        "--rename",
        "model.=net.",
        "--dtype",
        "grid=fp64",
    ]
    report = call_json(
        capsys, "consolidate", checkpoint, tmp_path / "out", *arguments, "--dtype", "fp16"
    )
    assert report["num_tensors"] == 4
    assert report["files"] == ["model.safetensors"]
    assert report["dtypes"] == {"F16": 3, "F64": 1}
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert written.pop("grid").tolist() == GRID.astype(np.float64).tolist()
    assert {key: value.tolist() for key, value in written.items()} == {
        key.replace("model.", "net."): np.full((4, 6), i, np.float16).tolist()
        for i, key in enumerate(LAYERS)
    }


def test_export_is_another_name_and_sizes_have_units(checkpoint, tmp_path, capsys):
    text = call(capsys, "export", checkpoint, tmp_path / "out", "--max-file-bytes", "1.5MB")
    assert "5 tensors (3 BF16, 2 F32)" in text
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert "pass --overwrite" in call_error(capsys, "export", checkpoint, tmp_path / "out")
    call(capsys, "export", checkpoint, tmp_path / "out", "--overwrite", "--keys", "grid")
    assert (
        safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")["grid"].tolist()
        == GRID.tolist()
    )
    assert "torch has no dtype 'bf61'" in call_usage_error(
        capsys, "export", "a", "b", "--dtype", "bf61"
    )
    assert "is not a size" in call_usage_error(
        capsys, "export", "a", "b", "--max-file-bytes", "5 apples"
    )
    assert "is not OLD=NEW" in call_usage_error(capsys, "export", "a", "b", "--rename", "model")


@pytest.mark.parametrize("text", ["40kB", "40KB", "40k", "40000"])
def test_sizes_are_read_as_they_are_printed(text):
    words = ["saved", "out", "--max-file-bytes", text]
    assert parser_of("export").parse_args(words).max_file_bytes == 40_000


def test_export_says_that_it_leaves_out_the_optimizer(tmp_path, capsys):
    keys = ("weight", "optimizer.state.exp_avg.weight")
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in keys}
    distckpt.save(state, tmp_path / "saved")
    said = "left out: 1 tensor; --dry-run names them, --all exports an optimizer's"
    assert said in call(capsys, "export", tmp_path / "saved", tmp_path / "out", "--dry-run")
    assert said in call(capsys, "export", tmp_path / "saved", tmp_path / "out")
    assert "left out" not in call(capsys, "export", tmp_path / "saved", tmp_path / "all", "--all")
    usage = call_usage_error(capsys, "export", "a", "b", "--all", "--keys", "x")
    assert "not allowed with argument" in usage


# --- JSON -----------------------------------------------------------------------------------------


def test_fields_of_json_are_those_that_are_documented(checkpoint, tmp_path, capsys):
    with distckpt.CheckpointManager(tmp_path / "root", async_save=False) as manager:
        manager.save(1, {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))})
    dcp_dir = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"w": torch.zeros(2)}, checkpoint_id=str(dcp_dir))
    lines = [
        ("inspect", checkpoint),
        ("inspect", checkpoint, "--key", "grid"),
        ("cat", checkpoint, "grid[0]"),
        ("cat", checkpoint, "grid", "--npy", tmp_path / "x.npy"),
        ("cat", checkpoint, "rng"),
        ("verify", checkpoint),
        ("diff", checkpoint, checkpoint),
        ("consolidate", checkpoint, tmp_path / "hf"),
        ("import", tmp_path / "hf", tmp_path / "imported"),
        ("convert", dcp_dir, tmp_path / "converted"),
        ("reshard", checkpoint, tmp_path / "resharded"),
        ("reject", tmp_path / "root", 1, "--reason", "bad"),
        ("prune", tmp_path / "root"),
        ("trace", tmp_path / "journal", "-o", tmp_path / "trace.json"),
        ("completion", "bash"),
    ]
    (tmp_path / "journal").touch()
    page = (ROOT / "docs" / "command-line.md").read_text()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    sections["import"] += sections["reshard"]  # which it refers to
    for line in lines:
        documented = set(re.findall(r"`(\w+)`", sections[line[0]].partition("JSON")[2]))
        assert call_json(capsys, *line).keys() <= documented, line


# --- Surprises ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "use"),
    [
        ("list", "ls ROOT"),
        ("check", "verify PATH"),
        ("load", "distckpt.load in a program"),
        ("info", "inspect PATH"),
        ("show", "inspect PATH"),
        ("compare", "diff A B"),
        ("size", "ls ROOT"),
        ("du", "ls ROOT"),
        ("rm", "prune ROOT"),
        ("help", "--help"),
        ("inspekt", "did you mean 'inspect'?"),
    ],
)
def test_names_that_other_commands_have_lead_to_the_verb(word, use, capsys):
    printed = call_usage_error(capsys, word)
    assert use in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("line", [("inspect",), ("inspect", "a", "b"), ("verify", "a", "--x")])
def test_mistakes_in_arguments_are_told_in_one_line(line, capsys):
    printed = call_usage_error(capsys, *line)
    assert printed.startswith(f"distckpt {line[0]}: error: ")
    assert printed.count("\n") == 1


def test_a_part_of_a_key_leads_to_the_key(checkpoint, capsys):
    key = next(iter(LAYERS))
    assert f"did you mean '{key}'" in call_error(capsys, "cat", checkpoint, key.split(".", 1)[1])
    assert "did you mean 'grid'" in call_error(capsys, "inspect", checkpoint, "--key", "gri")


def test_output_is_printed_in_ascii_where_there_is_nothing_else(tmp_path):
    values = {"w\u00e9": ShardedTensor.from_rank_offsets("w\u00e9", torch.arange(9.0))}
    distckpt.save(values, tmp_path / "c")
    for line in (("stats",), ("inspect",), ("inspect", "--key", "w\u00e9")):
        verb, *more = line
        with redirected_to_ascii() as printed:
            assert main([verb, str(tmp_path / "c"), *more]) == 0
        assert b"w\\xe9" in printed.getvalue()


@contextlib.contextmanager
def redirected_to_ascii():
    printed = io.BytesIO()
    stream = io.TextIOWrapper(printed, "ascii", write_through=True)
    with contextlib.redirect_stdout(stream):
        yield printed
    stream.detach()


def test_a_checkpoint_of_a_model_alone_has_no_line_about_objects(tmp_path, capsys):
    distckpt.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "c")
    lines = call(capsys, "inspect", tmp_path / "c").splitlines()
    assert not [line for line in lines if line.startswith(",")]
    assert lines[3] == ""


def test_verify_says_how_much_it_has_read(checkpoint, capsys):
    said = "only sizes and headers were read, no values"
    assert said in call(capsys, "verify", checkpoint, "--fast")
    assert said not in call(capsys, "verify", checkpoint)


def test_the_chunks_of_a_key_fit_a_narrow_terminal():
    heads = ["region", "owner", "file", "begins", "bytes"]
    file = "tensors/shard-00001-model-00001-of-00001.safetensors"
    row = ["[0:256, 0:64]", "rank 12", file, "12,345,678", "1,234,567"]
    drop = ["begins", "bytes", "owner"]
    assert max(map(len, table_lines(heads, [row], 3, drop, 80))) <= 80


def test_all_commands_count_tensors_alike(tmp_path, capsys):
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "norm": torch.nn.LayerNorm(4)})
    model["head"] = torch.nn.Linear(4, 6, bias=False)
    model["head"].weight = model["embed"].weight
    path = str(tmp_path / "c")
    distckpt.save({"model": model, "rng": distckpt.RngState(), "step": 3}, path)
    count = len(model.state_dict())
    assert call_json(capsys, "inspect", path)["num_tensors"] == count == 4
    assert call_json(capsys, "verify", path)["num_tensors"] == count
    assert call_json(capsys, "diff", path, path)["num_compared"] == count
    for command in (["inspect", path], ["verify", path], ["verify", path, "--fast"]):
        assert f"{count} tensors" in call(capsys, *command)
    assert f"{count} tensors compared" in call(capsys, "diff", path, path)
    assert distckpt.verify(path, live={"model": model}).num_tensors == count
