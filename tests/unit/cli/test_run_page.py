"""The pages of `distckpt ls --html` and `distckpt trace --html`."""

from __future__ import annotations

import math
import re

import pytest
import torch

import distckpt
from distckpt import CheckpointManager, SaveOptions
from tests.support.cli_command import call, call_error, journal_line

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def run_dir(tmp_path):
    return saved_run(tmp_path / "run", SaveOptions())


def saved_run(root, options):
    """Four steps of a model; layer 1 changes by a quarter from the second to the third, and has NaN
    in the fourth.
    """
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in "ab")}
    )
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with CheckpointManager(root, async_save=False, options=options) as manager:
        for step in (10, 20, 30, 40):
            with torch.no_grad():
                if step == 30:
                    model["layers"][1].weight.mul_(1.25)
                    model["layers"][1].bias.mul_(1.25)
                if step == 40:
                    model["layers"][1].weight[0, :2] = math.nan
            state = {"model": model, "optimizer": optimizer, "step": step}
            manager.save(step, state, metrics={HOSTILE: 1 / step})
    return root


def titles_of(page):
    return re.findall(r"<title>([^<]*)</title>", page.read_text())


def test_a_run_is_drawn_over_its_steps(run_dir, tmp_path, capsys):
    call(capsys, "ls", run_dir, "--html", tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    names = [f"step_{step:08d}" for step in (10, 20, 30, 40)]
    for name in names:
        assert f"{name}: &lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert page.count(f"{name}: ") >= 3
    assert "<script" not in page
    assert all(info.seconds > 0 for info in distckpt.list_checkpoints(run_dir))
    assert "Relative change" not in page


def test_changes_of_layers_are_those_of_their_tensors(run_dir, tmp_path, capsys):
    call(capsys, "ls", run_dir, "--html", tmp_path / "run.html", "--changes", "4")
    titles = titles_of(tmp_path / "run.html")
    changes = {text.split(": ")[0]: text for text in titles if "relative change" in text}
    assert changes["layers.0, step 30"].endswith("relative change 0")
    assert changes["layers.1, step 20"].endswith("relative change 0")
    assert changes["layers.1, step 30"].endswith("relative change 0.2")
    assert changes["layers.1, step 40"].endswith("NaN or infinite, 2 values NaN")
    assert re.search(
        r"layers\.1</td><td [^>]*>40 \(2 values\)", (tmp_path / "run.html").read_text()
    )
    assert not [text for text in titles if text.startswith("optimizer")]


def test_damaged_steps_are_left_out_of_changes(run_dir, tmp_path, capsys):
    (run_dir / "step_00000030" / "manifest.safetensors").unlink()
    call(capsys, "ls", run_dir, "--html", tmp_path / "run.html", "--changes", "9")
    page = (tmp_path / "run.html").read_text()
    assert "layers.1, step 40: " in page
    assert "layers.1, step 30: " not in page
    assert "not whole" in page


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (("ls", "run", "--changes", "2"), "--html"),
        (("ls", "run", "--recompute"), "--html"),
        (("ls", "run", "--html", "run.html", "--recompute"), "--changes N"),
        (("trace", "journal.jsonl"), "--html"),
    ],
)
def test_arguments_without_a_page_are_refused(words, needed, capsys):
    with pytest.raises(SystemExit):
        call(capsys, *words)
    assert needed in capsys.readouterr().err


def event(verb, phase, rank, start, seconds, **more):
    fields = {"verb": verb, "phase": phase, "rank": rank, "checkpoint": f"run/{HOSTILE}"}
    times = {"start": float(start), "seconds": seconds}
    return journal_line({**fields, **times, "thread": "MainThread", **more})


def test_calls_have_a_row_for_each_rank(tmp_path, capsys):
    lines = [
        event("save", phase, rank, 1000 * number + place, 0.5 + rank / 8)
        for number in range(3)
        for rank in range(2)
        for place, phase in enumerate(("plan", "write"))
    ]
    lines.append(event("load", "read", 0, 5000, 0.5, error="OSError", bytes=10**9))
    journal = tmp_path / "journal.jsonl"
    journal.write_text("\n".join(lines))
    call(capsys, "trace", journal, "--html", tmp_path / "trace.html")
    page = (tmp_path / "trace.html").read_text()
    assert page.count("<h2>save run/") == 3
    assert page.count("<h2>load run/") == 1
    assert "<script" not in page
    titles = titles_of(tmp_path / "trace.html")
    assert titles.count("rank 1: write 0.625 s") == 3
    assert titles.count("rank 0: waits") == 4
    assert "rank 0: read 0.500 s, 1.00 GB, OSError" in titles


@pytest.mark.parametrize("entry", ["optim", None])
def test_the_state_of_an_optimizer_is_left_out_of_changes_whatever_its_entry_is_called(
    entry, tmp_path, capsys, caplog
):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "run", async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, {"model": model} | ({entry: optimizer} if entry else {}))
    call(capsys, "ls", tmp_path / "run", "--html", tmp_path / "run.html", "--changes", "2")
    titles = titles_of(tmp_path / "run.html")
    assert [text for text in titles if text.startswith("weight, step 2")]
    assert not [text for text in titles if text.startswith("optim")]
    assert caplog.records == []


