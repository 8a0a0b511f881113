"""The pages of `inspect`, `diff`, `ls` and `trace` with `--html` in a browser."""

from __future__ import annotations

import pytest
import torch

import distckpt
from distckpt import ShardedTensor
from tests.support.browser import CHROMIUM, browser_page
from tests.support.cli_command import call, journal_line

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def pages(tmp_path, capsys):
    """The page of a checkpoint of four ranks, and that of its differences to another one."""
    values = {
        f"model.layers.{i}.{name}": torch.ones(64, 32)
        for i in range(4)
        for name in ("up.weight", "down.weight")
    }
    values |= {
        HOSTILE: torch.ones(8),
        "constructor.__proto__": torch.ones(8),
        "model": torch.ones(4),
    }
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    distckpt.save({**state, "note": HOSTILE}, tmp_path / "one")
    distckpt.reshard(tmp_path / "one", tmp_path / "a", num_ranks=4, grids={"*.up.weight": (2, 2)})
    values["model.layers.2.up.weight"] = values["model.layers.2.up.weight"] * 1.5
    state = {
        key: ShardedTensor.from_rank_offsets(key, value)
        for key, value in values.items()
        if key != "model"
    }
    distckpt.save({**state, "note": "b"}, tmp_path / "b")
    call(capsys, "inspect", tmp_path / "a", "--html", tmp_path / "a.html")
    call(capsys, "diff", tmp_path / "a", tmp_path / "b", "--html", tmp_path / "diff.html", code=1)
    return tmp_path / "a.html", tmp_path / "diff.html"


OF_ROWS = "[...document.querySelectorAll('#table tbody tr')].map((row) => row.cells)"
ROWS = f"{OF_ROWS}.map((cells) => cells[0].textContent)"
RATES = f"{OF_ROWS}.map((cells) => [cells[3].textContent, cells[5].textContent])"
COMMON = (
    "[...document.querySelectorAll('#common :is(tr, .values div)')]"
    ".map((row) => [...row.children].map((cell) => cell.textContent))"
)
CELLS = "[...document.querySelectorAll('#map .cell')].map((cell) => cell.title)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


FILLS = (
    "[...document.querySelectorAll('#detail .chunk')].map((chunk) => chunk.getAttribute('fill'))"
)


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
        assert page.evaluate(COMMON) == [["note", HOSTILE]]
        # Search.
        page.evaluate(search("layers.*.UP"))
        assert page.evaluate(ROWS) == ["▸model.layers.{0..3}.up.weight\u00a0\u00d7\u00a04"]
        page.evaluate("document.querySelector('#table tbody tr').click()")
        layers = [f"model.layers.{i}.up.weight" for i in range(4)]
        assert page.evaluate(ROWS)[1:] == layers
        page.evaluate("document.getElementById('group').click()")
        assert page.evaluate(ROWS) == layers
        assert (
            page.evaluate("document.getElementById('count').textContent")
            == "4 of 11 tensors, 32.77 kB"
        )
        # The layout of a tensor: its chunks in the colors of the ranks.
        page.evaluate("document.querySelector('#table tbody tr').click()")
        fills = page.evaluate(FILLS)
        assert len(set(fills)) == len(fills) == 4
        page.evaluate("document.querySelector('#detail button').click()")
        # Layers are read in rows; zoom in, and back.
        boxes = page.evaluate(
            "[...document.querySelectorAll('#map .cell')].filter((cell) => "
            "/layers.[0-9]+:/.test(cell.title)).map((cell) => [cell.offsetTop, cell.offsetLeft, "
            "cell.title])"
        )
        assert [title.partition(":")[0] for _, _, title in sorted(boxes)] == [
            f"model.layers.{i}" for i in range(4)
        ]
        before = page.evaluate(CELLS)
        page.evaluate("document.querySelector('#map .cell.group').click()")
        inside = page.evaluate(CELLS)
        assert len(inside) > 0
        assert all(title.startswith("model.layers.") for title in inside)
        page.evaluate("document.querySelector('#crumbs button').click()")
        assert page.evaluate(CELLS) == before
        # Differences.
        page.open(pages[1], 1440, "light")
        assert (
            page.evaluate("document.querySelector('h1').textContent")
            == "1 of 10 tensors differs, 1 only in A"
        )
        assert page.evaluate(ROWS)[:2] == ["model.layers.2.up.weight", "model"]
        assert page.evaluate(RATES)[:3] == [
            ["2,048 of 2,048", "3.3e-1"],
            ["only in A", ""],
            ["equal", ""],
        ]
        assert page.evaluate(COMMON) == [
            ["place", "A", "B"],
            ["common state: note", repr(HOSTILE), "'b'"],
        ]
        # A module has the root mean square of its tensors, in a window of any width.
        for width in (1440, 390):
            page.open(pages[1], width, "dark")
            (title,) = [
                title for title in page.evaluate(CELLS) if title.startswith("model.layers.2:")
            ]
            assert (
                title
                == f"model.layers.2: 16.38 kB, 1 of 2 differ; rel L2 {1 / 3 / 2**0.5:.1e}".replace(
                    "e-0", "e-"
                )
            )
        said = [event["method"] for event in page.events]
        assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}.isdisjoint(
            said
        )
        requests = [
            event["params"]
            for event in page.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert all(
            sent["request"]["url"].startswith(("file://", "data:", "blob:")) for sent in requests
        )


def test_long_keys_much_common_state_many_ranks_and_no_tensors_have_pages(tmp_path, capsys):
    keys = [f"layers.{i}.up" for i in (0, 1, 2, 4, 6, 7)]
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(96, 32)) for key in keys}
    state["x" * 150] = ShardedTensor.from_rank_offsets("x" * 150, torch.ones(2))
    distckpt.save({**state, "args": {f"option_{i}": i for i in range(100)}}, tmp_path / "one")
    distckpt.reshard(tmp_path / "one", tmp_path / "many", num_ranks=12, grids={"*.up": (12, 1)})
    distckpt.save({"step": 1, "seeds": torch.zeros(5000, dtype=torch.uint8)}, tmp_path / "none")
    for name in ("many", "none"):
        call(capsys, "inspect", tmp_path / name, "--html", tmp_path / f"{name}.html")
    tiles = (
        "[...document.querySelectorAll('.tile')]"
        ".map((tile) => tile.innerText.replace(/\\s+/g, ' '))"
    )
    shown = "document.getElementById('modules').checkVisibility()"
    with browser_page(tmp_path / "browser") as page:
        for width in (1440, 390):
            page.open(tmp_path / "many.html", width, "light")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            # More than is seen is below, and nothing is beside it.
            box = "document.querySelector('#common .limited')"
            assert page.evaluate(
                f"{box}.scrollWidth <= {box}.clientWidth && {box}.scrollHeight > {box}.clientHeight"
            )
        assert page.evaluate(shown)
        assert page.evaluate(ROWS)[0] == "▸layers.{0..2,4,6,7}.up\u00a0\u00d7\u00a06"
        page.evaluate("document.querySelector('#table tbody tr').click()")
        page.evaluate("document.querySelector('#table tr.member').click()")
        assert len(set(page.evaluate(FILLS))) == 12
        page.open(tmp_path / "none.html", 1440, "dark")
        assert not page.evaluate(shown)
        assert page.evaluate(COMMON) == [["step", "1"], ["seeds", "5000 uint8"]]
        assert page.evaluate(tiles) == [
            "0 tensors",
            "0 elements",
            "0 B of tensors",
            "1 file, written by 1 rank",
        ]


