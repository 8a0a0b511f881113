"""The server of byte ranges of files, and its client in another process."""

from __future__ import annotations

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from distckpt.manager._tiers import _file_server
from distckpt.manager._tiers._file_server import FileServer, FilesOfHost
from tests.support.file_servers import TIMEOUT, TOKEN, open_things, read_range, serving_process

SHORT = 0.2
"""Seconds after which a client gives up where a test waits for that."""


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def content():
    return np.random.default_rng(1).integers(0, 256, 5_000_000, np.uint8)


@pytest.fixture
def files(tmp_path, content):
    paths = [tmp_path / "first", tmp_path / "second"]
    paths[0].write_bytes(content.tobytes())
    paths[1].write_bytes(b"second")
    return [str(path) for path in paths]


@pytest.fixture
def server(files):
    server = FileServer(files, TOKEN)
    yield server
    server.close()


@pytest.fixture
def client(server):
    client = FilesOfHost(server.address, TOKEN, TIMEOUT)
    yield client
    client.close()


def test_ranges_of_another_process(files, content):
    with serving_process(files) as (launch, client):
        assert read_range(client, 1, 0, 6).tobytes() == b"second"
        for start, num_bytes in [(0, len(content)), (1, 1), (4_999_999, 1), (17, 3_000_001)]:
            assert (read_range(client, 0, start, num_bytes) == content[start:][:num_bytes]).all()
        launch.answer(0)
        launch.values()


def test_eight_threads_at_a_time(client, content):
    barrier = threading.Barrier(8)

    def read(number):
        barrier.wait(TIMEOUT)
        starts = range(number * 1000, len(content) - 700_000, 400_000)
        return all(
            (read_range(client, 0, start, 700_000) == content[start : start + 700_000]).all()
            for start in starts
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


def test_no_thread_and_no_socket_is_left(files):
    def use():
        server = FileServer(files, TOKEN)
        client = FilesOfHost(server.address, TOKEN, TIMEOUT)
        read_range(client, 0, 0, 1000)
        # A connection that never says anything, and one that is gone.
        with socket.create_connection(server.address):
            socket.create_connection(server.address).close()
            server.close()
        client.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)

    use()
    before = open_things()
    for _ in range(3):
        use()
    assert open_things() == before


def test_a_wrong_token_gets_nothing(server):
    client = FilesOfHost(server.address, TOKEN[:-1] + b"!", TIMEOUT)
    with pytest.raises(OSError, match=r"file 0 of 127.0.0.1"):
        read_range(client, 0, 0, 10)
    client.close()
    with socket.create_connection(server.address) as connection:
        connection.settimeout(TIMEOUT)
        connection.sendall(b"GET /first HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
        assert received(connection) == b""


def test_a_request_for_another_file_ends_the_connection(server):
    with socket.create_connection(server.address) as connection:
        connection.settimeout(TIMEOUT)
        connection.sendall(b"distckpt-tiers-1" + TOKEN + struct.pack("!QQQ", 2, 0, 1))
        assert received(connection) == b""


def received(connection):
    """Return all that comes until the other side ends the connection."""
    data = b""
    try:
        while more := connection.recv(1000):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_a_token_is_long(files):
    with pytest.raises(ValueError, match="at least 16 bytes"):
        FileServer(files, b"short")


def test_a_file_that_is_gone(client, tmp_path, content):
    (tmp_path / "second").unlink()
    with pytest.raises(FileNotFoundError, match=r"second.*file 1 of 127.0.0.1:\d+"):
        read_range(client, 1, 0, 6)
    assert (read_range(client, 0, 0, 100) == content[:100]).all()


def test_a_file_that_is_too_short(client, content):
    with pytest.raises(OSError, match=r"has 6 bytes only, bytes 3 to 7 were requested.*second"):
        read_range(client, 1, 3, 4)
    with pytest.raises(OSError, match="has 6 bytes only"):
        read_range(client, 1, 2**63, 10)
    assert read_range(client, 1, 3, 3).tobytes() == b"ond"


def test_a_process_that_was_killed_is_not_asked_again(files):
    with serving_process(files) as (launch, client):
        read_range(client, 0, 0, 1000)
        launch.kill(0)
        with pytest.raises(OSError, match="Connection refused"):
            read_range(client, 0, 0, 1000)
        # What listens there now is another server.
        with socket.create_server(client._address) as listener:
            with pytest.raises(OSError, match="Connection refused"):
                read_range(client, 0, 0, 1000)
            listener.settimeout(0)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = FilesOfHost(listener.getsockname(), TOKEN, SHORT)
        with pytest.raises(OSError, match=r"no bytes came for 0.2 s"):
            read_range(client, 0, 0, 10)
        # At once, for all threads.
        with pytest.raises(OSError, match=r"no bytes came for 0.2 s"):
            read_range(client, 1, 0, 10)


def test_a_server_that_stops_within_an_answer():
    def answer_in_part():
        for _ in range(2):
            with listener.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(struct.pack("!QQ", 0, 10) + b"12345")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_in_part)
        thread.start()
        client = FilesOfHost(listener.getsockname(), TOKEN, TIMEOUT)
        with pytest.raises(OSError, match=r"ended the connection|reset"):
            read_range(client, 0, 0, 10)
        thread.join()


def test_connections_that_were_unused_for_long(client, server, content, monkeypatch):
    read_range(client, 0, 0, 10)
    for connection in list(server._connections):
        _file_server._shut_down(connection)
    assert (read_range(client, 0, 0, 1000) == content[:1000]).all()


def test_more_connections_than_a_server_has(server, content, monkeypatch):
    monkeypatch.setattr(_file_server, "_MAX_CONNECTIONS", 2)
    clients = [FilesOfHost(server.address, TOKEN, TIMEOUT) for _ in range(5)]
    for _ in range(2):
        for client in clients:
            assert (read_range(client, 0, 5, 1000) == content[5:1005]).all()
    assert len(server._connections) <= 2
    for client in clients:
        client.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_on_the_way_to_the_master(host, files, monkeypatch):
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", "29500")
    server = FileServer(files, TOKEN)
    client = FilesOfHost(server.address, TOKEN, TIMEOUT)
    assert server.address[0] == host
    assert read_range(client, 1, 0, 6).tobytes() == b"second"
    client.close()
    server.close()


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_an_interface_without_address(files, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(OSError, match=r"GLOO_SOCKET_IFNAME.*none0"):
        FileServer(files, TOKEN)
