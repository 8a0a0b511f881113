"""The names that users import."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import typing
from pathlib import Path

import pytest

import distckpt
from tests.support.public_api import import_or_skip

ROOT = Path(__file__).parents[2]


def test_all_is_sorted_and_lists_everything_public():
    assert distckpt.__all__ == sorted(set(distckpt.__all__))
    submodules = {module.name for module in pkgutil.iter_modules(distckpt.__path__)}
    public = {name for name in dir(distckpt) if not name.startswith("_")} - submodules
    assert public - {"annotations", "importlib", "TYPE_CHECKING", "Any"} == set(distckpt.__all__)


def test_type_checkers_see_the_names_that_programs_get():
    block = next(
        node
        for node in ast.parse(Path(distckpt.__file__).read_text()).body
        if isinstance(node, ast.If)
    )
    imports = [(node.module, name.name) for node in block.body for name in node.names]
    assert sorted(name for _, name in imports if name != "__version__") == distckpt.__all__
    for module, name in imports:
        assert getattr(distckpt, name) is getattr(importlib.import_module(module), name)


def test_other_names_are_public_modules_or_errors():
    assert distckpt.hf is importlib.import_module("distckpt.hf")
    with pytest.raises(AttributeError, match="module 'distckpt' has no attribute 'nonsense'"):
        distckpt.nonsense  # noqa: B018


def undocumented_parts(name, value):
    """Return what lacks a docstring: the value, and the public methods and properties of a class
    (or their bases').
    """
    if inspect.isfunction(value):
        return [] if value.__doc__ else [name]
    parts = [
        attribute
        for attribute, member in vars(value).items()
        if not attribute.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod))
    ]
    # A dataclass without a docstring is given its signature for one.
    is_documented = value.__doc__ and not value.__doc__.startswith(f"{value.__name__}(")
    undocumented = [f"{name}.{part}" for part in parts if not inspect.getdoc(getattr(value, part))]
    return undocumented + ([] if is_documented else [name])


@pytest.mark.parametrize("name", distckpt.__all__)
def test_every_name_is_importable_and_documented(name):
    value = getattr(distckpt, name)
    assert inspect.isfunction(value) or inspect.isclass(value)
    assert undocumented_parts(name, value) == []
    assert value.__module__.startswith("distckpt")
    assert "._" not in value.__module__


def public_modules():
    found = [module.name for module in pkgutil.walk_packages(distckpt.__path__, "distckpt.")]
    return [name for name in found if not any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", public_modules())
def test_public_modules_list_their_names(name):
    module = import_or_skip(name)
    if any(getattr(value, "__module__", None) == name for value in vars(module).values()):
        assert module.__all__ == sorted(set(module.__all__))
        assert [public for public in module.__all__ if not hasattr(module, public)] == []


@pytest.mark.parametrize("name", ["distckpt", *public_modules()])
def test_public_names_say_a_public_module_and_have_types(name):
    """Those of a class that has moved are found in its new home."""
    module = import_or_skip(name)
    for value in (getattr(module, public) for public in getattr(module, "__all__", ())):
        assert "._" not in getattr(value, "__module__", "")
        members = [value, *vars(value).values()] if inspect.isclass(value) else [value]
        for member in members:
            if inspect.isclass(member) or inspect.isfunction(member):
                typing.get_type_hints(member)


@pytest.mark.parametrize("name", public_modules())
def test_public_modules_document_what_they_define(name):
    module = import_or_skip(name)
    assert module.__doc__
    undocumented = [
        part
        for attribute, value in vars(module).items()
        if not attribute.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == name
        for part in undocumented_parts(attribute, value)
    ]
    assert undocumented == []


def test_the_version_is_that_of_the_distribution():
    (declared,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert distckpt.__version__ == declared


def test_errors_are_found_under_the_standard_ones_too():
    assert issubclass(distckpt.InvalidShardingError, ValueError)
    assert issubclass(distckpt.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(distckpt.CheckpointExistsError, FileExistsError)
    assert issubclass(distckpt.LoadMismatchError, LookupError)
    assert issubclass(distckpt.UnsupportedObjectError, TypeError)
    errors = [getattr(distckpt, name) for name in distckpt.__all__ if name.endswith("Error")]
    assert len(errors) == 7
    assert all(issubclass(error, distckpt.CheckpointingException) for error in errors)