def test_what_is_wrong_is_above_everything_else(pages, tmp_path, capsys):
    file = next((tmp_path / "a/tensors").iterdir())
    file.unlink()
    call(capsys, "inspect", tmp_path / "a", "--html", tmp_path / "bad.html", code=1)
    banner = "document.querySelector('#problems')"
    with browser_page(tmp_path / "browser") as page:
        for path, is_shown in ((pages[0], False), (tmp_path / "bad.html", True)):
            page.open(path, 390, "dark")
            assert page.evaluate(f"!{banner}.hidden") == is_shown
            assert (str(file) in page.evaluate(f"{banner}.textContent")) == is_shown
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


WIDEST = "Math.max(...[...document.querySelectorAll('section *')].map((e) => {}))"
RIGHT_ENDS = WIDEST.format("e.getBoundingClientRect().right")
SMALLEST_TEXT = (
    "Math.min(...[...document.querySelectorAll('svg text')]"
    ".map((text) => text.getBoundingClientRect().height))"
)


def test_charts_and_tables_fit_a_phone_and_can_be_read_there(tmp_path, capsys):
    layers = torch.nn.ModuleDict(
        {f"a_long_name_of_a_layer_{i}": torch.nn.Linear(4, 4) for i in "ab"}
    )
    with distckpt.CheckpointManager(tmp_path / "run", async_save=False) as manager:
        for step in range(100_000, 1_000_000, 100_000):
            manager.save(step, {"model": layers}, metrics={"loss": 1 / step})
    next((tmp_path / "run/step_00200000/tensors").iterdir()).unlink()
    pages = [tmp_path / "run.html", tmp_path / "trace.html"]
    call(capsys, "ls", tmp_path / "run", "--html", pages[0], "--changes", "9")
    phases = [
        {"verb": "save", "phase": phase, "rank": rank, "start": float(start), "seconds": 0.5}
        for rank in range(2)
        for start, phase in enumerate(("plan", "write"))
    ]
    lines = [journal_line({**phase, "checkpoint": "x" * 90, "thread": "t"}) for phase in phases]
    (tmp_path / "journal.jsonl").write_text("\n".join(lines))
    call(capsys, "trace", tmp_path / "journal.jsonl", "--html", pages[1])
    with browser_page(tmp_path / "browser") as page:
        for path in pages:
            for width in (1440, 390):
                page.open(path, width, "light")
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                assert page.evaluate(RIGHT_ENDS) <= width
                assert page.evaluate(SMALLEST_TEXT) >= 10
