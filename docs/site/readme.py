"""The README as PyPI shows it, which hatchling makes when it builds the package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_RELATIVE_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s]+")
_PICTURES = (".svg", ".png")


class ReadmeHook(MetadataHookInterface):
    """Leads links and pictures to the repository, where `[project.urls]` has its address: PyPI
    shows relative ones as broken.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README into the metadata of the project."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        if repository is not None:
            text = with_absolute_links(text, repository.rstrip("/"), f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Replace relative links of Markdown by the addresses of files at a tag."""

    def address(link: re.Match[str]) -> str:
        view = "raw" if link[0].endswith(_PICTURES) else "blob"
        return f"{repository}/{view}/{tag}/{link[0]}"

    return _RELATIVE_LINK.sub(address, text)
