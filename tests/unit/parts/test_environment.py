"""`--part auto`: which part a process does."""

from __future__ import annotations

import os
from functools import partial
from unittest import mock

import pytest

from distckpt.tasks._pieces import Part, Piece, cut_files, share
from tests.support.cli_command import call, call_error
from tests.support.states import numbered, save_checkpoint

ARRAY = {
    "SLURM_ARRAY_TASK_ID": "5",
    "SLURM_ARRAY_TASK_MIN": "1",
    "SLURM_ARRAY_TASK_MAX": "9",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "5",
}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2"}
JOINED_PODS = {
    "JOB_COMPLETION_INDEX": "1",
    "RANK": "2",
    "WORLD_SIZE": "6",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "3",
}


refusal = partial(call_error, code=2)


@pytest.fixture
def verify(tmp_path, capsys):
    """Return a function that verifies a part of a checkpoint, as the environment says."""
    save_checkpoint(tmp_path / "c", {"w": numbered(4)})

    def run(call, variables, count=None):
        part = "auto" if count is None else f"auto/{count}"
        options = ("--part", part, "--journal", tmp_path / "journal")
        with mock.patch.dict(os.environ, variables, clear=True):
            return call(capsys, "verify", tmp_path / "c", *options)

    return run


@pytest.mark.parametrize(
    ("variables", "count", "expected"),
    [
        (ARRAY, None, "2/5"),
        (SRUN, None, "3/4"),
        (TORCHRUN, None, "1/2"),
        ({**SRUN, **TORCHRUN}, None, "1/2"),
        ({**ARRAY, **SRUN}, None, "11/20"),
        ({**ARRAY, **TORCHRUN}, 5, "5/10"),
        ({"JOB_COMPLETION_INDEX": "2"}, 16, "2/16"),
        ({"JOB_COMPLETION_INDEX": "2", **TORCHRUN}, 16, "5/32"),
        # torchrun has joined the pods, and its ranks count all of them.
        (JOINED_PODS, None, "2/6"),
        ({**JOINED_PODS, "GROUP_WORLD_SIZE": "1"}, 16, "8/96"),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}, None, "1/3"),
        # Of a batch script that has not called srun: it runs once.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", **ARRAY}, None, "2/5"),
    ],
)
def test_part(variables, count, expected, verify):
    assert f"part {expected}" in verify(call, variables, count)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "finds no SLURM_ARRAY_TASK_ID"),
        ({"JOB_COMPLETION_INDEX": "2"}, "auto/N with the number of completions"),
        ({**ARRAY, "SLURM_ARRAY_TASK_COUNT": "4"}, "with gaps"),
        ({"SLURM_ARRAY_TASK_ID": "5"}, "variables of the Slurm array are incomplete"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is '' in the environment, no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "There is no part 2/2"),
    ],
)
def test_what_the_environment_does_not_say(variables, text, verify):
    assert text in verify(refusal, variables)


@pytest.mark.parametrize(
    ("variables", "count", "text"),
    [
        (ARRAY, 16, "auto/16: the environment says that there are 5"),
        (TORCHRUN, 16, "auto/16: the environment says that there are 2"),
        (
            JOINED_PODS,
            3,
            "auto/3: the environment says that there are 6",
        ),
        ({"JOB_COMPLETION_INDEX": "12"}, 8, "There is no part 12/8"),
    ],
)
def test_another_count_than_the_environment_says(variables, count, text, verify):
    assert text in verify(refusal, variables, count)


def test_every_piece_has_one_part():
    pieces = cut_files({"a": 5_000_000_000, "b": 17, "c": 300_000_000}, divides=True)
    assert sum(piece.num_bytes for piece in pieces) == 5_300_000_017
    assert all(piece.start % 4096 == 0 for piece in pieces)
    costs = [piece.num_bytes for piece in pieces]
    for count in (1, 2, 3, 7, 100, 1000):
        parts = [share(costs, Part(index, count)) for index in range(count)]
        assert sorted(number for part in parts for number in part) == list(range(len(pieces)))
    sizes = [sum(pieces[i].num_bytes for i in share(costs, Part(k, 7))) for k in range(7)]
    assert max(sizes) - min(sizes) <= 2 * max(piece.num_bytes for piece in pieces)


def test_parts_are_counted_from_0():
    with pytest.raises(ValueError, match=r"the last of 4 is 3/4"):
        Part(4, 4)
    assert share([], Part(0, 1)) == []
    assert Piece("a", 3, 5).num_bytes == 2
