"""The page of `inspect --html` and `diff --html` in a browser."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.browser import CHROMIUM, browser_page
from tests.support.cli_command import call

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def pages(tmp_path, capsys):
    """The page of a checkpoint of four ranks, and that of its differences to another one."""
    values = {f"model.layers.{i}.{name}": torch.ones(64, 32) for i in range(4) for name in ("up.weight", "down.weight")}
    values |= {HOSTILE: torch.ones(8), "constructor.__proto__": torch.ones(8), "model": torch.ones(4)}
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    distckpt.save({**state, "note": HOSTILE}, tmp_path / "one")
    distckpt.reshard(tmp_path / "one", tmp_path / "a", num_ranks=4, grids={"*.up.weight": (2, 2)})
    values["model.layers.2.up.weight"] = values["model.layers.2.up.weight"] * 1.5
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items() if key != "model"}
    distckpt.save({**state, "note": "b"}, tmp_path / "b")
    call(capsys, "inspect", tmp_path / "a", "--html", tmp_path / "a.html")
    call(capsys, "diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "diff.html", code=1)
    return tmp_path / "a.html", tmp_path / "diff.html"


ROWS = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[0].textContent)"
CELLS = "[...document.querySelectorAll('#map .cell')].map((cell) => cell.title)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


FILLS = "[...document.querySelectorAll('#detail .chunk')].map((chunk) => chunk.getAttribute('fill'))"


def search(text):
    box = "document.getElementById('search')"
    return f"{box}.value = {text!r}; {box}.dispatchEvent(new Event('input'))"


def test_search_zoom_layouts_and_dark_mode_without_errors(pages, tmp_path):
    with browser_page(tmp_path / "browser") as page:
        backgrounds = set()
        for width in (1440, 390):
            for scheme in ("light", "dark"):
                page.open(pages[0], width, scheme)
                backgrounds.add(page.evaluate(BACKGROUND))
                assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert backgrounds == {"rgb(246, 247, 249)", "rgb(17, 21, 27)"}
        # Texts of the checkpoint are texts of the page.
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert {HOSTILE, "constructor.__proto__", "model"} < set(page.evaluate(ROWS))
        assert page.evaluate("document.querySelector('#common pre').textContent") == f'{{\n  "note": "{HOSTILE}"\n}}'
        # Search.
        page.evaluate(search("layers.*.UP"))
        assert page.evaluate(ROWS) == [f"model.layers.{i}.up.weight" for i in range(4)]
        assert page.evaluate("document.getElementById('count').textContent") == "4 of 11, 32.77 kB"
        # The layout of a tensor: its chunks in the colours of the ranks.
        page.evaluate("document.querySelector('#table tbody tr').click()")
        fills = page.evaluate(FILLS)
        assert len(set(fills)) == len(fills) == 4
        # Zoom in, and back.
        before = page.evaluate(CELLS)
        page.evaluate("document.querySelector('#map .cell.group').click()")
        inside = page.evaluate(CELLS)
        assert len(inside) > 0
        assert all(title.startswith("model.layers.") for title in inside)
        page.evaluate("document.querySelector('#crumbs button').click()")
        assert page.evaluate(CELLS) == before
        # Differences.
        page.open(pages[1], 1440, "light")
        page.evaluate(search("layers.2."))
        rates = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells[4].textContent)"
        assert page.evaluate(rates) == ["", "3.3e-1"]
        page.evaluate(search("model"))
        assert "only in A" in page.evaluate(rates)
        assert "note" in page.evaluate("document.querySelector('#common pre').textContent")
        said = [event["method"] for event in page.events]
        assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}.isdisjoint(said)
        requests = [event["params"] for event in page.events if event["method"] == "Network.requestWillBeSent"]
        assert all(sent["request"]["url"].startswith(("file://", "data:", "blob:")) for sent in requests)
