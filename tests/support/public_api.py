"""The public names and signatures of the package, as text.

python -m tests.support.public_api > tests/release/public_api.txt
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distckpt

ROOT = Path(distckpt.__file__).parent


def public_modules() -> list[str]:
    """List the modules whose path has no underscore; `__main__` is a command."""
    names = {"distckpt"}
    for file in ROOT.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not any(part.startswith("_") for part in parts):
            names.add(".".join(("distckpt", *parts)))
    return sorted(names)


def import_or_skip(name: str) -> ModuleType:
    """Import a public module; skip the test where the library that it is for is not installed."""
    module = import_if_possible(name)
    if module is None:
        pytest.skip(f"the library of {name} is not installed")
    return module


def import_if_possible(name: str) -> ModuleType | None:
    """Import a public module; None where the library that it is for is not installed."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of that library
            return importlib.import_module(name)
    except ModuleNotFoundError:
        if not name.startswith("distckpt.integrations."):
            raise
        return None


def listed_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: `__all__`, or what it defines without an underscore."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    defined = (
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    )
    return sorted(name for name in defined if not name.startswith("_"))


def signature(value: Any) -> str:
    """Return the parameters and defaults of a callable, without annotations and addresses."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(bare))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def described(name: str, value: Any) -> Iterator[str]:
    """Yield lines about one public name: its signature, and the members of a class."""
    if not inspect.isclass(value):
        yield f"{name}{signature(value)}" if callable(value) else name
        return
    kind = " (dataclass)" if dataclasses.is_dataclass(value) else ""
    # A signature that comes from another library differs between its releases.
    is_foreign = getattr(value.__init__, "__module__", "").startswith("transformers.")
    yield f"class {name}{'' if is_foreign else signature(value)}{kind}"
    for member, attribute in sorted(vars(value).items()):
        if not member.startswith("_"):
            function = getattr(attribute, "__func__", attribute)
            yield f"    {member}{signature(function) if callable(function) else ''}"


def describe_public_api() -> str:
    """Return all public names, a section for each module that can be imported."""
    lines: list[str] = []
    for module_name in public_modules():
        module = import_if_possible(module_name)
        if module is None:
            continue
        lines.append(f"[{module_name}]")
        for name in listed_names(module):
            lines += described(name, getattr(module, name))
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe_public_api(), end="")
