"""Add the README, the changelog, the examples and a page for each public module to the site.

Pages link to these files by their location in the repository. Here the links are rewritten to their location in the
site, so that they work in both places.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def public_modules() -> list[str]:
    """Return the dotted names of the public modules."""
    files = [file.relative_to(ROOT).with_suffix("") for file in sorted((ROOT / "distckpt").rglob("*.py"))]
    names = [".".join(file.parts) for file in files if not any(part.startswith("_") for part in file.parts)]
    return [name for name in names if name != "distckpt.cli"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add a page for each public module to the navigation."""
    assert config.nav is not None
    config.nav[-1] = {"API": ["api/index.md", *({name: f"api/{name}.md"} for name in public_modules())]}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and files from outside `docs/`."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for example in sorted((ROOT / "examples").rglob("*.py")):
        files.append(File.generated(config, example.relative_to(ROOT).as_posix(), abs_src_path=str(example)))
    for name in public_modules():
        files.append(File.generated(config, f"api/{name}.md", content=f"# {name}\n\n::: {name}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository to their location in the site."""
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](").replace("](examples/", "](../examples/")
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(source)}", f"]({target}", markdown)
    markdown = markdown.replace("](../examples/", "](examples/")
    return markdown if page.file.src_uri.startswith("api/") else _indented(markdown)


def _indented(markdown: str) -> str:
    """Indent what belongs to an item of a list by four, as Python-Markdown wants it, where our pages have two."""
    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        lines.append(f"  {line}" if line.startswith("  ") and not is_code else line)
    return "\n".join(lines)
