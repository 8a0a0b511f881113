from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path

import fsspec
import pytest

from distckpt import megatron
from distckpt.megatron import core
from tests.support.reference import megatron_or_skip

EXTRA_BASES = {
    core.CheckpointingException: Exception,
    core.InvalidShardingError: ValueError,
    core.CheckpointNotFoundError: FileNotFoundError,
    core.CheckpointExistsError: FileExistsError,
    core.CorruptCheckpointError: Exception,
    core.LoadMismatchError: LookupError,
    core.UnsupportedObjectError: TypeError,
}


@pytest.mark.parametrize(("kind", "extra_base"), EXTRA_BASES.items())
def test_error_can_be_caught_by_both_bases_and_pickled(kind, extra_base):
    error = kind("key 'w': what to do")
    assert isinstance(error, core.CheckpointingException)
    assert isinstance(error, extra_base)
    loaded = pickle.loads(pickle.dumps(error))
    assert type(loaded) is type(error)
    assert isinstance(loaded, kind)
    assert str(loaded) == str(error) == "key 'w': what to do"


def test_errors_are_errors_of_megatron_too_whichever_was_imported_first(tmp_path):
    theirs = megatron_or_skip("dist_checkpointing.core").CheckpointingException
    for kind in [*EXTRA_BASES, core.RankFailedError]:
        error = kind({}) if kind is core.RankFailedError else kind("key 'w'")
        for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert isinstance(each, kind)
            assert isinstance(each, theirs)
            assert (repr(each), str(each)) == (repr(error), str(error))
            assert type(each).__module__ == kind.__module__
    assert core.CheckpointNotFoundError(2, "text", "file").filename == "file"
    with pytest.raises(theirs, match="does not exist") as caught:
        megatron.load({}, tmp_path / "nothing")
    assert isinstance(caught.value, core.CheckpointNotFoundError)


def test_errors_are_those_of_distckpt_alone_without_megatron(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.core.dist_checkpointing.core", raising=False)
    for kind in EXTRA_BASES:
        assert type(kind("key 'w'")) is kind


def test_load_mismatch_keeps_its_keys_through_pickle():
    error = core.LoadMismatchError("differs", missing=["a", "b", "a"], unexpected={"c"})
    for e in (error, pickle.loads(pickle.dumps(error))):
        assert (str(e), e.missing, e.unexpected) == ("differs", frozenset("ab"), frozenset("c"))
    assert core.LoadMismatchError("differs").missing == frozenset()


def test_rank_failed_lists_ranks_and_causes_in_order():
    error = core.RankFailedError({11: ValueError("bad"), 3: OSError("disk full")})
    assert list(error.failures) == [3, 11]
    first, *causes = str(error).split("\n")
    assert first.startswith("2 ranks failed")
    assert [line.strip() for line in causes] == [
        "rank 3: OSError: disk full",
        "rank 11: ValueError: bad",
    ]


def test_rank_failed_counts_what_it_does_not_list():
    text = str(core.RankFailedError({rank: OSError("x") for rank in range(100)}))
    assert "rank 7: OSError: x" in text
    assert "rank 8:" not in text
    assert "92 more" in text


def test_rank_failed_says_in_which_phase():
    assert "'write'" in str(core.RankFailedError({0: OSError("x")}, phase="write"))


def test_rank_failed_survives_pickle():
    error = core.RankFailedError({2: core.LoadMismatchError("m", missing=["k"])}, "my message")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "my message"
    assert copy.failures[2].missing == {"k"}


def test_config_survives_a_round_trip(tmp_path):
    core.save_config(core.CheckpointingConfig("safetensors", 3), str(tmp_path))
    assert core.maybe_load_config(str(tmp_path)) == core.CheckpointingConfig("safetensors", 3)
    assert core.check_is_distributed_checkpoint(str(tmp_path))
    # A directory and nothing else: no temporary file is left.
    assert [p.name for p in tmp_path.iterdir()] == [core.CONFIG_FNAME]


def test_path_objects_and_object_stores_are_accepted(tmp_path):
    config = core.CheckpointingConfig("safetensors")
    for location in (tmp_path, "memory://test_core/ckpt"):
        assert core.maybe_load_config(location) is None
        core.save_config(config, location)
        assert core.maybe_load_config(location) == config
    assert fsspec.filesystem("memory").exists("/test_core/ckpt/metadata.json")


def test_save_config_replaces_a_marker_and_keeps_extra_fields(tmp_path):
    core.save_config(core.CheckpointingConfig("old"), str(tmp_path))
    core.save_config(
        core.CheckpointingConfig("new"),
        str(tmp_path),
        extra={"manifest": {"bytes": 7}, "sharded_backend": "x"},
    )
    expected = {"sharded_backend": "new", "sharded_backend_version": 1, "manifest": {"bytes": 7}}
    content = json.loads((tmp_path / "metadata.json").read_text())
    assert (content.pop("checksum") is not None, content) == (True, expected)
    assert core.read_marker(str(tmp_path)) == expected


def test_write_marker_writes_nothing_when_a_field_is_not_json(tmp_path):
    core.write_marker(str(tmp_path), {"sharded_backend": "a"})
    with pytest.raises(TypeError):
        core.write_marker(str(tmp_path), {"sharded_backend": object()})
    assert core.read_marker(str(tmp_path)) == {"sharded_backend": "a"}
    assert len(list(tmp_path.iterdir())) == 1


def test_no_marker_is_no_checkpoint(tmp_path):
    (tmp_path / "file").write_text("")
    for location in ("", None, tmp_path, tmp_path / "absent", tmp_path / "file"):
        assert core.maybe_load_config(location) is None
        assert not core.check_is_distributed_checkpoint(location)
    assert core.read_marker(str(tmp_path)) is None


def test_fields_of_other_writers_are_dropped(tmp_path):
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch", "new": 1}'
    )
    assert core.maybe_load_config(str(tmp_path)) == core.CheckpointingConfig("torch_dist", 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b'"sharded_backend"',
        b"{}",
        b'{"sharded_backend": 1}',
        b'{"sharded_backend": null}',
        b'{"sharded_backend": "a", "sharded_backend_version": "1"}',
        b'{"sharded_backend": "a", "sharded_backend_version": true}',
    ],
    ids=lambda content: repr(content[:60]),
)
def test_bad_marker_is_a_corrupt_checkpoint(tmp_path, content):
    path = tmp_path / "metadata.json"
    path.write_bytes(content)
    for read in (core.maybe_load_config, core.check_is_distributed_checkpoint):
        with pytest.raises(core.CorruptCheckpointError) as caught:
            read(str(tmp_path))
        assert str(path) in str(caught.value)


def test_markers_are_readable_in_both_directions(tmp_path: Path):
    package = megatron_or_skip("dist_checkpointing.core")
    core.save_config(core.CheckpointingConfig("safetensors", 2), str(tmp_path))
    theirs = package.maybe_load_config(str(tmp_path))
    assert (theirs.sharded_backend, theirs.sharded_backend_version) == ("safetensors", 2)
    assert package.CONFIG_FNAME == core.CONFIG_FNAME

    package.save_config(package.CheckpointingConfig("torch_dist"), str(tmp_path))
    assert core.maybe_load_config(str(tmp_path)) == core.CheckpointingConfig("torch_dist", 1)
