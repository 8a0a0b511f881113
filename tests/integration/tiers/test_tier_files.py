"""Checkpoints whose files are spread over directories, other hosts and a store."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import fsspec
import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from distckpt.manager._tiers._file_server import FilesOfHost
from distckpt.manager._tiers._tier_files import Source, mounted
from tests.support.file_servers import (
    SMALL,
    TOKEN,
    divided,
    loads_equal,
    numbered_tensors,
    open_things,
    read_range,
    saved,
    serving_process,
    tiered,
)
from tests.support.states import whole


class Spread(NamedTuple):
    """A checkpoint, its large files, and copies of them in two directories by turns."""

    path: object
    names: list[str]
    copies: list[str]

    def sizes(self):
        return [(self.path / name).stat().st_size for name in self.names]

    def files(self, sources):
        return tiered(self.path, self.names, sources)

    def stored(self, name):
        return Source("store", str(self.path / name))


@pytest.fixture
def spread(tmp_path):
    path = tmp_path / "store" / "step_00000007"
    path.parent.mkdir()
    names = saved(path)
    assert len(names) > 3
    copies = divided(path, names, [tmp_path / "first", tmp_path / "second"])
    return Spread(path, names, copies)


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the warnings of the tiers so far."""
    caplog.set_level(logging.WARNING, "distckpt.manager._tiers")
    return lambda: [record.getMessage() for record in caplog.records if "._tiers." in record.name]


def test_a_checkpoint_on_own_disk_and_another_host(spread, warnings):
    with serving_process(spread.copies) as (_, client):

        def sources(number, name):
            if number % 2:
                return [Source("peer", host=client, number=number)]
            return [Source("own", spread.copies[number])]

        files = spread.files(sources)
        with mounted(files, "step_00000007") as url:
            assert loads_equal(url)
            assert url.endswith("/step_00000007")
            report = distckpt.verify(url)
            assert report.is_whole
            assert report.strays == ()
        assert files.bytes_of_tiers().keys() == {"own", "peer"}
        assert sum(files.bytes_of_tiers().values()) >= sum(spread.sizes())
    assert warnings() == []


def test_load_fills_tensors(spread):
    target = torch.zeros(100, 6000)
    files = spread.files(lambda number, name: [spread.stored(name)])
    with mounted(files, "step_00000007") as url:
        distckpt.load({"w3": whole("w3", target)}, url, strict="report")
    assert torch.equal(target, numbered_tensors()["w3"])
    assert files.bytes_of_tiers().keys() == {"store"}


def test_columns_are_read_with_the_gaps_between_them(spread):
    with serving_process(spread.copies) as (_, client):
        files = spread.files(lambda number, name: [Source("peer", host=client, number=number)])
        target = ShardedTensor.from_rank_offsets("w1", torch.zeros(100, 1500), (1, 2, 4))
        with mounted(files, "step_00000007") as url:
            loaded = distckpt.load({"w1": target}, url, strict="report")
    assert torch.equal(loaded["w1"], numbered_tensors()["w1"][:, 3000:4500])


def test_a_killed_host_is_replaced_by_the_store_with_one_warning(spread, warnings):
    with serving_process(spread.copies) as (launch, client):
        files = spread.files(
            lambda number, name: [Source("peer", host=client, number=number), spread.stored(name)],
        )
        name = spread.names[0]
        expected = (spread.path / name).read_bytes()
        assert read_range(files, name, 0, 100).tobytes() == expected[:100]
        launch.kill(0)
        with mounted(files, "step_00000007") as url:
            assert loads_equal(url)
    (warning,) = warnings()
    assert f"host {client.name}" in warning
    assert "Connection refused" in warning
    assert "from the store" in warning
    assert files.bytes_of_tiers()["peer"] == 100


def test_a_silent_host_and_a_wrong_token_are_replaced(spread, warnings):
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving_process(spread.copies) as (_, good),
    ):
        silent = FilesOfHost(listener.getsockname(), TOKEN, 0.2)
        address = tuple(good.name.split(":"))
        stranger = FilesOfHost(address, b"x" * len(TOKEN), 10)
        files = spread.files(
            lambda number, name: [
                Source("peer", host=silent, number=number),
                Source("peer", host=stranger, number=number),
                Source("peer", host=good, number=number),
            ],
        )
        with mounted(files, "step_00000007") as url:
            assert loads_equal(url)
        assert files.bytes_of_tiers().keys() == {"peer"}
    assert len(warnings()) == 2
    for client in (silent, stranger):
        assert sum(f" is not read from host {client.name} " in text for text in warnings()) == 1


