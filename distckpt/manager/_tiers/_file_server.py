"""A server of byte ranges of local files, and its client.

A connection begins with the client's token. Then requests (`_REQUEST`) and answers (`_ANSWER`)
alternate; an answer is followed by the bytes of the file, or by the text of an error. Whatever else
goes wrong ends the connection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence

from distckpt._base.libc import fetch
from distckpt._base.memory import Bytes
from distckpt._ranks.groups import own_address

logger = logging.getLogger(__name__)

Address = tuple[str, int]
"""A host and port that sockets connect to."""

_HELLO = b"distckpt-tiers-1"
_REQUEST = struct.Struct("!QQQ")
"""Number of a file, first byte, number of bytes."""
_ANSWER = struct.Struct("!QQ")
"""0 or an errno, number of bytes that follow."""
_MIN_TOKEN_BYTES = 16
_MAX_TEXT_BYTES = 4096
_MAX_CONNECTIONS = 256
"""Connections of a server at a time; further ones wait, or take the place of an idle one."""
_IDLE_SECONDS = 60.0
"""Seconds after which a server ends a connection that makes no progress."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks of a server for its end."""
_MAX_UNUSED = 16
"""Unused connections that a client keeps."""
_SIOCGIFADDR = 0x8915
_MORE = getattr(socket, "MSG_MORE", 0)


class FileServer:
    """A server of byte ranges of local files to other hosts.

    Clients have its token, and name files by number. It listens at once. A file is opened for each
    request, so one that is removed is not served.

    Attributes:
        address: the host and port that other machines of the job connect to.
    """

    def __init__(self, files: Sequence[str], token: bytes) -> None:
        if len(token) < _MIN_TOKEN_BYTES:
            raise ValueError(f"a token has at least {_MIN_TOKEN_BYTES} bytes, got {len(token)}")
        self._paths = list(files)
        self._hello = _HELLO + token
        self._changed = threading.Condition()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._idle: dict[socket.socket, None] = {}
        self._is_closed = False
        self._listener = _listener(_own_host())
        self.address: Address = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(
            target=self._accept, name="distckpt-file-server", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """End all connections, and return when no thread or socket is left."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            threads = list(self._connections.values())
            # Threads that wait for one of these return; each closes its own.
            for connection in [self._listener, *self._connections]:
                _shut_down(connection)
        for thread in [self._acceptor, *threads]:
            thread.join()

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    self._admit(self._listener.accept()[0])
                except TimeoutError:
                    continue
                except (OSError, RuntimeError) as error:
                    # Such as too many open files or threads: clients wait, or read elsewhere.
                    with self._changed:
                        if not self._is_closed:
                            logger.warning("the file server at %s: %s", self.address, error)
                            self._changed.wait(_LOOK_SECONDS)

    def _admit(self, connection: socket.socket) -> None:
        """Serve a connection in a thread, when there are few enough."""
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="distckpt-file-server", daemon=True
        )
        with contextlib.ExitStack() as after_error, self._changed:
            after_error.enter_context(connection)
            while len(self._connections) >= _MAX_CONNECTIONS and not self._is_closed:
                for idle in self._idle:
                    _shut_down(idle)
                    break
                self._changed.wait()
            if self._is_closed:
                return
            thread.start()
            self._connections[connection] = thread
            after_error.pop_all()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                _set_up(connection, _IDLE_SECONDS)
                hello = self._receive(connection, len(self._hello))
                if hmac.compare_digest(hello, self._hello):
                    while self._answer(connection):
                        pass
        finally:
            with self._changed:
                del self._connections[connection]
                self._changed.notify_all()

    def _receive(self, connection: socket.socket, num_bytes: int) -> bytes:
        """Wait for the next bytes of a connection; there are fewer if it ends."""
        with self._changed:
            self._idle[connection] = None
            self._changed.notify_all()
        try:
            return connection.recv(num_bytes, socket.MSG_WAITALL)
        finally:
            with self._changed:
                del self._idle[connection]

    def _answer(self, connection: socket.socket) -> bool:
        """Answer a request; return whether there was one."""
        request = self._receive(connection, _REQUEST.size)
        if len(request) < _REQUEST.size:
            return False
        number, start, num_bytes = _REQUEST.unpack(request)
        if number >= len(self._paths):
            return False
        path = self._paths[number]
        try:
            fd = _open_range(path, start, start + num_bytes)
        except OSError as error:
            text = f"{error.strerror}: {path!r}".encode()[:_MAX_TEXT_BYTES]
            connection.sendall(_ANSWER.pack(error.errno, len(text)) + text)
            return True
        try:
            connection.sendall(_ANSWER.pack(0, num_bytes), _MORE)
            _send_range(connection, fd, start, start + num_bytes)
        finally:
            os.close(fd)
        return True


def _open_range(path: str, start: int, stop: int) -> int:
    """Open a file that has a range of bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(fd).st_size
    if size < stop:
        os.close(fd)
        text = f"the file has {size} bytes only, bytes {start} to {stop} were requested"
        raise OSError(errno.ENODATA, text)
    return fd


def _send_range(connection: socket.socket, fd: int, start: int, stop: int) -> None:
    # The system reads ahead for each descriptor: this one has read nothing yet.
    fetch(fd, start, stop - start)
    while start < stop:
        num_sent = os.sendfile(connection.fileno(), fd, start, stop - start)
        if not num_sent:
            raise OSError(errno.ENODATA, "the file was cut off while it was sent")
        start += num_sent


class FilesOfHost:
    """The files that another host serves, for several threads at a time.

    A host that fails to answer is not asked again: reads fail at once from then on.

    Attributes:
        name: its host and port.
    """

    def __init__(self, address: Address, token: bytes, timeout: float) -> None:
        self.name = f"{address[0]}:{address[1]}"
        self._address = address
        self._hello = _HELLO + token
        self._timeout = timeout
        self._unused: list[socket.socket] = []
        self._failure = ""

    def read_into(self, number: int, buffers: Sequence[Bytes], start: int) -> int:
        """Fill buffers from a position of a file on; return the bytes read: all.

        Raises:
            OSError: the host cannot read these bytes; with errno EHOSTUNREACH, it does not answer,
                or nothing came for `timeout` seconds.
        """
        place = f"file {number} of {self.name}"
        for is_last in (False, True):
            if self._failure:
                break
            try:
                told = self._read(number, buffers, start)
            except OSError as error:
                self.close()
                # The host ends connections that are unused for long: a new one may work.
                if is_last or error.errno not in (errno.ECONNRESET, errno.EPIPE):
                    self._failure = self._reason(error)
                continue
            if told is not None:
                raise OSError(*told, place)
            return sum(map(len, buffers))
        raise OSError(errno.EHOSTUNREACH, self._failure, place)

    def _reason(self, error: OSError) -> str:
        if isinstance(error, BlockingIOError):
            return f"no bytes came for {self._timeout:g} s"
        if error.errno == errno.ECONNRESET:
            return f"{error.strerror} (it ended, or belongs to another job)"
        return error.strerror or str(error)

    def close(self) -> None:
        """Close the connections that no thread uses."""
        # Another thread may take the last one.
        while self._unused:
            with contextlib.suppress(IndexError):
                self._unused.pop().close()

    def _read(self, number: int, buffers: Sequence[Bytes], start: int) -> tuple[int, str] | None:
        """Send a request, and receive its answer; return an error that the server tells."""
        num_bytes = sum(map(len, buffers))
        try:
            connection = self._unused.pop()
        except IndexError:
            connection = self._connect()
        with contextlib.ExitStack() as after_error:
            after_error.enter_context(connection)
            connection.sendall(_REQUEST.pack(number, start, num_bytes))
            told = _receive_head(connection, num_bytes)
            if told is None:
                for buffer in buffers:
                    _receive(connection, buffer.data)
            after_error.pop_all()
        self._unused.append(connection)
        if len(self._unused) > _MAX_UNUSED:
            self.close()
        return told

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self._address, self._timeout)
        except TimeoutError as error:
            text = f"it accepted no connection within {self._timeout:g} s"
            raise OSError(errno.ETIMEDOUT, text) from error
        try:
            _set_up(connection, self._timeout)
            connection.sendall(self._hello, _MORE)
        except BaseException:
            connection.close()
            raise
        return connection


