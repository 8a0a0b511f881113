"""Exports in parts: what they read and write, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

import distckpt
from distckpt import (
    CheckpointExistsError,
    CheckpointingException,
    CorruptCheckpointError,
    tasks,
)
from distckpt.rules import Rename
from distckpt.tasks import _journal as journal
from distckpt.tasks import _pieces as work_in_parts
from tests.support.disk import tree_of
from tests.support.parts import run_all, run_in_process
from tests.support.read_counts import counted_reads
from tests.support.states import numbered, save_checkpoint

MANY = {"max_file_bytes": 30_000}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of many small tensors."""
    tensors = {f"layers.{i}.w": numbered(60, 50) - i for i in range(20)}
    return save_checkpoint(tmp_path_factory.mktemp("small") / "a", tensors)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint whose export is one file of several pieces."""
    values = torch.arange(6000 * 1100) % 3001 * 0.37
    values[::1007] = 1e6
    matrix = values.to(torch.bfloat16).view(6000, 1100)
    tensors = {f"layers.{i}.mlp.up_proj.weight": matrix + i for i in range(11)}
    tensors["layers.0.norm"] = torch.ones(1001)
    return save_checkpoint(tmp_path_factory.mktemp("large") / "a", tensors)


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.float16}, {"quantize": "fp8-block"}],
    ids=["as stored", "converted", "quantized"],
)
def test_a_large_file_is_divided(large, tmp_path, options):
    expected = distckpt.consolidate(large, tmp_path / "one", **options)
    work = tasks.consolidate(large, tmp_path / "out", num_tasks=3, **options)
    reports = [task.run() for task in work]
    assert reports[-1].num_total == (2 if "quantize" in options else 3)
    assert reports[-1].report.overflows == expected.overflows
    assert bool(expected.overflows) == (options.get("dtype") == torch.float16)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "one")


def test_rules_and_other_files(small, tmp_path):
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "config.json").write_text('{"torch_dtype": "float32"}')
    (extra / "tokenizer.txt").write_text("a b c")
    options = {
        "rules": [Rename("layers.*.w", "model.layers.{0}.weight")],
        "rename": {"model.": "language_model."},
        "extra_files_from": extra,
        "dtype": torch.bfloat16,
        **MANY,
    }
    distckpt.consolidate(small, tmp_path / "one", **options)
    for task in tasks.consolidate(small, tmp_path / "out", num_tasks=4, **options):
        pickle.loads(pickle.dumps(task)).run()
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "one")


def test_any_number_of_parts_goes_on(small, tmp_path):
    first = tasks.consolidate(small, tmp_path / "out", num_tasks=3, **MANY)[1].run()
    assert 0 < first.num_pieces < first.num_total
    second = tasks.consolidate(small, tmp_path / "out", num_tasks=7, **MANY)
    done = [task.run() for task in second]
    assert sum(report.num_pieces for report in done) == first.num_total - first.num_pieces
    assert [report.is_complete for report in done] == [False] * 6 + [True]
    distckpt.consolidate(small, tmp_path / "one", **MANY)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "one")


def test_parts_are_even_in_bytes(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=5, **MANY)
    sizes = [task.run().num_bytes for task in work]
    assert max(sizes) - min(sizes) <= MANY["max_file_bytes"] + 1000


def test_scales_are_as_much_work_as_their_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(work_in_parts, "_MIN_PIECE_BYTES", 1 << 20)
    tensors = {f"layers.{i}.mlp.up_proj.weight": numbered(1024, 1024) + i for i in range(8)}
    save_checkpoint(tmp_path / "a", tensors)
    options = {"quantize": "fp8-block", "num_tasks": 2}
    parts = [task.run() for task in tasks.consolidate(tmp_path / "a", tmp_path / "out", **options)]
    # The scales of all are in the first piece of the file.
    assert parts[0].num_pieces < parts[1].num_pieces / 2
    assert parts[1].is_complete


def test_the_same_part_twice_at_the_same_time(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    running = [run_in_process(task) for task in [*work, *work, *work]]
    for process in running:
        process.join(100)
        assert process.exitcode == 0
    distckpt.consolidate(small, tmp_path / "one", **MANY)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "one")


def test_finish_needs_all_pieces(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=3, **MANY)
    work[0].run()
    with pytest.raises(CheckpointingException, match=r"7 of 10 pieces .* are missing"):
        work[0].finish()
    work[1].run()
    assert work[2].run().is_complete
    assert work[0].finish().num_tensors == 20


def test_other_options_are_refused_by_name(small, tmp_path):
    tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)[0].run()
    others = tasks.consolidate(small, tmp_path / "out", num_tasks=2, dtype=torch.bfloat16, **MANY)
    with pytest.raises(CheckpointingException, match=r"dtype was None and is torch.bfloat16"):
        others[1].run()
    with pytest.raises(CheckpointingException, match="it is consolidate, this is merge"):
        tasks.merge([small, small], tmp_path / "out", num_tasks=1)[0].run()
    (removed,) = tasks.abandon(tmp_path / "out")
    assert ".out.parts-" in removed
    assert sorted(tmp_path.iterdir()) == []
    assert [task.run() for task in others][-1].is_complete


@pytest.mark.parametrize("make", [tasks.consolidate, tasks.reshard])
def test_the_status_has_what_is_done_of_pieces(make, large, tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_SECONDS_BETWEEN", 0.0)
    seen = []

    def look(done, total):
        (status,) = tasks.status(tmp_path / "out")
        seen.append((done, status.bytes_whole + status.bytes_running, status.bytes_running))

    (task,) = make(large, tmp_path / "out", num_tasks=1)
    task.run(progress=look)
    assert [done for done, _, _ in seen] == pytest.approx([found for _, found, _ in seen], rel=0.01)
    assert max(running for _, _, running in seen) > 30_000_000
    (status,) = tasks.status(tmp_path / "out")
    assert (status.bytes_running, status.bytes_whole) == (0, status.bytes_total)


@pytest.mark.parametrize("make", [tasks.consolidate, tasks.reshard])
def test_the_order_of_keys_is_of_no_account(make, small, tmp_path):
    keys = ["layers.1*", "layers.2.w", "!layers.11.w"]
    make(small, tmp_path / "out", keys=keys, num_tasks=2)[0].run()
    assert make(small, tmp_path / "out", keys=keys[::-1], num_tasks=2)[1].run().is_complete
    assert distckpt.diff(small, tmp_path / "out", keys="layers.2.w").is_same


def test_a_changed_source_is_refused(tmp_path):
    save_checkpoint(tmp_path / "a", {"w": numbered(4, 4), "v": numbered(3)})
    options = {"max_file_bytes": 10}
    work = tasks.consolidate(tmp_path / "a", tmp_path / "out", num_tasks=2, **options)
    work[0].run()
    shutil.rmtree(tmp_path / "a")
    save_checkpoint(tmp_path / "a", {"w": 2 * numbered(4, 4), "v": numbered(3)})
    with pytest.raises(CheckpointingException, match=r"the source was .* and is"):
        work[1].run()


def test_a_target_that_is_there_is_refused(small, tmp_path):
    distckpt.consolidate(small, tmp_path / "out")
    with pytest.raises(CheckpointExistsError, match="already holds an export"):
        run_all(lambda num_tasks: tasks.consolidate(small, tmp_path / "out", num_tasks=num_tasks))
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, overwrite=True, **MANY)
    before = tree_of(tmp_path / "out")
    work[0].run()
    assert tree_of(tmp_path / "out") == before
    work[1].run()
    assert len(tree_of(tmp_path / "out")) == 11


def test_an_output_that_was_removed_since_is_not_complete(small, tmp_path):
    (task,) = tasks.consolidate(small, tmp_path / "out", num_tasks=1)
    task.run()
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(CheckpointingException, match="removed or replaced since"):
        task.run()
    tasks.abandon(tmp_path / "out")
    assert task.run().is_complete


def test_pieces_that_were_removed_are_missed(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    work[0].run()
    (journal,) = tmp_path.glob(".out.parts-*")
    (output,) = journal.glob(".out.tmp-*")
    shutil.rmtree(output)
    with pytest.raises(CheckpointingException, match="was removed"):
        work[1].run()


def test_what_goes_to_removed_files_is_not_noted(small, tmp_path):
    first, second = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    removed = []

    def remove(done, total):
        if not removed:
            removed.extend(tasks.abandon(tmp_path / "out"))
            process = run_in_process(second)
            process.join(100)
            assert process.exitcode == 0

    with pytest.raises(FileNotFoundError, match="removed while this part was writing"):
        first.run(progress=remove)
    assert tasks.status(tmp_path / "out")[0].num_whole == 5
    assert first.run().is_complete
    distckpt.consolidate(small, tmp_path / "one", **MANY)
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "one")


def test_status(small, tmp_path):
    assert tasks.status(tmp_path / "out") == []
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    work[0].run()
    (status,) = tasks.status(tmp_path / "out")
    assert (status.verb, status.num_whole, status.num_total) == ("consolidate", 5, 10)
    assert status.missing[0] == "model-00006-of-00010.safetensors"
    assert status.workers == ()
    assert not status.is_complete
    seen = []
    work[1].run(progress=lambda done, total: seen.append(tasks.status(tmp_path / "out")[0].workers))
    ((worker,), *_) = seen
    assert (worker.part, worker.is_running) == ("1/2", True)
    (status,) = tasks.status(tmp_path / "out")
    assert (status.num_whole, status.missing, status.workers) == (10, (), ())
    assert status.is_complete


def test_a_rerun_reads_next_to_nothing(large, tmp_path):
    (task,) = tasks.consolidate(large, tmp_path / "out", num_tasks=1)
    task.run()
    with counted_reads() as counts:
        assert task.run().num_pieces == 0
    assert counts.num_bytes < 0.01 * 145e6


def test_tasks_may_run_in_another_working_directory(small, tmp_path, monkeypatch):
    monkeypatch.chdir(small.parent)
    (small.parent / "extra").mkdir(exist_ok=True)
    (small.parent / "extra/config.json").write_text("{}")
    work = tasks.consolidate(small.name, "elsewhere", num_tasks=2, extra_files_from="extra", **MANY)
    work[0].run()
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(pickle.dumps(work[1])).run().is_complete
    assert (small.parent / "elsewhere/config.json").exists()


def test_status_is_not_complete_before_the_output_has_appeared(small, tmp_path):
    tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)[0].run()
    (journal,) = tmp_path.glob(".out.parts-*")
    # As a process leaves it that is killed just before the output appears.
    (journal / f"done-{16 * '0'}.json").write_text("[]")
    assert not tasks.status(tmp_path / "out")[0].is_complete


def test_another_scaling_of_the_adapter_is_refused(tmp_path):
    names = [f"layers.{i}" for i in range(4)]
    base = save_checkpoint(tmp_path / "a", {f"{name}.weight": torch.ones(60, 50) for name in names})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    matrices = {"A": torch.ones(2, 50), "B": torch.ones(60, 2)}
    save_file(
        {
            f"base_model.model.{name}.lora_{side}.weight": matrix.clone()
            for name in names
            for side, matrix in matrices.items()
        },
        adapter / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "target_modules": names}

    def run(index, alpha):
        text = json.dumps(config | {"lora_alpha": alpha})
        (adapter / "adapter_config.json").write_text(text)
        options = {"merge_adapter": adapter, "max_file_bytes": 15_000}
        return tasks.consolidate(base, tmp_path / "out", num_tasks=2, **options)[index].run()

    run(0, 2)
    with pytest.raises(CheckpointingException, match="the source 1 was"):
        run(1, 8)
    assert run(1, 2).is_complete


def test_a_damaged_journal(small, tmp_path, caplog):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    work[0].run()
    (journal,) = tmp_path.glob(".out.parts-*")
    (journal / "header.json").write_bytes(b'{"verb')
    others = tasks.consolidate(small, tmp_path / "out", num_tasks=1)
    for call in (others[0].run, lambda: tasks.status(tmp_path / "out")):
        with pytest.raises(CorruptCheckpointError, match=r"header\.json' is damaged .*--abandon"):
            call()
    assert work[1].run().is_complete
    assert "header.json' is damaged" in caplog.text
    assert tasks.status(tmp_path / "out")[0].is_complete


def test_a_damaged_record(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    work[0].run()
    record = next(tmp_path.glob(".out.parts-*/piece-*.json"))
    record.write_bytes(record.read_bytes().replace(b"result", b"resulT"))
    text = rf"{record.name}' is damaged .* 1 of \d+ pieces must be done again: run the parts again"
    with pytest.raises(CheckpointingException, match=text):
        work[1].run()
    assert [task.run().is_complete for task in work] == [True, True]


@pytest.mark.parametrize(
    ("verb", "options"),
    [(tasks.consolidate, MANY), (tasks.reshard, {}), (tasks.export_torch_dist, {})],
    ids=["consolidate", "reshard", "export_torch_dist"],
)
def test_a_file_of_a_complete_output_that_was_removed_is_found(verb, options, small, tmp_path):
    (task,) = verb(small, tmp_path / "out", num_tasks=1, **options)
    assert task.run().is_complete
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        content, state = path.read_bytes(), path.stat()
        path.unlink()
        with pytest.raises(CheckpointingException, match="removed or replaced since") as caught:
            task.run()
        # Without its last file there is no output.
        is_last = path.name in ("model.safetensors.index.json", "metadata.json")
        assert is_last or f"{path.name}' is missing" in str(caught.value)
        path.write_bytes(content[:-1])
        with pytest.raises(CheckpointingException, match="removed or replaced since"):
            task.run()
        path.write_bytes(content)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert task.run().is_complete


def test_a_record_that_was_removed_from_a_journal_that_is_complete(small, tmp_path):
    work = tasks.consolidate(small, tmp_path / "out", num_tasks=2, **MANY)
    for task in work:
        task.run()
    (record,) = tmp_path.glob(".out.parts-*/piece-000003.json")
    record.unlink()
    for call in (work[0].run, work[0].finish):
        with pytest.raises(CheckpointingException, match=r"lacks the record of piece 3.*--abandon"):
            call()
    assert tasks.abandon(tmp_path / "out")
    assert (tmp_path / "out").exists()
