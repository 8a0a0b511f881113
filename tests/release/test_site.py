"""The site of the documentation: it is built without a warning, from this repository alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distckpt
from tests.support.made_once import made_once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the site, built with warnings as errors."""
    return made_once(tmp_path_factory, "site", build)


def build(directory: Path) -> None:
    arguments = [
        "build",
        "--strict",
        "-f",
        str(ROOT / "docs" / "site" / "mkdocs.yml"),
        "-d",
        str(directory),
    ]
    # Nothing can be fetched: whatever tries is sent to a port that nobody listens on.
    nowhere = {
        name: "http://127.0.0.1:9"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    }
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", *arguments]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix(".html"))
        for page in (ROOT / "docs").rglob("*.md")
    }
    built = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    assert pages | {"index.html", "changelog.html"} <= built
    linked = set(re.findall(r'href="([^"#]+\.html)"', (site / "index.html").read_text()))
    assert (pages | {"changelog.html"}) - linked == set()


def test_every_public_module_has_a_page_with_its_names(site):
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "distckpt").rglob("*.py")]
    modules = [file.parent if file.name == "__init__" else file for file in files]
    names = {
        ".".join(module.parts)
        for module in modules
        if not any(part.startswith("_") for part in module.parts)
    }
    pages = {page.name.removesuffix(".html") for page in (site / "api").glob("distckpt.*.html")}
    assert pages == names - {"distckpt", "distckpt.cli"}


def test_every_name_of_the_package_is_in_the_index_and_explained_once(site):
    index = (site / "api" / "index.html").read_text()
    pages = {page.name: page.read_text() for page in (site / "api").glob("*.html")}
    for name in distckpt.__all__:
        assert f'#distckpt.{name}"' in index
        assert len([page for page in pages.values() if f'<h2 id="distckpt.{name}"' in page]) == 1, (
            name
        )
    assert re.findall(r'<h2 id="distckpt\.(\w+)"', pages["core.html"])[:2] == ["save", "load"]
    for field in ("num_bytes", "phases", "gigabytes_per_second"):  # inherited
        assert f'id="distckpt.SaveReport.{field}"' in pages["core.html"]


def test_the_landing_page_leads_to_the_quickstart_and_its_code_fits_a_phone(site):
    text = (site / "index.html").read_text()
    assert re.search(
        r'<a class="md-button md-button--primary" href="quickstart.html">Get started</a>', text
    )
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert max(map(len, code.splitlines())) <= 50  # characters, see style.css


def test_pictures_follow_the_theme_and_can_be_read_on_a_phone(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert (
            re.findall(r"<img[^>]*\.svg", text) == []
        )  # part of the page, whose theme they follow
        for picture in re.findall(r'<svg[^>]*class="distckpt-picture".*?</svg>', text, re.S):
            width = float(re.findall(r'viewBox="0 0 (\S+) ', picture)[0])
            smallest = min(map(float, re.findall(r'font-size="(\S+)"', picture)))
            assert smallest * 358 / width > 10.5, (
                page.name
            )  # pixels, where a phone leaves 358 for the picture
            assert re.findall(r'(?:fill|stroke)="(?!var|none)[^"]*"', picture) == []
    assert 'class="distckpt-picture"' in (site / "index.html").read_text()


def test_links_and_pictures_of_the_site_lead_to_its_files(site):
    broken = []
    for page in site.rglob("*.html"):
        targets = (
            re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())
            if page.name != "404.html"
            else []
        )
        local = [target for target in targets if not re.match(r"[a-z]+:", target)]
        broken += [
            f"{page.name}: {target}" for target in local if not (page.parent / target).exists()
        ]
    assert sorted(set(broken)) == []


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        # Links lead elsewhere; scripts, styles and pictures do not.
        parts = re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)"',
            page.read_text(),
        )
        assert parts == [], page
