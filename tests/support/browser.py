"""A headless Chromium, driven through pipes by the DevTools protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--remote-debugging-pipe",
]
PATIENCE = 100.0
"""Seconds to wait for an answer."""


class Page:
    """A tab. `events` are all messages of the browser that nobody asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._ends = (to_browser, from_browser)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ends[0], json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._ends[1]], [], [], PATIENCE)[0], (
                "the browser does not answer"
            )
            data = os.read(self._ends[1], 1 << 20)
            assert data, "the browser has ended"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, file: Path, width: int, scheme: str) -> None:
        """Show a page of `distckpt`, in a window of this width, with light or dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call("Page.navigate", url=file.as_uri())
        # Pages with a script say when it has run.
        static = "!document.scripts.length && document.readyState === 'complete'"
        is_ready = f"document.body && (document.body.dataset.ready || {static})"
        ready = f"{is_ready} ? done() : setTimeout(look, 20)"
        self.evaluate(f"new Promise((done) => {{ const look = () => {ready}; look(); }})")

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript, and wait for what it promises."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextlib.contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """Run a browser that keeps everything in a folder of its own."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}"]
    # The protocol is spoken through the descriptors 3 and 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}', "bash", *command]
    ends = (to_browser[0], from_browser[1])
    process = subprocess.Popen(
        shell, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for end in ends:
        os.close(end)
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        for end in (to_browser[1], from_browser[0]):
            os.close(end)
        process.kill()
        process.wait()
