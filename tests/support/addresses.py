"""Addresses for servers that tests start, and programs that serve there."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def reserved_address(host: str = "127.0.0.1") -> Iterator[str]:
    """Hand out "host:port" on this machine, for a server that sets SO_REUSEADDR, as TCPStore does.

    The port stays bound meanwhile, so that the system gives it to nobody else.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield f"{host}:{holder.getsockname()[1]}"


def found_program(name: str, source: str) -> str:
    """Return the path of a program; skip the test, with a name and a source, without it."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed ({source})")
    return program


@contextlib.contextmanager
def serving(address: str, *command: str) -> Iterator[None]:
    """Run a program, from when it accepts connections at an address to the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        host, _, port = address.partition(":")
        deadline = time.monotonic() + 120
        while not _accepts(host, int(port)):
            assert process.poll() is None, f"{command} has ended"
            assert time.monotonic() < deadline, f"{command} does not answer"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except OSError:
        return False
    return True
