"""Build the package with flit, with a README whose links and pictures lead to the repository.

PyPI shows relative ones as broken. The address is `Repository` in `[project.urls]`; until it is
there, the README is used as it is. flit has no hook for that, so its function that reads the README
is wrapped.
"""

from __future__ import annotations

import re
from pathlib import Path

from flit_core import config
from flit_core.buildapi import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_RELATIVE_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s]+")
_PICTURES = (".svg", ".png")
_read_description = config.description_from_file


def _description_from_file(
    name: str, folder: Path, guess_mimetype: bool = True
) -> tuple[str, str | None]:
    text, kind = _read_description(name, folder, guess_mimetype)
    project = config.tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    repository = project.get("urls", {}).get("Repository")
    if repository is not None:
        text = with_absolute_links(text, repository.rstrip("/"), f"v{project['version']}")
    return text, kind


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Replace relative links of Markdown by the addresses of files at a tag."""

    def address(link: re.Match[str]) -> str:
        view = "raw" if link[0].partition("#")[0].endswith(_PICTURES) else "blob"
        return f"{repository}/{view}/{tag}/{link[0]}"

    return _RELATIVE_LINK.sub(address, text)


config.description_from_file = _description_from_file
