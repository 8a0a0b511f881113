"""Add to the site what lies elsewhere: the README, the changelog, the examples, and the reference
of the public names.

Pages link to these files by their location in the repository. Here the links are rewritten to their
location in the site, so that they work in both places. Pictures become part of their page, so that
they follow its theme.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # what is documented, and no other version that is installed
import distckpt  # noqa: E402

_PROGRAMS = {".py", ".sbatch", ".sh", ".yaml", ".yml"}
"""Files of examples that pages link to."""
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}

CORE = [
    "save",
    "load",
    "async_save",
    "SaveHandle",
    "SaveOptions",
    "SaveReport",
    "LoadOptions",
    "LoadReport",
    "CheckpointManager",
    "PreemptionGuard",
    "RngState",
    "PerRank",
    "open",
    "Checkpoint",
    "TensorInfo",
    "list_checkpoints",
    "CheckpointInfo",
    "verify",
    "VerifyReport",
    "diff",
    "DiffReport",
    "reshard",
    "ReshardReport",
    "redistribute",
    "Route",
    "MoveOptions",
    "MoveReport",
]
MODELS = ["ShardedTensor", "ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"]
HUGGING_FACE = ["consolidate", "merge", "ExportOptions", "ExportReport"]
GROUPS = {
    "Core": [
        *CORE,
        *(name for name in distckpt.__all__ if name not in {*CORE, *MODELS, *HUGGING_FACE}),
    ],
    "Models": MODELS,
    "Hugging Face": HUGGING_FACE,
    "Trainers": [],
    "Compatibility": [],
}
"""The names of `distckpt` itself, on one page a group."""
MODULES = {
    "Core": ["tensors"],
    "Models": ["modules", "optimizer", "factories", "experts"],
    "Hugging Face": ["hf", "rules", "families", "jax", "streaming", "readers"],
    "Trainers": [
        "integrations",
        "integrations.lightning",
        "integrations.transformers",
        "integrations.accelerate",
        "integrations.torchdata",
    ],
}
"""The other public modules, each on a page of its own. All that are not named belong to
"Compatibility".
"""


def public_modules() -> list[str]:
    """Return the dotted names of the public modules."""
    files = [
        file.relative_to(ROOT).with_suffix("") for file in sorted((ROOT / "distckpt").rglob("*.py"))
    ]
    modules = [file.parent if file.name == "__init__" else file for file in files]
    names = [
        ".".join(module.parts)
        for module in modules
        if not any(part.startswith("_") for part in module.parts)
    ]
    return [name for name in names if name not in ("distckpt", "distckpt.cli")]


def modules_of(group: str) -> list[str]:
    """Return the public modules of a group."""
    named = {f"distckpt.{name}" for names in MODULES.values() for name in names}
    if group in MODULES:
        return [f"distckpt.{name}" for name in MODULES[group]]
    return [name for name in public_modules() if name not in named]


def page_of(group: str) -> str:
    return f"api/{group.lower().replace(' ', '-')}.md"


def summary(value: object) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(value) or "").partition("\n")[0]


def _parsed(name: str) -> ast.Module:
    """Parse a public module: some of them import a library that the site does not need."""
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _summary_of_module(name: str) -> str:
    return (ast.get_docstring(_parsed(name)) or "").partition("\n")[0]


def _listed(name: str) -> list[str]:
    """Return the names in `__all__` of a public module."""
    for node in _parsed(name).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
        if isinstance(node, ast.ImportFrom) and "__all__" in {each.name for each in node.names}:
            return _listed(node.module or "")
    return []


def index_page() -> str:
    """Return the tables of all public names and modules."""
    text = (ROOT / "docs" / "api" / "index.md").read_text()
    for group, names in GROUPS.items():
        text += f"\n## {group}\n\n| name | |\n|---|---|\n"
        text += "".join(
            f"| [`{name}`][distckpt.{name}] | {summary(getattr(distckpt, name))} |\n"
            for name in names
        )
        for name in modules_of(group):
            text += f"| [`{name}`]({name}.md) | {_summary_of_module(name)} |\n"
    return text


def group_page(group: str) -> str:
    """Return the page with the names of `distckpt` in a group."""
    options = "    options: {show_root_heading: true, show_root_full_path: false, heading_level: 2"
    hidden = {"SaveHandle": ', filters: ["!^_", "!^run$"]'}  # its thread calls it
    return f"# {group}\n\n" + "\n".join(
        f"::: distckpt.{name}\n{options}{hidden.get(name, '')}}}\n" for name in GROUPS[group]
    )


def module_page(name: str) -> str:
    """Return the page of a module; names that `distckpt` has as well are explained once."""
    names = _listed(name)
    elsewhere = [other for other in names if other in distckpt.__all__]
    links = ", ".join(f"[`{other}`][distckpt.{other}]" for other in elsewhere)
    also = f"Also here, the same as in `distckpt`: {links}.\n" if elsewhere else ""
    own = [other for other in names if other not in elsewhere]
    return f"# {name}\n\n::: {name}\n    options: {{members: {own if names else 'null'}}}\n\n{also}"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the reference to the navigation; put the version, and the repository once it
    has an address, into the header.
    """
    assert config.nav is not None
    config.site_name = f"distckpt {distckpt.__version__}"
    if address := re.search(r'^Repository = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M):
        config.repo_url, config.repo_name = address[1], "Repository"
    reference: list[Any] = ["api/index.md"]
    for group in GROUPS:
        own = [{"distckpt": page_of(group)}] if GROUPS[group] else []
        reference.append({group: [*own, *({name: f"api/{name}.md"} for name in modules_of(group))]})
    config.nav[-1] = {"API reference": reference}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages and files from outside `docs/`."""
    contents = {target: (ROOT / source).read_text() for source, target in PAGES.items()}
    contents |= {page_of(group): group_page(group) for group, names in GROUPS.items() if names}
    contents |= {f"api/{name}.md": module_page(name) for name in public_modules()}
    for target, content in contents.items():
        files.append(File.generated(config, target, content=content))
    programs = (each for each in (ROOT / "examples").rglob("*.*") if each.suffix in _PROGRAMS)
    for example in sorted(programs):
        files.append(
            File.generated(config, example.relative_to(ROOT).as_posix(), abs_src_path=str(example))
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository to their location in the site."""
    if page.file.src_uri == "api/index.md":
        return index_page()
    if page.file.src_uri == "examples.md":
        markdown = re.sub(
            r"^## (\w+\.py)\n(.*?)(?=^## |\Z)", _with_sources, markdown, flags=re.M | re.S
        )
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
        # Links in lines of their own are buttons, the first of them in color.
        markdown = re.sub(
            r"^(\[.*\]\(docs/[\w-]+\.md\))$", r"\1{ .md-button }", markdown, flags=re.M
        )
        markdown = markdown.replace("{ .md-button }", "{ .md-button .md-button--primary }", 1)
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](").replace("](examples/", "](../examples/")
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{re.escape(source)}", f"]({target}", markdown)
    markdown = markdown.replace("](../examples/", "](examples/")
    return markdown if page.file.src_uri.startswith("api/") else _indented(markdown)


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """Put pictures into the page itself, since those in files follow the system's theme; let names
    in tables break, and options not.
    """
    output = re.sub(
        r'<img alt="[^"]*" src="(\w+\.svg)"[^>]*>',
        lambda m: (ROOT / "docs" / m[1]).read_text(),
        output,
    )
    # A line may not end within the dashes of an option.
    output = re.sub(
        r"(?<=<code>)[^<]*--[^<]*",
        lambda code: re.sub(r"--\w[\w-]*", r'<span class="option">\g<0></span>', code[0]),
        output,
    )
    return re.sub(
        r"<td.*?</td>",
        lambda cell: re.sub(r"(?<=<code>)[^<]+", _breakable, cell[0]),
        output,
        flags=re.S,
    )


def _breakable(name: re.Match[str]) -> str:
    """Let a name break after dots and underscores and before capitals, rather than anywhere."""
    return re.sub(r"(?<=\w[._/])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", name[0])


def _with_sources(section: re.Match[str]) -> str:
    """Add the program that a section is about, and what it imports from its folder, folded."""
    text = (ROOT / "examples" / section[1]).read_text()
    names = [
        section[1],
        *(f"{name}.py" for name in re.findall(r"^from (_tiny_\w+) import", text, re.M)),
    ]
    sources = [(name, (ROOT / "examples" / name).read_text()) for name in names]
    blocks = [(name, indent(f"```python\n{code}```\n", "    ")) for name, code in sources]
    return section[0] + "".join(f'??? note "{name}"\n\n{block}\n' for name, block in blocks)


def _indented(markdown: str) -> str:
    """Indent what belongs to an item of a list by four, as Python-Markdown wants it, where our
    pages have two.
    """
    lines, is_code = [], False
    for line in markdown.split("\n"):
        is_code ^= line.startswith("```")
        lines.append(f"  {line}" if line.startswith("  ") and not is_code else line)
    return "\n".join(lines)