def test_a_page_that_is_written_again_reads_what_is_new(run_dir, tmp_path, capsys, caplog):
    page = tmp_path / "run.html"
    call(capsys, "ls", run_dir, "--html", page, "--changes", "4")
    first = page.read_text()
    before = titles_of(page)
    # Damaged figures are made anew.
    # In the name of a step: a last digit of a time may mean the same number.
    place = first.index("step_", first.index("distckpt-figures"))
    page.write_text(first[:place] + chr(ord(first[place]) ^ 1) + first[place + 1 :])
    with caplog.at_level("WARNING"):
        call(capsys, "ls", run_dir, "--html", page, "--changes", "4")
    assert f"the figures in {page} are damaged" in caplog.text
    assert titles_of(page) == before
    # Nothing of these steps but their markers and sizes is looked at again.
    for step in (10, 20, 30):
        for file in (run_dir / f"step_000000{step}" / "tensors").iterdir():
            data = file.read_bytes()
            begin = 8 + int.from_bytes(data[:8], "little")
            file.write_bytes(data[:begin] + b"\xff" * (len(data) - begin))
    call(capsys, "ls", run_dir, "--html", page, "--changes", "4")
    assert titles_of(page) == before
    # A step that was saved again, others of the steps and other keys are.
    with CheckpointManager(run_dir, async_save=False) as manager:
        manager.save(40, {"model": torch.nn.Linear(2, 2), "step": 40}, overwrite=True)
        manager.save(50, {"model": torch.nn.Linear(2, 2), "step": 50})
    call(capsys, "ls", run_dir, "--html", page, "--changes", "2")
    assert [text for text in titles_of(page) if text.startswith("weight, step 50: ")]
    assert not [text for text in titles_of(page) if text.startswith("layers.1, step 40: ")]
    page.write_text(first.replace("figures", "nothing"))
    assert "Checksum" in call_error(capsys, "ls", run_dir, "--html", page, "--changes", "5")


def test_saved_statistics_take_the_place_of_the_tensors(tmp_path, capsys):
    root, page = saved_run(tmp_path / "run", SaveOptions(stats=True)), tmp_path / "run.html"
    call(capsys, "ls", root, "--html", page, "--changes", "4", "--recompute")
    by_tensors = titles_of(page)
    assert any("relative change 0.2" in text for text in by_tensors)
    norms = [text.split(",")[0:2] for text in by_tensors if "norm" in text]
    for file in root.glob("step_*/tensors/*"):
        data = file.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        file.write_bytes(data[:begin] + b"\xff" * (len(data) - begin))
    page.unlink()

    call(capsys, "ls", root, "--html", page, "--changes", "4")

    titles = titles_of(page)
    changes = {text.split(": ")[0]: text for text in titles if "change of the norm" in text}
    assert changes["layers.1, step 20"].endswith("change of the norm 0")
    # From a norm of 4 to one of 5.
    assert changes["layers.1, step 30"].endswith("change of the norm 0.2")
    assert changes["layers.1, step 40"].endswith("NaN or infinite, 2 values NaN")
    assert "layers.1, step 10" not in changes
    assert '<td class="text">layers.1</td>' in page.read_text()
    assert "40 (2 values)" in page.read_text()
    assert "--recompute" in page.read_text()
    assert [text.split(",")[0:2] for text in titles if "norm" in text] == norms
    assert not [text for text in titles if text.startswith("optimizer")]
    assert "Checksum" in call_error(
        capsys, "ls", root, "--html", page, "--changes", "4", "--recompute"
    )


def test_steps_without_saved_statistics_are_read(tmp_path, capsys):
    root, page = tmp_path / "run", tmp_path / "run.html"
    model = torch.nn.Linear(4, 4)
    for step, stats in ((1, False), (2, True), (3, False)):
        with CheckpointManager(root, async_save=False, options=SaveOptions(stats=stats)) as manager:
            manager.save(step, {"model": model})
        with torch.no_grad():
            model.weight.mul_(2)
            model.bias.mul_(2)
    call(capsys, "ls", root, "--html", page, "--changes", "3")
    found = sorted(text for text in titles_of(page) if "norm" in text and "step 3" in text)
    assert len(found) == 2 * len(dict.fromkeys(text.split(",")[0] for text in found))
    assert all(text.endswith("change of the norm 0.5") for text in found)


def test_axes_have_all_digits(tmp_path, capsys):
    root, page = tmp_path / "run", tmp_path / "run.html"
    with CheckpointManager(root, async_save=False) as manager:
        for step, loss in ((1234567, 2.000012), (1300000, 2.000011)):
            manager.save(step, {"w": 1}, metrics={"loss": loss, "lr": 0.5})
    call(capsys, "ls", root, "--html", page)
    texts = re.findall(r"<text[^>]*>([^<]*)", page.read_text())
    assert texts[:4] == ["2.000012", "2.000011", "1234567", "1300000"]
    assert texts[4:7] == ["0.5", "1234567", "1300000"]


def test_a_plain_file_with_the_name_of_a_step_is_no_checkpoint(tmp_path, capsys):
    with CheckpointManager(tmp_path, async_save=False) as manager:
        manager.save(1, {"w": 1})
        (tmp_path / "step_00000002").write_text("notes")
        assert manager.load({})["w"] == 1
        assert manager.skipped == {2: "it is a file, and a checkpoint is a directory"}
    assert [info.name for info in distckpt.list_checkpoints(tmp_path)] == ["step_00000001"]
    assert "step_00000002" not in call(capsys, "ls", tmp_path)
