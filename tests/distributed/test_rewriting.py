"""`reshard` on several ranks, and `distckpt.open` on one of several."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import CheckpointingException, RankFailedError, ShardedObject, ShardedTensor
from tests.support.harness import error_of, run
from tests.support.states import numbered

WHOLE = numbered(48, 10)
SMALL = numbered(7, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint of one process."""
    path = tmp_path_factory.mktemp("source") / "c"
    state = {
        "w": ShardedTensor.from_rank_offsets("w", WHOLE),
        "small": ShardedTensor.from_rank_offsets("small", SMALL),
        "large": ShardedTensor.from_rank_offsets("large", torch.tensor([1e30, 1.0, -1e30])),
    }
    objects = {f"o{i}": ShardedObject("o", {"part": i}, (4,), (i,)) for i in range(4)}
    distckpt.save({**state, **objects, "step": 3}, path)
    return str(path)


def rewrite(rank, source, target, options):
    seen = []
    report = distckpt.reshard(source, target, progress=lambda *two: seen.append(two), **options)
    return report, seen[-1] if seen else (0, 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_ranks_write_a_share(source, tmp_path, num_ranks):
    target = str(tmp_path / "new")
    options = {"grids": {"w": (4, 1)}, "dtype": {"large": torch.float16}}
    results = run(rewrite, num_ranks, source, target, options)
    (report, *others), shares = zip(*results, strict=True)
    assert [(each.num_bytes, each.overflows) for each in others] == [
        (report.num_bytes, report.overflows)
    ] * (num_ranks - 1)
    assert (report.num_tensors, report.num_objects) == (3, 1)
    assert report.overflows == {"large": 2}
    assert all(done == total for done, total in shares)
    assert sum(total for _, total in shares) == report.num_bytes
    names = {file.name for file in (tmp_path / "new" / "tensors").iterdir()}
    assert {name.partition("-model")[0] for name in names} == {
        f"shard-{rank:05d}" for rank in range(1, num_ranks + 1)
    }
    assert distckpt.verify(target).is_whole
    checkpoint = distckpt.open(target)
    assert torch.equal(checkpoint.read("w"), WHOLE)
    assert torch.equal(checkpoint.read("small"), SMALL)
    assert checkpoint.common_state == {"step": 3}
    objects = {str(i): ShardedObject("o", None, (4,), (i,)) for i in range(4)}
    loaded = distckpt.load(dict(objects), target)
    assert [loaded[str(i)] for i in range(4)] == [{"part": i} for i in range(4)]


def test_files_of_other_ranks_than_those_that_write(source, tmp_path):
    target = str(tmp_path / "new")
    run(rewrite, 2, source, target, {"num_ranks": 5, "grids": {"w": (5, 1)}})
    files = [file.name for file in (tmp_path / "new" / "tensors").iterdir()]
    assert sorted(name.partition("-model")[0] for name in files) == [
        f"shard-{rank:05d}" for rank in range(1, 6)
    ]
    assert distckpt.diff(source, target).is_same


def errors_of_rewriting(rank, source, target, of_each):
    return error_of(distckpt.reshard, source, target, **of_each[rank])


def test_all_ranks_hear_of_the_same_error(source, tmp_path):
    options = [{"grids": {"nothing": (2,)}}] * 2
    for error in run(errors_of_rewriting, 2, source, str(tmp_path / "new"), options):
        assert type(error).__name__ == "CheckpointingException"
        assert "fit no tensor" in str(error)
    options = [{"keys": "w"}, {"keys": "small"}]
    for error in run(errors_of_rewriting, 2, source, str(tmp_path / "new"), options):
        assert isinstance(error, CheckpointingException | RankFailedError)
        assert "keys" in str(error)
    assert list(tmp_path.iterdir()) == []


def open_alone(rank, source):
    if rank != 1:
        return None
    checkpoint = distckpt.open(source)
    return checkpoint.read("w", (slice(3, 5),)).tolist(), checkpoint.common_state


def test_any_rank_opens_alone(source):
    assert run(open_alone, 2, source) == [None, (WHOLE[3:5].tolist(), {"step": 3})]
