"""Azure's emulator, and a stand-in for Google Cloud Storage, reached through the environment as the
real ones are.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from unittest import mock

import pytest

from tests.support.s3_server import FaultyProxy, new_bucket

_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of Azure's emulator, always the same."""


@contextlib.contextmanager
def running_azurite() -> Iterator[str]:
    """Run Azure's emulator, with the environment set up for it; yields the URL of an empty
    container.
    """
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed (npm install -g azurite)")
    port = _free_port()
    address = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    settings = {"AccountName": _ACCOUNT, "AccountKey": _KEY, "BlobEndpoint": address}
    connection = ";".join(f"{name}={value}" for name, value in settings.items())
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen(
        [program, "--blobPort", str(port), *options], stdout=subprocess.DEVNULL
    )
    try:
        _wait_for(port)
        container = f"container-{secrets.token_hex(8)}"
        _make_container(address, container)
        with mock.patch.dict(os.environ, {"AZURE_STORAGE_CONNECTION_STRING": connection}):
            yield f"az://{container}"
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.05)


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


class GoogleProxy(FaultyProxy):
    """Speaks Google's XML interface in front of an S3 server: they differ in conditions, which are
    on generations.
    """

    def __init__(self, server: str) -> None:
        super().__init__(server)
        self._generations: dict[str, int] = {}
        """ETag -> generation."""

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list, bytes]:
        headers = {name.lower(): value for name, value in headers.items()}
        assert headers["authorization"] == "Bearer none"
        headers["authorization"] = (
            "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"
        )
        wanted = headers.pop("x-goog-if-generation-match", None)
        if wanted is not None:
            etags = {str(generation): etag for etag, generation in self._generations.items()}
            condition = ("if-none-match", "*") if wanted == "0" else ("if-match", etags[wanted])
            headers |= dict([condition])
        # The client escapes the hyphen of a bucket's name, which the S3 server does not undo.
        status, answered, content = super().forward(method, path.replace("%2D", "-"), headers, body)
        if wanted is not None and status == 404:
            return 412, [], b""
        etag = {name.lower(): value for name, value in answered}.get("etag")
        if etag is not None:
            generation = self._generations.setdefault(etag, len(self._generations) + 1)
            answered = [*answered, ("x-goog-generation", str(generation))]
        return status, answered, content


@contextlib.contextmanager
def running_google_proxy(server: str) -> Iterator[str]:
    """Put a stand-in for Google Cloud Storage in front of an S3 server; yields the URL of an empty
    bucket.
    """
    with (
        GoogleProxy(server).running() as url,
        mock.patch.dict(os.environ, {"STORAGE_EMULATOR_HOST": url}),
    ):
        yield new_bucket(server).replace("s3://", "gs://")
