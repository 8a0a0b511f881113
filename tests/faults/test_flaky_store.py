"""Backends of fsspec other than S3's: requests that fail now and then are made again where that
does no harm.
"""

from __future__ import annotations

import errno
import gc

import pytest
import torch

import distckpt
from distckpt.megatron.core import CorruptCheckpointError
from distckpt.streaming import save_safetensors_streaming_sharded
from tests.support.flaky_store import FlakyFileSystem, failing
from tests.support.large_states import holds, large_request, large_state, numbers

LOCATION = "flaky://bucket/run/c"


class StatusError(Exception):
    """As gcsfs raises: it knows what the store answered."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the store answered {code}")
        self.code = code


class ServiceResponseError(Exception):
    """As the Azure library calls an answer that was cut off."""


PASSING = {
    "503": lambda: StatusError(503),
    "reset": lambda: OSError(errno.ECONNRESET, "reset by peer"),
    "azure": lambda: ServiceResponseError("cut off"),
}


@pytest.fixture(autouse=True)
def _empty_store():
    FlakyFileSystem.objects.clear()


def load(verify: bool = True) -> dict:
    return distckpt.load(large_request(), LOCATION, verify=verify)


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
def test_everything_survives_a_first_request_of_each_kind_that_fails(error):
    with failing(lambda kind, path, number: error() if number == 0 else None) as requests:
        distckpt.save(large_state(1), LOCATION)
        distckpt.save(large_state(2), LOCATION, overwrite=True)
        assert holds(LOCATION, 2)
        assert distckpt.verify(LOCATION).is_whole
        distckpt.consolidate(LOCATION, "flaky://bucket/hf")
        assert {kind for kind, _ in requests} == {
            "info",
            "list",
            "get",
            "put",
            "begin",
            "block",
            "remove",
        }
    assert holds(LOCATION, 2)
    assert len([name for name in FlakyFileSystem.objects if name.startswith("bucket/run")]) == 4
    assert torch.equal(distckpt.load(large_request(), "flaky://bucket/hf")["w"], numbers(2))


def test_a_stream_that_fails_in_the_middle_begins_again():
    with failing(
        lambda kind, path, number: StatusError(500) if kind == "block" and number == 2 else None
    ) as requests:
        distckpt.save(large_state(1), LOCATION)
    [blocks] = [count for (kind, _), count in requests.items() if kind == "block"]
    # Two, one that failed, and all three.
    assert blocks == 6
    assert holds(LOCATION, 1)


def test_a_stream_that_goes_on_failing_is_an_error_that_names_the_file_and_leaves_nothing():
    distckpt.save(large_state(1), LOCATION)
    before = dict(FlakyFileSystem.objects)
    with (
        failing(
            lambda kind, path, number: StatusError(500) if kind == "block" else None
        ) as requests,
        pytest.raises(OSError, match="answered 500") as caught,
    ):
        distckpt.save(large_state(2), LOCATION, overwrite=True)
    assert caught.value.filename.startswith(f"{LOCATION}/tensors-")
    # Streams that were given up are not closed later, which would put what has arrived.
    del caught
    gc.collect()
    assert [count for (kind, _), count in requests.items() if kind == "block"] == [4]
    assert before == FlakyFileSystem.objects


@pytest.mark.parametrize("kind", ["begin", "block", "put", "get"])
@pytest.mark.parametrize(
    "error", [PermissionError("no"), StatusError(403)], ids=["no permission", "403"]
)
def test_what_will_not_pass_is_said_at_once(kind, error):
    if kind == "get":
        distckpt.save(large_state(1), LOCATION)
    with (
        failing(lambda found, path, number: error if found == kind else None) as requests,
        pytest.raises(OSError, match=r"no|403"),
    ):
        _ = distckpt.save(large_state(1), LOCATION) if kind != "get" else load()
    # A load looks for the marker before, while and after it finds out.
    assert max(count for (found, _), count in requests.items() if found == kind) <= (
        3 if kind == "get" else 1
    )


def test_answers_that_are_cut_off_are_asked_for_again(monkeypatch):
    distckpt.save(large_state(1), LOCATION)
    whole, cut = FlakyFileSystem.cat_file, []

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = whole(self, path, start, end, **kwargs)
        if len(data) > 1 << 20 and len(cut) < 2:
            cut.append(path)
            return data[: len(data) // 2]
        return data

    monkeypatch.setattr(FlakyFileSystem, "cat_file", cat_file)
    assert torch.equal(load(False)["w"], numbers(1))
    assert len(cut) == 2


def test_tensors_that_come_once_are_not_written_twice():
    """A stream of tensors cannot begin again: its failure is an error, and what was written
    goes.
    """
    tensors = {f"t{i}": numbers(i) for i in range(2)}
    metas = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    with (
        failing(
            lambda kind, path, number: StatusError(503) if kind == "block" and number == 2 else None
        ),
        pytest.raises(Exception, match="answered 503"),
    ):
        save_safetensors_streaming_sharded(
            tensors.items(), "flaky://bucket/s", metas, max_file_bytes=100 << 20
        )
    assert FlakyFileSystem.objects == {}


def test_damage_of_what_is_read_while_a_stream_is_written_is_said_as_it_is():
    distckpt.save(large_state(1), LOCATION)
    [name] = [name for name in FlakyFileSystem.objects if "/tensors-" in name]
    damaged = bytearray(FlakyFileSystem.objects[name])
    damaged[-5] ^= 1
    FlakyFileSystem.objects[name] = bytes(damaged)
    with (
        failing(lambda kind, path, number: None) as requests,
        pytest.raises(CorruptCheckpointError, match="Checksum"),
    ):
        distckpt.consolidate(LOCATION, "flaky://bucket/hf")
    assert [count for (kind, _), count in requests.items() if kind == "begin"] == [1]
    assert not [name for name in FlakyFileSystem.objects if name.startswith("bucket/hf")]