def _receive_head(connection: socket.socket, num_expected: int) -> tuple[int, str] | None:
    """Receive the head of an answer; return an error that the server tells."""
    head = memoryview(bytearray(_ANSWER.size))
    _receive(connection, head)
    code, num_bytes = _ANSWER.unpack(head)
    if not code and num_bytes == num_expected:
        return None
    if not code or num_bytes > _MAX_TEXT_BYTES:
        raise OSError(errno.EPROTO, "it does not answer as a file server does")
    text = memoryview(bytearray(num_bytes))
    _receive(connection, text)
    return code, text.tobytes().decode(errors="replace")


def _receive(connection: socket.socket, memory: memoryview) -> None:
    """Fill memory with the next bytes of a connection.

    Raises:
        BlockingIOError: none came before the timeout.
        ConnectionResetError: the connection ended.
    """
    num_received = 0
    while num_received < len(memory):
        more = connection.recv_into(memory[num_received:], 0, socket.MSG_WAITALL)
        if not more:
            text = f"it ended the connection after {num_received} of {len(memory)} bytes"
            raise OSError(errno.ECONNRESET, text)
        num_received += more


# --- Sockets --------------------------------------------------------------------------------------


def _own_host() -> str:
    """Return the address or name that others reach this machine by."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface:
        return _address_of(interface)
    master = os.environ.get("MASTER_ADDR")
    if master:
        own = own_address(master, int(os.environ.get("MASTER_PORT", "0")))
        if own is not None:
            return own
    return socket.gethostname()


def _address_of(interface: str) -> str:
    """Return the address of a network interface, IPv4 first."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", os.fsencode(interface)[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as lines:
        for line in lines:
            digits, *_, name = line.split()
            # Others do not reach a link-local address without a name of their own interface.
            if name == interface and not digits.startswith("fe80"):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    raise OSError(
        errno.EADDRNOTAVAIL, "no address of this interface, of GLOO_SOCKET_IFNAME", interface
    )


def _listener(host: str) -> socket.socket:
    """Return a socket that listens on a free port of a host."""
    failure = OSError(errno.EADDRNOTAVAIL, "no address of this machine", host)
    for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            listener = socket.create_server(address, family=family, backlog=_MAX_CONNECTIONS)
            # Not all systems wake up a thread that waits when its socket is shut down.
            listener.settimeout(_LOOK_SECONDS)
            return listener
        except OSError as error:
            failure = OSError(error.errno, error.strerror, f"{host} ({address[0]})")
    raise failure


def _set_up(connection: socket.socket, timeout: float) -> None:
    """Limit the time for which a call waits for progress.

    It raises BlockingIOError then. Unlike with `settimeout`, the system waits, so that one call
    moves many bytes.
    """
    connection.settimeout(None)
    limit = struct.pack("@ll", *divmod(max(1, int(timeout * 1e6)), 1_000_000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    # The end of an answer goes out at once.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _shut_down(connection: socket.socket) -> None:
    """Make all calls that wait for a socket return."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
