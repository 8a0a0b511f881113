"""Addresses for servers that tests start."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
    """Hand out "host:port" on this machine, for a server that sets SO_REUSEADDR, as TCPStore does.

    The port stays bound meanwhile, so that the system gives it to nobody else.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"