def test_a_file_that_was_cut_off_is_read_elsewhere_behind_its_end(spread, warnings):
    place = max(range(len(spread.names)), key=spread.sizes().__getitem__)
    name = spread.names[place]
    expected = (spread.path / name).read_bytes()
    with open(spread.copies[place], "r+b") as file:
        file.truncate(1000)
    files = spread.files(
        lambda number, name: [Source("own", spread.copies[number]), spread.stored(name)],
    )
    assert read_range(files, name, 0, 1000).tobytes() == expected[:1000]
    assert warnings() == []
    assert read_range(files, name, 900, 200).tobytes() == expected[900:1100]
    assert read_range(files, name, 901, 199).tobytes() == expected[901:1100]
    (warning,) = warnings()
    assert "ends at byte 1000" in warning
    assert name in warning
    with mounted(files, "step_00000007") as url:
        assert loads_equal(url)
    assert len(warnings()) == 1


def test_a_file_that_is_nowhere(spread, tmp_path, warnings):
    with serving_process(["/nowhere"] * len(spread.names)) as (_, client):
        files = spread.files(
            lambda number, name: [
                Source("own", str(tmp_path / "none")),
                Source("peer", host=client, number=number),
                Source("store", f"memory://none/{name}"),
            ],
        )
        with mounted(files, "step_00000007") as url, pytest.raises(OSError, match="nowhere") as e:
            loads_equal(url)
    assert type(e.value) is OSError
    text = str(e.value)
    assert any(name in text for name in spread.names)
    for reason in ("this host: ", f"host {client.name}: ", "the store: "):
        assert text.count(reason) == 1


def test_a_file_without_an_entry_is_missing(spread):
    files = tiered(spread.path, spread.names[:-1], lambda number, name: [spread.stored(name)])
    with (
        mounted(files, "step_00000007") as url,
        pytest.raises(distckpt.CorruptCheckpointError, match=f"{spread.names[-1]}' is missing"),
    ):
        loads_equal(url)


def test_damage_is_found(spread):
    for copy in spread.copies:
        with open(copy, "r+b") as file:
            content = bytearray(file.read())
            content[-100] ^= 1
            file.seek(0)
            file.write(content)
    files = spread.files(lambda number, name: [Source("own", spread.copies[number])])
    with (
        mounted(files, "step_00000007") as url,
        pytest.raises(distckpt.CorruptCheckpointError, match="Checksum mismatch"),
    ):
        loads_equal(url)


def test_eight_threads_load_at_a_time(spread):
    with serving_process(spread.copies) as (_, client):
        files = spread.files(
            lambda number, name: [Source("peer", host=client, number=number)],
        )
        with mounted(files, "step_00000007") as url, ThreadPoolExecutor(8) as pool:
            assert all(pool.map(loads_equal, [url] * 8))


def test_nothing_is_left(spread):
    def use():
        with serving_process(spread.copies) as (_, client):
            files = spread.files(
                lambda number, name: [Source("peer", host=client, number=number)],
            )
            with mounted(files, "step_00000007") as url:
                assert loads_equal(url)
        return url

    use()
    before = open_things()
    url = use()
    assert open_things() == before
    with pytest.raises(distckpt.CheckpointNotFoundError):
        distckpt.open(url)


def test_writing_is_refused(spread):
    files = spread.files(lambda number, name: [spread.stored(name)])
    with (
        mounted(files, "step_00000007") as url,
        pytest.raises(OSError, match="distckpt-tiers:// is only read"),
    ):
        distckpt.save({"step": 1}, f"{url}/other")


def test_listing(spread):
    files = spread.files(lambda number, name: [spread.stored(name)])
    with mounted(files, "step_00000007") as url:
        fs, path = fsspec.url_to_fs(url)
        assert sorted(fs.find(path)) == sorted(f"{path}/{name}" for name in [*spread.names, *SMALL])
        assert sorted(entry.rpartition("/")[2] for entry in fs.ls(path, detail=False)) == sorted(
            [*SMALL, "objects", "tensors"]
        )
        assert fs.isdir(f"{path}/tensors")
        assert not fs.exists(f"{path}/tensor")
