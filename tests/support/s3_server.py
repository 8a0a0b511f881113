"""A real object store for tests: moto's S3 server on a free port of this machine, reached through
the environment.

Ranks that tests start inherit the environment, so they find the same server.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import logging
import os
import random
import re
import secrets
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from unittest import mock

import boto3

from distckpt._storage import remote

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    # No look-up of credentials at an address that only machines of a cloud have.
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Run a server; yields its URL."""
    # Ranks import this module too, and nothing but the server needs moto, which takes long.
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    puts, put_object = threading.Lock(), S3Response.put_object

    def put_one_at_a_time(response: S3Response) -> object:
        # S3 checks a condition and stores the object in one step, moto in two.
        with puts:
            return put_object(response)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    with mock.patch.object(S3Response, "put_object", put_one_at_a_time):
        server.start()
        host, port = server.get_host_and_port()
        try:
            yield f"http://{host}:{port}"
        finally:
            server.stop()


@contextlib.contextmanager
def reached_at(url: str, **settings: str) -> Iterator[None]:
    """Let this process, and those it starts, find S3 at a URL."""
    with mock.patch.dict(os.environ, {**CREDENTIALS, "AWS_ENDPOINT_URL": url, **settings}):
        yield


def new_bucket(url: str) -> str:
    """Make an empty bucket; returns its URL, such as `s3://bucket-0123`."""
    name = f"bucket-{secrets.token_hex(8)}"
    client(url).create_bucket(Bucket=name)
    return f"s3://{name}"


def client(url: str):
    """Return a client that has nothing to do with s3fs."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


def keys_in(url: str, prefix: str) -> list[str]:
    """List everything below a URL such as `s3://bucket/run`, by names relative to it."""
    bucket, _, path = prefix.removeprefix("s3://").partition("/")
    start = f"{path}/" if path else ""
    pages = client(url).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=start)
    return sorted(item["Key"][len(start) :] for page in pages for item in page.get("Contents", []))


def uploads_in(url: str, bucket: str) -> list[str]:
    """List the keys of multi-part uploads that were begun and neither completed nor aborted."""
    answer = client(url).list_multipart_uploads(
        Bucket=bucket.removeprefix("s3://").partition("/")[0]
    )
    return [upload["Key"] for upload in answer.get("Uploads", [])]


def hurry(monkeypatch) -> None:
    """Let this process repeat requests that failed without a pause."""
    monkeypatch.setattr(remote, "_FIRST_DELAY", 1e-5)


# --- A proxy that fails ---------------------------------------------------------------------------


class Fault(NamedTuple):
    """What goes wrong with requests of one kind.

    Attributes:
        method: such as "PUT".
        pattern: of the path with its query.
        action: "403", "500", "503", "501" (not implemented) or "404" (no such upload): answered so
            without being carried out. "cut body": the connection ends in the middle of what the
            client sends. "cut answer": ... of what the server sends. "lose answer": carried out,
            and then the connection ends.
        first: the number of the first request that it happens to, from 1.
        count: how many requests it happens to.
        header: that a request has; of any kind when empty.
        share: of these requests that it happens to, chosen at random.
    """

    method: str
    pattern: str
    action: str
    first: int = 1
    count: int = 1
    header: str = ""
    share: float = 1.0


class FaultyProxy:
    """Stands in front of a server; `happened` lists what it did to which request, `requests` all
    that came, and `ranges` those for a part of an object: its path, and the first byte and the one
    after the last.
    """

    def __init__(self, server: str, *faults: Fault) -> None:
        self.faults = list(faults)
        self.happened: list[tuple[str, str]] = []
        self.requests: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self._server = server.removeprefix("http://")
        self._numbers = [0] * len(faults)
        self._lock = threading.Lock()
        self._random = random.Random(0)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run the proxy; yields its URL."""
        handler = type("Handler", (_ProxyHandler,), {"proxy": self})
        listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()
            listener.server_close()

    def action_for(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        """Return what goes wrong with a request, None when nothing does."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            if found := re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("Range", "")):
                self.ranges.append((path, int(found[1]), int(found[2]) + 1))
            for number, fault in enumerate(self.faults):
                is_meant = fault.method == method and (not fault.header or fault.header in headers)
                if is_meant and re.search(fault.pattern, path):
                    self._numbers[number] += 1
                    is_due = fault.first <= self._numbers[number] < fault.first + fault.count
                    if is_due and self._random.random() < fault.share:
                        self.happened.append((fault.action, f"{method} {path}"))
                        return fault.action
        return None

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list, bytes]:
        connection = http.client.HTTPConnection(self._server, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()


class EqualPartsProxy(FaultyProxy):
    """Like Cloudflare R2: completes uploads only when all parts but the last, which may be smaller,
    have one size.
    """

    def __init__(self, server: str, *faults: Fault) -> None:
        super().__init__(server, *faults)
        self.parts: dict[str, dict[int, int]] = {}
        """Upload -> number of a part -> its size."""

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list, bytes]:
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(path).query))
        if method == "PUT" and "partNumber" in query:
            self.parts.setdefault(query["uploadId"], {})[int(query["partNumber"])] = len(body)
        if method == "POST" and "uploadId" in query:
            *others, last = [size for _, size in sorted(self.parts[query["uploadId"]].items())]
            if len(set(others)) > 1 or last > max(others, default=last):
                text = (
                    b"<Error><Code>InvalidPart</Code>"
                    b"<Message>parts have several sizes</Message></Error>"
                )
                return 400, [("Content-Type", "application/xml")], text
        return super().forward(method, path, headers, body)


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    proxy: FaultyProxy
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        self.close_connection = True
        action = self.proxy.action_for(self.command, self.path, self.headers)
        length = int(self.headers.get("Content-Length", 0))
        if action == "cut body":
            self.rfile.read(length // 2)
            return
        body = self.rfile.read(length)
        if action in _CODES:
            code = _CODES[action]
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            return self._answer(int(action), [("Content-Type", "application/xml")], text)
        status, headers, content = self.proxy.forward(
            self.command, self.path, dict(self.headers.items()), body
        )
        if action != "lose answer":
            self._answer(status, headers, content, cut=action == "cut answer")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    def _answer(self, status: int, headers: list, content: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        kept = [(name, value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]
        length = next(
            (value for name, value in headers if name.lower() == "content-length"),
            str(len(content)),
        )
        for name, value in [*kept, ("Content-Length", length), ("Connection", "close")]:
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content[: len(content) // 2] if cut else content)

    def log_message(self, *arguments: object) -> None:
        pass


_CODES = {
    "403": "AccessDenied",
    "500": "InternalError",
    "501": "NotImplemented",
    "503": "SlowDown",
    "404": "NoSuchUpload",
}
_OF_ONE_CONNECTION = {"connection", "content-length", "transfer-encoding", "keep-alive"}
